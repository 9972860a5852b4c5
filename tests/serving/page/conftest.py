import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from lynxkv.serving import page as page_files
from serving.apps import site
from serving.page.stage import Stage

CHROMIUM = shutil.which("chromium")

expect.set_options(timeout=20_000)  # other tests may have the cores


@pytest.fixture(scope="module")
def chromium():
    """Debian's browser, without a window. Playwright keeps an event loop running on this thread, which other tests of
    the same process must not find: it ends with the module."""
    if CHROMIUM is None:
        pytest.skip("no chromium here: apt-get install chromium (`make chromium`)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium):
    """``opened(url, **options)``: the page in a tab that has to end without an error of its own, nor any request that
    leaves its origin."""
    tabs = []

    def go(url, **options):
        context = chromium.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
        tab = context.new_page()
        tab.wrong = []
        tab.on("pageerror", lambda error: tab.wrong.append(str(error)))
        tab.on("console", lambda line: tab.wrong.append(line.text) if "Content Security" in line.text else None)
        tab.on("request", lambda asked: None if asked.url.startswith(url) else tab.wrong.append(asked.url))
        tabs.append(tab)
        tab.goto(f"{url}/ui")
        return tab

    yield go
    wrong = [each for tab in tabs for each in tab.wrong]
    for tab in tabs:
        tab.context.close()
    assert wrong == []


@pytest.fixture(scope="session")
def site_():
    with site() as it:
        yield it


@pytest.fixture
def staged(site_):
    """``staged(**options)``: a :class:`Stage` that is served, and its URL."""

    @contextmanager
    def serve(**options):
        stage = Stage(site_, **options)
        with site_.running(stage, page_files.routes()) as url:
            yield stage, url

    return serve


@pytest.fixture
def stage(staged):
    """One without keys: ``(stage, url)``."""
    with staged() as it:
        yield it


@pytest.fixture
def picture(tmp_path):
    """``picture(tab, name)`` keeps a screenshot under ``$LYNXKV_ARTIFACTS``, or with pytest's own files."""
    folder = Path(os.environ.get("LYNXKV_ARTIFACTS") or tmp_path) / "page"
    folder.mkdir(parents=True, exist_ok=True)

    def take(tab, name, animations="disabled"):
        tab.screenshot(path=folder / f"{name}.png", animations=animations)

    return take
