"""What the leader is asked for and what its answers mean: which call is next, what Tune gets, and what an iteration
shows.
"""

from __future__ import annotations

from fluidtune.engine import messages as engine
from fluidtune.trials import messages as m
from fluidtune.trials.life import TrialStateMachine, on_event
from fluidtune.trials.recoveries import fail, move, recover
from fluidtune.trials.resizes import ask_to_leave, begin_resize, end_growth

#: Why a trial whose trainable can have several workers does not use them itself.
NO_MODULE = "it has called no torch module with parameters in an iteration"


def issue_next(life: TrialStateMachine) -> None:
    """Send the trial's oldest call to its leader, unless one is under way."""
    if life.place != "live" or not life.calls or life.calls[0].issued:
        return
    call = life.calls[0]
    if life.wish == "leave" and call.method == "train":
        if life.movable:
            move(life)
            return
        if life.outside.can_save:
            # The trial is asked for a checkpoint of its newest iteration, as Tune would before a pause.
            call = m.Call("save")
            life.calls.appendleft(call)
    call.issued, life.saved = True, None
    assert life.crew.leader is not None
    life.order(m.CallLeader(life.crew.leader, call))


@on_event.register
def _on_method_called(event: m.MethodCalled, life: TrialStateMachine) -> None:
    call = event.call
    stands_at, life.stands_at = life.stands_at, None
    if stands_at is not None and call.method == "restore" and life.place == "live":
        life.order(m.TellTune(call, stands_at))
        return
    if life.saved is not None and not life.calls and call.method == "save" and event.plain:
        # It came with the newest result.
        saved, life.saved = life.saved, None
        life.order(m.TellTune(call, saved))
        return
    life.calls.append(call)
    issue_next(life)


@on_event.register
def _on_calls_dropped(event: m.CallsDropped, life: TrialStateMachine) -> None:
    life.crew.computes = life.crew.computes or any(call.issued for call in life.calls)
    life.order(m.DropCalls(tuple(life.calls)))
    life.calls.clear()


@on_event.register
def _on_loaded(event: m.Loaded, life: TrialStateMachine) -> None:
    if not life.expects(event.worker):
        return  # the trial ended while it was being loaded
    life.go("live")
    life.times_live += 1
    life.crew.facts = event.facts
    if len(life.crew.wanted) > len(life.crew.devices):
        begin_resize(life)
    if life.times_live == 1:
        life.order(m.TellRunning(event.worker))
        return
    # It is loaded at its last commit or checkpoint: go on with Tune's calls.
    life.order(m.TellRunning(event.worker, life.losses.last))
    if life.outside.newest_checkpoint() is not None and not (life.calls and life.calls[0].method == "restore"):
        life.calls.appendleft(m.Call("restore"))
    issue_next(life)


def _answered(life: TrialStateMachine, call: m.Call) -> None:
    """The call is answered: the next one may be sent."""
    life.calls.remove(call)
    issue_next(life)


@on_event.register
def _on_answered(event: m.Answered, life: TrialStateMachine) -> None:
    call = event.call
    if not life.expects(call):
        return
    if call.method == "save" and not call.wants_result:
        life.calls.remove(call)
        life.order(m.KeepCheckpoint(event.value))
    else:
        _answered(life, call)
    life.order(m.TellTune(call, event.value))


@on_event.register
def _on_checkpoint_kept(event: m.CheckpointKept, life: TrialStateMachine) -> None:
    issue_next(life)


@on_event.register
def _on_checkpoint_restored(event: m.CheckpointRestored, life: TrialStateMachine) -> None:
    if life.expects(event.call):
        # They change when another trial's checkpoint was restored, and in a retry.
        life.seen.delivered, life.seen.number = event.delivered, event.number
        _answered(life, event.call)
        life.order(m.TellTune(event.call, event.delivered))


@on_event.register
def _on_raised(event: m.Raised, life: TrialStateMachine) -> None:
    if not life.expects(event.by):
        return
    if isinstance(event.by, m.Call) and event.by.wants_error and not event.final:
        _answered(life, event.by)
        life.order(m.TellError(event.by, event.error))
    else:
        # A restore or save of our own failed, too: the trial cannot go on from where Tune thinks it is.
        fail(life, event.error)


