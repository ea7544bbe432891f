"""A page in a headless Chromium that must say nothing on its console, and ask nobody but whom it may."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.conftest import CHROMIUM


@contextmanager
def watched_page(may_ask: Callable[[str], bool], **given: Any) -> Iterator[Any]:
    """``may_ask``: whether the page may ask for this URL. ``given``: as for playwright's ``new_page``."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page, wrong = browser.new_page(**given), list[str]()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("request", lambda request: None if may_ask(request.url) else wrong.append(request.url))
        yield page
        browser.close()
        assert wrong == []
