"""What is quoted of an error, also of those in which Ray wraps what a task or a constructor has raised."""

from __future__ import annotations

import pytest
import ray

from fluidtune.error_lines import failure, first_line


class Speechless(Exception):
    """Has no message."""


@pytest.mark.parametrize(
    ("error", "line", "named"),
    [
        (ValueError("one\ntwo"), "one", "ValueError: one"),
        (Speechless(), "Speechless", "Speechless"),
        (Speechless("  \n "), "Speechless", "Speechless"),
        (OSError(28, "No space left"), "[Errno 28] No space left", "OSError: [Errno 28] No space left"),
    ],
)
def test_an_error_is_quoted_in_one_line(error, line, named):
    assert (first_line(error), failure(error)) == (line, named)


class Born:
    def __init__(self, dead: bool) -> None:
        if dead:
            raise OSError("the path is\ntoo long")

    def work(self) -> None:
        raise LookupError("no such thing\nnowhere")


@pytest.mark.ray
def test_of_rays_errors_what_was_raised_is_quoted(ray2):
    with pytest.raises(ray.exceptions.RayActorError) as stillborn:
        ray.get(ray.remote(Born).options(num_cpus=0).remote(True).work.remote())
    assert first_line(stillborn.value) == failure(stillborn.value) == "OSError: the path is"
    actor = ray.remote(Born).options(num_cpus=0).remote(False)
    with pytest.raises(ray.exceptions.RayTaskError) as failed:
        ray.get(actor.work.remote())
    assert failure(failed.value) == "LookupError: no such thing"
    ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError) as killed:
        ray.get(actor.work.remote())
    assert failure(killed.value).startswith("ActorDiedError: The actor died unexpectedly")
