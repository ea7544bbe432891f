"""`fluidtune.shared` in real processes: one loads, the others map, and nothing is left."""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import signal
import socket
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
from fluidtune.cluster.data import shared_data
from fluidtune.cluster.data.data_keeper import HEAD, VARIABLE, DataKeeper
from fluidtune.errors import FluidTuneError
from tests.contracts.processes import connected, without_descriptors

pytestmark = [pytest.mark.slow, pytest.mark.core]

ROOT = Path(__file__).parents[3]
#: A process of a trial: it asks for data, says so, and holds it until the test goes on. PLACE: a folder for notes.
PROCESS = """
import os, sys, time
import numpy, psutil
import fluidtune
place, size, slow = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
def until_over():
    late = time.monotonic() + 100
    while not os.path.exists(os.path.join(place, "over")) and time.monotonic() < late:
        time.sleep(0.05)
def load():
    open(os.path.join(place, f"loads-{os.getpid()}"), "w").close()
    if len(sys.argv) > 4 and os.fork() == 0:
        until_over()
        os._exit(0)
    time.sleep(slow)
    if sys.argv[4:] == ["raises"]:
        raise MemoryError
    return {"x": numpy.ones(size, dtype=numpy.uint8), "name": "ones"}
try:
    data = fluidtune.shared(load)
except MemoryError:
    until_over()
    raise
total = int(data["x"].sum())
print(total, data["name"], flush=True)
asked = sys.stdin.readline().strip()
if asked == "size":
    print(psutil.Process().memory_full_info().pss, flush=True)
    sys.stdin.readline()
if asked == "write":
    data["x"][:] = 3
    print(int(data["x"].sum()), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def keeper(monkeypatch) -> Iterator[DataKeeper]:
    """The keeper of this machine, for this process and those that it starts."""
    name = f"fluidtune-data-test-{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv(VARIABLE, name)
    made = DataKeeper(name)
    yield made
    made.close()


@pytest.fixture
def processes(keeper, tmp_path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A function that starts a process of a trial."""
    program = tmp_path / "process.py"
    program.write_text(PROCESS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = []

    def start(size: int = 1000, slow: float = 0.0, *forks: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(program), str(tmp_path), str(size), str(slow), *forks]
        pipes: Any = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.communicate()


def test_a_keeper_without_descriptors_sleeps_and_answers_later():
    name = f"fluidtune-data-test-{os.getpid()}-full"
    program = f"from fluidtune.cluster.data.data_keeper import DataKeeper\nDataKeeper({name!r})\nprint()\ninput()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: Any = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes) as kept:
        assert kept.stdout is not None and kept.stdout.readline()
        with without_descriptors(kept.pid, lambda: connected(f"\0{name}")) as asker:
            message = json.dumps({"data": "a"}).encode()
            asker.sendall(HEAD.pack(len(message)) + message)
            assert json.loads(asker.recv(4096)) == {"load": True}
        kept.communicate("\n")


def loads(folder: Path) -> list[int]:
    return [int(each.name.split("-")[1]) for each in folder.glob("loads-*")]


def asked(process: subprocess.Popen[str], for_what: str) -> int:
    process.stdin.write(f"{for_what}\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def kept() -> int:
    """How many data sets this process keeps."""
    found = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum("fluidtune-shared" in each for each in found)


def test_processes_that_ask_at_once_and_later_have_the_data_once(processes, tmp_path):
    size = 200 << 20
    together = [processes(size, 0.2) for _ in range(3)]
    said = [process.stdout.readline().split() for process in together]
    together.append(processes(size))
    said.append(together[-1].stdout.readline().split())
    assert said == [[str(size), "ones"]] * 4
    assert len(loads(tmp_path)) == 1
    # The proportional sizes of three add up to three quarters of the data, and to what the processes have besides.
    assert sum(asked(process, "size") for process in together[1:]) < 2 * size


def test_what_a_process_changes_is_its_own(processes):
    one, other = processes(), processes()
    assert [each.stdout.readline().split()[0] for each in (one, other)] == ["1000", "1000"]
    assert asked(one, "write") == 3000
    assert processes().stdout.readline().split()[0] == "1000"


def test_when_the_process_that_loads_is_killed_the_next_one_loads(processes, tmp_path):
    first = processes(slow=30)
    while not loads(tmp_path):
        time.sleep(0.01)
    waiting = [processes() for _ in range(2)]
    time.sleep(0.5)
    os.kill(loads(tmp_path)[0], signal.SIGKILL)
    first.wait()
    assert [each.stdout.readline().split()[0] for each in waiting] == ["1000", "1000"]
    assert len(loads(tmp_path)) == 2


@pytest.mark.parametrize("how", ["is killed", "raises"])
def test_processes_that_a_load_has_forked_keep_no_other_process_waiting(processes, tmp_path, how):
    first = processes(1000, 1.0 if how == "raises" else 30, how)
    while not loads(tmp_path):
        time.sleep(0.01)
    waiting = processes()
    if how == "is killed":
        time.sleep(0.5)
        os.kill(loads(tmp_path)[0], signal.SIGKILL)
    assert waiting.stdout.readline().split()[0] == "1000"
    assert not (tmp_path / "over").exists()
    (tmp_path / "over").touch()
    first.wait()


def test_data_are_freed_when_the_keeper_has_closed_and_no_process_maps_them(keeper, processes):
    process = processes()
    process.stdout.readline()
    assert kept() == 1
    keeper.close()
    assert kept() == 0
    assert "fluidtune-shared" in Path(f"/proc/{process.pid}/maps").read_text()


def test_where_nothing_keeps_data_a_process_loads_its_own_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(shared_data, "_WAIT_S", 0.1)
    monkeypatch.setenv(VARIABLE, "fluidtune-data-nothing")
    assert fluidtune.shared(lambda: 7) == 7
    assert "loads its own copy" in caplog.text


def test_a_process_waits_for_a_keeper_that_is_about_to_start(monkeypatch):
    name = f"fluidtune-data-late-{os.getpid()}"
    monkeypatch.setenv(VARIABLE, name)
    later: list[DataKeeper] = []
    thread = threading.Timer(0.5, lambda: later.append(DataKeeper(name)))
    thread.start()
    assert fluidtune.shared(lambda: 7) == 7
    thread.join()
    assert kept() == 1
    later[0].close()


@pytest.mark.parametrize(
    "sent", [b"", b"\0", HEAD.pack(1 << 40), HEAD.pack(4) + b"nope", HEAD.pack(2) + b"{}", HEAD.pack(4) + b"[[]]"]
)
def test_whoever_sends_something_else_is_hung_up_on_and_the_others_are_served(keeper, sent):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect("\0" + os.environ[VARIABLE])
        connection.sendall(sent)
        assert fluidtune.shared(lambda: 7) == 7
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""


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
    "nothing": lambda: None,
}


#: A process under an allocator that takes pages which it has returned to the kernel for zeros.
ZEROS = """
import os, sys
import numpy, torch
from fluidtune.cluster.data import data_keeper, shared_data
make = {
    "array": lambda: numpy.full(4_000_000, 7.0),
    "part": lambda: numpy.full(4_100_000, 7.0)[1000:4_000_000],
    "tensor": lambda: torch.full((4_000_000,), 7.0, dtype=torch.float64),
}[sys.argv[1]]
value = make()
file = shared_data._written(value, "data")
first, last = float(value[0]), float(value[-1])
del value
found = numpy.zeros(3_900_000)
print(first, last, int(numpy.count_nonzero(found)), "jemalloc" in open("/proc/self/maps").read())
"""


@pytest.mark.parametrize("kind", ["array", "part", "tensor"])
def test_memory_that_an_allocator_gets_back_has_no_data_under_it(kind):
    """Ray preloads jemalloc where RAY_LD_PRELOAD_ON_WORKERS=1 is set."""
    jemalloc = Path(ray.__file__).parent / "core" / "libjemalloc.so"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(jemalloc)}
    command = [sys.executable, "-c", ZEROS, kind]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.split() == ["7.0", "7.0", "0", "True"], done.stderr


