"""When a job shows a picture: with a notebook's kernel. IPython is played."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from fluidtune.tune.notebook_picture import picture_here


def ipython(monkeypatch: pytest.MonkeyPatch, shell: object) -> list[tuple[str, str]]:
    """Put IPython with this shell in; returns what it displays."""
    shown: list[tuple[str, str]] = []

    def display(what: str, display_id: bool) -> SimpleNamespace:
        shown.append(("new", what))
        return SimpleNamespace(update=lambda what: shown.append(("update", what)))

    package, part = ModuleType("IPython"), ModuleType("IPython.display")
    vars(package).update(get_ipython=lambda: shell)
    vars(part).update(HTML=str, display=display)
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", part)
    return shown


def test_a_notebook_has_one_picture_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = ipython(monkeypatch, SimpleNamespace(kernel=object()))
    picture = picture_here()
    assert picture is not None and shown == []
    picture.show("one busy", {0: "node", 1: "node"}, {"a": (0,), "b": (0,)})
    picture.show("both busy", {0: "node", 1: "node"}, {"a": (0, 1)})
    assert [how for how, _ in shown] == ["new", "update"]
    assert all(text in shown[1][1] for text in ("both busy", "a on device 0", "a on device 1", "b on device 0"))


@pytest.mark.parametrize("shell", [None, SimpleNamespace()])
def test_a_terminal_has_none(shell: object, monkeypatch: pytest.MonkeyPatch) -> None:
    ipython(monkeypatch, shell)
    assert picture_here() is None


def test_where_ipython_is_not_imported_it_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert picture_here() is None and "IPython" not in sys.modules


def test_a_package_of_that_name_that_is_another_one_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    assert picture_here() is None


def test_a_picture_that_cannot_be_shown_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ipython(monkeypatch, SimpleNamespace(kernel=object()))
    picture = picture_here()
    assert picture is not None
    monkeypatch.delattr(sys.modules["IPython.display"], "HTML")
    for _ in range(3):
        picture.show("one busy", {0: "node"}, {"a": (0,)})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
