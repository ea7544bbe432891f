"""`fluidtune serve plan`, without Ray: devices by rate and SLO, and where the models of a file are to stand."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from fluidtune.cli import cli
from fluidtune.errors import FluidTuneError
from fluidtune.serving import capacity, model_placement
from symphony_serve.profiles import Profile, profiles_to_json

#: l(b) = b + 5 ms.
FIGURE_4 = Profile.linear(0.001, 0.005, 32)


@pytest.fixture
def profiles(tmp_path):
    """The directory of a run that was served."""
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving" / "profiles.json").write_text(profiles_to_json({"t": FIGURE_4}, "somewhere", {"t": 0.002}))
    return tmp_path


@pytest.fixture
def planned(monkeypatch):
    """Run the command with these words, without Ray: what it says, also if that is an error."""
    monkeypatch.setitem(sys.modules, "ray", None)

    def run(*words):
        done = CliRunner().invoke(cli, ["serve", "plan", *words])
        if isinstance(done.exception, FluidTuneError):
            assert "\n" not in str(done.exception)
            return str(done.exception)
        assert done.exception is None, done.exception
        return done.output

    return run


@pytest.mark.slow
def test_more_requests_need_more_devices(profiles):
    models = capacity.models_of(str(profiles), 0.05, "deferred")
    needed = [capacity.devices_for(models, rate)[0] for rate in (100.0, 2000.0, 4000.0)]
    assert needed == sorted(set(needed)) and needed[0] == 1
    # A device that does nothing but the largest batch in time bears 32 requests in 37 ms.
    assert needed[2] >= 4000 * 0.037 / 32
    enough, one_less = (capacity.bad_rate(models, count, 4000.0) for count in (needed[2], needed[2] - 1))
    assert enough <= 0.01 < one_less


def test_the_delays_that_were_measured_count(profiles):
    (model,) = capacity.models_of(str(profiles), 0.05, "eager")
    assert model.delays.margin == 0.002
    with pytest.raises(
        FluidTuneError, match=r"has an SLO of 0.007 s, but a batch of 1 takes 0.006 s and the network 0.002"
    ):
        capacity.models_of(str(profiles), 0.007, "eager")


def test_the_number_of_devices(profiles, planned):
    said = planned(str(profiles), "--rate", "300", "--slo", "0.05")
    assert "1 device is needed for 300 requests/s with an SLO of 50 ms.\nThen 0." in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("nowhere", 0.1, "eager"), "there are no profiles at 'nowhere'; serve the run once"),
        (("profiles", 0.1, "soon"), "starts is 'soon', expected deferred or eager"),
    ],
)
def test_what_cannot_be_planned(given, said):
    with pytest.raises(FluidTuneError, match=said):
        capacity.models_of(*given)


def test_services_of_other_names_are_named(profiles):
    (profiles / "serving").rename(profiles / "serving-digits")
    with pytest.raises(FluidTuneError, match=r"/serving/profiles.json'; give one of .*/serving-digits$"):
        capacity.models_of(str(profiles), 0.1, "eager")


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00"])
def test_a_file_of_something_else(content, tmp_path):
    (tmp_path / "profiles.json").write_bytes(content)
    with pytest.raises(FluidTuneError, match="profiles"):
        capacity.models_of(str(tmp_path / "profiles.json"), 0.1, "eager")


@pytest.mark.parametrize("rate", [0.0, -1.0, 1e-306, float("nan"), float("inf"), 1e9])
def test_a_rate_that_is_none_or_needs_too_many_devices_is_refused_before_anything_is_simulated(profiles, rate):
    said = f"rate is {rate}, expected requests per second above 0"
    with pytest.raises(FluidTuneError, match=r"about \d+ devices are needed for 1e\+09 re" if rate == 1e9 else said):
        capacity.devices_for(capacity.models_of(str(profiles), 0.05, "eager"), rate)


TWO = """
[[models]]
name = "ranker"
seconds = 0.1
bytes = 2_000_000_000
slo = 0.5
rate = 4
cv = 4

