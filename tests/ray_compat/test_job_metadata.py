"""The metadata of the Ray job, by which a job names its user."""

from __future__ import annotations

import json

import pytest

from fluidtune.ray_compat import job_metadata as module


def test_without_a_cluster_there_is_none(monkeypatch):
    monkeypatch.setattr(module, "global_worker", object())
    assert module.job_metadata() == {}
    monkeypatch.setenv("LOGNAME", "bert")
    assert (module.user_of_job(), module.user_of_job("anna")) == ("bert", "anna")


@pytest.mark.ray
@pytest.mark.parametrize("submitted", [True, False])
def test_what_a_script_or_a_submission_says(submitted, no_ray, monkeypatch):
    import ray
    from ray.job_config import JobConfig

    given = {"user": "anna"}
    if submitted:
        # So `ray job submit --metadata-json` tells a driver.
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"metadata": given}))
    config = None if submitted else JobConfig(metadata=given)
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, job_config=config)
    try:
        assert module.job_metadata() == given
        assert module.user_of_job() == "anna"
    finally:
        ray.shutdown()
