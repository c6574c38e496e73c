"""What README and docs show is what happens: their code runs, their commands and files exist."""

from __future__ import annotations

import pkgutil
import re
import shlex
from collections.abc import Callable, Iterator
from glob import glob
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer.main
from conftest import LEASE, RECIPE
from document_files import pdf_of
from servers import serving
from serving import SECRET
from typer.testing import CliRunner

from experiments import pages
from sedem import Document, MemoryBank, SeDeM
from sedem.checkpoint.folder import embedded
from sedem.cli.main import app
from sedem.serve.settings import Settings
from sedem.training.recipe import read_entries
from sedem.training.shipped_recipes import shipped_recipe

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    pages.CARD,
    *sorted(ROOT.glob("docs/**/*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NANO = "sedem-nano/backbone"
MADE_BY_THE_SITE = {"cli.md"}
LINK = re.compile(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)")
REPORTS = {
    "lease.pdf": (LEASE[: LEASE.index(" The deposit")], LEASE[LEASE.index("The deposit") :]),
    "kitchen.pdf": (RECIPE[: RECIPE.index("\n")], "It keeps two days."),
}
"""Texts of the pages of PDFs, by name."""
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def fenced(page: Path, language: str) -> list[str]:
    return [code for name, code in FENCE.findall(page.read_text("utf-8")) if name == language]


def commands(page: Path) -> list[list[str]]:
    """Every `sedem ...` line, comments off."""
    lines = [line for code in fenced(page, "") for line in code.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("sedem ")]


def anchors(page: Path) -> set[str]:
    """Those of a page's headings, as GitHub and the site name them."""
    titles = HEADING.findall(page.read_text("utf-8"))
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


SHOWN = re.compile(r"^```python\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
WITH_PYTHON = [pytest.param(page, id=page.name) for page in PAGES if fenced(page, "python")]
COMMANDS = [pytest.param(words, id=" ".join(words)) for page in PAGES for words in commands(page)]


@pytest.fixture
def served(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server with a bank `lease`, and a folder of PDFs, for pages that show OpenAI's client."""
    if "from openai import" not in page.read_text("utf-8"):
        yield
        return
    model = SeDeM.from_pretrained("sedem-nano", light=True)
    model.read([Document("lease.txt", LEASE)]).save(tmp_path / "lease.bank")
    (tmp_path / "reports").mkdir()
    for name, texts in REPORTS.items():
        (tmp_path / "reports" / name).write_bytes(pdf_of(texts))
    settings = Settings(folder=tmp_path / "server", banks={"lease": tmp_path / "lease.bank"})
    with serving(settings, model) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.api)
        monkeypatch.setenv("OPENAI_API_KEY", SECRET)
        yield


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_that_is_shown_runs_and_prints_what_is_shown(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks of a page run in order in one session; a text block after one is its output."""
    monkeypatch.chdir(tmp_path)
    session: dict[str, Any] = {}
    for code, shown in SHOWN.findall(page.read_text("utf-8")):
        exec(compile(code, page.name, "exec"), session)
        printed = capsys.readouterr().out
        assert printed.strip()
        if shown:
            assert printed == shown


@pytest.mark.parametrize("words", COMMANDS)
def test_the_commands_that_are_shown_exist(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    rest = words[1:]
    while hasattr(command, "commands"):
        # The first word after eval is one of its verbs, or a method.
        name = rest[0] if rest[0] in command.commands else "METHOD"
        assert name in command.commands, f"there is no command {rest[0]}"
        command, rest = command.commands[name], rest[1:]
    known = {option for parameter in command.params for option in parameter.opts}
    used = [word for word in rest if re.match(r"--?[a-z]", word)]
    assert known.issuperset(used)
    for option, name in pairwise(rest):
        if option == "--recipe":
            read_entries(shipped_recipe(name))


def test_readmes_walk_from_files_to_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lease.txt").write_text(LEASE)
    Path("house-rules.md").write_text(RECIPE)
    walk = [words for words in commands(ROOT / "README.md") if words[1] in ("build", "ask", "bank")]
    assert len(walk) >= 4
    for words in walk:
        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == 0, result.output
        assert result.stdout.strip()


def test_thirty_documents_are_trained_on_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_folder: Callable[..., str]
) -> None:
    """Every block of the page in its order; a tiny backbone counts as that of sedem-nano."""
    backbone = Path(tiny_folder(depth=2, max_position_embeddings=4096))

    def shipped(name: str) -> Path | None:
        return backbone if name == NANO else embedded(name)

    monkeypatch.setattr("sedem.checkpoint.folder.embedded", shipped)
    monkeypatch.setattr("sedem.training.adapt.MOST_HELD_OUT", 8)
    monkeypatch.chdir(tmp_path)
    session: dict[str, Any] = {}
    page = (ROOT / "docs" / "train-on-your-documents.md").read_text("utf-8")
    for language, code in FENCE.findall(page):
        if language == "python":
            exec(compile(code, "thirty", "exec"), session)
        for line in code.splitlines() if not language else ():
            words = shlex.split(line)
            if words[0] != "sedem":
                continue
            words = [name for word in words for name in sorted(glob(word)) or [word]]
            result = CliRunner().invoke(app, words[1:])
            assert result.exit_code == 0, (line, result.output)
    bank = MemoryBank.open(Path("notes.bank"))
    assert len(bank.documents) == 30
    assert bank.made_by["model"] == str(Path("runs/mine/final").resolve())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text("utf-8")):
        if target in MADE_BY_THE_SITE:
            continue
        goal = page.parent / target if target else page
        assert goal.exists(), target
        assert not anchor or anchor in anchors(goal), f"{target}#{anchor}"


def test_the_demo_prints_what_the_readme_shows() -> None:
    [shown] = fenced(ROOT / "README.md", "text")
    printed = CliRunner().invoke(app, ["demo"]).stdout.splitlines()
    assert {line for line in shown.splitlines() if line.strip() != "..."} <= set(printed)


def test_the_tree_names_what_is_there() -> None:
    tree = next(c for c in fenced(ROOT / "README.md", "") if c.startswith("src/sedem/\n"))
    for line in tree.splitlines()[1:]:
        inside = line.startswith("  ")
        names = re.findall(r"[\w-]+(?:\.py|/)", line)
        assert names
        for name in names:
            assert ((ROOT / "src" / "sedem" if inside else ROOT) / name).exists(), name


@pytest.mark.parametrize("page", ["paper-map.md", "deviations.md"])
def test_names_in_the_column_of_code_exist(page: str) -> None:
    """Dotted names are those of `sedem`, the others are paths."""
    names = set()
    column = None
    for line in (ROOT / "docs" / page).read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if not cells:
            column = None
        elif column is None:
            column = next((i for i, name in enumerate(cells) if name in ("function", "code")), -1)
        elif column >= 0:
            names.update(re.findall(r"`([^`]+)`", cells[column]))
    assert len(names) > 20
    for name in names:
        if "/" in name:
            assert (ROOT / name).exists(), name
        else:
            pkgutil.resolve_name(f"sedem.{name}")


def test_the_paper_map_names_tests_that_exist() -> None:
    paths = re.findall(r"tests/[\w/]+\.py", (ROOT / "docs" / "paper-map.md").read_text("utf-8"))
    assert paths
    assert {path for path in paths if not (ROOT / path).is_file()} == set()


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: f"{page.parent.name}-{page.name}")
def test_tables_hold_what_was_measured(page: Path) -> None:
    text = page.read_text("utf-8")
    assert pages.studies_of(text)
    assert pages.rendered(text) == text, "run `python -m experiments page`"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150
