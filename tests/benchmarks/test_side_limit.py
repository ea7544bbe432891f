"""A side that does not end: it is ended, named, and costs the others nothing."""

import pytest

from benchmarks.common import NotEnded
from benchmarks.side_limit import SideLimit, repeat


def side(name, values, order, limits):
    left = iter(values)

    def run(limit):
        order.append(name)
        limits.append(limit)
        value = next(left)
        if value is None:
            raise NotEnded(f"{name} took more than {limit:.0f} s")
        return {"seconds": value}

    return run


def test_a_side_that_did_not_end_has_no_figures_and_is_not_run_again(capsys):
    order, limits = [], []
    sides = {"x": side("x", [5.0, 1.0], order, limits), "y": side("y", [2.0, None, 8.0], order, limits)}
    limit = SideLimit(4.0)
    found = repeat(sides, 3 - 1, limit)
    assert order == ["x", "y"] * 2 and found.keys() == {"x"} and limit.not_ended.keys() == {"y"}
    assert "y was ended: y took more than 4 s" in capsys.readouterr().err
    assert limit.run("y", sides["y"]) is None and order == ["x", "y"] * 2
    limit.require("x")
    with pytest.raises(SystemExit, match="y, which the other sides are compared with, did not end within"):
        limit.require("y")
