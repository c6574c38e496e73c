"""What README and docs show is what happens: their code runs, their commands and files exist."""

from __future__ import annotations

import itertools
import os
import pkgutil
import re
import shlex
import sys
from collections.abc import Iterator
from glob import glob
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer.main
from commands import succeeds
from conftest import LEASE, RECIPE
from document_files import pdf_of
from servers import serving
from serving import SECRET

from experiments import pages
from sedem import Document, MemoryBank, SeDeM
from sedem.cli.main import app
from sedem.errors import ConfigError
from sedem_lab.training.recipe import read_entries
from sedem_lab.training.shipped_recipes import shipped_recipe
from sedem_serve.server.settings import ServerSettings

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    pages.CARD,
    pages.REAL_CARD,
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("experiments/*.md")),
]
WALK = ROOT / "docs" / "train-on-your-documents.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHOWN = re.compile(r"^```python\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
REPORTS = {
    "lease.pdf": (LEASE[: LEASE.index(" The deposit")], LEASE[LEASE.index("The deposit") :]),
    "kitchen.pdf": (RECIPE[: RECIPE.index("\n")], "It keeps two days."),
}
"""Texts of the pages of PDFs, by name."""


def fenced(page: Path, language: str) -> list[str]:
    return [code for name, code in FENCE.findall(page.read_text("utf-8")) if name == language]


def commands(page: Path) -> list[list[str]]:
    """Every `sedem ...` line, without comments."""
    lines = [line for code in fenced(page, "") for line in code.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("sedem ")]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site name them."""
    titles = HEADING.findall(page.read_text("utf-8"))
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.fixture(params=["sedem-nano", pytest.param("sedem-smol", marks=pytest.mark.slow)])
def shown_model(request: pytest.FixtureRequest) -> SeDeM:
    """The model that pages show, or the small one in its place, which needs no download."""
    try:
        return SeDeM.from_pretrained(request.param)
    except ConfigError as error:
        pytest.skip(f"the backbone cannot be had here: {error}")


@pytest.fixture
def served(shown_model: SeDeM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SeDeM]:
    """A server with a bank `lease`, for pages that show OpenAI's client."""
    model = shown_model
    model.read([Document("lease.txt", LEASE)]).save(tmp_path / "lease.bank")
    settings = ServerSettings(folder=tmp_path / "server", banks={"lease": tmp_path / "lease.bank"})
    with serving(settings, model) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.api)
        monkeypatch.setenv("OPENAI_API_KEY", SECRET)
        yield model


def test_the_python_that_is_shown_runs_and_prints_what_is_shown(
    served: SeDeM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The blocks of a page run in order in one session; a text block after one is its output."""
    # A session of an agent starts the command.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    for page in PAGES:
        folder = tmp_path / page.stem / "reports"
        folder.mkdir(parents=True, exist_ok=True)
        for name, texts in REPORTS.items():
            (folder / name).write_bytes(pdf_of(texts))
        monkeypatch.chdir(folder.parent)
        session: dict[str, Any] = {}
        text = page.read_text("utf-8").replace("sedem-smol", served.name)
        for code, shown in SHOWN.findall(text) if page != WALK else ():
            exec(compile(code, page.name, "exec"), session)
            printed = capsys.readouterr().out
            # The small model's answers are others.
            same = printed == shown or served.name == "sedem-nano"
            assert printed.strip() and (same or not shown), page.name


def test_the_commands_that_are_shown_exist() -> None:
    for words in itertools.chain.from_iterable(map(commands, PAGES)):
        command: Any = typer.main.get_command(app)
        rest = words[1:]
        while hasattr(command, "commands"):
            # The first word after eval is one of its verbs, or a method.
            verb = command.get_command(None, rest[0]) or command.get_command(None, "METHOD")
            assert verb is not None, words
            command, rest = verb, rest[1:]
        known = {option for parameter in command.params for option in parameter.opts}
        assert known.issuperset(word for word in rest if re.match(r"--?[a-z]", word)), words
        for word, name in pairwise(words):
            if word in ("train", "--recipe") and "/" in name:
                read_entries(shipped_recipe(name))


def test_readmes_walk_from_files_to_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lease.txt").write_text(LEASE)
    Path("house-rules.md").write_text(RECIPE)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("papers").mkdir()
    Path("papers/lease.txt").write_text(LEASE)
    walk = [words for words in commands(ROOT / "README.md") if words[1] in ("build", "ask", "bank")]
    # A reader is a server of its own; tests/contract/test_reader.py has one.
    walk = [words for words in walk if "--reader" not in words]
    assert len(walk) >= 4
    for words in walk:
        assert succeeds(*words[1:]).strip()


def test_thirty_documents_are_trained_on_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every block of the page in its order; a text block after one is its output."""
    monkeypatch.chdir(tmp_path)
    session: dict[str, Any] = {}
    for language, code in FENCE.findall(WALK.read_text("utf-8")):
        if language == "python":
            capsys.readouterr()
            exec(compile(code, "thirty", "exec"), session)
        elif language == "text":
            assert capsys.readouterr().out == code
        for line in code.splitlines() if not language else ():
            words = shlex.split(line)
            if words[0] != "sedem":
                continue
            succeeds(*(name for word in words[1:] for name in sorted(glob(word)) or [word]))
    bank = MemoryBank.open(Path("notes.bank"))
    assert len(bank.documents) == 30
    assert bank.made_by["model"] == str(Path("runs/stage2/final").resolve())


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target, anchor in LINK.findall(page.read_text("utf-8")):
            goal = page.parent / target if target else page
            if target != "cli.md":  # The site makes it.
                assert goal.exists(), (page.name, target)
                assert not anchor or anchor in anchors(goal), (page.name, target, anchor)


@pytest.mark.slow
def test_the_demo_prints_what_the_readme_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sedem.cli.main.DEFAULT_MODEL", "sedem-smol")
    [shown] = fenced(ROOT / "README.md", "text")
    printed = succeeds("demo").splitlines()
    assert {line for line in shown.splitlines() if line.strip() != "..."} <= set(printed)


def test_the_tree_names_what_is_there() -> None:
    tree = next(c for c in fenced(ROOT / "README.md", "") if c.startswith("src/sedem/ "))
    for line in tree.splitlines():
        names = re.findall(r"[\w/-]+(?:\.py|/)", line)
        assert names
        for name in names:
            folder = ROOT / "src" / "sedem" if line.startswith("  ") else ROOT
            assert (folder / name).exists(), name


def test_names_in_the_columns_of_code_and_tests_exist() -> None:
    """Names with a slash are paths, the others are those of `sedem`."""
    for page in ("paper-map.md", "deviations.md"):
        names = set()
        columns: list[int] | None = None
        for line in (ROOT / "docs" / page).read_text("utf-8").splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
            if not cells:
                columns = None
            elif columns is None:
                columns = [
                    i for i, name in enumerate(cells) if name in ("function", "code", "test")
                ]
            else:
                names.update(n for i in columns for n in re.findall(r"`([^`]+)`", cells[i]))
        assert len(names) > 20
        for name in names:
            if "/" in name:
                assert (ROOT / name).exists(), name
            else:
                pkgutil.resolve_name(name if name.startswith("sedem_") else f"sedem.{name}")


def test_tables_hold_what_was_measured() -> None:
    for page in pages.PAGES:
        text = page.read_text("utf-8")
        assert pages.studies_of(text)
        assert pages.rendered(text) == text, f"{page}: run `python -m experiments page`"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150
