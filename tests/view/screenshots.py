"""Pictures of a run's page for docs/view.md: 1,280 and 390 pixels wide, light and dark, with its best trial open.

``python -m tests.view.screenshots RUN_DIR docs/pictures`` wants what tests/view/test_browser.py wants.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image

from fluidtune.report import EVENT_LOG_NAME
from fluidtune.view.page_file import write_page
from tests.browsing import watched_page


def main(run: Path, pictures: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        address = write_page(run / EVENT_LOG_NAME, Path(folder) / "page.html").as_uri()
        for screen in ({"width": 1280, "height": 1130}, {"width": 390, "height": 844}):
            for scheme in ("light", "dark"):
                with watched_page(lambda url: url == address, viewport=screen, color_scheme=scheme) as page:
                    page.goto(address)
                    if screen["width"] > 1000:
                        page.locator("#rows tbody td.first button").first.click()
                    page.locator("#rows tbody tr[data-trial]").first.wait_for()
                    path = pictures / f"view-{screen['width']}-{scheme}.png"
                    page.screenshot(path=path)
                    Image.open(path).quantize(256).save(path, optimize=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
