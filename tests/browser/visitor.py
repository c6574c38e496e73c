"""What tests of the page share: the server that they visit, and how a person asks and uploads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Page

from sedem import MemoryBank
from sedem_serve.server.service import Service

DESKTOP, PHONE = (1440, 900), (360, 740)
Opener = Callable[..., Page]


@dataclass(frozen=True)
class Served:
    """A server that runs in a thread.

    Attributes:
        url: of its page, without a slash at the end.
        service: what stands behind it.
        bank: what the bank "demo" holds.
    """

    url: str
    service: Service
    bank: MemoryBank


def ask(page: Page, question: str, **settings: str) -> None:
    """Ask with the keyboard and wait for the whole answer; settings are values of choices."""
    for name, value in settings.items():
        fold(page, is_open=True)
        page.locator(f"input[name={name}][value='{value}']").check()
        fold(page, is_open=False)
    box = page.get_by_role("textbox", name="Ask")
    box.fill(question)
    box.press("Enter")
    page.locator(".answer").first.locator(".timings").wait_for()


def fold(page: Page, *, is_open: bool) -> None:
    """Show the settings, or hide them behind their line."""
    page.locator(".settings").evaluate(f"(one) => {{ one.open = {str(is_open).lower()}; }}")


def delete_bank(page: Page) -> None:
    """Delete the bank that is shown."""
    page.get_by_role("button", name="Delete this bank").click()
    page.get_by_role("button", name="Delete", exact=True).click()


def upload(page: Page, *files: Path) -> None:
    """Choose files and read them into a new bank of the name that the dialog proposes."""
    page.locator("#files").set_input_files([str(file) for file in files])
    page.locator("input[name=place][value=new]").check()
    page.get_by_role("button", name="Read", exact=True).click()
