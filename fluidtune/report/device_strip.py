"""The small picture of a run in a notebook: a row for each device, a column for each look, a colour for each trial.

Pure: an SVG as text, from what the looks found. `fluidtune.tune.notebook_picture` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from fluidtune.report.drawing import GRID, INK

#: A look: the trials on each device at one moment. Devices without a trial are left out.
Look = Mapping[int, Sequence[str]]
#: Okabe and Ito's colours, which differ for all kinds of colour vision; without black and yellow, which are no fills.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
#: Columns of the picture, and pixels of a column, of a row, and of all rows at most. Judgement: half of a cell's width.
LOOKS, COLUMN, ROW, MOST_HEIGHT = 120, 4, 10, 240


def strip(looks: Sequence[Look], devices: Sequence[int], line: str) -> str:
    """The last `LOOKS` looks at these devices, the newest on the right, above ``line``. A trial's id is its tooltip."""
    row = min(ROW, MOST_HEIGHT / max(1, len(devices)))
    width, height = LOOKS * COLUMN, row * len(devices)
    shown = looks[-LOOKS:]
    bars = []
    for at, device in enumerate(devices):
        # Equal columns beside each other are one bar: the picture stays small.
        begin = 0
        while begin < len(shown):
            there, end = tuple(shown[begin].get(device, ())), begin + 1
            while end < len(shown) and tuple(shown[end].get(device, ())) == there:
                end += 1
            for part, trial in enumerate(there):
                high = row / len(there)
                bars.append(
                    f'<rect x="{width - COLUMN * (len(shown) - begin)}" y="{at * row + part * high:.2f}"'
                    f' width="{COLUMN * (end - begin)}" height="{0.9 * high:.2f}" fill="{colour_of(trial)}">'
                    f"<title>{escape(trial)} on device {device}</title></rect>"
                )
            begin = end
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 20:g}" role="img">'
        f'<rect width="{width}" height="{height:g}" fill="{GRID}" fill-opacity="0.4"/>{"".join(bars)}'
        f'<text y="{height + 14:g}" font-family="sans-serif" font-size="12" fill="{INK}">{escape(line)}</text></svg>'
    )


def colour_of(trial: str) -> str:
    """A trial's colour, which does not depend on the others."""
    return COLOURS[sum(trial.encode()) % len(COLOURS)]
