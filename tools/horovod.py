"""`make horovod`: build Horovod's wheel from its source on PyPI, check it, and install it.

The released source does not compile against the present torch, and its processes abort when a member dies at the wrong
moment. `MENDS` lists every change, and docs/horovod.md gives the reasons. The wheel is kept in a cache outside the
source tree (``$XDG_CACHE_HOME/fluidtune`` or ``~/.cache/fluidtune``), in a directory whose name depends on everything
that the wheel depends on. So a second run only checks and installs. Building needs cmake, a C++20 compiler, and torch
and setuptools in the environment; ``--can`` only says whether the tools are there.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from pathlib import Path

#: The newest release of Horovod.
VERSION = "0.28.1"
#: The SHA-256 of this release's source on PyPI.
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
#: Packages that the build needs in the environment, and that Horovod needs at run time.
PACKAGES = ("setuptools", "wheel", "packaging", "cffi", "cloudpickle", "psutil", "pyyaml")

#: (file, text in the released source, text that replaces it). Each text must occur exactly once in its file.
MENDS = (
    # torch's headers are C++20.
    ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    # Compiling takes less time without debug information and without unused headers.
    (
        "CMakeLists.txt",
        'string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")',
        'set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -DNDEBUG")',
    ),
    (
        "horovod/torch/adapter_v2.h",
        "#include <torch/extension.h>\n#include <torch/torch.h>\n",
        "#include <torch/types.h>\n",
    ),
    (
        "horovod/torch/mpi_ops_v2.cc",
        "#include <torch/extension.h>\n#include <torch/torch.h>\n",
        "#include <torch/csrc/utils/pybind.h>\n#include <torch/types.h>\n",
    ),
    # If a member dies while a group forms, the initialisation of the others must fail. As released, their processes
    # abort. (This is for a build without MPI, as ours.)
    (
        "horovod/common/operations.cc",
        """#endif // HAVE_MPI
  {
    global_gloo_context.Initialize(ParseGlooIface());
  }
  if (state.control_operation == LibType::GLOO) {
    // Initializes global controller
    state.process_set_table.Initialize(global_gloo_context);
  }
#endif // HAVE_GLOO
""",
        """#endif // HAVE_MPI
  try {
    global_gloo_context.Initialize(ParseGlooIface());
    if (state.control_operation == LibType::GLOO) {
      // Initializes global controller
      state.process_set_table.Initialize(global_gloo_context);
    }
  } catch (const std::exception& ex) {
    LOG(ERROR) << "Horovod could not be initialized: " << ex.what();
    global_gloo_context.Disconnect();
    state.process_set_table.Get(0).gloo_context.Disconnect();
    state.process_set_table.Finalize(global_gloo_context, SHUT_DOWN_ERROR);
    global_gloo_context.Finalize();
    state.shut_down = true;
    state.initialization_failed = true;
    return;
  }
#endif // HAVE_GLOO
""",
    ),
    # A failed initialisation must not make later ones fail.
    (
        "horovod/common/operations.cc",
        "    horovod_global.initialization_done = false;\n    horovod_global.background_thread =",
        "    horovod_global.initialization_done = false;\n    horovod_global.initialization_failed = false;\n"
        "    horovod_global.background_thread =",
    ),
    # Members must not wait for one that died before it had connected; as released, they wait 150 s. Python learns of
    # the death and ends the waiting through `horovod_call_off_init`.
    (
        "third_party/gloo/gloo/transport/tcp/pair.h",
        "class Pair : public ::gloo::transport::Pair",
        "// Nobody waits to be connected any more\nextern std::atomic<bool> calledOff;\n\n"
        "class Pair : public ::gloo::transport::Pair",
    ),
    (
        "third_party/gloo/gloo/transport/tcp/pair.h",
        """      auto done = cv_.wait_for(lock, relTime, pred);
""",
        """      const auto deadline = std::chrono::steady_clock::now() + relTime;
      auto done = pred();
      while (!done && !calledOff && std::chrono::steady_clock::now() < deadline) {
        done = cv_.wait_for(lock, std::chrono::milliseconds(20), pred);
      }
