"""`sedem data inspect`: its output and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sedem.cli.main import app

FIXTURES = Path(__file__).parents[1] / "fixtures"


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["data", "inspect", *map(str, words)])


def found(*words: object) -> dict[str, object]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_a_set_is_shown_as_counts_and_histograms() -> None:
    result = run(FIXTURES / "qasper.json")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["examples", "3"] in lines and ["left", "out", "1"] in lines
    assert ["left", "out", "reason", "such", "as"] in lines
    assert ["1", "unanswerable", "1909.00694-2"] in lines
    assert "tokens per context: mean" in result.stdout
    assert ["2", "1", "#" * 20] in lines and ["5", "2", "#" * 40] in lines
    assert "blocks of 128 tokens per context" in result.stdout


def test_json_has_the_same_facts(tmp_path: Path) -> None:
    picture = tmp_path / "squad.svg"
    told = found(
        FIXTURES / "squad.json", "--option", "records=:1", "--limit", "2", "--plot", picture
    )
    assert (told["name"], told["examples"], told["measured"]) == ("squad", 12, 2)
    assert picture.stat().st_size > 1000
    assert told["dropped_ids"] == {}


def test_options_and_the_tokenizer_reach_the_set(tiny_folder: object) -> None:
    told = found(FIXTURES / "qasper.json", "--option", "drop=none")
    assert told["noted"] == {"unanswerable, kept": 1}
    folder = tiny_folder()  # type: ignore[operator]
    assert found(FIXTURES / "musique.jsonl", "--tokenizer", folder)["tokenizer"] == folder
    result = run(
        FIXTURES / "hotpotqa-hub.jsonl", "--schema", "ruler-qa2", "--tokenizer", folder,
        "--option", "length=20000",
    )  # fmt: skip
    # Letters, not words: the two records have some five thousand of them.
    assert result.exit_code == 1 and "make only 4,998 tokens;" in result.output


def test_plain_text_is_measured_as_texts() -> None:
    told = found(FIXTURES / "articles.jsonl")
    assert (told["texts"], told["dropped"]) == (9, {})
    assert found(FIXTURES / "articles.jsonl", "--schema", "cloze")["examples"] == 65


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "there is no file 'nowhere' and no public set of that name; the names are"),
        ([FIXTURES / "squad.json", "--option", "seed"], "'seed' is not of the form KEY=VALUE"),
        (
            [FIXTURES / "squad.json", "--option", "schema=own"],
            "'schema' is not an option of the data; a schema is --schema NAME",
        ),
        ([FIXTURES / "squad.json", "--option", "split=train"], "is a file: leave it out"),
        ([FIXTURES / "articles.jsonl", "--option", "records=:2"], "--option is for questions; "),
    ],
)
def test_impossible_input_is_an_error_of_one_line(words: list[object], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert len(result.stderr.splitlines()) == 1 and not result.stdout
