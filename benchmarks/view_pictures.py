"""Screenshots of `mtrl view` for the docs, from a run of the embedded model.

    python -m benchmarks.view_pictures RUN [--step 4] [--row 1] [--word blue]

The run must have been recorded with `training.record_attention_maps=true`. One screenshot shows a response in light
colours on a laptop screen, the other its group in dark colours on a larger one. In both, the pointer is on a token and
the image shows its attention. Needs Chromium.
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from playwright.sync_api import sync_playwright

from mtrl.commands.view import listen
from mtrl.view.run_index import open_runs
from mtrl.view.server import make_app

DOCS = Path(__file__).resolve().parent.parent / "docs"
LAPTOP, DESK = {"width": 1280, "height": 800}, {"width": 1920, "height": 1080}


@contextmanager
def served(run: Path) -> Iterator[str]:
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        app = make_app(open_runs([run]), "127.0.0.1", port)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}/"
        server.should_exit = True
        thread.join()


def take_screenshot(browser: Any, address: str, screen: dict[str, int], scheme: str, word: str, out: Path) -> None:
    """Saves a screenshot with the pointer on the first token that contains `word`."""
    context = browser.new_context(viewport=screen, color_scheme=scheme)
    page = context.new_page()
    page.goto(address)
    page.locator(".response").first.wait_for()
    page.locator(".response .token").filter(has_text=word.strip()).first.hover()
    page.locator(".images canvas.attention-map").first.wait_for()
    page.screenshot(path=out)
    context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, default=4)
    parser.add_argument("--row", type=int, default=1, help="row of the response")
    parser.add_argument("--word", default="blue", help="text of the token under the pointer")
    parser.add_argument("--out", type=Path, default=DOCS)
    arguments = parser.parse_args()
    fragment = (
        f"#rollouts?from={arguments.step}&to={arguments.step}&latest=false&step={arguments.step}&row={arguments.row}"
    )
    path = shutil.which("chromium") or shutil.which("google-chrome")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with served(arguments.run) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=options)
        take_screenshot(
            browser, f"{address}{fragment}", LAPTOP, "light", arguments.word, arguments.out / "view_response.png"
        )
        group = f"{address}{fragment}&view=group&heat=advantage"
        take_screenshot(browser, group, DESK, "dark", arguments.word, arguments.out / "view_looks.png")
        browser.close()


if __name__ == "__main__":
    main()
