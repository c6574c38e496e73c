"""axe looks for what keeps people from using the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser.visitor import DESKTOP, PHONE, Opener, ask
from playwright.sync_api import Page


def problems(page: Page) -> list[str]:
    found = Axe().run(page).response["violations"]
    return [f"{one['impact']} {one['id']}: {one['nodes'][0]['html'][:100]}" for one in found]


@pytest.mark.parametrize(("scheme", "size"), [("light", DESKTOP), ("dark", PHONE)])
def test_axe_finds_nothing(
    visit: Opener, scheme: str, size: tuple[int, int], tmp_path: Path
) -> None:
    page = visit("/#bank=demo", scheme=scheme, size=size)
    ask(page, "In what year was Ulysses launched?", k="1")
    ask(page, "In what year was Ulysses launched?", k="8")
    page.get_by_text("Scores as a table").click()
    assert problems(page) == []
    file = tmp_path / "a.txt"
    file.write_text("Some words.")
    page.locator("#files").set_input_files(str(file))
    assert problems(page) == []
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.context.set_offline(True)
    page.locator("#send").click()
    page.locator("#notice").wait_for()
    page.context.set_offline(False)
    assert problems(page) == []


@pytest.mark.parametrize(("scheme", "size"), [("dark", DESKTOP), ("light", PHONE)])
def test_axe_finds_nothing_in_the_other_colours(
    visit: Opener, scheme: str, size: tuple[int, int]
) -> None:
    page = visit("/#bank=demo", scheme=scheme, size=size)
    ask(page, "In what year was Ulysses launched?", k="2")
    assert problems(page) == []
    form = visit(key=False, scheme=scheme, size=size)
    assert problems(form) == []
