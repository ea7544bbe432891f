"""The content of the pictures, read from matplotlib's objects, and the files of a report."""

from __future__ import annotations

import json
from itertools import combinations

import numpy as np
import pytest

from benchmarks import stock_events
from fluidtune.report.drawing import COLOURS, save_png
from fluidtune.report.fold import fold_of
from fluidtune.report.occupancy import held_part, occupancy_of
from fluidtune.report.pictures import (
    timeline_figure,
    utilisation_figure,
    write_report,
)
from fluidtune.report.summary import summarise
from tests.report.makers import begin, ended, ev, over, random_run, resized, resizing, result, started, written

PNG = b"\x89PNG\r\n\x1a\n"


def small() -> list:
    return [
        begin(0, 2, kind="emulated"),
        started(0, "t_00", 0, share=0.5),
        started(0, "t_01", 0, share=0.5),
        started(0, "t_02", 1),
        ended(4, "t_00"),
        ended(4, "t_01"),
        resized(5, "t_02", 1, 0),
        resized(7, "t_02", 1),
        ev(8, "worker_lost", worker="w", device=1, reason="killed"),
        ev(9, "device_lost", device=1),
        over(10),
    ]


def collection(axes, gid):
    return next(found for found in axes.collections if found.get_gid() == gid)


def boxes(axes) -> list[list[float]]:
    """(left, right, top, bottom) of each bar as drawn."""
    corners = [path.vertices for path in collection(axes, "trials").get_paths()]
    return [[*x_y.min(axis=0)[:1], *x_y.max(axis=0)[:1], x_y[:, 1].min(), x_y[:, 1].max()] for x_y in corners]


def test_the_timeline_has_a_bar_for_each_span_in_its_devices_row():
    (axes,) = timeline_figure(small()).axes
    held = [(device, span) for device, spans in occupancy_of(small()).by_device().items() for span in spans]
    drawn = sorted(boxes(axes))
    assert len(drawn) == len(held) == 6
    assert [(left, right) for left, right, _, _ in drawn] == sorted((span.start, span.end) for _, span in held)
    for left, right, top, bottom in drawn:
        row = int(top)
        assert row < top < bottom < row + 1
        span = next(span for device, span in held if (device, span.start, span.end) == (row, left, right))
        assert bottom - top == pytest.approx(0.88 * span.share)
    # The two halves lie one above the other.
    half_a, half_b = (box for box in drawn if box[:2] == [0, 4] and box[2] < 1)
    assert half_a[3] == pytest.approx(half_b[2]) or half_b[3] == pytest.approx(half_a[2])


def test_marks_title_labels_and_legend():
    figure = timeline_figure(small())
    (axes,) = figure.axes
    assert collection(axes, "grown").get_offsets().tolist() == [[5, 1.5]]
    assert collection(axes, "shrunk").get_offsets().tolist() == [[7, 1.5]]
    assert collection(axes, "lost").get_offsets().tolist() == [[8, 1.5], [9, 1.5]]
    assert axes.get_title(loc="left") == "test, 3 trials on 2 emulated devices, 79% held"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("time since start (s)", "device")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1"]
    assert [text.get_text() for text in axes.texts if text.get_text() == "2"], "a long bar has its name"
    (legend,) = figure.legends
    texts = {text.get_text() for text in legend.get_texts()}
    assert {"trial 0", "trial 1", "trial 2", "idle", "worker or device lost"} <= texts


def test_a_trial_that_starts_is_lighter_and_the_title_has_the_summarys_figures():
    """Seen: "99% held" above a picture of which 44 % was start-up, and 53.4 % in the summary."""
    events = [begin(0, 1), started(0, "a", 0), result(10, "a", 1, 6.0, 1.0), ended(10, "a"), over(10)]
    (axes,) = timeline_figure(events).axes
    (veil,) = collection(axes, "starts").get_paths()
    assert (veil.vertices[:, 0].min(), veil.vertices[:, 0].max()) == (0, 4)
    assert axes.get_title(loc="left").endswith(f", {summarise(events).utilisation:.0%} in iterations, 40% in starts")
    held, of_use, line = utilisation_figure(events).axes[0].patches
    assert [np.average(area.get_data().values) for area in (held, of_use)] == pytest.approx([100, 60])
    assert line.get_label() == "FluidTune: 60% in iterations, 40% in starts, 10 s"


def test_no_two_trials_that_run_at_one_time_have_one_colour():
    """Seen: eight colours in turn, for trials beside each other, too."""
    fold = fold_of(random_run(1, devices=16, trials=150, iterations=6))
    spans = [(span, fold.trials[span.trial].colour) for span in fold.spans]
    for (one, colour), (other, its) in combinations(spans, 2):
        assert colour != its or one.trial == other.trial or one.end <= other.start or other.end <= one.start
    assert len({colour for _, colour in spans}) == len(set(COLOURS)) == 60


