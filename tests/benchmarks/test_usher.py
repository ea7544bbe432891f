"""The duel with ParvaGPU finds what is wrong with an answer; the rivals of USHER's plans are sound."""

from __future__ import annotations

import pytest

from benchmarks import duel_parvagpu as duel
from benchmarks import usher
from benchmarks.placement.configurations import NeedyModel
from benchmarks.placement.needs import Need

#: Figures made up here; the rows without throughput did not run.
ROWS = "1,8,1,10,0.01\n1,8,2,8,0.02\n2,8,1,25,0.01\n3,8,1,40,0.01\n4,8,2,25,0.01\n7,8,1,0.0,0.0\n"
HEAD = "Mig instance,Batch size,Workload Number,Throughput,Latency\n"
ANSWER = "Num instance,Num GPU,Model,Placement,Instance size,Batch size,Num proc\n0,0,a,4,3,8,1\n0,1,b,0,1,8,1\n"


@pytest.fixture
def data(tmp_path):
    (tmp_path / "a.csv").write_text(HEAD + ROWS)
    (tmp_path / "b.csv").write_text(HEAD + ROWS)
    (tmp_path / "SLO_req_rate.csv").write_text("40,10\nN/A,10\n")
    (tmp_path / "SLO_latency.csv").write_text("30.5,30\nN/A,30\n")
    (tmp_path / "SLO1_ParvaGPU_deploy.csv").write_text(ANSWER)
    (tmp_path / "SLO2_ParvaGPU_deploy.csv").write_text(ANSWER.replace("0,0,a,4,3,8,1\n", ""))
    return tmp_path


def test_the_duel(data):
    measured, (both, one) = duel.read(data)
    assert both == duel.Scenario({"a": 40, "b": 10}, {"a": 0.030, "b": 0.030}) and list(one.rates) == ["b"]
    assert measured["a"][4, 8, 2] == (50.0, 0.01) and (7, 8, 1) not in measured["a"]
    found = duel.run_all(data, 2)
    first = found["scenarios"][0]
    assert (first["gpus"], first["gpcs"], first["least_gpus"], first["knapsack"], first["valid"]) == (1, 4, 1, 1, True)
    assert first["parvagpu"] == {"gpus": 2, "gpcs": 4, "collisions": 0} and found["gpus"] == {"ours": 2, "parvagpu": 3}


def test_an_answer_that_breaks_the_rules_is_found(data):
    measured, (both, _) = duel.read(data)
    good = [duel.Instance("0", 4, "a", 3, 8, 1), duel.Instance("0", 0, "b", 1, 8, 1)]
    assert not duel.faults(measured, both, good) and not duel.collisions(good)
    assert "a: 0.0 of 40 requests/s" in duel.faults(measured, both, good[1:])
    assert "takes 0.02 s" in duel.faults(measured, both, [*good, duel.Instance("1", 0, "b", 1, 8, 2)])[0]
    assert duel.collisions([*good, duel.Instance("0", 6, "b", 1, 8, 1)]) == ["0"]
    assert duel.collisions([duel.Instance("0", 1, "b", 2, 8, 1)]) == ["0"]


def test_the_rivals_by_hand():
    """Two batches of 8 a second on half a GPU: 16 requests/s are one replica, 40 are three."""
    needs = (Need(8, 0.5, 0.3, 0.5),)
    models = [NeedyModel("a", 40, 1.0, needs), NeedyModel("b", 16, 1.0, needs)]
    assert usher.dedicated(models) == 4 and usher.first_fit(models) == 2
    assert usher.gpulet(models) == 2 and usher.gslice(models) == 2
    # One replica of a model on a GPU at most, so the three of a stand on three.
    assert usher.optimum(models, 10.0) == (3, True) and usher.planned(models)[:2] == (3, 3)


def test_requests_that_would_be_late_are_refused():
    """A replica takes 1 s for any batch: with an SLO of 2 s all are answered, below a second none is."""
    model = NeedyModel("a", 3, 2.0 + 1e-9, (Need(64, 0.5, 0.5, 1.0),))
    assert usher.answered(model, [1.0] * 65, [1.0], 300, 1) == 1.0
    assert usher.answered(model._replace(slo=0.9), [1.0] * 65, [1.0], 300, 1) == 0.0
    # One at a time: no more than one a second of the three that come.
    assert usher.answered(model, [1.0] * 2, [1.0], 300, 1) == pytest.approx(1 / 3, abs=0.05)


def test_made_up_models_are_as_busy_as_asked():
    models = usher.drawn(20, 16, 3)
    busy = sum(
        one.rate / need.capacity * max(need.compute, need.memory) for one in models for need in one.allowed()[-1:]
    )
    assert busy == pytest.approx(16) and all(one.allowed() == one.needs for one in models)
