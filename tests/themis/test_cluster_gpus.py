"""Which devices of a Ray cluster are leased, from what Ray says of its nodes."""

from __future__ import annotations

from typing import Any

import ray

from themis_bridge.shell import reservations


def node(name: str, address: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {
        "NodeID": name,
        "NodeManagerAddress": address,
        "Alive": alive,
        "Resources": {f"node:{address}": 1.0, **resources},
    }


def found(monkeypatch, *nodes: dict[str, Any]) -> tuple[list[str], list[str]]:
    monkeypatch.setattr(ray, "nodes", lambda: list(nodes))
    gpus, ties, left_out = reservations.cluster_gpus("CPU")
    assert {gpu.machine for gpu in gpus} == set(ties)
    return [gpu.id for gpu in gpus], left_out


def test_a_node_without_devices_takes_no_address_from_one_that_has_some(monkeypatch):
    # Seen: with a head without cores and a worker node at the same address the arbiter had no devices.
    assert found(monkeypatch, node("a", "10.0.0.1"), node("b", "10.0.0.1", CPU=2.0)) == (["b-0", "b-1"], [])


def test_the_devices_of_a_second_node_at_an_address_are_named_for_the_operator(monkeypatch):
    nodes = [node("a", "10.0.0.1", CPU=1.0), node("b", "10.0.0.1", CPU=2.0), node("c", "10.0.0.2", CPU=1.0)]
    said = ["2 CPUs of node b are not leased: another has its address, 10.0.0.1"]
    assert found(monkeypatch, *nodes) == (["a-0", "c-0"], said)
    assert found(monkeypatch, node("d", "10.0.0.1", alive=False, CPU=4.0), *nodes) == (["a-0", "c-0"], said)
