"""`fluidtune run SCRIPT`: the script's process is what ``python SCRIPT`` makes it, from its first line to its end.

The script runs in a module `__main__` of its own, which Python finds and clears when it ends. Until its first line
nothing is imported but a few light files; FluidTune comes with the script's own import of Ray (`stand_ins`).
"""

from __future__ import annotations

import _frozen_importlib_external as files
import builtins
import os
import sys
import zipimport

from fluidtune import hash_seed
from fluidtune.errors import FluidTuneError
from fluidtune.tune.stand_ins import AtTheImportOfRay


def run_script(words: list[str], settings: dict[str, object]) -> None:
    """Run the script as ``__main__``; in a Slurm job, on Ray on all of its nodes (`fluidtune.slurm`).

    Args:
        words: the script's path and its arguments. "-" is the standard input. A folder and a zip file have a
            ``__main__.py``.
        settings: those of `FluidExecutor` that are given; "shared": True for a job with an arbiter; "m": True for the
            name of a module in place of the path.

    Raises:
        FluidTuneError: there is no such script, a setting is impossible, or the script called neither ``ray.tune.run``
            nor ``ray.tune.Tuner.fit``.
        Whatever the script raises.
    """
    script, module = words[0], settings.pop("m", False)
    if not (module or script == "-" or os.path.exists(script)):
        raise FluidTuneError(f"there is no script {script!r}; give the path of a Python file")
    executor = None
    if settings:
        from fluidtune.tune.executor import FluidExecutor

        executor = FluidExecutor(arbiter="auto" if settings.pop("shared", False) else None, **settings)  # type: ignore[arg-type]
        executor = None if executor == FluidExecutor() else executor
    if "SLURM_JOB_NODELIST" in os.environ and "RAY_ADDRESS" not in os.environ:
        from fluidtune.slurm.job import run_here

        sys.exit(run_here(sys.argv[2:]))
    hash_seed.take_back()
    sys.meta_path.insert(0, AtTheImportOfRay(executor))  # type: ignore[arg-type]
    try:
        _run(script, words, bool(module))
    except SystemExit as leaving:
        # Many scripts end with `sys.exit(main())`. One that did so without a run gets the message below.
        if leaving.code not in (None, 0) or _was_called():
            raise
    except FluidTuneError:
        raise
    except BaseException as error:
        _show_below_us(error)
        raise
    if not _was_called():
        raise FluidTuneError(
            f"{script} ended without calling ray.tune.run or ray.tune.Tuner(...).fit(), so there was nothing "
            "for FluidTune to execute; is the call behind a condition or an argument?"
        )


def _was_called() -> bool:
    return bool(getattr(sys.modules.get("fluidtune.tune.api"), "called", False))


def _run(script: str, words: list[str], module: bool) -> None:
    """Do with the script what Python does (``Modules/main.c``)."""
    path = os.path.join(os.getcwd(), script)
    package = module or (script != "-" and _is_package(script))
    if module:
        path0 = os.getcwd()
    elif package:
        path0 = path
    else:
        path0 = "" if script == "-" else os.path.dirname(os.path.realpath(script))
    if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
        sys.path[0] = path0  # Python has put the folder of this command there.
    sys.argv[:] = ["-m", *words[1:]] if module else words
    main = sys.modules["__main__"] = type(sys)("__main__")
    names = vars(main)
    names.update(__loader__=sys.__loader__, __annotations__={}, __builtins__=builtins)
    if package:
        import runpy

        runpy._run_module_as_main(script if module else "__main__", module)  # type: ignore[attr-defined]
    elif script == "-":
        names.update(__file__="<stdin>", __cached__=None)
        exec(compile(sys.stdin.buffer.read(), "<stdin>", "exec", dont_inherit=True), names)
    else:
        loader = (files.SourcelessFileLoader if path.endswith(".pyc") else files.SourceFileLoader)("__main__", path)
        names.update(__loader__=loader, __file__=path, __cached__=None)
        if path.endswith(".pyc"):
            exec(loader.get_code("__main__") or "", names)
        else:
            exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), names)


def _is_package(script: str) -> bool:
    """Whether this is a folder or a zip file, in which Python looks for ``__main__``."""
    try:
        return os.path.isdir(script) or bool(zipimport.zipimporter(script))
    except zipimport.ZipImportError:
        return False


def _show_below_us(error: BaseException) -> None:
    """Have Python show this uncaught exception from the script's line on, by the hook that the script has."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    theirs = sys.excepthook

    def once(kind: type[BaseException], error: BaseException, _: object) -> None:
        sys.excepthook, sys.last_traceback = theirs, frames
        theirs(kind, error.with_traceback(frames), frames)

    sys.excepthook = once
