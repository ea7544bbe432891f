"""The small picture of a notebook: which bars it has."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from fluidtune.report.device_strip import COLUMN, LOOKS, ROW, strip

SVG = "{http://www.w3.org/2000/svg}"


def bars(text: str) -> list[tuple[str, float, float, float]]:
    """Tooltip, left, top and width of each bar."""
    return [
        (str(bar.findtext(f"{SVG}title")), *(float(bar.get(name, "nan")) for name in ("x", "y", "width")))
        for bar in ET.fromstring(text).iter(f"{SVG}rect")
        if len(bar)
    ]


def test_a_trial_that_moves_and_grows_while_another_one_joins_it():
    looks = [{3: ["a"]}, {3: ["a"], 7: ["a"]}, {7: ["a", "b"]}]
    edge = COLUMN * LOOKS
    assert bars(strip(looks, [3, 7], "two devices")) == [
        ("a on device 3", edge - 3 * COLUMN, 0, 2 * COLUMN),
        ("a on device 7", edge - 2 * COLUMN, ROW, COLUMN),
        ("a on device 7", edge - COLUMN, ROW, COLUMN),
        ("b on device 7", edge - COLUMN, ROW + ROW / 2, COLUMN),
    ]


#: What XML can hold.
texts = st.text(st.characters(codec="utf-8", exclude_categories=("C",)), max_size=9)


@given(st.lists(st.dictionaries(st.integers(0, 3), st.lists(texts, max_size=2)), max_size=LOOKS + 5), texts)
def test_any_text_is_text_and_no_bar_leaves_the_picture(looks, line):
    shown = ET.fromstring(strip(looks, range(4), line))
    assert shown.findtext(f"{SVG}text") == line
    for bar in shown.iter(f"{SVG}rect"):
        assert 0 <= float(bar.get("x", 0)) <= COLUMN * LOOKS - float(bar.get("width", 0))
