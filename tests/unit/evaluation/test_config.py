"""The settings of an evaluation: what they accept, and how a result records them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unit.evaluation.conftest import Echo

from sedem.errors import ConfigError
from sedem_lab.evaluation import command
from sedem_lab.evaluation.config import EvaluationConfig, MethodSettings, QuestionSettings

ROOT = Path(__file__).parents[3]
SQUAD = ROOT / "tests" / "fixtures" / "squad.json"


def make(**changes: Any) -> EvaluationConfig:
    return EvaluationConfig(**{"method": "sedem", "data": SQUAD, "checkpoint": "c", **changes})


@pytest.fixture
def recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[EvaluationConfig], dict[str, Any]]:
    """The settings that a result of an evaluation records, of a checkpoint with known weights."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(command, "locate", lambda name: tmp_path)
    monkeypatch.setattr(command, "open_method", lambda name, settings: Echo())
    monkeypatch.setattr(command, "evaluate", lambda method, chosen, settings, *_: settings)
    return command.run_evaluation


def test_a_result_records_all_settings_under_their_names_and_in_their_order(
    recorded: Callable[[EvaluationConfig], dict[str, Any]],
) -> None:
    config = make(
        schema_name="squad",
        records=":1",
        options={"distractors": 1},
        limit=2,
        seed=7,
        k="all",
        control="gold-documents",
        max_new_tokens=2,
        dtype="bfloat16",
        batch=3,
        shift=4,
        engine="eager",
        memory="int8",
    )
    assert json.dumps(recorded(config)) == (
        '{"method": "sedem", "data": "squad.json", "data_sha256": '
        '"18d0965fbec1767f714ea5b5f655a9905a37b96342f6869f21982b1171e2a7fd", "weights_sha256": '
        '"9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c", "schema": "squad", '
        '"records": ":1", "split": null, "options": {"distractors": 1}, "limit": 2, "seed": 7, '
        '"checkpoint": "c", "k": "all", "control": "gold-documents", "condition": null, '
        '"selection": null, "hops": null, "answer": null, '
        '"max_new_tokens": 2, "dtype": "bfloat16", "batch": 3, "shift": 4, '
        '"device": null, "engine": "eager", "memory": "int8", '
        '"dropped": {}}'
    )


@pytest.mark.parametrize(("schema", "limit"), [("squad", 64), ("qasper", 128)])
def test_the_data_decides_the_schema_and_the_answer_limit(
    schema: str, limit: int, recorded: Callable[[EvaluationConfig], dict[str, Any]]
) -> None:
    data = SQUAD.with_name(f"{schema}.json")
    settings = recorded(make(data=data))
    assert (settings["schema"], settings["max_new_tokens"]) == (schema, limit)
    assert recorded(make(data=data, max_new_tokens=3))["max_new_tokens"] == 3


def test_the_settings_of_committed_results_are_still_accepted() -> None:
    files = (ROOT / "experiments" / "results").rglob("*.json")
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    # A constant answer has no checkpoint.
    evaluations = [d["settings"] for d in documents if "checkpoint" in d.get("settings", {})]
    evaluations = [settings for settings in evaluations if "method" in settings]
    assert evaluations
    for settings in evaluations:
        given = {name: settings[name] for name in MethodSettings.model_fields if name in settings}
        assert MethodSettings(**given).model_dump(include=given.keys()) == given


def test_no_setting_is_declared_twice_and_each_has_a_help_text() -> None:
    assert not QuestionSettings.model_fields.keys() & MethodSettings.model_fields.keys()
    assert all(field.description for field in EvaluationConfig.model_fields.values())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"k": "most"},
            "k is 'most'; input should be a valid integer, or input should be 'all' or 'auto'",
        ),
        ({"shift": -1}, "shift is -1; input should be greater than or equal to 0"),
        ({"schema": "squad"}, "unknown key 'schema'; did you mean 'schema_name'?"),
    ],
)
def test_a_wrong_setting_is_explained(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**changes)
    assert str(caught.value) == f"EvaluationConfig: {sentence}"
