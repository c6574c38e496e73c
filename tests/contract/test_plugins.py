"""A package of somebody else adds a method and a command, by entry points alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import error_of, prints_json, refused, succeeds

CODE = '''
"""A method and a command."""

import typer

from sedem import Answer, Citation
from sedem_lab.baselines.full_context import FullContext
from sedem.errors import DataError

app = typer.Typer()


@app.command()
def count(path: str) -> None:
    "Count the lines of a file."
    if not path.endswith(".txt"):
        raise DataError(f"'{path}' is no text; give a .txt file")
    typer.echo(len(open(path).readlines()))


class FirstDocument:
    """answers with the first document

    Whatever was asked.
    """

    name = "first-document"

    def __init__(self, settings):
        settings.refuse(self.name, "k")

    def read(self, documents):
        return documents[0]

    def answer(self, memory, question):
        citation = Citation(1, memory.name, 0, len(memory.text), None, memory.text)
        return Answer(memory.text, (citation,), 1, 1, {}, "end", self.name)


class LastDocument(FullContext):
    """reads the last document with the frozen backbone"""

    name = "last-document"

    def read(self, documents):
        return super().read(documents[-1:])
'''
POINTS = """
[sedem.methods]
first-document = strangers_method:FirstDocument
last-document = strangers_method:LastDocument
bm25 = strangers_method:FirstDocument
lost = strangers_method:Lost

[sedem.commands]
lines = strangers_method:app
ask = strangers_method:app
broken = strangers_method:broken
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an installed package puts on the path: a module, and its metadata."""
    site = tmp_path / "site"
    metadata = site / "strangers_method-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "strangers_method.py").write_text(CODE)
    (metadata / "METADATA").write_text("Name: strangers-method\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)


def test_a_strangers_method_is_listed_and_evaluated(tiny_checkpoint: str) -> None:
    points = Path("site/strangers_method-1.0.dist-info/entry_points.txt")
    refused("eval", "--list", words="method 'lost' cannot be imported from 'strangers_method:Lost'")
    points.write_text(points.read_text().replace("lost = strangers_method:Lost", ""))
    lines = succeeds("eval", "--list").splitlines()
    assert [line.split(maxsplit=1) for line in lines[-2:]] == [
        ["first-document", "answers with the first document"],
        ["last-document", "reads the last document with the frozen backbone"],
    ]
    assert sum(line.startswith("bm25 ") for line in lines) == 1, "names of sedem take precedence"

    documents = [{"name": "a", "text": "900 euros"}, {"name": "b", "text": "Keep quiet."}]
    example = {"documents": documents, "question": "What is the rent?", "answers": ["900 euros"]}
    Path("own.jsonl").write_text(json.dumps(example))
    asked = ("eval", "first-document", "--data", "own.jsonl", "-m", tiny_checkpoint)
    metrics = prints_json(*asked, "--json")
    assert (metrics["em"]["mean"], metrics["settings"]["method"]) == (100.0, "first-document")
    refused(*asked, "-k", "2", words="k is 2, but first-document has no k; leave it out")
    read = ("eval", "last-document", *asked[2:], "--max-new-tokens", 2)
    assert prints_json(*read, "--json")["counts"]["not_answered"] == 0
    refused(*read, "--hops", "2", words="but last-document has no hops; leave it out")
    words = "there is no method 'last'; there are sedem, .*, comprexit, first-document"
    refused("eval", "last", "--data", "own.jsonl", words=words)
    words = "'first-document' is not trained; methods that are: full-context-tuned"
    refused("train", "nano/icae-text", "--set", "method=first-document", words=words)


def test_a_strangers_command_runs_and_its_errors_are_sentences() -> None:
    words = "command 'broken' cannot be imported from 'strangers_method:broken'"
    refused("broken", words=words)
    shown = succeeds("--help")  # also of what is broken
    assert "Count the lines of a file." in shown and "(error: command 'broken' cannot" in shown
    Path("two.txt").write_text("one\ntwo\n")
    assert succeeds("lines", "two.txt") == "2\n"
    assert error_of("lines", "two.pdf") == "'two.pdf' is no text; give a .txt file"
    assert "Answer questions from a bank" in succeeds("ask", "--help")
