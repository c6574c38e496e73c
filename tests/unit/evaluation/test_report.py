"""Reports over finished, unfinished and foreign folders."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from unit.evaluation.conftest import Echo, hill

from sedem.errors import ConfigError, DataError
from sedem_lab.commands.evaluate import print_report
from sedem_lab.evaluation.report import draw, name_of, report
from sedem_lab.evaluation.run import evaluate


def make(out: Path, count: int = 6, right: bool = True, bad: tuple[str, ...] = ()) -> Path:
    settings = {"method": "echo", "data": "hills", "k": 1, "control": "selected", "right": right}
    examples = [hill(number) for number in range(count)]
    evaluate(Echo(batch=2, right=right, bad=bad), examples, settings, out)
    return out


def test_runs_stand_side_by_side_and_are_compared_with_the_first(tmp_path: Path) -> None:
    good, poor = make(tmp_path / "good"), make(tmp_path / "poor", right=False, bad=("q3",))
    result = report([good, poor])
    first, second = result["runs"]
    assert (first["run"], first["method"], first["k"], first["n"]) == (str(good), "echo", 1, 6)
    assert (first["recall_at"], first["batch"]) == (1, 2)
    assert first["metrics"]["f1"] == {"mean": 100, "interval": [100, 100], "n": 6}
    assert first["metrics"]["recall"]["mean"] == first["metrics"]["mrr"]["mean"] == 100
    assert (first["metrics"]["conditioning"]["mean"], second["not_answered"]) == (40, 1)
    (difference,) = result["differences"]
    assert (difference["run"], difference["to"]) == (str(poor), str(good))
    assert difference["metrics"]["f1"] == {
        "mean": -100, "interval": [-100, -100], "below_zero": 1, "n": 6,
    }  # fmt: skip
    assert result["problems"] == []
    assert json.loads(json.dumps(result)) == result


def test_folders_without_a_finished_run_are_named_and_the_others_reported(tmp_path: Path) -> None:
    good = make(tmp_path / "good")
    half, foreign, torn, short = (tmp_path / name for name in ("half", "foreign", "torn", "short"))
    for copy in (half, torn, short):
        shutil.copytree(good, copy)
    (half / "metrics.json").unlink()
    foreign.mkdir()
    (foreign / "metrics.json").write_text("{}")
    (torn / "metrics.json").write_text('{"em": ')
    lines = (short / "predictions.jsonl").read_text().splitlines(keepends=True)
    (short / "predictions.jsonl").write_text("".join(lines[:-1]))
    other = make(tmp_path / "other", count=4)
    result = report([half, foreign, tmp_path / "nothing", torn, good, short, other])
    assert [run["run"] for run in result["runs"]] == [str(good), str(other)]
    assert result["differences"] == []
    expected = [
        r"half' holds an unfinished run with 6 examples answered; run its command",
        r"foreign' holds no results of 'sedem eval --out'",
        r"nothing' holds no results of 'sedem eval --out'",
        r"torn/metrics.json' is not a 'sedem eval' result",
        r"short' has 5 predictions and metrics of 6; evaluate again into another folder",
        r"other' is not compared with .*good': the runs have different examples: 6 and 4, of ",
    ]
    for words, problem in zip(expected, result["problems"], strict=True):
        assert re.search(words, problem), problem
        assert "\n" not in problem
    with pytest.raises(DataError, match="nothing' holds no results"):
        report([tmp_path / "nothing"])


def test_a_table_is_printed_with_intervals_and_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, poor = make(tmp_path / "good"), make(tmp_path / "poor", right=False, bad=("q3",))
    print_report(report([good, poor, tmp_path / "nothing"]))
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].split()[:2] == ["EM", "F1"]
    assert re.search(r"^1  \S+good +100.0 +100.0 .* 100.0 @1 ", lines[1])
    assert re.search(r"^   echo K=1 batch=2 n=6 +100.0..100.0 ", lines[2])
    assert re.search(r"^2  \S+poor +-100.0 +-100.0 ", shown.out, re.MULTILINE)
    assert re.search(r"^   resamples below zero +100.0 %", shown.out, re.MULTILINE)
    assert max(map(len, lines)) < 160 + len(str(good))
    assert "poor' has 1 not answered" in shown.err
    assert "nothing' holds no results" in shown.err


def test_the_plot_shows_every_run(tmp_path: Path) -> None:
    result = report([make(tmp_path / "good"), make(tmp_path / "poor", right=False)])
    draw(result, tmp_path / "runs.svg")
    root = ElementTree.parse(tmp_path / "runs.svg").getroot()
    assert root.tag.endswith("svg")
    texts = {
        "".join(element.itertext()).strip()
        for element in root.iter()
        if element.tag.endswith("}text")
    }
    assert {"1  good: echo K=1", "2  poor: echo K=1", "F1 (95 % interval)"} <= texts
    with pytest.raises(ConfigError, match=r"it a name that ends in \.svg, \.png, \.pdf"):
        draw(result, tmp_path / "runs.txt")
    for run, k, control, name in (
        ("runs/rag", None, "selected", "rag"),
        ("runs/rag", 2, "gold", "rag K=2 gold"),
        ("runs/first", 2, None, "first: rag K=2"),
    ):
        assert name_of({"run": run, "method": "rag", "k": k, "control": control}) == name