def with_reasons() -> list:
    events = small()
    places = [place for place, event in enumerate(events) if event["event"] == "resized"]
    events.insert(places[1], resizing(7, "t_02", [1, 0], [1], why="waiting_trials"))
    events.insert(places[0], resizing(5, "t_02", [1], [1, 0], why="idle_devices"))
    return events


def test_a_change_of_width_has_its_reason_in_words_and_the_legend_counts_them():
    figure = timeline_figure(with_reasons())
    (axes,) = figure.axes
    written = {text.get_text(): text.xy for text in axes.texts if text.get_gid() == "why"}
    assert written == {"idle devices": (5, 1.5), "waiting trials": (7, 1.5)}
    texts = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"resize: more devices (1 x idle devices)", "resize: fewer devices (1 x waiting trials)"} <= texts
    (old,) = timeline_figure(small()).axes
    assert not [text for text in old.texts if text.get_gid() == "why"]


@pytest.mark.parametrize("devices", [4, 26])
def test_labels_stay_inside_their_bars(devices):
    figure = timeline_figure(random_run(2, devices=devices, trials=100, iterations=10))
    (axes,) = figure.axes
    figure.draw_without_rendering()
    assert axes.texts
    bars = [axes.transData.transform([(left, top), (right, bottom)]) for left, right, top, bottom in boxes(axes)]
    for text in axes.texts:
        box = text.get_window_extent()
        assert any(
            min(x) <= box.x0 and box.x1 <= max(x) and min(y) - 2 <= box.y0 and box.y1 <= max(y) + 2
            for x, y in (bar.T for bar in bars)
        )


def test_utilisation_has_all_devices_above_and_each_below():
    events = small()
    above, below = utilisation_figure(events).axes
    (area, _, line) = above.patches
    # Every change is at a multiple of the window, so averaging hides nothing.
    values, edges, _ = line.get_data()
    assert np.average(values, weights=np.diff(edges) * (np.where(edges[:-1] < 9 - 1e-9, 2, 1))) == pytest.approx(
        100 * held_part(occupancy_of(events))
    )
    assert area.get_fill() and not line.get_fill()
    assert len(below.patches) == 2 * 3
    assert above.get_ylim()[1] > 100
    assert [label.get_text() for label in below.get_yticklabels()] == ["0", "1"]
    assert below.get_xlabel() == "time since start (s), averaged over 0.1 s"


def test_the_devices_of_a_stock_run_are_matched_with_ours_in_ascending_order(monkeypatch):
    monkeypatch.setattr(stock_events, "save_png", lambda figure, out: figure)
    record = {"trial": "a", "start": 0.0, "end": 9.0, "device": 0}
    ours, stock = (stock_events.events_from_tune_results([record], devices=count) for count in (2, 1))
    assert stock_events.beside_png(ours, stock, "").axes[1].patches[-1].get_data().baseline == 1


def test_what_nvml_measured_is_drawn_over_each_device():
    def sample(t, device, part):
        memory = {"memory_used": 1, "memory_total": 2}
        return ev(t, "device_sample", device=device, utilisation=part, **memory, processes={})

    samples = [sample(2, 0, 0.5), sample(4, 1, None), sample(6, 0, 1.0)]
    events = [begin(0, 2), started(0, "a", 0, 1), *samples, ended(10, "a")]
    below = utilisation_figure(events).axes[1]
    labels = ["computing, by NVML", "memory in use, by NVML"]
    computing, memory = ([line for line in below.lines if line.get_label() == label] for label in labels)
    assert [list(line.get_ydata()) for line in computing] == [pytest.approx([1 + 0.43, 1 + 0.86])]
    assert [list(line.get_ydata()) for line in memory] == [pytest.approx([1 + 0.43, 1 + 0.43])]
    assert [text.get_text() for text in below.get_legend().get_texts()] == labels
    assert not [line for line in utilisation_figure(events[:2]).axes[1].lines if "NVML" in str(line.get_label())]


@pytest.mark.parametrize("events", [[], [begin(0, 0)], [begin(0, 2)], [begin(0, 1), over(5)]])
def test_an_empty_run_can_be_drawn(tmp_path, events):
    assert save_png(timeline_figure(events), tmp_path / "a" / "t.png").read_bytes().startswith(PNG)
    assert save_png(utilisation_figure(events), tmp_path / "a" / "u.png").read_bytes().startswith(PNG)


def test_write_report(tmp_path):
    log = written(tmp_path / "run", small())
    log.write_text(log.read_text() + '{"t": 11, "ev')
    fold = fold_of(log.parent)
    paths = write_report(fold, summarise(fold), log.parent)
    assert paths == [log.parent / name for name in ("timeline.png", "utilisation.png")]
    assert all(path.read_bytes().startswith(PNG) and path.stat().st_size > 5000 for path in paths)
    assert json.loads((log.parent / "summary.json").read_text())["dropped_lines"] == 1
