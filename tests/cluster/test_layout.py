"""How a job's trials sit on its devices, worked out from what one trial asks for. Pure."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluidtune.cluster.devices.layout import DeviceSpec, Layout, lack, layout
from fluidtune.errors import FluidTuneError


def made(devices: str | None, request: dict[str, float], cluster: dict[str, float], **more: Any) -> Layout:
    return layout(DeviceSpec.parse(devices), request, cluster, **{"max_packing": 1, **more})


DEMANDED = {"on_demand": True}
#: What is asked for, and what comes of it: (devices, one trial's request, the cluster, further arguments), the layout.
LAYOUTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "a part of a core": (
        ("cpu:2", {"CPU": 0.5}, {"CPU": 2}, {}),
        dict(most=2, share=0.5, packing=2, worker={"CPU": 0.5}),
    ),
    "an emulated device, which has next to nothing of the cluster": (
        ("emulated:64", {"CPU": 1, "GPU": 0.5}, {"CPU": 2}, {}),
        dict(kind="emulated", most=64, packing=2, share=0.5, bundle={"CPU": 0.002}),
    ),
    "a GPU with its cores": (
        (None, {"CPU": 3, "GPU": 1}, {"CPU": 8, "GPU": 2}, {}),
        dict(kind="gpu", most=2, packing=1, bundle={"CPU": 3, "GPU": 1}),
    ),
    "no more cores than there are": (
        ("gpu:1", {"CPU": 2, "GPU": 0.5}, {"CPU": 3, "GPU": 1}, {}),
        dict(packing=1, bundle={"CPU": 2, "GPU": 1}),
    ),
    "a larger share, for want of room": (
        ("gpu:1", {"CPU": 2, "GPU": 0.25}, {"CPU": 5, "GPU": 1}, {}),
        dict(packing=2, share=0.5),
    ),
    "several GPUs, over which the rest is divided": (
        (None, {"GPU": 2, "memory": 40e9}, {"CPU": 8, "GPU": 2, "memory": 64e9}, {}),
        dict(bundle={"GPU": 1, "memory": 20e9}, worker={"GPU": 1, "memory": 20e9}),
    ),
    "custom resources, which every worker has": (
        ("cpu:1", {"CPU": 0.5, "licence": 1}, {"CPU": 1, "licence": 2}, {}),
        dict(worker={"CPU": 0.5, "licence": 1}, bundle={"CPU": 1, "licence": 2}),
    ),
    "the script's concurrency": (
        ("cpu:2", {"CPU": 1}, {"CPU": 2}, {"concurrency": 5}),
        dict(packing=3, worker={"CPU": 0.3333}),
    ),
    "cores of which not all can be held": (
        (None, {"CPU": 2}, {"CPU": 6}, {"concurrency": 6, "nodes": [{"CPU": 3}, {"CPU": 3}]}),
        dict(most=3, packing=2),
    ),
    "no core, and none is taken": (
        (None, {"licence": 1}, {"CPU": 2, "licence": 4}, DEMANDED),
        dict(bundle={"licence": 1}, worker={"licence": 1}, most=None, packing=1, share=1.0),
    ),
    "no core, and the user says that cores are devices": (
        ("cpu:2", {"licence": 1}, {"CPU": 2, "licence": 4}, DEMANDED),
        dict(bundle={"CPU": 1, "licence": 1}),
    ),
    "no core, and the job takes all of them": (
        (None, {"licence": 1}, {"CPU": 2, "licence": 4}, {}),
        dict(bundle={"CPU": 1, "licence": 1}),
    ),
    "on demand, a GPU that no node has": (
        (None, {"CPU": 1, "GPU": 1}, {"CPU": 2}, DEMANDED),
        dict(bundle={"CPU": 1, "GPU": 1}, share=1.0),
    ),
    "on demand, half of one": (
        (None, {"CPU": 1, "GPU": 0.5}, {"CPU": 2}, DEMANDED),
        dict(bundle={"CPU": 2, "GPU": 1}, share=0.5),
    ),
    "on demand, two": (
        (None, {"CPU": 4, "GPU": 2}, {"CPU": 2}, DEMANDED),
        dict(bundle={"CPU": 2, "GPU": 1}, share=2.0),
    ),
    "on demand, more cores than a node has": ((None, {"CPU": 8}, {"CPU": 2}, DEMANDED), dict(bundle={"CPU": 8})),
    "on demand, the setting is the limit": (("gpu:4", {"GPU": 1}, {"CPU": 64, "GPU": 64}, DEMANDED), dict(most=4)),
    "on demand, also of an empty cluster": (("cpu:5", {"CPU": 2}, {"CPU": 0, "GPU": 0}, DEMANDED), dict(most=2)),
}


@pytest.mark.parametrize("what", LAYOUTS)
def test_how_trials_sit_on_devices(what: str) -> None:
    (devices, request, cluster, more), wanted = LAYOUTS[what]
    plan = made(devices, request, cluster, **more)
    assert {name: getattr(plan, name) for name in wanted} == wanted
    assert plan.share_of(request) == plan.share


AMOUNTS = {"CPU": st.sampled_from([0.5, 1, 3, 4, 8]), "GPU": st.sampled_from([0, 0.25, 0.5, 1, 2])}
NODES = {"CPU": st.integers(0, 16), "GPU": st.integers(0, 2), "memory": st.sampled_from([0, 1e9, 64e9])}


@given(
    st.fixed_dictionaries(AMOUNTS | {"memory": st.sampled_from([0, 2e9]), "licence": st.sampled_from([0, 1])}),
    st.lists(st.fixed_dictionaries(NODES | {"licence": st.just(2)}), min_size=1, max_size=3),
    *(st.integers(1, 32), st.booleans(), st.booleans()),
)
def test_a_device_is_what_a_node_has_and_its_trials_fit_it_or_a_line_says_what_lacks(
    request_: dict[str, float], nodes: list[dict[str, float]], packing: int, on_demand: bool, searched: bool
) -> None:
    """Ray counts ten-thousandths, and some releases round them up: the last trial of 6 would wait for ever."""
    asked = {name: amount for name, amount in request_.items() if amount}
    cluster = {name: sum(node[name] for node in nodes) for name in nodes[0]}
    how: dict[str, Any] = {"nodes": nodes, "max_packing": packing, "on_demand": on_demand}
    how["searched"] = searched and "GPU" in asked
    fits = any(all(node[name] >= amount for name, amount in asked.items()) for node in nodes)
    assert (lack(asked, nodes) is None) == fits
    try:
        plan = made(None, asked, cluster, **how)
    except FluidTuneError as refused:
        assert "\n" not in str(refused) and not (on_demand and asked)
        return
    workers = plan.packing / max(1.0, plan.share)
    assert all(amount * workers <= plan.bundle[name] + 1e-9 for name, amount in plan.worker.items())
    assert all(round(amount * 10_000) == pytest.approx(amount * 10_000) for amount in plan.worker.values())
    assert plan.share_of(asked) == plan.share
    assert not fits or any(all(node[name] >= amount for name, amount in plan.bundle.items()) for node in nodes)


@pytest.mark.parametrize(
    "devices, request_, cluster, mentions",
    [
        ("gpu", {"CPU": 1}, {"CPU": 2}, 'devices="gpu"'),
        (None, {"GPU": 1}, {"CPU": 2}, 'devices="gpu"'),
        ("gpu:3", {}, {"CPU": 2, "GPU": 2}, "at most 2"),
        ("cpu:3", {}, {"CPU": 2}, "at most 2"),
        (None, {"CPU": 3}, {"CPU": 2}, "asks for 3 CPU cores"),
        (None, {"CPU": 1, "GPU": 1.5}, {"CPU": 2, "GPU": 2}, "1.5 GPUs"),
        (None, {"CPU": 1, "GPU": 3}, {"CPU": 2, "GPU": 2}, "3 GPUs"),
        ("gpu:1", {"CPU": 1, "GPU": 2}, {"CPU": 2, "GPU": 2}, "2 GPUs"),
        (None, {"CPU": 1, "licence": 1}, {"CPU": 2}, "(0 licence at most); ask"),
    ],
)
def test_what_cannot_be_held(
    devices: str | None, request_: dict[str, float], cluster: dict[str, float], mentions: str
) -> None:
    with pytest.raises(FluidTuneError) as raised:
        made(devices, request_, cluster)
    assert mentions in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "request_, nodes, packing, bundle, worker, threads",
    [
        ({"CPU": 4, "GPU": 1}, [{"CPU": 16, "GPU": 1}], 4, {"CPU": 4, "GPU": 1}, {"CPU": 1, "GPU": 0.25}, 4),
        ({"CPU": 4, "GPU": 1}, [{"CPU": 2}], 4, {"CPU": 4, "GPU": 1}, {"CPU": 1, "GPU": 0.25}, 4),
        ({"CPU": 2, "GPU": 0.5}, [{"CPU": 16, "GPU": 1}], 4, {"CPU": 4, "GPU": 1}, {"CPU": 1, "GPU": 0.25}, 2),
        ({"GPU": 1}, [{"CPU": 16, "GPU": 1}], 4, {"GPU": 1}, {"GPU": 0.25}, 1),
        # Seen: it asked for 16 cores and a GPU, which no node had, and waited for ever.
        ({"CPU": 4, "GPU": 0.25}, [{"CPU": 8, "GPU": 1}], 4, {"CPU": 8, "GPU": 1}, {"CPU": 2, "GPU": 0.25}, 4),
        ({"GPU": 1, "licence": 1}, [{"GPU": 1, "licence": 4}], 1, *[{"GPU": 1, "licence": 1}] * 2, 1),
    ],
)
def test_a_search_for_the_packing_limit_holds_no_more_than_one_trial_asks_for(
    request_: dict[str, float],
    nodes: list[dict[str, float]],
    packing: int,
    bundle: dict[str, float],
    worker: dict[str, float],
    threads: int,
) -> None:
    plan = made(None, request_, nodes[0], max_packing=4, on_demand=True, searched=True, nodes=nodes)
    assert (plan.packing, plan.bundle, plan.worker, plan.threads) == (packing, bundle, worker, threads)
    assert int(1 / plan.share) * request_.get("CPU", 0) <= plan.bundle.get("CPU", 0), "trials lack cores"
