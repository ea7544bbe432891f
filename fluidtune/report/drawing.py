"""What every picture shares: colours, an empty figure, plain axes, the unit of a time axis, the PNG file.

Decides how a picture looks, not what it shows: that is for pictures.py and `fluidtune plan`. Imports matplotlib only
when a picture is drawn, and never pyplot: no global state, no display, and any thread may draw.
"""

from __future__ import annotations

import os
from colorsys import hls_to_rgb
from pathlib import Path
from typing import TYPE_CHECKING

from fluidtune.report.fold import COLOUR_COUNT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The first six are Okabe and Ito's (Color Universal Design, 2008), which people with any common kind of colour
#: blindness can tell apart; their black is left out, and their vermillion is `marks.LOSS`.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442", "#7A5195", "#8C6D31")
#: What is drawn of a run, and what it is compared with.
OURS, OTHER = PALETTE[:2]
#: Text and markers.
INK = "#263238"
#: Lines behind the data.
GRID = "#CFD8DC"
#: Pixels per inch: a figure 12 inches wide is 1,440 pixels, which fits a usual screen.
DPI = 120


def _colour(number: int) -> str:
    """Hues a golden section apart in five lightnesses: any two of the first 60 differ by 7 in CIE 1976 L*a*b*."""
    lightness = (0.3, 0.42, 0.54, 0.66, 0.78)[number % 5]
    return "#" + "".join(f"{round(255 * part):02X}" for part in hls_to_rgb(number * 0.618034 % 1, lightness, 0.6))


#: The colours of trials, by `Trial.colour`.
COLOURS = (*PALETTE, *map(_colour, range(len(PALETTE), COLOUR_COUNT)))


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit for an axis as long as ``seconds``: its length in seconds and its name."""
    if seconds > 3 * 3600:
        return 3600.0, "h"
    return (60.0, "min") if seconds > 300 else (1.0, "s")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of ``width`` by ``height`` inches that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def polish_axes(axes: Axes) -> None:
    """No frame above and to the right, small tick labels, the grid behind the data."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=9, colors=INK)
    axes.set_axisbelow(True)


def as_written(figure: Figure) -> None:
    """Show all text of ``figure`` as it is: two "$" in a name are no formula, as matplotlib takes them for.

    Labels of ticks are matplotlib's own.
    """
    from matplotlib.text import Text

    ticks = {text for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for text in axis.get_ticklabels("both")}
    for text in figure.findobj(Text):
        if text not in ticks:
            text.set_parse_math(False)


def save_png(figure: Figure, out: str | os.PathLike[str]) -> Path:
    """Write ``figure`` to ``out`` as a PNG; missing directories are made. Returns the path."""
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    as_written(figure)
    figure.savefig(out, format="png")
    return out