""",
    ),
    (
        "third_party/gloo/gloo/transport/tcp/pair.cc",
        "static void setSocketBlocking(",
        "std::atomic<bool> calledOff{false};\n\nstatic void setSocketBlocking(",
    ),
    (
        "horovod/common/gloo/gloo_context.cc",
        '#include "gloo/transport/tcp/device.h"\n',
        '#include "gloo/transport/tcp/device.h"\n#include "gloo/transport/tcp/pair.h"\n\n'
        'extern "C" void horovod_call_off_init(bool off) { gloo::transport::tcp::calledOff = off; }\n\n',
    ),
    # A member must not ask a server that is gone again and again for 1.5 s.
    (
        "horovod/common/gloo/http_store.h",
        "#define RETRY_WAITING_TIME_MILLSEC 500",
        "#define RETRY_WAITING_TIME_MILLSEC 50",
    ),
    # A member that notices another one's death closes all its connections, so that the rest do not wait 30 s.
    (
        "horovod/common/operations.cc",
        """        << "Horovod background loop uncaught exception: " << ex.what();
""",
        """        << "Horovod background loop uncaught exception: " << ex.what();
#if HAVE_GLOO
    global_gloo_context.Disconnect();
    state.process_set_table.Get(0).gloo_context.Disconnect();
#endif
""",
    ),
    (
        "horovod/common/gloo/gloo_context.h",
        "  void Finalize();\n",
        "  void Finalize();\n\n"
        "  // Close all connections, so that no peer waits for this process\n"
        "  void Disconnect();\n",
    ),
    (
        "horovod/common/gloo/gloo_context.cc",
        "void GlooContext::Finalize() {\n",
        """void GlooContext::Disconnect() {
  for (auto& context : {ctx, local_ctx, cross_ctx}) {
    if (context != nullptr) {
      context->closeConnections();
    }
  }
}

