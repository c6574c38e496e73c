"""Pictures of the page for its documentation; `pytest -m slow tests/browser` renews them."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser.conftest import serve
from browser.visitor import PHONE, Opener, Served, ask, upload
from PIL import Image
from playwright.sync_api import Page, expect

from sedem import SeDeM
from sedem.demo import DOCUMENTS
from sedem.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"
TOTAL_BYTES = 250_000
WINDOW = (1280, 800)
QUESTION = "Who is the mayor of Belholm?"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The model that people install."""
    try:
        model = SeDeM.from_pretrained("sedem-smol")
    except ConfigError as error:
        pytest.skip(f"the backbone cannot be had here: {error}")
    yield from serve(model, tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """All pictures together stay small enough for a repository."""
    yield
    assert sum(path.stat().st_size for path in DOCS.glob("page-*.png")) < TOTAL_BYTES


def save(page: Page, name: str) -> None:
    page.mouse.move(1, 1)
    page.wait_for_timeout(500)
    picture = Image.open(io.BytesIO(page.screenshot()))
    small = picture.convert("RGB").quantize(
        32, method=Image.Quantize.MEDIANCUT, kmeans=4, dither=Image.Dither.NONE
    )
    small.save(DOCS / f"page-{name}.png", optimize=True)


def test_answers(visit: Opener) -> None:
    page = visit("/#bank=demo", size=WINDOW)
    ask(page, QUESTION, k="1")
    ask(page, QUESTION, k="4")
    page.locator(".source").first.click()
    page.locator("#question").focus()
    page.evaluate("scrollTo(0, 0)")
    save(page, "light")


def test_phone(visit: Opener) -> None:
    page = visit("/#bank=demo", size=PHONE)
    ask(page, QUESTION, k="2")
    page.evaluate("scrollTo(0, 0)")
    save(page, "phone")


def test_reading(visit: Opener) -> None:
    page = visit("/#bank=demo", size=(720, 376))
    upload(page, *sorted(DOCUMENTS.glob("*.txt")))
    expect(page.locator("#reading-text")).to_contain_text(re.compile(r"[1-9][\d,]* of [\d,]+ ch"))
    save(page, "reading")
    expect(page.locator("#reading")).to_be_hidden(timeout=300_000)
