"""What README and docs show is what happens: their code runs, their commands and files exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from conftest import LEASE, RECIPE
from typer.testing import CliRunner

from experiments.system import pages
from sedem.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", pages.CARD, *sorted(ROOT.glob("docs/*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")


def fenced(page: Path, language: str) -> list[str]:
    return [code for name, code in FENCE.findall(page.read_text("utf-8")) if name == language]


def commands(page: Path) -> list[list[str]]:
    """Every `sedem ...` line, comments off."""
    lines = [line for code in fenced(page, "") for line in code.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("sedem ")]


PYTHON = [pytest.param(code, id=page.name) for page in PAGES for code in fenced(page, "python")]
COMMANDS = [pytest.param(words, id=" ".join(words)) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize("code", PYTHON)
def test_the_python_that_is_shown_runs(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "shown", "exec"), {})
    assert capsys.readouterr().out.strip()


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
    for recipe in (word for word in rest if word.startswith("recipes/")):
        assert (ROOT / recipe).is_file()


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text("utf-8")):
        assert (page.parent / target).exists(), target


def test_the_tree_names_what_is_there() -> None:
    tree = next(c for c in fenced(ROOT / "README.md", "") if c.startswith("src/sedem/\n"))
    for line in tree.splitlines()[1:]:
        inside = line.startswith("  ")
        names = re.findall(r"[\w-]+(?:\.py|/)", line)
        assert names
        for name in names:
            assert ((ROOT / "src" / "sedem" if inside else ROOT) / name).exists(), name


def test_the_paper_map_names_functions_and_tests_that_exist() -> None:
    text = (ROOT / "docs" / "paper-map.md").read_text("utf-8")
    for path in re.findall(r"tests/[\w/]+\.py", text):
        assert (ROOT / path).is_file(), path
    for module, name in re.findall(r"`((?:\w+\.)?\w+)\.(\w+)`", text):
        path = ROOT / "src" / "sedem" / f"{module.replace('.', '/')}.py"
        if path.is_file():
            assert re.search(rf"(def|class) {name}\b", path.read_text("utf-8")), f"{module}.{name}"


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: f"{page.parent.name}-{page.name}")
def test_tables_hold_what_was_measured(page: Path) -> None:
    text = page.read_text("utf-8")
    assert pages.studies_of(text)
    assert pages.rendered(text) == text, "run `python -m experiments page`"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 200
