"""A real server over sedem-nano, and a headless Chromium that shows its page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser.visitor import DESKTOP, Opener, Served
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    expect,
    sync_playwright,
)
from servers import serving
from serving import SECRET

from sedem import Document, SeDeM
from sedem.demo import DOCUMENTS
from sedem_serve.server.settings import ServerSettings

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
CHARACTERS = 6000
SECONDS = 60
"""After which what the page should show counts as missing."""
DEMO = ("harbour-register.txt", "ulysses-spacecraft.txt")


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests of the page."""
    yield from serve(SeDeM.from_pretrained("sedem-nano"), tmp_path_factory.mktemp("served"))


def serve(model: SeDeM, folder: Path) -> Iterator[Served]:
    """A server with a bank that the operator gave."""
    texts = {name: (DOCUMENTS / name).read_text("utf-8")[:CHARACTERS] for name in DEMO}
    bank = model.read([Document(*one) for one in texts.items()])
    bank.save(folder / "demo.bank")
    settings = ServerSettings(
        folder=folder / "server",
        banks={"demo": folder / "demo.bank"},
        max_file_bytes=200_000,
    )
    with serving(settings, model) as server:
        yield Served(server.url, server.service, bank)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for the tests of a file.

    No longer: while playwright runs, other tests of this process cannot run event loops.
    """
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    expect.set_options(timeout=SECONDS * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser, served: Served) -> Iterator[Opener]:
    """Return a function that opens the page in a new window, signed in unless `secret` is None.

    At the end of the test no window may have seen an error of a script or of the content policy.
    """
    contexts: list[BrowserContext] = []
    problems: list[str] = []

    def note(message: ConsoleMessage) -> None:
        # Chromium reports responses such as 401 there too; what the page makes of them is tested.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            problems.append(message.text)

    def visit(
        path: str = "/",
        *,
        secret: str | None = SECRET,
        scheme: str = "light",
        size: tuple[int, int] = DESKTOP,
    ) -> Page:
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme=scheme,  # type: ignore[arg-type]
            reduced_motion="reduce",
            base_url=served.url,
        )
        contexts.append(context)
        context.set_default_timeout(SECONDS * 1000)
        if secret is not None:
            cookie = {"name": "sedem_key", "value": secret, "url": served.url}
            context.add_cookies([cookie])  # type: ignore[list-item]
        page = context.new_page()
        page.on("console", note)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(path)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture
def page(visit: Opener) -> Page:
    """The page in a wide window, ready to ask the bank of the operator."""
    page = visit("/#bank=demo")
    page.locator("#work").wait_for()
    return page
