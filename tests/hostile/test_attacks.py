"""What `make attack` makes at full size: its page."""

from __future__ import annotations

from hostile.attacks import REPORT


def test_the_page_shows_the_committed_report() -> None:
    page = REPORT.page.read_text(encoding="utf-8")
    assert REPORT.rendered(page) == page
