"""`nox`: the tests on each Python and on the oldest and the newest Ray that FluidTune is for.

``nox -s "tests-3.12(ray='newest')"`` runs one of them. A Python that this machine lacks is left out and named.
"""

import nox

#: The Pythons of pyproject.toml.
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
CONSTRAINTS = {"newest": "constraints.txt", "oldest": "constraints-oldest.txt"}


@nox.session(python=PYTHONS)
@nox.parametrize("ray", list(CONSTRAINTS))
def tests(session: nox.Session, ray: str) -> None:
    """What `make test` runs, without lint."""
    pins = ("-c", CONSTRAINTS[ray])
    if (session.python, ray) == ("3.13", "oldest"):
        # Ray 2.44 has no wheel for Python 3.13; 2.45 is the first that has.
        session.install("ray[tune]==2.45.0", "protobuf==6.33.6")
        pins = ()
    session.install(*pins, "torch==2.13.0")  # first and pinned: an unpinned torch pulls gigabytes of CUDA libraries
    session.install(*pins, "-e", ".[dev,serve,client]")
    session.run("python", "-m", "pytest", "-m", "not ray and not faults and not slow", "-n", "auto")
    session.run("python", "-m", "pytest", "-m", "core", "--kills", "1", "-n", "2", "--reruns", "1")