@on_event.register
def _on_room_lacking(event: m.RoomLacking, life: TrialStateMachine) -> None:
    """The device has no room for the trial: it goes on elsewhere, from where it loses as little as possible."""
    if not life.expects(event.by):
        return
    if event.devices is not None:
        life.order(m.Write("room_lacking", {"device": life.crew.devices[0], "memory": None}, event.reason))
        recover(life, event.reason)
        life.order(m.ShareCapabilities(m.TrainableCapabilities(devices=event.devices)))
        return
    if event.need is not None:
        persistent, ephemeral = event.need
        life.order(m.Tell(engine.NeedFound(life.trial, persistent + ephemeral, ephemeral)))
    if life.outside.shares_gpus_by_count:
        # It gets another try on a GPU without neighbours, of which idle workers hold contexts, too.
        life.squeezed = True
        life.order(m.EndIdleWorkers())
    fields = {"device": life.crew.devices[0], "memory": event.need}
    life.order(m.Write("room_lacking", fields, event.reason))
    if event.between and life.place == "live" and (life.movable or life.outside.can_save):
        ask_to_leave(life, event.reason)
        life.calls[0].issued = False
        issue_next(life)
    else:
        recover(life, event.reason)


@on_event.register
def _on_iteration_done(event: m.IterationDone, life: TrialStateMachine) -> None:
    call, reply = event.call, event.reply
    if not life.expects(call):
        return
    for saved in reply.rewritten:
        life.order(m.KeepCheckpoint(saved))
    _answered(life, call)
    reported = life.seen.delivered
    progress = None if event.final else life.seen.note_result(reply.iteration, event.number)
    _learn(life, reply, event.final, reported)
    if not life.calls and not life.outside.waits_for_checkpoints:
        life.saved = reply.saved
    life.order(m.TellTune(call, reply.result, progress))


def _learn(life: TrialStateMachine, reply: m.Reply, final: bool, reported: int) -> None:
    """Tell the engine and the log what an iteration showed. ``reported``: the iterations that Tune had seen before.

    The engine's estimates of speed come from `Result` alone. The log and the stall detector get the same seconds at
    once, while the engine gets its events in batches: in the log an iteration stands before what follows from it.
    """
    crew, before, facts = life.crew, life.crew.facts, reply.facts
    life.losses.forgive()
    life.done_here += 1
    crew.facts = crew.facts if final else facts
    if facts.width >= crew.failed_at:
        crew.failed_growths.clear()
    life.streams = facts.streams or life.streams
    if reply.kind != life.kind:
        _is_of(life, reply.kind)
        life.order(m.ShareCapabilities(m.TrainableCapabilities(kind=reply.kind)))
    if facts.calls_modules and not life.growable:
        _can_grow(life)
        life.order(m.ShareCapabilities(m.TrainableCapabilities(growable=True)))
    for module, verdict, why in facts.checked:
        life.order(m.Write("growth_checked", {"module": module, "verdict": verdict}, why))
    if facts.grown is not None:
        life.order(m.Write("divided", dict(zip(("workers", "seconds", "stall"), facts.grown, strict=True))))
    if facts.began_at is not None and before.began_at is None and life.seen.results > 1:
        life.order(m.Write("went_on", {"iteration": facts.began_at, "reported": reported}))
    if facts.cannot_commit is not None and before.cannot_commit is None:
        warning = m.Warn(f"trial {life.trial} has no commit of its last iterations: {facts.cannot_commit}")
        life.order(warning, m.Write("not_committed", reason=facts.cannot_commit))
    if facts.ungrowable is not None:
        end_growth(life, facts.ungrowable)
    elif facts.width > 1 and not facts.calls_modules:
        end_growth(life, NO_MODULE)
    if not final:
        needs = reply.memory, reply.ephemeral, reply.compute
        life.order(m.Tell(engine.Result(life.trial, reply.seconds, crew.ran_at, *needs)), m.WriteIteration(reply))


def _is_of(life: TrialStateMachine, kind: m.Kind) -> None:
    """The kind of a trial is in the log whoever has shown it, the trial itself or another one."""
    life.kind = kind
    life.order(m.Write("kind_found", {"kind": kind}), m.Tell(engine.KindFound(life.trial, kind)))


def _can_grow(life: TrialStateMachine) -> None:
    life.growable = True
    life.order(m.Write("can_grow"), m.Tell(engine.CanGrow(life.trial)))


@on_event.register
def _on_capabilities_learned(event: m.CapabilitiesLearned, life: TrialStateMachine) -> None:
    shown = event.shown
    if shown.kind is not None and life.kind == "plain":
        _is_of(life, shown.kind)
    if shown.growable and not life.growable:
        _can_grow(life)
    if shown.devices:
        life.gang = True
        life.order(m.Tell(engine.GangFound(life.trial, shown.devices)))
