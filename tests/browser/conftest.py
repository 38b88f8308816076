"""A real browser, headless: Debian's package `chromium`, or Chrome where that is installed."""

import os
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")  # its event loop would stand in the way of other tests
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright, which drives the browser")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("Chromium is not installed here: apt-get install chromium")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=options)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """A page of a laptop's size. Nothing may go wrong in it, and it may ask nobody but its own server."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(15_000)
    wrong, asked = [], []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}") or dialog.dismiss())
    page.on("request", lambda request: asked.append(request.url))
    yield page
    context.close()
    wrong = [text for text in wrong if "ERR_CONNECTION_REFUSED" not in text]  # the server goes before the page does
    assert not wrong, wrong
    assert all(url.startswith(("http://127.0.0.1:", "data:", "file:")) for url in asked), asked
