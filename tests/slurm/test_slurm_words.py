"""The pure parts of `fluidtune slurm`: the job script of a command line, and what a job's variables say."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluidtune.errors import FluidTuneError
from fluidtune.slurm.allocation import Memory, Share, allocation, check_place, checked, memory, share
from fluidtune.slurm.submission import Submission, script, seconds_of, submission


def test_the_script_of_a_command_line() -> None:
    words = "search.py --nodes 2 --gpus-per-node=4 --time 0:30:00 --print --notice 90 -- --epochs 3"
    asked = submission(words.split())
    assert asked == Submission(
        ("--nodes 2", "--gpus-per-node=4", "--time 0:30:00"), ("search.py", "--epochs", "3"), 90, shown=True
    )
    assert script(asked, "search.py", "/venv/bin/python") == (
        "#!/bin/bash\n#SBATCH --job-name=search.py\n#SBATCH --requeue\n#SBATCH --open-mode=append\n"
        "#SBATCH --signal=B:USR1@90\n#SBATCH --nodes 2\n#SBATCH --gpus-per-node=4\n#SBATCH --time 0:30:00\n"
        "exec /venv/bin/python -m fluidtune run search.py --epochs 3\n"
    )


PYTHON = ["python", "-m", "fluidtune", "run"]
word = st.text(st.characters(exclude_characters="\0\n\r", exclude_categories=["Cs"]), min_size=1)


@given(st.lists(word), st.lists(word))
def test_each_word_reaches_the_one_whom_it_is_for(options: list[str], after: list[str]) -> None:
    options = [f"--x={each}" for each in options]
    asked = submission(["s.py", *options, "--", *after])
    assert [shlex.split(line) for line in asked.options] == [[each] for each in options]
    assert asked.run == ("s.py", *after)
    assert shlex.split(script(asked, "s.py", "python").partition("\nexec ")[2]) == [*PYTHON, "s.py", *after]


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("30", 1800),
        ("1:30", 90),
        ("2:00:01", 7201),
        ("1-2", 93600),
        ("1-2:30", 95400),
        ("1-0:0:5", 86405),
        ("0", None),
        ("UNLIMITED", None),
        ("-1", None),
    ],
)
def test_a_time_limit_as_sbatch_reads_it(text: str, seconds: int | None) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "words, said",
    [
        ("s.py --time 1", "--time 1 is 60 s, and 60 s before its end the search is told to end"),
        ("s.py -t1", "--time 1 is 60 s"),
        ("s.py --notice soon", "--notice soon: expected seconds"),
        ("s.py --notice=0", "--notice 0: expected seconds"),
        ("s.py --comment=a\nb", "has a line break"),
    ],
)
def test_words_that_cannot_be(words: str, said: str) -> None:
    with pytest.raises(FluidTuneError, match=said):
        submission(words.split(" "))


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n1"}


def test_a_job_is_known_by_its_variables_unless_a_ray_is_named() -> None:
    found = allocation(JOB)
    assert found is not None and (found.job, found.hosts, found.here, found.tasks) == ("7", "n[1-3]", "n1", 1)
    checked(found)
    assert allocation({}) is None and allocation({**JOB, "RAY_ADDRESS": "local"}) is None
    several = allocation({**JOB, "SLURM_STEP_NUM_TASKS": "4"})
    assert several is not None
    with pytest.raises(FluidTuneError, match="job 7: srun starts this search 4 times"):
        checked(several)


@pytest.mark.parametrize(
    "variables, affinity, has",
    [
        ({"SLURM_CPUS_ON_NODE": "8"}, 64, Share(8, 0, None)),
        ({"SLURM_CPUS_ON_NODE": "8"}, 4, Share(4, 0, None)),
        ({"SLURM_CPUS_ON_NODE": "8", "SLURM_MEM_PER_CPU": "512"}, 64, Share(8, 0, 4 << 30)),
        ({"SLURM_MEM_PER_NODE": "4096", "SLURM_GPUS_ON_NODE": "2"}, 2, Share(2, 2, 4 << 30)),
        ({"SLURM_MEM_PER_NODE": "0", "CUDA_VISIBLE_DEVICES": "3,5", "SLURM_GPUS_ON_NODE": "9"}, 2, Share(2, 2, None)),
        ({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,MIG-c"}, 1, Share(1, 3, None)),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 1, Share(1, 0, None)),
        ({"CUDA_VISIBLE_DEVICES": ""}, 1, Share(1, 0, None)),
    ],
)
def test_what_a_job_has_of_a_node(variables: dict[str, str], affinity: int, has: Share) -> None:
    assert share(variables, affinity, memory(variables)) == has


def test_memory_and_a_folder_that_ray_cannot_do_with() -> None:
    with pytest.raises(FluidTuneError, match="the job has 100 MiB of the node's memory"):
        share({}, 1, Memory(node=100))
    check_place("/tmp", "ft-slurm-12345678")
    with pytest.raises(FluidTuneError, match="RAY_TMPDIR=/scratch/user/of/the/job is too long"):
        check_place("/scratch/user/of/the/job", "ft-slurm-12345678")


def test_a_script_that_bash_reads() -> None:
    asked = submission(["a b.py", '--comment=it\'s "$HOME" #1', "--", "$(id)", "`id`", "'"])
    done = subprocess.run(["bash", "-n"], input=script(asked, "a b", "python"), text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