[[models]]
name = "reader"
layers = { seconds = [0.05, 0.05, 0.05, 0.05], bytes = [1e9, 1e9, 1e9, 1e9] }
slo = 1.5
trace = "arrivals.txt"
weight = 2
"""
ONE = '[[models]]\nname = "a"\nseconds = 0.1\nbytes = 1e9\nslo = 0.5\nrate = 4\n'


@pytest.fixture
def asked(tmp_path, monkeypatch, planned):
    """Run the command on this text of a file of models, beside two traces: what it says."""
    monkeypatch.setattr(model_placement, "SAMPLE", 400)
    (tmp_path / "arrivals.txt").write_text("\n".join(str(at * 0.4) for at in range(200)))
    (tmp_path / "zeros").write_text("0\n0")

    def ask(text, *options):
        (tmp_path / "models.toml").write_text(text)
        return planned("--models", str(tmp_path / "models.toml"), *options)

    return ask


def test_the_plan_as_json(asked):
    found = json.loads(asked(TWO, "--gpus", "3", "--gpu-memory", "4", "--json"))
    assert [one["name"] for one in found["models"]] == ["ranker", "reader"]
    assert 0 < found["attainment"] <= 1 and found["ended"] and "serve start" in found["advice"]
    used = [gpu for group in found["groups"] for gpu in group["gpus"]]
    assert sorted(used) == list(range(len(used))) and len(used) + found["idle_gpus"] == found["gpus"] == 3
    for group in found["groups"]:
        op, pp = map(int, group["configuration"].split("x"))
        assert len(group["gpus"]) == op * pp and 0 < group["bytes_per_gpu"] <= 4 * 2**30
    for at, one in enumerate(found["models"]):
        assert one["groups"] == [n for n, group in enumerate(found["groups"]) if one["name"] in group["models"]]
        assert 0 < one["attainment"] <= 1 and one["mean_seconds"] >= 0.1 + at * 0.1


def test_the_plan_for_people(asked):
    said = asked(TWO, "--gpus", "3")
    assert "of the requests within their SLO, by simulation" in said and "?" in said
    assert "serve start --models" in said and "refused" in said


def test_the_least_number_of_gpus(asked):
    found = json.loads(asked(ONE.replace("rate = 4", "rate = 40"), "--find", "--json"))
    assert found["attainment"] >= 0.99 and found["gpus"] >= 5
    fewer = json.loads(asked(ONE.replace("rate = 4", "rate = 40"), "--gpus", str(found["gpus"] - 1), "--json"))
    assert fewer["attainment"] < 0.99


def test_a_run_that_was_served(asked, tmp_path):
    (tmp_path / "run").mkdir()
    profiles = {"t1": Profile.linear(0.1, 0.1, 2), "t2": Profile.linear(0.01, 0.01, 2)}
    profiles["t3"] = profiles["t1"].in_stages([0.5, 0.5])
    (tmp_path / "run" / "profiles.json").write_text(profiles_to_json(profiles, "somewhere", {"t1": 0.03}))
    text = '[[models]]\nname = "a"\nrun = "run"\nslo = 0.22\nrate = 1\n'
    assert asked(text, "--gpus", "1").endswith("model a has the trial None, expected `trial` of t1, t2, t3")
    said = asked(text + 'trial = "t1"\n', "--gpus", "1")
    assert said.endswith(
        "has an SLO of 0.22 s, but a request takes 0.2318 s at the least; give an SLO of at least 0.2318 s"
    )
    said = asked(text + 'trial = "t3"\n', "--gpus", "1")
    assert said.endswith("model a has a `run` that was served in stages; give its `layers`")
    found = json.loads(asked(text + 'trial = "t2"\n', "--gpus", "1", "--json"))
    assert found["models"][0]["mean_seconds"] == pytest.approx(0.02018, rel=0.2)


def test_a_search_that_is_ended_says_so(asked, monkeypatch):
    found = json.loads(asked(TWO.replace("rate = 4", "rate = 60"), "--gpus", "3", "--seconds", "0", "--json"))
    assert not found["ended"]

    def interrupted(self):
        yield from ()
        raise KeyboardInterrupt

    monkeypatch.setattr(model_placement.Search, "steps", interrupted)
    assert asked(ONE, "--gpus", "1").startswith("the search was ended before it found a placement")


@pytest.mark.parametrize(
    "text, options, said",
    [
        (ONE + ONE, "--gpus 1", "has two models named 'a'; give them different names"),
        (ONE + "ratee = 1\n", "--gpus 1", "model a has the unknown key 'ratee'; did you mean 'rate'?"),
        ("[model]\n", "--gpus 1", "has the unknown key 'model'; did you mean 'models'?"),
        ("models = 3\n", "--gpus 1", "has no models; write a [[models]] table for each"),
        ("[[models]\n", "--gpus 1", "models.toml is no TOML: "),
        (ONE.replace('"a"', "3"), "--gpus 1", "model 1 has the name 3, expected text"),
        (ONE.replace("slo = 0.5", "slo = 0.1"), "--gpus 1", "has an SLO of 0.1 s, but a request takes 0.1009 s"),
        (ONE.replace("slo = 0.5", ""), "--gpus 1", "model a has no `slo`"),
        (ONE.replace("slo = 0.5", "slo = true"), "--gpus 1", "has `slo` True, expected a number above 0"),
        (ONE.replace("rate = 4", "rate = nan"), "--gpus 1", "has `rate` nan, expected a number above 0"),
        (ONE.replace("rate = 4", "rate = 1e12"), "--find", "keep at least 100900000000 GPUs busy, and no plan is made"),
        (ONE.replace("rate = 4", ""), "--gpus 1", "model a has neither `rate` nor `trace`; give one of them"),
        (ONE.replace("rate = 4", 'trace = "none"'), "--gpus 1", "none' cannot be read: No such file or directory"),
        (ONE.replace("rate = 4", 'trace = "models.toml"'), "--gpus 1", "has a line that is no number of seconds"),
        (ONE.replace("rate = 4", 'trace = "zeros"'), "--gpus 1", "zeros' has no request after 0 s, so it has no rate"),
        (ONE, "--gpus 1 --seconds nan", "--seconds is nan, expected a number of 0 or more"),
        (ONE + "cv = -1\n", "--gpus 1", "has `cv` -1, expected a number of 0 or more"),
        (ONE + "cv = 1e-200\n", "--gpus 1", "has `cv` 1e-200, expected a number of 0 or more (1e-12 to 100)"),
        (ONE.replace("rate = 4", "rate = 1e-306"), "--gpus 1", "has `rate` 1e-306, expected a number above 0 (1e-06"),
        (ONE + "weight = 1e308\n", "--gpus 1", "has `weight` 1e+308, expected a number above 0 (1e-12 to 1e+24)"),
        (ONE + 'run = "x"\n', "--gpus 1", "has both `run` and `seconds`; give one of them"),
        (ONE.replace("seconds = 0.1", 'run = "x"'), "--gpus 1", "there are no profiles at "),
        (
            ONE.replace("seconds = 0.1\nbytes = 1e9\n", ""),
            "--gpus 1",
            "has no times; give `run`, `seconds` or `layers`",
        ),
        (ONE + "layers = [1]\n", "--gpus 1", "has `layers` [1], expected a table"),
        (ONE + "layers = { seconds = [1, 2], bytes = [1] }\n", "--gpus 1", "2 seconds and 1 bytes of layers"),
        (ONE, "--gpus 1 --gpu-memory 0.5", "has 0.931 GiB on a GPU even in its smallest stages, and a GPU has 0.5"),
        (ONE.replace("bytes = 1e9", ""), "--gpus 1 --gpu-memory 1", "has no `bytes`; --gpu-memory needs the bytes"),
        (ONE + 'trial = "x"\n', "--gpus 1", "model a has `trial` without `run`"),
        (
            ONE.replace("slo = 0.5", "slo = 0.15") + "layers = { seconds = [0.1, 0.1], bytes = [5e8, 5e8] }\n",
            "--gpus 2 --gpu-memory 0.6",
            "model a has an SLO of 0.15 s, but a request takes 0.2036 s at the least",
        ),
        (ONE, "", "with --models, give either --gpus N or --find"),
        (ONE, "--gpus 1 --find", "with --models, give either --gpus N or --find"),
        (ONE, "--gpus 1 --rate 3", "the file of --models has runs, rates and SLOs"),
        (ONE, "--gpus 0", "--gpus is 0, expected 1 to 1024"),
        (ONE, "--gpus 1 --gpu-memory -1", "--gpu-memory is -1, expected GiB above 0"),
        (ONE, "--find --attainment 2", "--attainment is 2, expected a part above 0, up to 1"),
    ],
)
def test_bad_input_is_one_line(asked, text, options, said):
    assert said in asked(text, *options.split())


@pytest.mark.parametrize(
    "words, said",
    [
        ("somewhere", "give SOURCE, --rate and --slo, or --models FILE"),
        ("somewhere --rate 1 --slo 1 --gpus 2", "--gpus 2 is for --models FILE; leave it out"),
        ("somewhere --rate 1 --slo 1 --attainment .5", "--attainment 0.5 is for --find; leave it out"),
    ],
)
def test_an_option_of_another_plan_is_refused(planned, words, said):
    assert planned(*words.split()) == said
