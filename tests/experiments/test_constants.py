"""The constant answer is chosen on training questions alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.quality import constant
from experiments.system import answers
from experiments.system.answers import best_constant, training_questions
from experiments.system.scales import NANO, ROOT, Questions
from sedem import Document
from sedem_lab.data.examples import Example

FIXTURES = ROOT / "tests" / "fixtures"
SMALL = replace(
    NANO,
    name="small",
    sets={"2wiki": Questions("2Wiki", "2wikimultihopqa.json", "2wikimultihopqa")},
)


def asked(*answers: str) -> Example:
    return Example("q", (Document("d", "text"),), "What?", answers)


def test_the_best_constant_has_the_highest_mean_f1_on_the_training_questions() -> None:
    # "no" is the most frequent answer; "river of sand" shares tokens with three questions.
    examples = [asked("no"), asked("no"), *map(asked, ("a river of sand", "river of ice", "river"))]
    plain = [1.0, 2 / 3, 1 / 2]
    assert best_constant(examples) == ("a river of sand", pytest.approx(100 * sum(plain) / 5))
    assert best_constant([asked("No"), asked("yes"), asked("no")]) == ("No", pytest.approx(200 / 3))


def test_among_equals_the_most_frequent_constant_is_taken_then_the_first() -> None:
    assert best_constant([asked("Rome"), asked("Oslo")])[0] == "Rome"
    # Both get one question of three; only one is a reference twice.
    pairs = [asked("Rome"), asked("Oslo", "oslo"), asked("Bonn")]
    assert best_constant(pairs)[0] == "Oslo"


def test_a_constant_is_scored_by_the_harness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = answers.constant(constant("2wiki", "yes"), SMALL, FIXTURES)
    # The fixture has the answers "yes" and "Rome".
    assert result["em"]["mean"] == 50 and result["counts"]["examples"] == 2
    assert (result["yes_no"]["em"]["mean"], result["other"]["em"]["mean"]) == (100, 0)
    assert result["settings"]["answer"] == "yes" and "chosen" not in result["settings"]
    assert {"machine", "versions", "commit"} <= set(result)
    training = [asked("yes"), asked("no"), asked("yes"), asked("yes")]
    monkeypatch.setattr(answers, "training_questions", lambda *_: (training, []))
    chosen = answers.constant(constant("2wiki"), SMALL, FIXTURES)["settings"]
    assert chosen["chosen"] == {"sources": [], "questions": 4, "f1": 75.0}
    assert chosen["method"] == "constant" and chosen["answer"] == "yes"


def test_a_constant_is_chosen_on_the_sources_of_the_recipe_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = yaml.safe_load((ROOT / "recipes" / "nano" / "stage2.yaml").read_text())
    (source,) = (s for s in recipe["data"]["training"] if s["path"].startswith("2wiki"))
    path = tmp_path / source["path"]
    path.parent.mkdir(parents=True)
    (given, *_) = json.loads((FIXTURES / "2wikimultihopqa.json").read_text())
    rows = [{**given, "_id": str(n), "answer": "yes" if n < 400 else "no"} for n in range(500)]
    path.write_text(json.dumps(rows))
    for other in recipe["data"]["training"]:
        if "set" not in other and other is not source:
            whole = tmp_path / other["path"]
            whole.parent.mkdir(parents=True, exist_ok=True)
            whole.write_bytes((FIXTURES / "squad.json").read_bytes())
    examples, sources = training_questions(NANO, "2wiki", tmp_path)
    assert [example.answers for example in examples] == [("yes",)] * 400
    assert [entry["records"] for entry in sources] == [":400"]
    assert NANO.sets["2wiki"].records == "400:"


def test_no_training_source_of_a_constant_has_evaluation_questions() -> None:
    """A committed constant names its sources; an evaluation file is another, or another part."""
    for key, questions in NANO.sets.items():
        result = constant(key).read(NANO)
        if result is None:
            continue
        chosen = result["settings"]["chosen"]
        assert chosen["questions"] > 0 and chosen["sources"], key
        for source in chosen["sources"]:
            assert disjoint(source, questions), (key, source)


def disjoint(source: dict[str, Any], questions: Questions) -> bool:
    if source["path"] != questions.source:
        return True
    end, start = str(source["records"]).removeprefix(":"), str(questions.records).removesuffix(":")
    return int(end) <= int(start)
