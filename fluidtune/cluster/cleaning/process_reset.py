"""Decides whether a used process may serve another trial.

It may if the packages that the trial imported are known (`trial_modules`), and a look finds nothing unusual. Before, it
is put back what a plain training script touches (`process_settings`), and the user's modules are forgotten. The random
streams of Python, numpy and torch start from entropy, as in a new process. Everything else is looked for: other
settings, replaced functions (`patches`), exit handlers (`noted_calls`), what the trial owns in Ray, and threads,
processes, files, ports and memory (`process_leftovers`).
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from typing import Any

from fluidtune.cluster.cleaning.noted_calls import NotedCalls
from fluidtune.cluster.cleaning.patches import Patches
from fluidtune.cluster.cleaning.process_leftovers import Leftovers
from fluidtune.cluster.cleaning.process_settings import looked_at, put_back
from fluidtune.cluster.cleaning.trial_modules import forget
from fluidtune.cluster.sharing.gpu_probe import cuda_failure, torch_on_gpu
from fluidtune.ray_compat import ownership
from salus_share.memory import forget_workspaces


class ProcessBaseline:
    """What a process is like before a trial's code runs in it, and before the trial's modules are imported.

    It is made once a process.
    """

    def __init__(self) -> None:
        #: The names of modules that stay, and of those that were imported without the trial.
        self._modules = set(sys.modules)
        self._known = set(self._modules)
        find = sys.modules.get
        self._leftovers = Leftovers()
        self._put_back = [(each, each.value()) for each in put_back(find)]
        self._looked_at = [(each, each.value()) for each in looked_at(find)]
        self._calls = NotedCalls(find("torch"))
        self._patches = Patches(self._known, find)
        #: The first trial has left, and what there was then is not looked at by the collector any more.
        self._frozen = False

    def note_imports(self) -> None:
        """Note the process' size; called when a trial's modules are imported and its code has not run."""
        self._leftovers.note_size()

    def restore(self, memory_free: Callable[[], None] | None = None) -> str | None:
        """Put back what a plain script changes, and look for everything else.

        ``memory_free``: called when the trial's memory is free, before the look for what is left. Returns None if
        the process is as good as new, else one line that says what the trial has left behind.
        """
        try:
            return self._restore(memory_free)
        except Exception as error:  # as when a thread that is left is in the middle of an import
            return f"it could not be looked at: {type(error).__name__}: {error}"

    def _restore(self, memory_free: Callable[[], None] | None) -> str | None:
        failure = cuda_failure()
        if failure is not None:
            return f"CUDA cannot be used any more: {failure}"
        trouble = forget(sys.modules.keys() - self._modules, self._known)
        self._modules |= sys.modules.keys()
        changed = [(setting, value) for setting, value in self._put_back if setting.always or setting.value() != value]
        for setting, value in changed:
            setting.put_back(value)
        _draw_anew()
        gc.collect()
        _free_gpu()  # after the collector, which frees models that hold themselves, as prepared ones do by their hooks
        if memory_free is not None:
            memory_free()
        owned = ownership.owned()
        trouble = trouble or (f"created in Ray: {owned}" if owned else None) or self._calls.left()
        trouble = trouble or _different([*changed, *self._looked_at])
        # Threads come last: those that are ending are waited for, which is in vain if the process ends anyway.
        trouble = trouble or self._patches.found() or self._leftovers.found()
        if trouble is None and not self._frozen:
            # What has come since belongs to libraries for the most part: later collections need not look at it.
            gc.freeze()
            self._frozen = True
        return trouble


def _different(settings: list[tuple[Any, Any]]) -> str | None:
    changed = [each.name for each, value in settings if each.value() != value]
    return f"changed: {', '.join(changed[:5])}" if changed else None


def _draw_anew() -> None:
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


def _free_gpu() -> None:
    """Give the GPU back what torch keeps of it. The next trial may have all of it, and its peak begins at 0."""
    torch = torch_on_gpu()
    if torch is not None:
        forget_workspaces(torch)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(1.0)
