"""What reaches a terminal or a pipe: no character that steers it, and tables with all they hold."""

from __future__ import annotations

import json
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import sedem as run
from conftest import LEASE
from typer.testing import Result

from sedem import Document, MemoryBank, SeDeM
from sedem.cli.output import print_facts, print_json, print_table
from sedem.errors import is_safe, printable

ESCAPE, BELL, RETURN, BACKSPACE = "\x1b]0;owned\x07\x1b[2J", "\x07", "\r", "\x08"
C1, BIDI = "\x9b31m", "\u202eabc\u2066"
HOSTILE = ESCAPE + BELL + RETURN + BACKSPACE + C1 + BIDI
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x07\r\x08\x9b31m\u202eabc\u2066"
NAME = f"lease {HOSTILE}.txt"


def steering(text: str) -> set[str]:
    """Control and format characters of a text, line breaks aside."""
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")} - {"\n"}


def sedem(*words: object) -> Result:
    """Run a command with colour, since click takes escapes out of a pipe otherwise."""
    result = run(*words, color=True)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def here(model: SeDeM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a checkpoint and a bank whose name and text are hostile."""
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("tiny")
    bank = model.read(
        [Document(NAME, f"{HOSTILE} {LEASE}"), Document("plain.txt", "A plain text.")]
    )
    bank.made_by["model"] = HOSTILE
    bank.save("a.bank")
    return tmp_path


class Stream(Iterator[str]):
    """A stream that gives a hostile answer one character at a time."""

    def __init__(self, answer: Any) -> None:
        self._pieces = iter(f"first\n{HOSTILE}")
        self.answer = answer

    def __next__(self) -> str:
        return next(self._pieces)


# Characters


def test_answers_and_sources_are_escaped(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(self: SeDeM, bank: MemoryBank, question: str, **options: Any) -> Stream:
        del options["estimated"]
        answer = self.answer(bank, question, **options)
        return Stream(replace(answer, cut=(f"cut {HOSTILE}",)))

    monkeypatch.setattr(SeDeM, "stream", stream)
    shown = sedem("ask", "a.bank", "What?", "-m", "tiny", "-k", "all").stdout
    assert shown.startswith(f"first\n{SHOWN}\n")
    assert f"lease {SHOWN}.txt:0-" in shown
    # Snippets are blocks of 16 bytes.
    assert "  \\x1b]0;owned\\x07\\x1b[2J\\x07\n" in shown and r"  \x08\x9b31m\u202eabc" in shown
    assert f"  note: cut {SHOWN}\n" in shown
    assert not steering(shown)
    told = sedem("ask", "a.bank", "What?", "-m", "tiny", "-k", "all", "--json").stdout
    assert NAME in {citation["document"] for citation in json.loads(told)["citations"]}
    assert not steering(told)


def test_what_a_bank_says_is_escaped(here: Path) -> None:
    listed, shown = sedem("bank", "ls", "a.bank").stdout, sedem("bank", "show", "a.bank").stdout
    assert f"lease {SHOWN}.txt" in listed and re.search(
        rf"^model +{re.escape(SHOWN)}$", shown, re.M
    )
    assert not steering(listed + shown)
    entries = sedem("bank", "ls", "a.bank", "--json").stdout
    facts = sedem("bank", "show", "a.bank", "--json").stdout
    assert json.loads(entries)[0]["document"] == NAME and json.loads(facts)["model"] == HOSTILE
    assert not steering(entries + facts)
    removed = sedem("bank", "rm", "a.bank", NAME).stdout
    assert f"removed 'lease {SHOWN}.txt'" in removed and not steering(removed)


@pytest.fixture
def questions(here: Path) -> Path:
    """Two questions with a hostile id, name, text and question each; one is too long to answer."""
    entries = [
        {
            "id": f"{number}{HOSTILE}",
            "documents": [{"name": NAME, "text": f"{HOSTILE} {LEASE}"}],
            "question": f"What {HOSTILE}?" if number else "?" * 9000,
            "answers": [f"{HOSTILE}"],
        }
        for number in range(2)
    ]
    path = here / f"set{C1}{BIDI}.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def test_what_a_set_of_questions_says_is_escaped(questions: Path) -> None:
    shown = sedem("data", "inspect", questions).stdout
    assert r"set\x9b31m\u202eabc\u2066" in shown and not steering(shown)
    told = sedem("data", "inspect", questions, "--json").stdout
    assert json.loads(told)["name"] == f"set{C1}{BIDI}" and not steering(told)
    # What was left out has a name too.
    qasper = Path(__file__).parents[1] / "fixtures" / "qasper.json"
    text = qasper.read_text("utf-8").replace("1909.00694", f"1909{json.dumps(HOSTILE)[1:-1]}")
    Path("qasper.json").write_text(text, encoding="utf-8")
    shown = sedem("data", "inspect", "qasper.json").stdout
    assert re.search(rf"unanswerable +1909{re.escape(SHOWN)}", shown) and not steering(shown)


def test_results_are_escaped(questions: Path) -> None:
    out = f"run{C1}{BIDI}"
    words = ("sedem", "--data", questions, "-m", "tiny", "--max-new-tokens", 2, "--out", out)
    shown = sedem("eval", *words).stdout
    assert f"the first, 0{SHOWN}: the question has " in shown
    assert not steering(shown) and not steering(sedem("eval", *words, "--json").stdout)
    metrics = json.loads(Path(out, "metrics.json").read_text("utf-8"))
    metrics["settings"].update(method=HOSTILE, control=HOSTILE)
    Path(out, "metrics.json").write_text(json.dumps(metrics), "utf-8")
    shutil.copytree(out, "second")
    result = sedem("eval", "report", out, "second", f"none{C1}{BIDI}")
    assert f"   {SHOWN} {SHOWN} " in result.stdout and r"1  run\x9b31m\u202e" in result.stdout
    assert r"note: 'none\x9b31m\u202e" in result.stderr
    assert not steering(result.stdout + result.stderr)
    assert not steering(sedem("eval", "report", out, "second", "--json").stdout)


@pytest.mark.parametrize(
    "text", ["Görlitz, 100 €", "日本語\u3000テスト", "a\xa0b", "شود\u200cمی", "👩\u200d🔬", r"a\b"]
)
def test_ordinary_text_stays_as_it_is(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printable(text) == text
    print_json({text: text})
    assert capsys.readouterr().out == json.dumps({text: text}, ensure_ascii=False) + "\n"


def test_every_character_that_steers_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    every = [chr(number) for number in range(sys.maxunicode + 1)]
    safe = {c for c in every if is_safe(c)}
    assert steering("".join(safe)) == {"\u200c", "\u200d"}
    assert not {c for c in every if unicodedata.category(c) == "Cs"} & safe
    unsafe = [c for c in every if c not in safe and unicodedata.category(c) != "Cn"]
    assert printable("".join(unsafe)).isprintable()
    print_json(unsafe)
    told = capsys.readouterr().out
    assert told.removesuffix("\n").isascii() and json.loads(told) == unsafe


# Tables

LONG = "name-" * 24
SHORT_ROWS = [("1,234", "5", LONG), ("9", "12", "[bold]s[/bold] :x: 日本語")]
WIDE_ROWS = [(LONG, "text", *(f"{n},000.25 ({n}-{n})" for n in range(9))) for _ in range(2)]
NUMBERS = [f"number {n}" for n in range(9)]
KINDS: dict[str, Callable[[], None]] = {
    "list": lambda: print_table(SHORT_ROWS, ("characters", "blocks", "document"), left=(2,)),
    "facts": lambda: print_facts([("short", 1), ("long_name", 1234567), ("text", LONG)]),
    "wide": lambda: print_table(WIDE_ROWS, ("name", "kind", *NUMBERS), left=(0, 1)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_plain_lines_wherever_it_is_written(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    KINDS[kind]()
    piped = capsys.readouterr().out
    for name, value in {"COLUMNS": "40", "FORCE_COLOR": "1", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    KINDS[kind]()
    assert piped == capsys.readouterr().out
    assert LONG in piped
    assert not steering(piped) and not re.search("[─-╿▀-▟]", piped)
    assert all(line == line.rstrip() for line in piped.splitlines())


def test_a_pipe_gets_a_line_a_row_with_columns_for_awk(capsys: pytest.CaptureFixture[str]) -> None:
    KINDS["list"]()
    heading, first, second = capsys.readouterr().out.splitlines()
    assert heading == "characters  blocks  document"
    assert first == f"     1,234       5  {LONG}"
    assert second == "         9      12  [bold]s[/bold] :x: 日本語"
    KINDS["wide"]()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == rows[2] and rows[1][:2] == [LONG, "text"]
