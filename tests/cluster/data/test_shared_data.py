"""`fluidtune.shared` in real processes: one loads, the others map, and nothing is left."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as arrow
import pytest
import ray
import torch

import fluidtune
from fluidtune.cluster.data.node_files import VARIABLE, NodeFiles
from tests.contracts.processes import python

pytestmark = [pytest.mark.slow, pytest.mark.core]

ROOT = Path(__file__).parents[3]
#: A process of a trial: it asks for data, says so, and holds it until the test goes on. PLACE: a folder for notes.
#: While it loads, it has a child, and gets and drops data of another kind.
PROCESS = """
import os, sys, time
import numpy, psutil
import fluidtune
place, size, slow, how = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
def load():
    open(os.path.join(place, f"loads-{os.getpid()}"), "w").close()
    assert len(fluidtune.shared(lambda: numpy.ones(5))) == 5
    if os.fork() == 0:
        os.close(1)
        while not os.path.exists(os.path.join(place, "over")):
            time.sleep(0.05)
        os._exit(0)
    time.sleep(slow)
    if how == "raises":
        raise MemoryError
    return {"x": numpy.ones(size, dtype=numpy.uint8), "name": "ones"}
try:
    data = fluidtune.shared(load)
    print(int(data["x"].sum()), data["name"], flush=True)
except MemoryError:
    print("raised", flush=True)
for asked in sys.stdin:
    if asked == "size\\n":
        print(psutil.Process().memory_full_info().pss, flush=True)
    if asked == "write\\n":
        data["x"][:] = 3
        print(int(data["x"].sum()), flush=True)
"""


@pytest.fixture
def files(monkeypatch) -> Iterator[NodeFiles]:
    """The shared data of this machine, for this process and those that it starts."""
    made = NodeFiles()
    monkeypatch.setenv(VARIABLE, made.paths)
    yield made
    made.close()


@pytest.fixture
def processes(files, tmp_path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A function that starts a process of a trial."""
    program = tmp_path / "process.py"
    program.write_text(PROCESS)
    started = []

    def start(size: int = 1000, slow: float = 0.0, how: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, str(program), str(tmp_path), str(size), str(slow), how]
        pipes: Any = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, **pipes))
        return started[-1]

    yield start
    (tmp_path / "over").touch()
    for process in started:
        process.communicate()


def loads(folder: Path) -> list[int]:
    return [int(each.name.split("-")[1]) for each in folder.glob("loads-*")]


def begun(folder: Path) -> int:
    """The process that loads."""
    while not loads(folder):
        time.sleep(0.01)
    return loads(folder)[0]


