"""What the page says when something is missing or goes wrong."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from browser.visitor import Opener, Served, ask, delete_bank, fold, upload
from playwright.sync_api import Page, expect
from serving import READER, SECRET

from sedem.answering.running import RunningAnswers

QUESTION = "In what year was Ulysses launched?"


def test_a_key_is_asked_for_and_a_wrong_one_refused(visit: Opener) -> None:
    page = visit(secret=None)
    page.get_by_label("Key of this server").fill("this-is-not-the-right-key")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("not known")
    page.get_by_label("Key of this server").fill(SECRET)
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("#asked-bank")).not_to_be_empty()
    # The address with a key signs in and forgets it.
    page = visit(f"/?key={SECRET}", secret=None)
    expect(page.locator("#asked-bank")).not_to_be_empty()
    assert SECRET not in page.url


def test_a_key_that_ends_leads_back_to_the_form(page: Page) -> None:
    expect(page.locator("#work")).to_be_visible()
    page.context.clear_cookies()
    page.locator("#question").fill(QUESTION)
    page.locator("#send").click()
    expect(page.locator("#notice")).to_contain_text("does not accept your key")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_label("Key of this server")).to_be_focused()


def test_a_full_queue_says_when_to_try_again(
    page: Page, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(served.service.scheduler, "limit", 0)
        page.locator("#question").fill(QUESTION)
        page.locator("#send").click()
        expect(page.locator("#notice")).to_contain_text("more questions than it can answer")
        expect(page.get_by_role("button", name="Try again")).to_be_visible()
    page.get_by_role("button", name="Try again", exact=True).click()
    page.locator(".timings").wait_for()
    expect(page.locator("#notice")).to_be_hidden()


def test_a_server_that_is_gone_can_be_tried_again(page: Page) -> None:
    expect(page.locator("#work")).to_be_visible()
    page.context.set_offline(True)
    page.locator("#question").fill(QUESTION)
    page.locator("#send").click()
    expect(page.locator("#notice")).to_contain_text("cannot be reached")
    page.context.set_offline(False)
    page.get_by_role("button", name="Try again").click()
    page.locator(".timings").wait_for()


def test_an_answer_can_be_stopped(
    page: Page, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An answer in free words, token by token, never ends by itself, however slow the browser is.
    monkeypatch.setattr(RunningAnswers, "step", lambda running: time.sleep(0.1))
    fold(page, is_open=True)
    page.locator("input[name=answer][value=free]").check()
    page.locator("#question").fill("What did Ulysses study?")
    page.locator("#question").press("Enter")
    page.locator(".source").first.wait_for()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".answer")).to_contain_text("Stopped.")
    expect(page.locator("#send")).to_be_visible()
    scheduler = served.service.scheduler
    deadline = time.monotonic() + 5
    while scheduler.running and time.monotonic() < deadline:
        time.sleep(0.05)
    assert scheduler.running == 0


def test_what_cannot_be_read_or_named_is_explained(visit: Opener, tmp_path: Path) -> None:
    page = visit()
    file = tmp_path / "large.txt"
    file.write_text("word " * 60_000)
    page.locator("#files").set_input_files(str(file))
    page.get_by_label("Name of the new bank").fill("../etc")
    page.get_by_role("button", name="Read", exact=True).click()
    expect(page.locator("#upload-error")).to_contain_text("lowercase letters")
    page.get_by_role("button", name="Cancel", exact=True).click()
    expect(page.locator("#upload")).to_be_hidden()
    upload(page, file)
    expect(page.locator("#notice")).to_contain_text("large")
    expect(page.locator("#work")).to_be_visible()
    file = tmp_path / "broken.pdf"
    file.write_bytes(b"this is not a PDF")
    upload(page, file)
    expect(page.locator("#notice")).to_contain_text("broken.pdf")
    delete_bank(page)
    expect(page.get_by_role("button", name="broken")).to_have_count(0)


def test_a_key_that_may_only_ask_is_told_so(visit: Opener, tmp_path: Path) -> None:
    page = visit(secret=READER)
    expect(page.locator("#asked-bank")).not_to_be_empty()
    expect(page.get_by_role("button", name="Add documents")).to_be_hidden()
    expect(page.get_by_role("button", name="Delete this bank")).to_be_hidden()
    file = tmp_path / "a.txt"
    file.write_text("Some words.")
    page.locator("#files").set_input_files(str(file))
    expect(page.locator("#notice")).to_contain_text("may ask, but it may not add documents")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Key of this server")).to_be_focused()


def test_nothing_read_yet_invites_to_drop_a_document(
    visit: Opener, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = served.service.library
    monkeypatch.setattr(library, "names", lambda key: [])
    page = visit()
    expect(page.get_by_role("heading", name="Nothing has been read yet")).to_be_visible()
    expect(page.get_by_role("button", name="Choose a document")).to_be_visible()


def test_text_of_a_document_is_never_markup(visit: Opener, tmp_path: Path) -> None:
    page = visit()
    file = tmp_path / "<img src=x onerror=alert(1)>.txt"
    file.write_text("<script>alert(2)</script><b>The password of the shed is plum.</b>")
    upload(page, file)
    expect(page.locator("#text")).to_contain_text("<script>alert(2)</script>")
    ask(page, "What is the password of the shed?", k="1")
    expect(page.locator(".source .name")).to_have_text(file.name)
    assert page.locator("img[src=x], #text script, #text b").count() == 0
    delete_bank(page)
