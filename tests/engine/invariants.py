"""The invariants of an engine's books, asserted after any event."""

from __future__ import annotations

from fluidtune.engine import Engine
from fluidtune.engine.device_table import DeviceTable
from fluidtune.engine.state import State
from fluidtune.engine.trial import Trial
from fluidtune.engine.wait_queue import WaitQueue


def check_engine(engine: Engine) -> None:
    """Asserts every invariant of the books."""
    state = engine._state
    check_devices(state.devices)
    check_queue(state.waiting)
    tenants: dict[str, list[int]] = {}
    for device, names in state.devices.tenants.items():
        for name in names:
            tenants.setdefault(name, []).append(device)
    running = {group: 0 for group in state.groups}
    for name, trial in state.trials.items():
        holds = trial.status in ("running", "suspending")
        running[trial.group.name] += holds
        assert holds == bool(trial.devices) == bool(trial.share) == (name in state.running), trial
        assert sorted(trial.held) == sorted(tenants.get(name, [])), trial
        assert (trial.status == "waiting") == (name in state.waiting), trial
        assert (holds or trial.status == "waiting") == (name in trial.group.live), trial
        assert (name in state.batch) == (name in trial.group.live and trial.group.synchronous), trial
        assert trial.iterations is None or trial.iterations >= 0, trial
        assert trial.cooldown >= 0 and (holds or trial.resizing_to is None), trial
        _check_devices_of(trial, state)
    for group in state.groups.values():
        assert group.running == running[group.name], group
    for name in state.claims:
        assert state.trials[name].first and state.trials[name].status in ("suspending", "paused"), name
    assert set(tenants) == set(state.running)


def _check_devices_of(trial: Trial, state: State) -> None:
    assert len(set(trial.devices)) == len(trial.devices), trial
    wide = trial.gang == 1 and len(trial.devices) > 1
    assert (trial.name in state.wide) == wide, trial
    if trial.gang > 1:
        assert len(trial.devices) in (0, trial.gang) and trial.resizing_to is None, trial
        assert len({state.devices.node[device] for device in trial.devices}) <= 1, trial
    if trial.status == "suspending":
        assert trial.first and trial.name in state.claims, trial
    if trial.resizing_to is not None:
        assert trial.resizing_to[0] == trial.devices[0], trial
    for device in trial.held:
        slots = state.devices.slots[device]
        assert len(trial.held) == 1 or slots == 1, trial
        assert abs(trial.share - 1 / slots) < 1e-9, trial


def check_devices(table: DeviceTable) -> None:
    """Asserts what the comments of the table's attributes say."""
    assert set(table.node) == set(table.tenants) == set(table.slots)
    for device, tenants in table.tenants.items():
        assert len(tenants) <= table.slots[device], f"device {device} over-committed: {tenants}"
        assert len(set(tenants)) == len(tenants), (device, tenants)
        assert tenants or table.slots[device] == 1, device
    assert table.leaving <= set(table.node)
    staying = {d: tenants for d, tenants in table.tenants.items() if d not in table.leaving}
    assert table.idle == sorted(d for d, tenants in staying.items() if not tenants)
    by_node: dict[str, list[int]] = {node: [] for node in table.size}
    for device in table.idle:
        by_node[table.node[device]].append(device)
    assert by_node == table.idle_on
    assert sum(table.size.values()) == len(table) and all(table.size.values())
    assert table.models.of.keys() <= table.node.keys()
    loaded = sorted((len(t), table._place[d], d) for d, t in staying.items() if t)
    assert loaded == sorted((count, *entry) for count, entries in table._loaded.items() for entry in entries)
    assert list(table._place) == list(table.node) and all(e == sorted(e) for e in table._loaded.values())
    assert table._open == sorted((len(t), d) for d, t in staying.items() if 0 < len(t) < table.slots[d])


def check_queue(queue: WaitQueue) -> None:
    """Asserts what the comments of the queue's attributes say."""
    seen = 0
    for key, line in queue._lines.items():
        assert line.trials, key
        assert line.trials == sorted(line.trials, key=lambda trial: (trial.order, trial.number)), key
        seen += len(line.trials)
        for trial in line.trials:
            assert queue._where[trial.name] is line and line.key == key, trial
    assert seen == len(queue._where)
