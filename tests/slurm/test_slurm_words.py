"""The pure parts of `fluidtune slurm`: the job script of a command line, and what a job's variables say."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluidtune.cli import cli
from fluidtune.errors import FluidTuneError
from fluidtune.slurm.allocation import allocation, share_options
from fluidtune.slurm.submission import script, seconds_of, submission

word = st.text(st.characters(exclude_characters="\0\n\r", exclude_categories=["Cs"]), min_size=1)


@given(st.lists(word), st.lists(word))
def test_each_word_reaches_the_one_whom_it_is_for(options: list[str], after: list[str]) -> None:
    asked = submission(["s.py", "--notice", "90", *(f"--x={each}" for each in options), "--print", "--", *after])
    assert asked.shown and "\n#SBATCH --signal=B:USR1@90\n" in script(asked, "s.py", "python")
    assert [shlex.split(line) for line in asked.options] == [[f"--x={each}"] for each in options]
    run = shlex.split(script(asked, "s.py", "python").partition("\nexec ")[2])
    assert run == ["python", "-m", "fluidtune", "run", "s.py", *after] and asked.run == ("s.py", *after)


@given(*[st.integers(1, 59)] * 4)
def test_a_time_limit_as_sbatch_reads_it(d: int, h: int, m: int, s: int) -> None:
    hours = h * 3600
    short = {"0": None, "-1": None, f"{m}": m * 60, f"{m}:{s}": m * 60 + s, f"{h}:00:{s}": hours + s}
    days = {f"{d}-{h}": hours, f"{d}-{h}:{m}": hours + m * 60, f"{d}-{h}:{m}:{s}": hours + m * 60 + s}
    told = {**short, **{time: d * 86400 + rest for time, rest in days.items()}}
    assert {time: seconds_of(time) for time in told} == told


@pytest.mark.parametrize(
    "words, said",
    [
        ("s.py --time 1", "--time 1 is 60 s, and the search is told 60 s before its end"),
        ("s.py -t1", "--time 1 is 60 s"),
        ("s.py --notice=10", "--notice 10: expected seconds before the limit, above 10"),
        ("s.py --elastic x", "--elastic x: expected the number of jobs"),
        ("s.py --comment=a\nb", "has a line break"),
        (f"--print -- --notice-s 55 {__file__}", "--notice-s 55: of --notice 60 the driver has 50 s; give a longer"),
    ],
)
def test_words_that_cannot_be(words: str, said: str) -> None:
    with pytest.raises(FluidTuneError, match=said):
        cli(["slurm", *words.split(" ")], standalone_mode=False)


@pytest.mark.parametrize(
    "variables, has",
    [
        ("SLURM_CPUS_ON_NODE=2 SLURM_MEM_PER_CPU=512 SLURM_GPUS_ON_NODE=3", "--num-cpus=2 --num-gpus=3 1024"),
        ("SLURM_MEM_PER_NODE=0 CUDA_VISIBLE_DEVICES=MIG-a,MIG-b SLURM_GPUS_ON_NODE=3", "--num-cpus=4 --num-gpus=2"),
        ("SLURM_MEM_PER_NODE=4096 CUDA_VISIBLE_DEVICES=NoDevFiles", "--num-cpus=4 --num-gpus=0 4096"),
    ],
)
def test_what_a_job_has_of_a_node_of_four_cores(variables: str, has: str) -> None:
    told = dict(each.split("=") for each in f"SLURM_JOB_ID=1 SLURM_JOB_NODELIST=n1 {variables}".split())
    cores, gpus, *sizes = share_options(told, 4, allocation(told).memory)
    mib = [str(sum(int(size.partition("=")[2]) for size in sizes) >> 20)] if sizes else []
    assert " ".join([cores, gpus, *mib]) == has
