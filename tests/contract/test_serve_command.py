"""`sedem serve` and shell completion: what is refused, what is written, what deploy/ relies on."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import stat
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import typer.main
from commands import error_of, succeeds
from typer.testing import CliRunner

from sedem.cli.main import app
from sedem_serve.server.keys import KeyRing, digest_of
from sedem_serve.server.settings import LIMITS

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCS = Path(__file__).parents[2] / "docs" / "operate.md"


def refused(*words: object) -> str:
    return error_of("serve", *words)


def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without_fastapi(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "fastapi" else found(name, package)

    monkeypatch.setattr("sedem_serve.commands.serve.find_spec", without_fastapi)
    assert refused() == "`sedem serve` needs fastapi; run pip install 'sedem[serve]'"


def test_a_flag_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    for words, message in [
        (("--bank", "reports"), "bank 'reports' is not of the form NAME=PLACE"),
        (("--bank", "a=x", "--bank", "a=y"), "2 banks are named 'a'"),
        (("--bank", "../a=x"), "'../a' cannot name a bank"),
        (("--bank", "a=nowhere.bank"), "bank 'nowhere.bank' does not exist; create it with"),
        (("--limit", "max_k=0"), "max_k is 0"),
        (("--limit", "max_k=many"), "max_k is 'many'"),
        (("--limit", "port=1"), "'port' is not a limit; give one of rows, waiting"),
        (("--limit", "waiting=0"), "waiting is 0"),
        (("--log-format", "xml"), "log_format is 'xml'"),
        (("--cors", "*"), "'*' is not an origin"),
        (("--cors", "app.example"), "'app.example' is not an origin"),
        (("--new-key", "ann"), "--new-key needs --keys FILE"),
        (("--read-only",), "--read-only and --bank-scope require --new-key"),
        (("--bank-scope", "a"), "--read-only and --bank-scope require --new-key"),
        (("--keys", tmp_path / "none.json"), "none.json"),
    ]:
        assert message in refused("--folder", tmp_path, *words)


def test_a_new_key_is_shown_once_and_works(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    words = ("serve", "--keys", path, "--new-key")
    full = succeeds(*words, "ann").strip()
    limits = ("--read-only", "--bank-scope", "team-*", "--bank-scope", "lease")
    limited = succeeds(*words, "ben", *limits).strip()
    ring = KeyRing.load(path)
    ann, ben = ring.find(full), ring.find(limited)
    assert ann is not None and (ann.write, ann.metrics, ann.banks) == (True, True, ("*",))
    assert ben is not None and (ben.name, ben.metrics) == ("ben", False)
    assert json.loads(path.read_text())["keys"][1] == {
        "name": "ben", "sha256": digest_of(limited), "banks": ["team-*", "lease"], "write": False,
        "metrics": False,
    }  # fmt: skip
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "has a key named 'ann'" in refused("--keys", path, "--new-key", "ann")
    assert "'a/b' cannot name a key" in refused("--keys", path, "--new-key", "a/b")


# What deploy/ and the docs rely on


def flags_of_serve() -> set[str]:
    command = typer.main.get_command(app).get_command(None, "serve")  # type: ignore[attr-defined]
    return {flag for parameter in command.params for flag in parameter.opts}


def commands_of(path: Path) -> list[list[str]]:
    """The calls of `sedem serve` in a file, as words."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    calls = [
        json.loads(line.removeprefix("ENTRYPOINT "))
        if line.startswith("ENTRYPOINT")
        else shlex.split(line.strip("#` \n"))
        for line in text.splitlines()
        if re.search(r"sedem\"?,? \"?serve\b", line) and "--" in line
    ]
    return [words for words in calls if "serve" in words]


def test_every_flag_and_file_that_is_written_down_exists() -> None:
    known = flags_of_serve()
    for path in (DEPLOY / "Dockerfile", DEPLOY / "sedem.service", DOCS):
        calls = commands_of(path)
        assert calls
        for words in calls:
            used = {word.split("=")[0] for word in words if word.startswith("-") and len(word) > 2}
            assert used <= known, used - known
        limits = re.findall(r"--limit (\w+)=", path.read_text(encoding="utf-8"))
        assert set(limits) <= set(LIMITS)
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        for name in line.split()[:-1]:
            assert (DEPLOY.parent / name).exists(), name


def test_every_metric_is_explained_in_the_docs() -> None:
    from sedem_serve.server.metrics import Metrics

    text = DOCS.read_text(encoding="utf-8")
    named = re.findall(r"^# TYPE (\S+) ", Metrics().text().decode(), re.MULTILINE)
    assert named
    for name in named:
        assert name.endswith("_created") or f"`{name}`" in text, name


# Completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_commands_and_flags(
    shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_SEDEM_COMPLETE", f"source_{shell}")
    result = CliRunner().invoke(app, [], prog_name="sedem")
    assert result.exit_code == 0 and "_SEDEM_COMPLETE" in result.stdout
    if shell == "bash":
        line = "sedem serve --bank"
        for name, value in {"": "complete_bash", "_WORDS": line, "_CWORD": "2"}.items():
            monkeypatch.setenv(f"COMP{name}" if name else "_SEDEM_COMPLETE", value)
        result = CliRunner().invoke(app, [], prog_name="sedem")
        assert set(result.stdout.split()) == {"--bank", "--bank-scope"}
