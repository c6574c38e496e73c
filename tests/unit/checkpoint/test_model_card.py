from __future__ import annotations

import json
from pathlib import Path

from sedem.checkpoint.model_card import SUMMARY_FILE, model_card, summary_of

SUMMARY = {
    "recipe": {
        "start_from": "runs/stage1/final",
        "data": {
            "training": [
                {"path": "hotpotqa", "set": None, "records": ":400"},
                {"path": "/home/me/lease.jsonl", "set": "own", "records": None},
            ]
        },
        "text": None,
    },
    "steps": 1400,
    "examples_seen": 22400,
    "tokens_seen": 9876543,
    "seconds": 12.5,
    "trained_parameters": {"compressor": 1000, "lora": 234},
    "evaluation": {"eval_loss": 1.23456, "eval_recall": 0.5, "eval_runtime": 9.0, "step": 1400},
    "machine": {"device": "one GPU"},
    "versions": {"sedem": "0.1.0"},
}
ENTRIES = {"encoder": "owner/tiny", "decoder": None, "inject_layer": 2, "compression": 4}


def test_the_card_tells_budget_data_and_scores() -> None:
    card = model_card("me/reader", ENTRIES, SUMMARY)
    assert card.startswith("---\nbase_model:\n- owner/tiny\nlibrary_name: sedem\n")
    assert 'SeDeM.from_pretrained("me/reader")' in card
    for row in (
        "| encoder | owner/tiny |",
        "| inject_layer | 2 |",
        "| steps | 1,400 |",
        "| tokens | 9,876,543 |",
        "| trained parameters | 1,234 (compressor, lora) |",
        "- `hotpotqa`, records :400",
        "| loss | 1.235 |",
        "| recall | 0.5 |",
    ):
        assert row in card, row
    assert "continued from another checkpoint" in card
    assert "runtime" not in card and "decoder" not in card
    # A path of the author's machine is nobody's business.
    assert "- `lease.jsonl`, set own" in card and "/home/me" not in card


def test_the_card_of_a_baseline_says_how_to_evaluate_it() -> None:
    entries = {"method": "icae", "backbone": "sedem-nano/backbone", "memory": 32}
    summary = {**SUMMARY, "recipe": {"text": {"path": "hub:a/b", "windows": 10}}, "evaluation": {}}
    card = model_card("me/icae", entries, summary)
    assert "base_model" not in card
    assert "sedem eval icae --data questions.jsonl -m me/icae" in card
    assert "- `hub:a/b`, windows 10" in card
    assert "The run evaluated nothing." in card


def test_a_summary_is_found_beside_the_final_checkpoint_of_its_run(tmp_path: Path) -> None:
    final = tmp_path / "final"
    final.mkdir()
    assert summary_of(final) is None
    (tmp_path / SUMMARY_FILE).write_text(json.dumps({"steps": 3}))
    assert summary_of(final) == {"steps": 3}
    (tmp_path / "other").mkdir()
    assert summary_of(tmp_path / "other") is None
