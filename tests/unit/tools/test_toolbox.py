"""The tools as plain functions: exact texts, bounded results, and calls that lead on."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from conftest import LEASE, RECIPE
from unit.tools.conftest import place

from sedem import Document, MemoryBank, SeDeM
from sedem.errors import BankError, ConfigError, DataError, UnknownDocumentError
from sedem.guidance import Confidence
from sedem.reading.followed import OpenBank
from sedem_serve.tools.results import MOST
from sedem_serve.tools.toolbox import Toolbox

QUESTION = "What is the rent?"


def call(toolbox: Toolbox, text: str) -> Any:
    """Make a call that a result names, as an agent does."""
    parsed = ast.parse(text, mode="eval").body
    assert isinstance(parsed, ast.Call)
    given = {str(one.arg): ast.literal_eval(one.value) for one in parsed.keywords}
    return getattr(toolbox, ast.unparse(parsed.func))(**given)


def size(result: Any) -> int:
    return len(result.model_dump_json())


# Searching


def test_search_quotes_exactly(toolbox: Toolbox) -> None:
    found = toolbox.search(QUESTION)
    assert found.status == "found" and found.results and not found.omitted and not found.next
    for one in found.results:
        document, characters = place(one.id)
        text = {"lease/lease.txt": LEASE, "lease/kitchen/recipe.txt": RECIPE}[document]
        assert one.text == text[characters]
        assert one.url == f"sedem:///{document}" and one.title == document.rpartition("/")[2]
        assert one.model_dump().keys() == {"id", "title", "url", "text"}


def test_what_has_no_news_is_not_told(make_toolbox: Callable[..., Toolbox]) -> None:
    copies = Document("a.txt", LEASE), Document("copy.txt", LEASE)
    toolbox = make_toolbox(*copies, Document("two.pdf", RECIPE, (0,)))
    found = toolbox.search(QUESTION, k=2, per_document=1)
    assert found.model_dump().keys() <= {"results", "confidence"}
    told = {one.title: one.also for one in found.results}
    assert told == {"a.txt": ["copy.txt"], "two.pdf, page 1": []}
    listed = toolbox.documents().model_dump()
    assert [*listed] == ["notes", "documents", "total"] and listed["documents"][1:] == [
        {"document": "made/copy.txt", "characters": len(LEASE)},
        {"document": "made/two.pdf", "characters": len(RECIPE), "pages": 1},
    ]


@pytest.mark.parametrize(
    "scope",
    ["kitchen/", "lease/kitchen", "kitchen/*.txt", "recipe.txt;kitchen/recipe.txt", "*recipe*"],
)
def test_scope_limits_a_search_to_folders_and_patterns(toolbox: Toolbox, scope: str) -> None:
    found = toolbox.search(QUESTION, scope)
    assert {place(one.id)[0] for one in found.results} == {"lease/kitchen/recipe.txt"}
    listed = toolbox.documents(scope).documents
    assert [one.document for one in listed] == ["lease/kitchen/recipe.txt"]
    assert toolbox.search(QUESTION, "lease").results == toolbox.search(QUESTION).results


def test_scripts_without_spaces_are_found(
    make_toolbox: Callable[..., Toolbox], model: SeDeM
) -> None:
    texts = {"ja.txt": "猫は東京の家にいます。", "zh.txt": "租金每月九百欧元。", "en.txt": LEASE}
    toolbox = make_toolbox(*(Document(name, text) for name, text in texts.items()))
    model.config = model.config.with_changes(selection="words")
    for question, name in (("猫はどこにいますか", "ja.txt"), ("租金是多少", "zh.txt")):
        best = toolbox.search(question, k=1).results[0]
        assert best.title == name and best.text == texts[name]


def test_a_large_result_is_cut_counts_what_it_omits_and_leads_on(
    make_toolbox: Callable[..., Toolbox],
) -> None:
    texts = [f"{'Some words that fill a sentence. ' * 12}End {n}." for n in range(40)]
    toolbox = make_toolbox(*(Document(f"{n}.txt", text) for n, text in enumerate(texts)))
    first = toolbox.search(QUESTION, k=40, per_document=1, budget=5_000)
    assert size(first) <= 5_000 and 0 < len(first.results) < 40
    assert first.omitted == 40 - len(first.results)
    seen, found = list(first.results), first
    while found.next:
        found = call(toolbox, found.next)
        assert size(found) <= 30_000
        seen += found.results
    assert [one.id for one in seen[:40]] == [
        one.id for one in toolbox.search(QUESTION, k=40, budget=MOST).results
    ]
    assert size(toolbox.search(QUESTION, k=100, per_document=50, budget=10**9)) <= MOST


def test_one_passage_fits_every_budget(make_toolbox: Callable[..., Toolbox]) -> None:
    escaped = "\x01" * 300  # six characters each in JSON
    toolbox = make_toolbox(*(Document(f"{n}.txt", f"Words. {escaped} {n}.") for n in range(3)))
    found = toolbox.search(QUESTION, budget=1)
    assert found.status == "found" and len(found.results) == 1 and found.omitted and found.next


def test_a_list_of_documents_leads_on(make_toolbox: Callable[..., Toolbox]) -> None:
    names = [f"{number:03}.txt" for number in range(120)]
    toolbox = make_toolbox(*(Document(name, f"Text of {name}.") for name in names))
    listing = toolbox.documents(budget=4_000)
    assert listing.total == 120 and listing.omitted == 120 - len(listing.documents) > 0
    seen = [one.document for one in listing.documents]
    while listing.next:
        listing = call(toolbox, listing.next)
        seen += [one.document for one in listing.documents]
    assert seen == [f"made/{name}" for name in names]


def test_nothing_found_and_still_reading_differ(
    toolbox: Toolbox, lease: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MemoryBank.open(lease).remove("lease.txt", "kitchen/recipe.txt")
    assert toolbox.search(QUESTION).status == "nothing found"
    assert toolbox.documents().status == "nothing found"
    assert toolbox.request(QUESTION) is None
    assert toolbox.unanswered(QUESTION).status == "nothing found"
    monkeypatch.setattr(OpenBank, "reading", lambda self: "still reading 3 files of 'lease'")
    found = toolbox.search(QUESTION)
    assert found.status == "still reading" and found.notes == ["still reading 3 files of 'lease'"]
    assert toolbox.search(QUESTION, "attic/").status == "still reading"
    monkeypatch.setattr(OpenBank, "snapshot", lambda self: None)
    assert toolbox.search(QUESTION).status == "still reading"


def test_a_doubtful_or_outdated_passage_is_told(
    toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenBank, "changed", lambda self, document: document == "lease.txt")
    found = toolbox.search(QUESTION, "lease.txt")
    assert all(one.changed for one in found.results)
    assert "some files have changed since they were read" in found.notes[0]
    assert toolbox.search(QUESTION, "kitchen/").notes == []
    assert toolbox.read("lease.txt").changed and not toolbox.read("recipe.txt").changed


@pytest.mark.parametrize("least", [0.0, 1.0])
def test_what_the_model_would_decline_to_answer_is_told(
    toolbox: Toolbox, model: SeDeM, least: float
) -> None:
    model.confidence = Confidence()
    model.config = model.config.with_changes(min_confidence=least)
    found = toolbox.search(QUESTION, "kitchen/")
    assert found.results and found.confidence is not None
    assert [note for note in found.notes if "probably do not say" in note] == found.notes
    assert bool(found.notes) == (least == 1)


# Reading


def test_a_document_can_be_walked(toolbox: Toolbox) -> None:
    part = toolbox.read("lease.txt", length=50)
    assert part.document == "lease/lease.txt" and part.characters == len(LEASE) and not part.start
    parts = [part]
    while parts[-1].end < part.characters:
        parts.append(toolbox.read(part.document, parts[-1].end, 50))
    assert "".join(one.text for one in parts) == LEASE
    # Around a passage are its neighbours.
    passage = toolbox.search(QUESTION, "lease.txt", k=1, per_document=1).results[0]
    around = toolbox.read(passage.id, length=len(passage.text) + 60)
    assert passage.text in around.text and len(around.text) > len(passage.text)
    assert around.start <= place(passage.id)[1].start and around.end >= place(passage.id)[1].stop


def test_a_page_is_read_by_its_number(make_toolbox: Callable[..., Toolbox]) -> None:
    text = "First page. Its end.\n\nSecond page."
    toolbox = make_toolbox(Document("two.pdf", text, (0, text.index("Second"))))
    assert toolbox.read("two.pdf", page=1).text == "First page. Its end.\n\n"
    second = toolbox.read("two.pdf", page=2)
    assert (second.text, second.page, second.pages) == ("Second page.", 2, 2)
    with pytest.raises(DataError, match=r"there is no page 3 in 'two.pdf'; it has 2"):
        toolbox.read("two.pdf", page=3)


def test_a_text_full_of_escapes_stays_within_the_largest_result(
    make_toolbox: Callable[..., Toolbox],
) -> None:
    toolbox = make_toolbox(Document("odd.txt", "words\x01\x02 " * 9_000))
    part = toolbox.read("odd.txt", length=MOST)
    assert size(part) <= MOST and part.end < part.characters
    fetched = toolbox.fetch("made/odd.txt")
    assert size(fetched) <= MOST
    assert fetched.metadata == {"start": "0", "end": str(len(fetched.text)), "characters": "72000"}


# Asking


def test_an_answer_has_its_sources(toolbox: Toolbox, model: SeDeM, lease: Path) -> None:
    asked = toolbox.request(QUESTION, k=2, max_tokens=5)
    assert asked is not None
    bank, request, decoding = asked
    answer = model.answer_requests([request], decoding)[0]
    answered = toolbox.answered(bank, answer)
    expected = model.answer(MemoryBank.open(lease), QUESTION, k=2, decoding=decoding)
    assert answered.answer == expected.text and answered.confidence is None
    assert [one.text for one in answered.results] == [one.text for one in expected.citations]


def test_a_question_goes_to_the_bank_that_knows_most(
    toolbox: Toolbox, model: SeDeM, tmp_path: Path
) -> None:
    model.read([Document("other.txt", "Other text, which says something else.")]).save(
        tmp_path / "other.bank"
    )
    both = Toolbox([OpenBank(tmp_path / "other.bank", "other"), *toolbox.banks], lambda: model)
    best = both.search(QUESTION, k=1).results[0]
    asked = both.request(QUESTION)
    assert asked is not None and asked[0].name == best.id.partition("/")[0]
    only = both.request(QUESTION, "other/")
    assert only is not None and only[0].name == "other"


# Notes


def test_a_note_is_committed_and_found_by_another_process(toolbox: Toolbox, lease: Path) -> None:
    text = "The landlord prefers calls after six."
    noted = toolbox.remember(text, "landlord")
    assert (noted.document, noted.done) == ("lease/landlord.note", "remembered")
    # Another object, as another process would open it.
    assert MemoryBank.open(lease).documents[-1] == Document("landlord.note", text)
    found = toolbox.search("When to call?", "landlord.note")
    assert [one.text for one in found.results] == [text]
    [listed] = toolbox.documents("*.note").documents
    assert listed.note and not listed.changed
    assert toolbox.remember("Call after seven.", "lease/landlord.note").done == "replaced"
    assert toolbox.forget("landlord").done == "forgotten"
    assert MemoryBank.open(lease).documents.names == ["lease.txt", "kitchen/recipe.txt"]
    # Without a name, it gets the time.
    names = {toolbox.remember(f"Note {number}.").document for number in range(3)}
    assert len(names) == 3
    for name in names:
        datetime.strptime(name, "lease/%Y-%m-%d %H.%M.%S.%f.note")


# Refusals


PATTERNS = [";".join(f"*{n}*" for n in range(count)) for count in (101, 5_000, 100_000)]
NAMED = "the name of a note must have 1 to 195 printable"
REFUSED: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("search", (QUESTION, "attic/"), DataError, r"no document is in the scope 'attic/'; documents"),
    *(("search", ("rent", one), DataError, "patterns, at most 100 are com") for one in PATTERNS),
    *(("documents", (one,), DataError, f"{one.count(';') + 1:,} patterns") for one in PATTERNS),
    ("read", ("leese.txt",), UnknownDocumentError, r"no document 'leese.txt'; .*'lease/lease.txt'"),
    ("read", ("lease.txt", 0, 9, 1), DataError, "it has no pages; give start instead"),
    ("forget", ("lease.txt",), DataError, "'lease.txt' was read from a file; forget removes only"),
    ("forget", ("x",), UnknownDocumentError, "there is no note 'x'; there are none"),
    *(("remember", ("x", one), DataError, NAMED) for one in ("a\nb", " ", "x" * 500, "\x1b[0m")),
    ("remember", ("x" * 200_001,), DataError, "the note has 200,001 characters"),
]


def test_what_cannot_be_done_is_refused_in_one_sentence(toolbox: Toolbox, lease: Path) -> None:
    before, began = lease.read_bytes(), time.monotonic()
    for tool, arguments, kind, words in REFUSED:
        with pytest.raises(kind, match=words):
            getattr(toolbox, tool)(*arguments)
    assert time.monotonic() - began < 10, "many patterns are not compared"
    assert toolbox.documents(";".join(["lease.txt"] * 100)).total == 1
    toolbox.writable = False
    for tool in ("remember", "forget"):
        with pytest.raises(ConfigError, match="there is no bank for notes"):
            getattr(toolbox, tool)("x")
    assert lease.read_bytes() == before


# Several banks


def test_a_damaged_bank_is_told_and_the_others_answer(
    toolbox: Toolbox, model: SeDeM, tmp_path: Path
) -> None:
    (tmp_path / "bad.bank").write_bytes(b"SQLite format 3\0" + bytes(4096))
    bad = OpenBank(tmp_path / "bad.bank", "bad")
    found = Toolbox([bad, *toolbox.banks], lambda: model).search(QUESTION)
    assert found.results and re.search("bad.bank.*", found.notes[0])
    with pytest.raises(BankError, match=r"bad\.bank"):
        Toolbox([bad], lambda: model).search(QUESTION)


def test_a_file_that_cannot_be_read_is_told_once_and_in_every_list(
    toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = ["'a.txt' is binary", "'b.txt' is empty"]
    monkeypatch.setattr(OpenBank, "unreadable", lambda self: bad[:1])
    assert toolbox.search(QUESTION).notes[0] == bad[0]
    assert bad[0] not in toolbox.search(QUESTION).notes + toolbox.read("lease.txt").notes
    assert toolbox.documents().notes == toolbox.documents().notes == bad[:1]
    monkeypatch.setattr(OpenBank, "unreadable", lambda self: bad)
    assert [one for one in toolbox.search(QUESTION).notes if one in bad] == bad[1:]
    # What is wrong with a whole folder is in every result.
    monkeypatch.setattr(OpenBank, "reading", lambda self: "the folder is empty")
    for _ in range(2):
        for result in (toolbox.search(QUESTION), toolbox.documents(), toolbox.read("lease.txt")):
            assert "the folder is empty" in result.notes


def test_the_same_name_in_two_banks_needs_the_banks_name(
    toolbox: Toolbox, model: SeDeM, tmp_path: Path
) -> None:
    model.read([Document("lease.txt", "Another lease.")]).save(tmp_path / "other.bank")
    both = Toolbox([*toolbox.banks, OpenBank(tmp_path / "other.bank", "other")], lambda: model)
    with pytest.raises(UnknownDocumentError, match=r"'lease/lease\.txt', 'other/lease\.txt'; give"):
        both.read("lease.txt")
    assert both.read("other/lease.txt").text == "Another lease."
    assert both.names(2) == ["lease/lease.txt", "lease/kitchen/recipe.txt"]
