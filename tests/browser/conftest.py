"""A real headless browser: Debian's package `chromium`, or Chrome if that is installed."""

import os
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")  # its event loop would interfere with other tests
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=options)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """A page of a laptop's size. It must have no errors and must send requests only to its own server."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(15_000)
    errors, urls = [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: errors.append(f"dialog: {dialog.message}") or dialog.dismiss())
    page.on("request", lambda request: urls.append(request.url))
    yield page
    context.close()
    errors = [text for text in errors if "ERR_CONNECTION_REFUSED" not in text]  # the server ends before the page
    assert not errors, errors
    assert all(url.startswith(("http://127.0.0.1:", "data:", "file:")) for url in urls), urls
