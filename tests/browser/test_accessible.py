"""axe looks for what keeps people from using the page."""

from __future__ import annotations

from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from browser.visitor import DESKTOP, PHONE, Opener, Served, ask, fold, upload
from playwright.sync_api import Page

LOOKS = [("light", DESKTOP), ("dark", DESKTOP), ("dark", PHONE), ("light", PHONE)]


def problems(page: Page) -> list[str]:
    """What axe finds in both colours and on both sizes of window."""
    found = []
    for scheme, (width, height) in LOOKS:
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.set_viewport_size({"width": width, "height": height})
        for one in Axe().run(page).response["violations"]:
            place = one["nodes"][0]["html"][:100]
            found.append(f"{scheme} {width}: {one['impact']} {one['id']}: {place}")
    return found


def test_axe_finds_nothing_where_people_sign_in_ask_and_upload(
    visit: Opener, page: Page, served: Served, tmp_path: Path
) -> None:
    assert problems(visit(secret=None)) == []
    ask(page, "Who is the mayor of Belholm?")
    ask(page, "In what year was Ulysses launched?", k="1")
    ask(page, "In what year was Ulysses launched?", k="8")
    fold(page, is_open=True)
    page.locator("#earlier-list summary").click()
    page.get_by_text("Scores as a table").click()
    page.get_by_text("3 more sources").click()
    page.context.set_offline(True)
    page.locator("#send").click()
    page.locator("#notice").wait_for()
    page.context.set_offline(False)
    assert problems(page) == []
    file = tmp_path / "a.txt"
    file.write_text("Some words.")
    page.locator("#files").set_input_files(str(file))
    assert problems(page) == []
    page.get_by_role("button", name="Cancel", exact=True).click()
    file.write_bytes("Zażółć gęślą jaźń.".encode("windows-1250"))
    upload(page, file)
    page.locator("#encodings").wait_for()
    assert problems(page) == []
    served.service.library.delete("a")
