"""The engine: which trial runs on which devices, how wide, and when that changes.

Events go in (a trial was added, an iteration is done, a device was lost), instructions come out (start, resize,
suspend, release); `messages` lists both, and `reasons` why an instruction may be given. Pure: no Ray, no torch, no
clock, no randomness. A shell carries the instructions out: `fluidtune.tune` on Ray, `fluidtune.twin` on a virtual
clock.

Start reading at `Engine.handle` and docs/engine.md (a trial's statuses, the steps, how c is found). Then:

- `event_handlers` changes the books (`state`, with the records of `trial`) for each event
- `placing` starts what waits (`wait_queue`, `device_table`), `resizing` changes widths, `packing_search` finds c
- `width_rules` and `estimates` answer both, from what `speed`, `runtime_prediction` and `sharing` have measured

It does not decide which trials there are (Tune does), how a resize is done (the shell does), nor which GPUs the job has
(themis_bridge does). The formulas of the paper are in `fluidtune.planning`.
"""

from fluidtune.engine.device_demand import DeviceDemand, with_arrivals
from fluidtune.engine.engine import Engine
from fluidtune.engine.reasons import Reason, Why, because
from fluidtune.engine.trial import EngineError

__all__ = ["DeviceDemand", "Engine", "EngineError", "Reason", "Why", "because", "with_arrivals"]
