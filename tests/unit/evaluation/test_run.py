"""The harness neither loses nor repeats an answer when a run is killed or an example fails."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from unit.evaluation.conftest import Echo, hill

from sedem import Answer, Document
from sedem.errors import ConfigError, DataError
from sedem_lab.data.examples import Example
from sedem_lab.evaluation import results
from sedem_lab.evaluation.readers import evaluate_reader
from sedem_lab.evaluation.run import evaluate

SETTINGS = {"method": "echo"}


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]


def quality(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: metrics[name] for name in ("em", "f1", "mrr", "recall@1", "counts")}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("half", ["", '{"id": "q5", "predic'])
def test_a_killed_run_is_resumed(
    batch: int, half: str, examples: list[Example], tmp_path: Path
) -> None:
    whole = evaluate(Echo(batch), examples, SETTINGS, tmp_path / "whole")
    dying, out = Echo(batch, dies="q5"), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        evaluate(dying, examples, SETTINGS, out)
    assert not (out / "metrics.json").exists()
    with (out / "predictions.jsonl").open("a") as file:
        file.write(half)
    again = Echo(batch)
    seen: list[tuple[int, int]] = []
    metrics = evaluate(again, examples, SETTINGS, out, lambda *step: seen.append(step))
    assert dying.answered + again.answered == [example.id for example in examples]
    assert dying.answered
    assert [line["id"] for line in lines(out)] == [example.id for example in examples]
    assert quality(metrics) == quality(whole)
    assert seen[-1] == (7, 7)


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_a_failed_example_counts_as_wrong_and_the_others_are_answered(
    batch: int, examples: list[Example], tmp_path: Path
) -> None:
    method = Echo(batch, bad=["q2", "q6"])
    metrics = evaluate(method, examples, SETTINGS, tmp_path)
    assert sorted(method.answered) == ["q1", "q3", "q4", "q5", "q7"]
    for name in ("em", "f1", "rouge_l", "string_match", "recall@1", "precision@1", "mrr"):
        assert (metrics[name]["mean"], metrics[name]["n"]) == (pytest.approx(500 / 7, abs=0.01), 7)
    assert metrics["evidence_recall@1"]["n"] == 7
    # Failed examples have no times and no sizes.
    assert (metrics["conditioning"]["mean"], metrics["conditioning"]["n"]) == (40, 5)
    assert (metrics["bytes_per_token"]["mean"], metrics["ttft_ms"]["n"]) == (10, 5)
    assert metrics["counts"]["not_answered"] == 2
    assert metrics["counts"]["blocks_mean"] == 2
    assert metrics["first_error"] == "q2: the question of q2 is too long"
    errors = {line["id"]: line.get("error") for line in lines(tmp_path)}
    assert errors["q6"] == "the question of q6 is too long"
    assert errors["q1"] is None
    assert evaluate(Echo(batch), examples, SETTINGS, tmp_path)["counts"]["not_answered"] == 2


def test_examples_without_evidence_have_no_selection_metrics(tmp_path: Path) -> None:
    bare = Example("q0", hill(0).documents, "Hill 0?", ("000 metres",))
    metrics = evaluate(Echo(), [bare, hill(1)], SETTINGS, tmp_path / "one")
    assert (metrics["recall@1"]["n"], metrics["em"]["n"]) == (1, 2)
    # A failed example is wrong even if an empty answer would be right.
    empty = Example("q", (Document("a", "a"),), "Which article?", ("the",))
    metrics = evaluate(Echo(bad=["q"]), [empty], SETTINGS, tmp_path / "two")
    assert metrics["em"]["mean"] == 0 and "mrr" not in metrics


# Provenance


Process = Callable[[str], dict[str, Any]]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    """A function that makes this the process of a commit and returns its provenance."""

    def become(commit: str) -> dict[str, Any]:
        made = {"machine": {"device": commit}, "versions": {}, "commit": {"id": commit}}
        monkeypatch.setattr(results, "provenance", lambda device: made)
        return made

    return become


def signature(metrics: dict[str, Any]) -> dict[str, Any]:
    names = ("machine", "versions", "commit", "earlier")
    return {name: metrics[name] for name in names if name in metrics}


def die_at(example: str, examples: list[Example], out: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        evaluate(Echo(dies=example), examples, SETTINGS, out)


def test_every_process_that_answered_is_named_once_and_the_last_one_signs(
    examples: list[Example], tmp_path: Path, process: Process
) -> None:
    one = process("one")
    die_at("q2", examples, tmp_path)
    die_at("q3", examples, tmp_path)
    two = process("two")
    die_at("q5", examples, tmp_path)
    process("three")  # It answers nothing.
    die_at("q5", examples, tmp_path)
    four = process("four")
    expected = {**four, "earlier": [one, two]}
    assert signature(evaluate(Echo(), examples, SETTINGS, tmp_path)) == expected
    process("five")  # It answers nothing either.
    assert signature(evaluate(Echo(), examples, SETTINGS, tmp_path)) == expected


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        *itertools.product(("provenance.json", "metrics.json"), ("", '{"q1": {"mach', "[]")),
        ("provenance.json", '{"q1": 3}'),
    ],
)
def test_damaged_signatures_are_refused_and_results_kept(
    damaged: str, words: str, examples: list[Example], tmp_path: Path
) -> None:
    evaluate(Echo(), examples, SETTINGS, tmp_path)
    made = (tmp_path / "predictions.jsonl").read_bytes()
    # The document is read only if parts are unsigned.
    (tmp_path / "provenance.json").unlink()
    (tmp_path / damaged).write_text(words)
    with pytest.raises(ConfigError, match=rf"{damaged}'.* is damaged.* remove it"):
        evaluate(Echo(), examples, SETTINGS, tmp_path)
    assert (tmp_path / "predictions.jsonl").read_bytes() == made
    (tmp_path / damaged).unlink()
    metrics = evaluate(Echo(), examples, SETTINGS, tmp_path)
    assert metrics["counts"]["examples"] == len(examples)


@pytest.mark.parametrize("finished", [True, False])
def test_a_folder_without_signatures_is_resumed(
    finished: bool, examples: list[Example], tmp_path: Path, process: Process
) -> None:
    one = process("one")
    if finished:
        evaluate(Echo(), examples, SETTINGS, tmp_path)
    else:
        die_at("q5", examples, tmp_path)
    (tmp_path / "provenance.json").unlink()
    two = process("two")
    metrics = evaluate(Echo(), examples, SETTINGS, tmp_path)
    assert signature(metrics) == (one if finished else {**two, "earlier": [None]})
    process("three")
    assert evaluate(Echo(), examples, SETTINGS, tmp_path) == metrics


def test_results_of_other_settings_and_foreign_files_are_refused(
    examples: list[Example], tmp_path: Path
) -> None:
    evaluate(Echo(), examples, SETTINGS, tmp_path / "a")
    with pytest.raises(ConfigError, match="holds results of other settings"):
        evaluate(Echo(), examples, {"method": "other"}, tmp_path / "a")
    (tmp_path / "a" / "settings.json").write_text('{"method": "ec')
    with pytest.raises(ConfigError, match="holds results of other settings"):
        evaluate(Echo(), examples, SETTINGS, tmp_path / "a")
    evaluate(Echo(), examples, SETTINGS, tmp_path / "b")
    first = lines(tmp_path / "b")[0]
    wrong = [{**first, "timings": 3}, {**first, "selected": [{"score": 1.0}]}, {"id": 3}, [1]]
    for foreign in (*map(json.dumps, wrong), "not JSON"):
        (tmp_path / "b" / "predictions.jsonl").write_text(f"{foreign}\n")
        with pytest.raises(DataError, match=r"predictions\.jsonl', line 1 is not a .* prediction"):
            evaluate(Echo(), examples, SETTINGS, tmp_path / "b")


class FirstWords:
    """A reader that uses only the public types of this package."""

    name = "first-words"

    def read(self, documents: Sequence[Document]) -> list[Document]:
        return list(documents)

    def answer(self, memory: list[Document], question: str) -> Answer:
        times = {"select_ms": 0.0, "ttft_ms": 0.0, "total_ms": 0.0}
        return Answer(memory[-1].text, (), 0, len(memory), times, "end", self.name)


def test_any_reader_is_evaluated(examples: list[Example], tmp_path: Path) -> None:
    metrics = evaluate_reader(FirstWords(), examples, tmp_path, settings={"words": 9})
    assert (metrics["em"]["mean"], metrics["string_match"]["mean"]) == (0, 100)
    assert metrics["settings"]["method"] == "first-words"
    assert metrics["settings"]["words"] == 9
    # It selects nothing and does not report what it stores.
    for name in ("recall@1", "mrr", "conditioning", "bytes_per_token"):
        assert name not in metrics
    assert evaluate_reader(FirstWords(), examples, tmp_path, settings={"words": 9})
    with pytest.raises(ConfigError, match="holds results of other settings"):
        evaluate_reader(FirstWords(), examples[:3], tmp_path, settings={"words": 9})