def asked(process: subprocess.Popen[str], for_what: str) -> int:
    process.stdin.write(f"{for_what}\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def test_processes_that_ask_at_once_and_later_have_the_data_once(processes, tmp_path):
    size = 200 << 20
    together = [processes(size, 0.2) for _ in range(3)]
    said = [process.stdout.readline().split() for process in together]
    together.append(processes(size))
    said.append(together[-1].stdout.readline().split())
    assert said == [[str(size), "ones"]] * 4
    assert len(loads(tmp_path)) == 1
    # The proportional sizes of four add up to the data, and to what the processes have besides.
    assert sum(asked(process, "size") for process in together) < 2 * size


def test_what_a_process_changes_is_its_own(processes):
    one, other = processes(), processes()
    assert [each.stdout.readline().split()[0] for each in (one, other)] == ["1000", "1000"]
    assert asked(one, "write") == 3000
    assert processes().stdout.readline().split()[0] == "1000"


@pytest.mark.parametrize("how", ["is killed", "raises"])
def test_when_the_process_that_loads_ends_or_raises_the_next_one_loads_whatever_children_live_on(
    processes, tmp_path, how
):
    first = processes(1000, 1.0 if how == "raises" else 30, how)
    begun(tmp_path)
    waiting = [processes() for _ in range(2)]
    if how == "is killed":
        time.sleep(0.5)
        os.kill(begun(tmp_path), signal.SIGKILL)
    else:
        assert first.stdout.readline() == "raised\n"
    assert [each.stdout.readline().split()[0] for each in waiting] == ["1000", "1000"]
    assert len(loads(tmp_path)) == 2


def test_processes_keep_what_they_have_when_its_holder_is_killed_and_later_ones_load_their_own(
    processes, tmp_path, monkeypatch, caplog
):
    program = "from fluidtune.cluster.data.node_files import NodeFiles\nprint(NodeFiles().paths, flush=True)\ninput()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: Any = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes) as holder:
        monkeypatch.setenv(VARIABLE, holder.stdout.readline().strip())
        process = processes()
        process.stdout.readline()
        holder.kill()
    assert asked(process, "write") == 3000
    assert fluidtune.shared(lambda: 7) == 7
    assert "loads its own copy, because its node has no shared data" in caplog.text


class Plain:
    def __init__(self) -> None:
        self.rows = np.arange(6.0).reshape(2, 3)


COMPRESSED = (torch.sparse_csr, torch.sparse_csc)
VALUES: dict[str, Callable[[], Any]] = {
    "array": lambda: np.arange(12).reshape(3, 4),
    "fortran": lambda: np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "no elements": lambda: (np.zeros((0, 3)), torch.zeros(0, 3), torch.UntypedStorage(0)),
    "strided array": lambda: np.arange(12)[::2],
    "objects": lambda: np.array([{"a": 1}, None], dtype=object),
    "tensor": lambda: torch.arange(12).reshape(3, 4).t(),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "bool and scalar": lambda: (torch.tensor([True, False]), torch.tensor(2.5)),
    "parameter": lambda: torch.nn.Linear(3, 2),
    "dataset": lambda: torch.utils.data.TensorDataset(torch.eye(3), torch.arange(3)),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "sparse": lambda: (torch.eye(4).to_sparse(), [torch.eye(4).to_sparse(layout=each) for each in COMPRESSED]),
    "sparse blocks": lambda: [torch.eye(4).to_sparse_bsr((2, 2)), torch.eye(4).to_sparse_bsc((2, 2))],
    "conjugate, gradient": lambda: (torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, requires_grad=True)),
    "nested": lambda: {"train": [np.ones(3), (torch.ones(2), "text")], "n": 3},
    "own class": Plain,
    "table": lambda: pandas.DataFrame({"a": range(5), "b": np.linspace(0, 1, 5), "c": list("vwxyz")}),
    "arrow": lambda: arrow.table({"a": [1, 2], "s": ["x", None]}),
    "nothing": lambda: None,
}


