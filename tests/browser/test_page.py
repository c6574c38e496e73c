"""The page in a real browser: read, ask, and see where the answer came from."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from browser.visitor import PHONE, Opener, Served, ask, delete_bank, fold, upload
from playwright.sync_api import Locator, Page, Route, expect
from readers import reader_server

from sedem import Document, Reader
from sedem_serve.server.served import UploadBank

QUESTION = "In what year was Ulysses launched?"
PIES = "🥧🥧 Pies of the valley. 🥧 All of them are baked on Friday.\n\n" * 12
NOTE = PIES + "The cellar key hangs behind the blue door. 🗝 Nobody but Anna may take it.\n"


def test_a_document_is_read_and_can_be_asked(visit: Opener, served: Served, tmp_path: Path) -> None:
    page = visit()
    file = tmp_path / "Cellar Note.md"
    file.write_text(NOTE, "utf-8")
    upload(page, file)
    expect(page.get_by_role("button", name="cellar-note")).to_contain_text("1 document")
    expect(page.locator("#status")).to_have_text("cellar-note is ready. You can ask now.")
    page.reload()
    expect(page.locator("#asked-bank")).to_have_text("cellar-note")
    assert page.evaluate("location.hash") == "#bank=cellar-note"
    page.locator("#text .block").first.wait_for()
    assert page.locator("#text").text_content() == NOTE

    ask(page, "Where does the cellar key hang?", k="1")
    library = served.service.library
    [document] = library.get("cellar-note").bank.snapshot().documents
    [source] = page.evaluate("[...document.querySelectorAll('mark')].map((m) => m.textContent)")
    assert _marked(document.text, page.locator(".source").first) == source

    delete_bank(page)
    expect(page.get_by_role("button", name="cellar-note")).to_have_count(0)
    assert page.evaluate("location.hash") == "#bank=demo"


def test_progress_is_shown_while_a_document_is_read(visit: Opener, tmp_path: Path) -> None:
    page = visit()
    seen = page.evaluate_handle(
        """() => {
          const seen = [];
          new MutationObserver(() => seen.push(document.getElementById("reading-text").textContent))
            .observe(document.getElementById("reading-text"), { childList: true });
          return seen;
        }"""
    )
    files = [tmp_path / f"part-{number}.txt" for number in (1, 2)]
    for number, file in enumerate(files, 1):
        file.write_text(f"Chapter {number} of the long story. " * 120)
    upload(page, *files)
    expect(page.locator("#status")).to_have_text("part-1 is ready. You can ask now.")
    expect(page.locator("#reading")).to_be_hidden()
    lines = seen.json_value()
    assert lines
    assert any("of 2 documents" in line for line in lines)
    options = page.locator("#document-select option").all_inner_texts()
    assert options == ["part-1.txt", "part-2.txt"]


def test_an_answer_streams_in_after_its_sources(page: Page) -> None:
    order = page.evaluate_handle(
        """() => {
          const order = [];
          let first;
          new MutationObserver((changes) => {
            for (const { target } of changes) {
              const found = document.querySelectorAll(".source").length;
              const said = document.querySelector(".said")?.textContent ?? "";
              first ??= document.querySelector(".source");
              order.push([found, said, first === document.querySelector(".source")]);
            }
          }).observe(document.getElementById("answers"), { childList: true, subtree: true });
          return order;
        }"""
    )
    ask(page, QUESTION, k="2")
    steps = order.json_value()
    assert next(said for found, said, _ in steps if found) == ""
    assert all(same for *_, same in steps), "a source would lose the focus"
    answer = page.locator(".said").inner_text()
    assert answer == "1990"
    expect(page.locator(".source")).to_have_count(2)
    expect(page.locator(".source").first).to_contain_text("ulysses-spacecraft.txt")
    expect(page.locator(".confidence")).to_contain_text(re.compile(r"(sure|likely) \(0\.\d\d\)"))
    expect(page.locator(".timings")).to_contain_text("First token")
    expect(page.locator("#status")).to_contain_text("Answer: 1990")


def test_ones_own_model_writes_the_answer(
    visit: Opener, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "Ulysses was launched in 1990 [1]."
    with reader_server(lambda body: [said[:9], said[9:]]) as own:
        monkeypatch.setattr(served.service, "reader", Reader(own.url, "qwen3:4b"))
        page = visit()
        expect(page.locator("#settings-shown")).to_contain_text("qwen3:4b")
        usual = str(served.service.model.config.k)
        ask(page, QUESTION, k=usual)
        expect(page.locator(".said")).to_have_text(said)
        expect(page.locator(".chips").first).to_contain_text(re.compile(r"^[3-8] passages$"))
        expect(page.locator("#answers")).to_contain_text("Written by qwen3:4b")
        expect(page.locator("mark").first).to_be_visible()
        # If it gives none, the model's own answer is shown, with its sources.
        own.reply = lambda body: (500, "out of memory")
        ask(page, QUESTION, k="2")
        expect(page.locator(".said").first).to_have_text("1990")
        expect(page.locator("#answers")).to_contain_text("refuses with 500")


def test_a_source_is_scrolled_to_and_lit_exactly(page: Page, served: Served) -> None:
    ask(page, QUESTION, k="4")
    answer = page.locator(".source")
    texts = {document.name: document.text for document in served.bank.snapshot().documents}
    for index in (3, 0):
        button = answer.nth(index)
        name = button.locator(".name").inner_text()
        button.press("Enter")
        mark = page.locator(f"mark[data-rank='{index + 1}']")
        expect(mark).to_be_focused()
        expect(mark).to_be_in_viewport()
        assert mark.text_content() == _marked(texts[name], button)
        assert mark.get_attribute("data-label").startswith(f"{index + 1} · ")


def test_the_strip_shows_every_score_and_moves_by_keyboard(page: Page, served: Served) -> None:
    strip = page.get_by_role("slider", name="Score of each block")
    expect(page.locator("#heat-summary")).to_contain_text("Ask a question")
    ask(page, QUESTION, k="1")
    document = served.bank.snapshot().documents.names.index("ulysses-spacecraft.txt")
    blocks = int((served.bank.snapshot().blocks.documents == document).sum())
    expect(strip).to_have_attribute("aria-valuemax", str(blocks))
    expect(page.locator("#heat-summary")).to_contain_text("Highest score here")
    strip.press("Home")
    expect(strip).to_have_attribute("aria-valuetext", _words(1, blocks, source=1))
    strip.press("ArrowDown")
    expect(strip).to_have_attribute("aria-valuetext", _words(2, blocks))
    strip.press("End")
    strip.press("Enter")
    expect(page.locator(".block").last).to_be_focused()
    page.get_by_text("Scores as a table").click()
    rows = page.locator("#heat-rows tr")
    expect(rows.first.locator("td").nth(1)).to_have_text("1")
    scores = [float(row.locator("td").first.inner_text()) for row in rows.all()]
    assert scores == sorted(scores, reverse=True)
    cited, last = _warmth(page, 0.5 / blocks, 1 - 0.5 / blocks)
    assert cited > last


def test_settings_change_and_the_answer_before_stays_beside(page: Page) -> None:
    ask(page, QUESTION, k="1")
    ask(page, QUESTION, k="4", condition="text")
    new, old = page.locator(".answer").all()
    expect(new.locator(".chips")).to_have_text("K 4text")
    expect(old.locator(".chips")).to_have_text("K 1memory")
    expect(old.get_by_role("heading", name="Before")).to_be_visible()
    expect(new.locator(".difference")).to_contain_text("3 new sources")
    assert new.bounding_box()["y"] == old.bounding_box()["y"]
    expect(page.locator("mark")).not_to_have_count(1)
    old.locator(".source").first.click()
    expect(page.locator("mark")).to_have_count(1)
    ask(page, QUESTION, k="auto")
    expect(page.locator(".answer").first.locator(".chips")).to_contain_text("used)")


def test_only_the_same_question_is_compared(page: Page) -> None:
    ask(page, "Who is the mayor of Belholm?", k="1")
    ask(page, QUESTION, condition="memory")
    expect(page.locator("#answers .answer")).to_have_count(1)
    ask(page, QUESTION.upper(), condition="text")
    expect(page.locator("#answers .answer")).to_have_count(2)
    expect(page.locator(".difference")).to_have_count(1)
    earlier = page.locator("#earlier-list details")
    expect(earlier).to_have_count(1)
    expect(earlier.locator("summary")).to_contain_text("Who is the mayor of Belholm?")
    earlier.locator("summary").press("Enter")
    expect(earlier.locator(".answer")).to_have_class(re.compile("active"))


def test_the_thread_of_questions_survives_a_reload(page: Page) -> None:
    questions = ["Who is the mayor of Belholm?", QUESTION, QUESTION]
    for question, condition in zip(questions, ("memory", "memory", "text"), strict=True):
        ask(page, question, k="2", condition=condition)
    before = page.locator("#answers").inner_text()
    page.reload()
    expect(page.locator("#answers .answer")).to_have_count(2)
    assert page.locator("#answers").inner_text() == before
    expect(page.locator("#earlier-list summary")).to_contain_text(questions[0])
    expect(page.locator("mark")).not_to_have_count(0)
    page.locator(".source").first.press("Enter")
    expect(page.locator("mark[data-rank='1']")).to_be_focused()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Key of this server").wait_for()
    assert page.evaluate("sessionStorage.length") == 0


def test_an_unsure_answer_says_how_sure_and_what_else_and_who_decided(page: Page) -> None:
    text = "Bell A rang at noon. Bell B rang at nine."
    place = {"document": "ulysses-spacecraft.txt", "start": 0, "end": len(text)}
    found = {
        "citations": [{**place, "rank": 1, "score": 3.5, "text": text}], "k": 1, "confidence": 0.8,
    }  # fmt: skip
    decided = {
        **found, "answer_confidence": 0.5, "certainty": "unsure", "alternative": "Bell B",
        "sentences": [{**place, "end": 20}], "timings": {"total_ms": 5.0},
    }  # fmt: skip
    events = [
        {"choices": [{"delta": {}}], "sedem": found},
        {"choices": [{"delta": {"content": "Bell A"}}]},
        {"choices": [{"delta": {}}], "sedem": decided},
    ]
    body = "".join(f"data: {json.dumps(one)}\n\n" for one in events)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        body=body, content_type="text/event-stream"))  # fmt: skip
    ask(page, "Which bell rang?")
    card = page.locator(".answer")
    expect(card.locator(".confidence")).to_have_text("The answer is unsure (0.40)")
    expect(card).to_contain_text("Very likely in the documents (0.80)")
    expect(card).to_contain_text("Or: Bell B")
    expect(card.get_by_role("heading", name="Decided by the text of")).to_be_visible()
    expect(card.locator("q")).to_have_text("Bell A rang at noon.")


def test_a_follow_up_brings_the_question_before_and_its_answer(page: Page) -> None:
    ask(page, QUESTION, k="2")
    expect(page.locator(".said")).to_have_text("1990")
    bodies: list[str] = []
    page.on("request", lambda sent: bodies.append(sent.post_data or ""))
    ask(page, "And who launched it?", k="2")
    expect(page.locator(".said").first).not_to_be_empty()
    [body] = [body for body in bodies if "messages" in body]
    told = [(one["role"], one["content"]) for one in json.loads(body)["messages"]]
    assert told == [("user", QUESTION), ("assistant", "1990"), ("user", "And who launched it?")]
    # One that stands alone does not need them, and nothing is said of that.
    with page.expect_response("**/v1/chat/completions"):
        ask(page, "Which ship?", k="2")
    expect(page.locator(".said[aria-busy]")).to_have_count(0)
    expect(page.locator(".timings").first).to_be_visible()
    expect(page.get_by_text("was not used")).to_have_count(0)


def test_asking_goes_on_while_documents_are_read(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, parse = threading.Event(), UploadBank._document

    def slow(bank: UploadBank, name: str, path: Path) -> Document:
        assert go_on.wait(60)
        return parse(bank, name, path)

    monkeypatch.setattr(UploadBank, "_document", slow)
    file = tmp_path / "later.txt"
    file.write_text("The lighthouse was built in 1877.")
    upload(page, file)
    expect(page.locator("#reading")).to_be_visible()
    ask(page, QUESTION, k="2")
    expect(page.locator(".said")).to_have_text("1990")
    expect(page.locator("#reading")).to_be_visible()
    go_on.set()
    expect(page.locator("#notice")).to_contain_text("later is ready.")
    expect(page.locator(".said")).to_have_text("1990")
    page.get_by_role("button", name="Show it").click()
    expect(page.locator("#asked-bank")).to_have_text("later")
    expect(page.locator("#text")).to_have_text(file.read_text())
    delete_bank(page)


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("windows-1250", "Zażółć gęślą jaźń, powiedział stróż nocny."),
        ("koi8-r", "Смотритель маяка хранит ключ от подвала."),
        ("shift_jis", "灯台の鍵は青い扉の裏に掛かっています。"),
    ],
)
def test_a_file_is_read_again_in_the_encoding_that_is_chosen(
    visit: Opener, tmp_path: Path, encoding: str, text: str
) -> None:
    page = visit("/#bank=demo")
    file = tmp_path / "old.txt"
    file.write_bytes(text.encode(encoding))
    upload(page, file)
    choice = page.get_by_label("old.txt")
    choice.select_option("windows-1252")
    expect(page.locator("#encodings output")).not_to_contain_text(text)
    choice.select_option(encoding)
    expect(page.locator("#encodings output")).to_contain_text(text)
    page.get_by_role("button", name="Read again").click()
    expect(page.locator("#text")).to_have_text(text)
    expect(page.locator("#encodings")).to_be_hidden()
    expect(page.locator("#document-select option")).to_have_count(1)
    delete_bank(page)


def test_the_model_decides_what_to_select_by_unless_the_visitor_does(page: Page) -> None:
    bodies = []
    for settings in ({}, {"selection": "words"}):
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, QUESTION, **settings)
        bodies.append(sent.value.post_data_json)
    assert "selection" not in bodies[0] and bodies[1]["selection"] == "words"


def test_a_quoted_answer_is_marked_in_its_source_and_in_the_document(page: Page) -> None:
    ask(page, QUESTION, k="2", answer="span")
    quoted = page.locator(".answer").first.locator(".said").inner_text()
    source = page.locator(".source .excerpt strong")
    expect(source).to_have_text(quoted)
    words = page.locator("#text mark strong")
    assert "".join(words.all_inner_texts()) == quoted
    expect(words.first).to_be_in_viewport()
    ask(page, QUESTION, k="2", answer="free")
    expect(words).to_have_count(0)


def test_a_question_that_the_documents_do_not_say_is_declined(page: Page) -> None:
    fold(page, is_open=True)
    slider = page.get_by_label("Minimum confidence")
    slider.press("End")
    expect(page.locator("#settings-shown")).to_contain_text("at least 95 %")
    expect(page.locator("#min-confidence-shown")).to_have_text("95 %")
    ask(page, "Who painted the ceiling of the town hall?")
    expect(page.locator(".chips")).to_contain_text("min. 95 %")
    expect(page.locator(".said")).to_contain_text("documents do not")


def test_files_are_dropped_anywhere_or_chosen_with_the_keyboard(page: Page) -> None:
    files = page.evaluate_handle(
        """() => {
          const files = new DataTransfer();
          files.items.add(new File(["Some words."], "Dropped here.txt"));
          return files;
        }"""
    )
    page.dispatch_event("#heat", "dragenter", {"dataTransfer": files})
    expect(page.get_by_text("Drop to read")).to_be_visible()
    page.dispatch_event("#heat", "drop", {"dataTransfer": files})
    expect(page.get_by_text("Drop to read")).to_be_hidden()
    expect(page.get_by_label("Name of the new bank")).to_have_value("dropped-here")
    page.keyboard.press("Escape")
    expect(page.locator("#upload")).to_be_hidden()
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add documents").press("Enter")
    assert chooser.value.is_multiple()


@pytest.mark.slow
def test_a_long_document_is_shown_in_parts(visit: Opener) -> None:
    page = visit("about:blank")
    text = "".join(f"{number:06d} 🥧 line\n" for number in range(60_000))
    spans = [[start, min(start + 504, len(text))] for start in range(0, len(text), 504)]
    asked: list[tuple[int, int]] = []

    def answer(route: Route) -> None:
        query = parse_qs(urlsplit(route.request.url).query)
        start, end = (int(query[name][0]) for name in ("start", "end"))
        end = min(end, len(text))
        asked.append((start, end))
        inside = [span for span in spans if span[0] < end and span[1] > start]
        part = {"text": text[start:end], "start": start, "end": end, "spans": inside}
        route.fulfill(json={**part, "characters": len(text), "pages": []})

    page.route("**/v1/banks/demo/documents/0?*", answer)
    page.goto("/#bank=demo")
    expect(page.locator("#reader-facts")).to_contain_text("shown: 0 to 400,000")
    expect(page.get_by_role("button", name="Earlier part")).to_be_disabled()
    page.get_by_role("button", name="Later part").click()
    page.get_by_role("button", name="Later part").click()
    expect(page.get_by_role("button", name="Later part")).to_be_disabled()
    start, end = asked[-1]
    assert end == len(text)
    assert page.locator("#text").text_content() == text[start:end]
    first = page.locator("#text .block").nth(1).text_content()
    second = -(-start // 504) * 504
    assert first == text[second : second + 504]


def test_a_phone_has_a_list_to_choose_from_and_no_sideways_scrolling(visit: Opener) -> None:
    page = visit("/#bank=demo", size=PHONE)
    expect(page.get_by_label("Bank", exact=True)).to_be_visible()
    expect(page.locator("#bank-list")).to_be_hidden()
    ask(page, QUESTION, k="2")
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    page.locator(".source").first.click()
    expect(page.locator("mark[data-rank='1']")).to_be_in_viewport()


def test_everything_can_be_done_with_the_keyboard(visit: Opener) -> None:
    page = visit("/#bank=demo")
    expect(page.locator("#work")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the question")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_be_focused()
    page.keyboard.type(QUESTION)
    page.keyboard.press("Tab")
    expect(page.locator("#settings-shown")).to_be_visible()
    expect(page.locator("input[name=k]").first).to_be_hidden()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    expect(page.locator("input[name=k][value='4']")).to_be_checked()
    for _ in ("condition", "selection", "answer", "min-confidence"):
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#min-confidence-shown")).to_have_text("1 %")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator(".timings").wait_for()
    expect(page.locator("#send")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("mark[data-rank='1']")).to_be_focused()


def _marked(text: str, source: Locator) -> str:
    """What is marked of the characters that a source says it has: whole words."""
    found = re.match(r"characters ([\d,]+) to ([\d,]+)", source.locator(".place").inner_text())
    assert found
    edges = [int(number.replace(",", "")) for number in found.groups()]
    start, end = (
        edge - len(re.search(r"\S*$", text[:edge])[0]) if re.match(r"\S", text[edge:]) else edge
        for edge in edges
    )
    return text[start:end]


def _words(block: int, of: int, source: int | None = None) -> re.Pattern[str]:
    end = f", source {source}" if source else ""
    return re.compile(rf"Block {block} of {of}, score -?\d+\.\d\d{end}$")


def _warmth(page: Page, *shares: float) -> list[int]:
    """How far the colour of the strip is from grey at shares of its height."""
    return page.evaluate(
        """(shares) => {
          const { width, height } = document.getElementById("heat");
          const pen = document.getElementById("heat").getContext("2d");
          const { data } = pen.getImageData(width - 8, 0, 1, height);
          const at = (share) => 4 * Math.floor(share * height);
          return shares.map((share) => data[at(share)] - data[at(share) + 2]);
        }""",
        list(shares),
    )