@pytest.mark.parametrize("kind", ["array", "part", "tensor"])
def test_what_was_loaded_is_in_memory_once_while_it_is_written_and_after_that(kind):
    size = 64 << 20
    whole: Any = torch.ones(size >> 3, dtype=torch.float64) if kind == "tensor" else np.ones(size >> 3)
    value = whole[1000:-1000] if kind == "part" else whole
    before = anonymous()
    file = shared_data._written(value, "data")
    assert anonymous() < before - 0.9 * size
    assert value.sum() == len(value)
    os.close(file)


#: A trial with 64 MiB of memory, which maps data of 512 MiB, looks at all of them and changes 32 MiB.
WITHIN = """
import numpy, resource
from fluidtune.cluster.data import data_keeper, shared_data
from salus_share.memory import ResidentMeter
file = shared_data._written(numpy.ones(512 << 20, numpy.uint8), "data")
meter = ResidentMeter(0, data_keeper.NAME)
for again in range(2):
    meter.limit(meter._framework + (64 << 20))
    data = shared_data._mapped(file) if not again else data
    meter.reset()
    total = int(data.sum())
    data[: 32 << 20] = 2
    print(total >> 20, round(meter.read().model / (1 << 20), -1), meter.read().ephemeral >> 24)
    try:
        numpy.ones(128 << 20, numpy.uint8)
    except MemoryError:
        print("refused")
"""