void GlooContext::Finalize() {
""",
    ),
)

#: The version of this recipe. It is part of the wheel's version, so that one sees who built it.
LOCAL_VERSION = "fluidtune1"

#: A script that runs with the built wheel. It fails if the wheel does not work, and prints its collectives.
CHECK = """
import horovod, torch, horovod.torch as hvd
assert hvd.gloo_built(), "without gloo"
hvd.init()
total = hvd.allreduce(torch.ones(3), op=hvd.Sum)
assert hvd.size() == 1 and total.tolist() == [1, 1, 1]
hvd.shutdown()
hvd.init()
hvd.shutdown()
built = ["gloo"] + ["nccl"] * bool(hvd.nccl_built())
print(f"Horovod {horovod.__version__} with {' and '.join(built)}, for torch {torch.__version__}")
"""


def cache() -> Path:
    """The directory of the wheel. Its name depends on the source, the recipe, the platform, Python and torch."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parts = [VERSION, SHA256, LOCAL_VERSION, repr(MENDS), importlib.metadata.version("torch"), operations()]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return base / "fluidtune" / f"horovod-{sysconfig.get_platform()}-{platform.python_version()}-{key}"


def operations() -> str:
    """The value of HOROVOD_GPU_OPERATIONS; if unset, "NCCL" if torch is built for CUDA and nvcc is there, else ""."""
    given = os.environ.get("HOROVOD_GPU_OPERATIONS")
    if given is not None:
        return given
    import torch

    return "NCCL" if torch.version.cuda and shutil.which("nvcc") else ""


def for_cpus_only() -> str | None:
    """Why the wheel will not work on GPUs although torch does; None if there is no such problem."""
    import torch

    if not torch.version.cuda or operations():
        return None
    return "for CPUs only, though torch is built for CUDA: GPUs need its compiler, nvcc, on the PATH"


def missing() -> str | None:
    """Which of the tools to build are missing, in words; None if all are there."""
    lacking = [name for name in ("cmake", "make") if shutil.which(name) is None]
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        lacking.append("a C++ compiler")
    return f"cannot build Horovod without {', '.join(lacking)}" if lacking else None


def pip(*arguments: str, **more: str) -> None:
    """Run pip; ``more``: further environment variables."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **more})


def fetch(folder: Path) -> Path:
    """Download, unpack and change the source. RuntimeError if it is not the source that this recipe was written for."""
    # Without --no-build-isolation, pip would download another torch to read the source's metadata.
    pip("install", "-q", *PACKAGES)
    source = ["--no-deps", "--no-build-isolation", "--no-binary", "horovod", f"horovod=={VERSION}"]
    pip("download", "-q", "-d", str(folder), *source)
    archive = folder / f"horovod-{VERSION}.tar.gz"
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SHA256:
        raise RuntimeError(f"{archive.name} has SHA-256 {digest}, not {SHA256}: it is not the released source")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    tree = folder / f"horovod-{VERSION}"
    mend(tree)
    return tree


def mend(tree: Path) -> None:
    """Apply `MENDS`. RuntimeError if a text does not occur exactly once."""
    for name, old, new in MENDS:
        text = (tree / name).read_text()
        if text.count(old) != 1:
            expected = old.strip().splitlines()[0]
            raise RuntimeError(f"{name} is not as this recipe expects: {expected!r} is not there exactly once")
        (tree / name).write_text(text.replace(old, new))


def built(place: Path) -> Path | None:
    """The wheel in the cache; None if it has to be built. SystemExit if it cannot be built."""
    wheel = next(place.glob("*.whl"), None)
    trouble = missing() if wheel is None else None
    if trouble is not None:
        raise SystemExit(f"horovod: {trouble}")
    return wheel


def build(place: Path) -> Path:
    """Build the wheel into ``place`` and check it."""
    with tempfile.TemporaryDirectory(prefix="fluidtune-horovod-") as temporary:
        folder = Path(temporary)
        tree = fetch(folder)
        say(f"building Horovod {VERSION}: minutes, once (into {place})")
        options = {
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_WITHOUT_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITHOUT_MPI": "1",
            "HOROVOD_LOCAL_VERSION": LOCAL_VERSION,
            "MAKEFLAGS": f"-j{os.cpu_count()}",  # by default it runs 8 jobs, whatever memory there is
        }
        if operations():
            options["HOROVOD_GPU_OPERATIONS"] = operations()
        pip("wheel", "-q", str(tree), "--no-deps", "--no-build-isolation", "-w", str(folder / "wheel"), **options)
        wheel = next((folder / "wheel").glob("*.whl"))
        pip("install", "-q", "--no-deps", "--target", str(folder / "try"), str(wheel))
        check(PYTHONPATH=str(folder / "try"))
        # The wheel gets its final name only when it is complete and checked.
        shutil.copy(wheel, place / f"{wheel.name}.new")
        return (place / f"{wheel.name}.new").rename(place / wheel.name)


def check(**environment: str) -> str:
    """Run `CHECK` with the Horovod that Python finds. Returns what it says; RuntimeError if Horovod does not work."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    done = subprocess.run(
        [sys.executable, "-c", CHECK], env={**clean, **environment}, capture_output=True, text=True, cwd=os.sep
    )
    if done.returncode != 0:
        raise RuntimeError(f"this Horovod does not work:\n{done.stderr or done.stdout}")
    return done.stdout.strip().splitlines()[-1]


def installed() -> str | None:
    """The version of the installed Horovod; None if there is none."""
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None


def say(text: str) -> None:
    print(f"horovod: {text}", flush=True)


def main() -> None:
    if sys.argv[1:] == ["--can"]:
        built(cache())
        return
    try:
        run()
    except (RuntimeError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"horovod: not built: {error}") from error


def run() -> None:
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("horovod: torch must be installed first; `make horovod` does that")
    place = cache()
    place.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two concurrent runs, only one builds
        wheel = built(place)
        if wheel is None:
            wheel = build(place)
            say(f"built in {time.monotonic() - started:.0f} s")
    mark = place / "installed" / hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    if installed() != f"{VERSION}+{LOCAL_VERSION}" or not mark.exists():
        pip("install", "-q", *PACKAGES)
        pip("install", "-q", "--no-deps", "--force-reinstall", str(wheel))
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
    say(check())
    limit = for_cpus_only()
    if limit is not None:
        say(limit)


if __name__ == "__main__":
    main()
