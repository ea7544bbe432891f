"""What Ray tells of a cluster whether it may grow."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray._private import worker as rays

from fluidtune.ray_compat import cluster_state


@pytest.mark.parametrize(
    "types, grows",
    [(["node_ab12"], False), (["node_ab12", "node_cd34"], False), (["ray.head.default"], True), (["node_zz"], True)],
)
def test_an_autoscaler_has_types_of_nodes(types: list[str], grows: bool) -> None:
    nodes = [{"NodeID": "ab12"}, {"NodeID": "cd34"}]
    assert cluster_state.has_autoscaler({"active_nodes": dict.fromkeys(types, 1)}, nodes) is grows


def test_a_cluster_that_says_nothing_may_grow() -> None:
    for worker in (SimpleNamespace(gcs_client=SimpleNamespace(internal_kv_get=lambda *args: None)), SimpleNamespace()):
        assert cluster_state.may_get_nodes(worker, 0.1)


@pytest.mark.ray
@pytest.mark.usefixtures("ray2")
def test_a_cluster_of_ones_own_does_not_grow() -> None:
    assert not cluster_state.may_get_nodes()


def test_local_mode_is_known_by_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert getattr(rays, "LOCAL_MODE", 2) == 2 and not cluster_state.in_local_mode()
    monkeypatch.setattr(rays.global_worker, "mode", 2)
    assert cluster_state.in_local_mode()
