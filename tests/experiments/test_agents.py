"""A scripted agent reads a small folder with tools for files, and with those of `sedem mcp`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.pages import STUDIES
from experiments.system.agents import CALLS, Calls, Line, folder, tool_servers, with_files
from experiments.system.measures import measure
from experiments.system.scales import COVID, NANO, SMOL, SQUAD, Scale

HILLS = [f"Hill {n} is {n}00 metres high, and its owner is called Ada {n}." for n in range(1, 7)]
PAPER = "Masks help. " * 12 + "The incubation period was 5.2 days. " + "Hands were washed. " * 12


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """An article of six paragraphs, each with a question, and a paper."""

    def asked(text: str, question: str, answer: str) -> dict[str, object]:
        answers = [{"text": answer, "answer_start": text.index(answer)}]
        return {"context": text, "qas": [{"id": text, "question": question, "answers": answers}]}

    hills = [asked(text, f"Who owns {text[:6]}?", text[-6:-1]) for text in HILLS]
    paper = {**asked(PAPER, "How long was the incubation period?", "5.2 days"), "document_id": 7}
    articles = {"title": "Hills", "paragraphs": hills}, {"title": "?", "paragraphs": [paper]}
    for article, name in zip(articles, (SQUAD["source"], COVID), strict=True):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps({"data": [article]}), encoding="utf-8")
    return tmp_path


@pytest.fixture
def scale(tiny_checkpoint: str) -> Scale:
    sets = {**NANO.sets, "qasper": replace(NANO.sets["qasper"], records=None)}
    return replace(NANO, stand_in=True, shipped={SMOL: Path(tiny_checkpoint)}, sets=sets)


def test_a_folder_has_long_files_and_a_question_about_each(data: Path, scale: Scale) -> None:
    texts, asked = folder(scale, data)
    assert [*texts] == [*asked] == ["Hills-1.txt", "Hills-2.txt", "Hills-3.txt", "paper-7.txt"]
    assert texts["Hills-2.txt"] == f"{HILLS[2]}\n\n{HILLS[3]}\n\n"
    question, start, end = asked["Hills-2.txt"]
    assert texts["Hills-2.txt"][start:end] == f"Ada {question[-2]}" in ("Ada 3", "Ada 4")
    assert texts["paper-7.txt"].replace("\n", " ") == PAPER
    assert max(map(len, texts["paper-7.txt"].splitlines())) < 100


def test_an_agent_with_files_searches_rare_words_first_and_reads_around_them() -> None:
    texts = ["Ada walked.", "Ada saw the hill.", "Bob saw a lake.", "Nobody saw Ada leave."]
    lines = [Line("a.txt", n, 20 * n, text) for n, text in enumerate(texts)]
    lines.append(Line("b.txt", 0, 0, "The lake is deep."))

    async def gathered(calls: Calls) -> list[tuple[str, list[tuple[str, int, int]]]]:
        return [call async for call in calls]

    question = "Where is the lake that Bob saw with Ada?"
    counts, *shown = asyncio.run(gathered(with_files(lines, question, counted=True)))
    assert counts == ("lake: 2\nBob: 1\nsaw: 3\nAda: 3\nBob saw: 1", [])
    bob = "1 lines\na.txt:2:Bob saw a lake.", [("a.txt", 40, 55)]
    both = [("a.txt", 40, 55), ("b.txt", 0, 17)]
    lake = "2 lines\na.txt:2:Bob saw a lake.\nb.txt:0:The lake is deep.", both
    # Three words, then the page with most of them and the other, then the words that are left.
    assert shown[:3] == [bob, bob, lake] and [len(places) for _, places in shown[5:]] == [3, 3]
    assert shown[3] == ("\n".join(texts), [("a.txt", 0, len("\n".join(texts)))])
    assert shown[4] == ("The lake is deep.", [("b.txt", 0, 17)])
    # Without counts: names, then long words.
    shown = asyncio.run(gathered(with_files(lines, question, counted=False)))
    assert [shown[0], shown[2]] == [bob, lake] and shown[1][0].startswith("3 lines\na.txt:0:Ada")


def test_all_ways_find_the_answers_of_a_small_folder(
    data: Path, scale: Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    study = STUDIES["agent_savings"]
    [cell] = study.cells(scale)
    measure(cell, scale, data, study.name)
    result = cell.read(scale)
    assert result is not None
    assert result["questions"] == result["by_all"] == 4 and result["told"] > 1000
    for way in result["ways"].values():
        assert way["found"]["mean"] == 100 and 1 <= way["calls"]["mean"] < CALLS
    assert all(number.value(scale) is not None for number in study.numbers(scale))


def test_the_server_is_measured_on_the_household_papers(scale: Scale, data: Path) -> None:
    study = STUDIES["tool_servers"]
    [cell] = study.cells(scale)
    result = tool_servers(cell, scale, data)
    assert (result["files"], result["questions"]) == (8, 3)
    found = result["servers"]["sedem mcp"]
    assert 0 <= found["recall"]["5"] <= 1 and found["characters"] > 100
    assert 0 < found["started_s"] < found["first_s"]