def test_shared_data_count_neither_as_a_trials_memory_nor_for_its_limit():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", WITHIN], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.split("\n") == ["512 30.0 0", "refused", "544 30.0 0", "refused", ""], done.stderr


def anonymous() -> int:
    """Bytes of this process that are in no file."""
    return int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10


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
    return flat(vars(value)) if isinstance(value, Plain) else value


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_as_it_was_loaded(name):
    torch.manual_seed(1)
    expected = flat(VALUES[name]())
    torch.manual_seed(1)
    file = shared_data._written(VALUES[name](), name)
    try:
        assert flat(shared_data._mapped(file)) == expected
    finally:
        os.close(file)
    gc.collect()
    assert kept() == 0  # nor is it mapped any more


def test_tables_are_as_they_were_loaded(keeper):
    table = pandas.DataFrame({"a": range(5), "b": np.linspace(0, 1, 5), "c": list("vwxyz")})
    got = fluidtune.shared(lambda: (table, arrow.table({"a": [1, 2], "s": ["x", None]})))
    pandas.testing.assert_frame_equal(got[0], table)
    assert got[1].equals(arrow.table({"a": [1, 2], "s": ["x", None]}))


def test_views_of_one_storage_stay_views_of_one_storage(keeper):
    def load() -> Any:
        base = torch.zeros(8)
        return base, base[2:5]

    whole, part = fluidtune.shared(load)
    part.fill_(1)
    assert whole.tolist() == [0, 0, 1, 1, 1, 0, 0, 0]


def of(size: int) -> Any:
    return np.full(size, size)


def test_functions_are_told_apart_by_their_code_and_by_what_they_are_given(keeper):
    def enclosing(size: int) -> Callable[[], Any]:
        return lambda: np.full(size, size)

    assert len(fluidtune.shared(functools.partial(of, 3))) == 3
    assert len(fluidtune.shared(functools.partial(of, size=4))) == 4
    assert len(fluidtune.shared(enclosing(5))) == 5
    assert len(fluidtune.shared(enclosing(6))) == 6
    assert kept() == 4
    fluidtune.shared(enclosing(6))
    assert kept() == 4


def test_a_function_that_encloses_itself_is_known_by_what_it_does(keeper):
    def enclosing(base: int) -> Callable[[], Any]:
        def rows(depth: int) -> list[int]:
            return [base] * depth if depth < 2 else [*rows(depth - 1), other(depth)]

        def other(depth: int) -> int:
            return len(rows(depth - 1))

        return lambda: rows(3)

    assert fluidtune.shared(enclosing(5)) == [5, 1, 2]
    assert fluidtune.shared(enclosing(5)) == [5, 1, 2]
    assert kept() == 1
    assert fluidtune.shared(enclosing(6)) == [6, 1, 2]
    assert kept() == 2


SET = """
import sys
from fluidtune.cluster.data import shared_data
names = set(sys.argv[1:])
print(shared_data._key(lambda: [each for each in "abc" if each in {"alpha", "beta", "gamma"} or each in names]))
"""


def test_functions_with_sets_are_equal_in_all_processes():
    found = set()
    for seed in "123":
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", SET, "delta", "epsilon", "zeta"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        found.add(done.stdout)
    assert len(found) == 1, done.stderr


def test_what_cannot_tell_a_function_from_others_is_named(keeper):
    lock = threading.Lock()
    for load in (lambda: lock, functools.partial(of, size=lock)):
        with pytest.raises(FluidTuneError, match=r"shared\(.*\): by (lock|size), a lock, .*cannot pickle"):
            fluidtune.shared(load)


def test_what_cannot_be_shared_is_refused_in_one_line_and_the_next_process_is_not_kept_waiting(keeper):
    with pytest.raises(FluidTuneError, match=r"shared\(.*load\): what it returned, a generator, cannot be shared"):

        def load() -> Any:
            return (each for each in range(3))

        fluidtune.shared(load)
    with pytest.raises(ZeroDivisionError):
        fluidtune.shared(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        fluidtune.shared(lambda: 1 // 0)


def test_outside_fluidtune_it_is_what_the_function_returns(tmp_path):
    program = "import fluidtune\nprint(fluidtune.shared(lambda: 5))"
    path = tmp_path / "program.py"
    path.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout == "5\n", done.stderr