def flat(value: Any) -> Any:
    """A value as what can be compared."""
    if isinstance(value, torch.Tensor):
        layout, value = str(value.layout), value.to_dense().detach()
        return layout, str(value.dtype), tuple(value.stride()), value.tolist()
    if isinstance(value, torch.UntypedStorage):
        return len(value)
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.flags.fnc, value.tolist()  # fnc: Fortran's order of axes, and not C's
    if isinstance(value, torch.nn.Module):
        return [flat(each) for each in value.state_dict().values()], [each.requires_grad for each in value.parameters()]
    if isinstance(value, torch.utils.data.TensorDataset):
        return [flat(each) for each in value.tensors]
    if isinstance(value, dict):
        return {name: flat(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [flat(each) for each in value]
    if isinstance(value, pandas.DataFrame):
        return arrow.Table.from_pandas(value)
    return flat(vars(value)) if isinstance(value, Plain) else value


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_as_it_was_loaded(files, name, caplog):
    torch.manual_seed(1)
    expected = flat(VALUES[name]())
    torch.manual_seed(1)
    assert flat(fluidtune.shared(VALUES[name])) == expected
    assert flat(fluidtune.shared(VALUES[name])) == expected
    assert not caplog.text


def test_views_of_one_storage_stay_views_of_one_storage(files):
    def load() -> Any:
        base = torch.zeros(8)
        return base, base[2:5]

    whole, part = fluidtune.shared(load)
    part.fill_(1)
    assert whole.tolist() == [0, 0, 1, 1, 1, 0, 0, 0]


#: Prints the most memory that the data take while they are written, divided by their size, and that afterwards.
ONCE = """
import os, re, sys
import numpy, torch
from fluidtune import shared
size = 128 << 20
kept = []
def load():
    kept.append({
        "array": lambda: numpy.ones(size >> 3),
        "part": lambda: numpy.ones(size >> 3)[1000:-1000],
        "tensor": lambda: torch.ones(size >> 3, dtype=torch.float64),
    }[sys.argv[1]]())
    return kept[0]
def memory():
    own = int(re.findall(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[0]) << 10
    return own + os.stat(os.environ["FLUIDTUNE_DATA"].split(":")[0]).st_blocks * 512
before, seen, write = memory(), [], os.pwrite
def counted(*arguments):
    wrote = write(*arguments)
    seen.append(memory() - before)
    return wrote
os.pwrite = counted
data = shared(load)
assert data[0] == data[-1] == kept[0][0] == kept[0][-1] and len(data) == len(kept[0])
print(max(seen) / size, (memory() - before) / size)
"""


@pytest.mark.parametrize("kind", ["array", "part", "tensor"])
def test_data_are_in_memory_once_while_they_are_written_and_after_that(files, kind):
    most, after = map(float, python("-c", ONCE, kind).split())
    assert most < 1.1 and after < 1.03  # a piece of 8 MiB of 128 is there twice


#: A process under an allocator that takes pages which it has returned to the kernel for zeros.
ZEROS = """
import sys
import numpy, torch
import fluidtune
def load():
    return numpy.full(4_000_000, 7.0) if sys.argv[1] == "array" else torch.full((4_000_000,), 7.0).double()
data = fluidtune.shared(load)
found = numpy.zeros(3_900_000)
print(float(data[0]), float(data[-1]), int(numpy.count_nonzero(found)), "jemalloc" in open("/proc/self/maps").read())
"""


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_memory_that_an_allocator_gets_back_has_no_data_under_it(files, kind):
    """Ray preloads jemalloc where RAY_LD_PRELOAD_ON_WORKERS=1 is set."""
    jemalloc = Path(ray.__file__).parent / "core" / "libjemalloc.so"
    assert python("-c", ZEROS, kind, LD_PRELOAD=str(jemalloc)) == "7.0 7.0 0 True\n"


#: A trial with 64 MiB of memory beside data of 512 MiB, of which it changes 32 MiB.
WITHIN = """
import numpy, ray
import fluidtune
from fluidtune.cluster.data.node_files import NAME
from salus_share.memory import ResidentMeter
load = lambda: numpy.ones(512 << 20, numpy.uint8)
meter = ResidentMeter(0, NAME)
fluidtune.shared(load)
for again in range(2):
    meter.limit(meter.read().framework + (64 << 20))
    data = fluidtune.shared(load) if not again else data
    meter.reset()
    total = int(data.sum())
    data[: 32 << 20] = 2
    print(total >> 20, round(meter.read().model / (1 << 20), -1), meter.read().ephemeral >> 24)
    try:
        numpy.ones(128 << 20, numpy.uint8)
    except MemoryError:
        print("refused")
"""


def test_shared_data_count_neither_as_a_trials_memory_nor_for_its_limit(files):
    assert python("-c", WITHIN).split() == ["512", "30.0", "0", "refused", "544", "30.0", "0", "refused"]


def of(size: int) -> Any:
    return np.full(size, size)


def test_functions_are_told_apart_by_their_code_and_by_what_they_enclose_or_are_given(files):
    def enclosing(base: int) -> Callable[[], Any]:
        def rows(depth: int) -> list[int]:
            return [base] * depth if depth < 2 else [*rows(depth - 1), other(depth)]

        def other(depth: int) -> int:
            return len(rows(depth - 1))

        return lambda: rows(3)

    assert len(fluidtune.shared(functools.partial(of, 3))) == 3
    assert len(fluidtune.shared(functools.partial(of, size=4))) == 4
    for base in (5, 5, 6):
        assert fluidtune.shared(enclosing(base)) == [base, 1, 2]
        assert fluidtune.shared(lambda base=base: [base]) == [base]


SET = """
import sys
from fluidtune.cluster.data.load_identity import identity
names = set(sys.argv[1:])
print(identity(lambda: [each for each in "abc" if each in {"alpha", "beta", "gamma"} or each in names]).hex())
"""


def test_functions_with_sets_are_equal_in_all_processes():
    found = {python("-c", SET, "delta", "epsilon", "zeta", PYTHONHASHSEED=seed) for seed in "123"}
    assert len(found) == 1


def test_what_cannot_be_pickled_is_each_processs_own_and_a_line_says_so(files, caplog):
    lock = threading.Lock()

    def load() -> Any:
        return (each for each in range(3))

    for wrong, line in ((lambda: lock, "encloses or is given a value"), (load, "a generator, cannot be shared")):
        caplog.clear()
        assert fluidtune.shared(wrong) is not None
        assert line in caplog.text and "annot pickle" in caplog.text
    assert list(fluidtune.shared(load)) == [0, 1, 2]


def test_outside_fluidtune_it_is_what_the_function_returns(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    value = object()
    assert fluidtune.shared(lambda: value) is value
