"""`fluidtune serve plan --models` for models that share GPUs: files with `shares`, and what is printed."""

from __future__ import annotations

import json

import pytest

#: Throughput is that of a process. A batch of 16 takes more than half of the SLO.
CSV = """gpcs,batch,processes,throughput,latency
1,8,1,10,0.05
2,8,2,15,0.05
2,16,2,40,0.2
"""
SHARES = '[[models]]\nname = "a"\nshares = "a.csv"\nslo = 0.2\nrate = 60\nbytes = 1e9\n'
TABLES = """
[[models]]
name = "b"
shares = [{ percent = 40, batch = 4, throughput = 10, latency = 0.1 }]
slo = 0.2
rate = 15
"""


@pytest.fixture
def asked(tmp_path, plan_said):
    """Run the command on this text of a file, beside a CSV file: what was said."""
    (tmp_path / "a.csv").write_text(CSV)
    return lambda text, options: plan_said(text, *options.split())


def test_shares_of_a_csv_file(asked):
    found = json.loads(asked(SHARES, "--find --json"))
    (gpu,) = found["shared"]
    assert all(one["slot"] in (0, 2, 4) for one in gpu)
    assert [(one["gpcs"], one["batch"], one["processes"]) for one in gpu] == [(2, 8, 2), (2, 8, 2)]
    assert (found["gpus"], found["least_gpus"], found["attainment"], found["ended"]) == (1, 1, 1.0, True)
    keys = ("name", "slo", "rate", "capacity", "gpus")
    assert [tuple(one[key] for key in keys) for one in found["models"]] == [("a", 0.2, 60, 60, [0])]
    assert len(json.loads(asked(SHARES.replace("60", "120"), "--find --json"))["shared"]) == 2
    assert json.loads(asked(SHARES.replace("60", "200"), "--find --attainment 0.5 --json"))["gpus"] == 1


def test_as_much_as_a_number_of_gpus_can_serve(asked):
    found = json.loads(asked(SHARES.replace("60", "200"), "--gpus 1 --json"))
    assert found["attainment"] == pytest.approx(0.5) and found["most_attainment"] == pytest.approx(0.5)
    assert json.loads(asked(SHARES, "--gpus 3 --json"))["idle_gpus"] == 2
    said = asked(SHARES.replace("60", "200"), "--gpus 1")
    assert "GPUs: 1. There is capacity for 50.00% of each rate." in said and "gpcs" in said
    assert "No plan on these GPUs has it for more than 50.00%." in said


def test_shares_in_percent(asked):
    found = json.loads(asked(TABLES, "--find --json"))
    assert [(one["percent"], one["processes"], "slot" in one) for one in found["shared"][0]] == [(40, 1, False)] * 2
    assert "percent" in asked(TABLES, "--find") and "slot" not in asked(TABLES, "--find")


def test_memory_is_that_of_the_share(asked):
    """2 of 8 slices of 8 GiB hold two processes of 1e9 bytes; of 7 GiB, they do not, and 1 GPC holds one in neither."""
    assert json.loads(asked(SHARES, "--find --gpu-memory 8 --json"))["shared"][0][0]["gpcs"] == 2
    assert "model a has an SLO of 0.2 s, but" in asked(SHARES, "--find --gpu-memory 7")
    assert "has no `bytes`; --gpu-memory needs the bytes of a process" in asked(TABLES, "--find --gpu-memory 7")


def test_a_csv_file_with_a_row_that_is_longer_or_shorter_than_its_first_line(asked, tmp_path):
    (tmp_path / "b.csv").write_text(CSV + "3,8,1,20,0.05,7\n")
    line = len(CSV.splitlines()) + 1
    said = f"line {line} of 'b.csv' has not as many values as the first line"
    assert said in asked(SHARES.replace("a.csv", "b.csv"), "--find")
    (tmp_path / "b.csv").write_text(CSV + "3,8,1,20\n")
    assert said in asked(SHARES.replace("a.csv", "b.csv"), "--find")


def test_a_csv_file_with_the_mark_of_a_spreadsheet(asked, tmp_path):
    (tmp_path / "b.csv").write_text(CSV, encoding="utf-8-sig")
    assert '"gpus": 1' in asked(SHARES.replace("a.csv", "b.csv"), "--find --json")


PLAIN = '[[models]]\nname = "c"\nseconds = 0.1\nslo = 0.5\nrate = 4\n'


@pytest.mark.parametrize(
    "text, said",
    [
        (SHARES + PLAIN, "model 1 has `shares` and model 2 has none; give them to all models of a file"),
        (SHARES + TABLES, "model a has shares in `gpcs` and model b in `percent`; a GPU is divided by MIG or by MPS"),
        (SHARES + SHARES, "has two models named 'a'"),
        (SHARES + "cv = 1\n", "model a has the unknown key 'cv'; expected name, slo, rate, bytes, shares"),
        (SHARES.replace("a.csv", "b.csv"), "model a: shares: 'b.csv' cannot be read: No such file or directory; give"),
        (SHARES.replace('"a.csv"', "3"), "model a: shares is 3, expected tables, or the path of a CSV file with rows"),
        (SHARES.replace("rate = 60", ""), "model a has no `rate`"),
        (SHARES.replace("slo = 0.2", "slo = 0.09"), "model a has an SLO of 0.09 s, but a request waits for a batch"),
        (TABLES.replace("percent", "gpcs"), "model b has a share of 40 GPCs, expected 1, 2, 3, 4, 7"),
        (TABLES.replace("40", "140"), "a share has 140 percent, expected 1 to 100"),
        (TABLES.replace("40", "2.5"), "has `percent` 2.5, expected a whole number"),
        (TABLES.replace("percent = 40,", ""), "has a share with 0 of `gpcs` and `percent`; give one of them"),
        (TABLES.replace("throughput", "thruput"), "unknown key 'thruput'; did you mean 'throughput'?"),
        (SHARES.replace("rate = 60", "rate = 1" + "0" * 309), "expected a number above 0"),  # Seen: a traceback
        (TABLES.replace("latency = 0.1", "latency = 0"), "has `latency` 0, expected a number above 0"),
        (
            SHARES.replace("rate = 60", "rate = 1e9"),
            "the rates need at least 10000000 GPUs, and no plan is made for more",
        ),
    ],
)
def test_bad_input_is_one_line(asked, text, said):
    assert said in asked(text, "--find")
