"""`sedem adapt` end to end on a tiny backbone, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from unit.training.runs import killed_in_step

from sedem import Document, SeDeM
from sedem.demo import DOCUMENTS
from sedem.errors import CheckpointError, ConfigError, DataError
from sedem.training import adapt as adapting
from sedem.training.adapt import adapt, finished, prepare, working_folder
from sedem.training.adapt_recipes import Adaptation
from sedem.training.recipe import load_recipe
from sedem.training.stages import Stage2Recipe

TEXTS = [
    Document(f"/home/ada/{path.name}", path.read_text("utf-8")[:1500])
    for path in sorted(DOCUMENTS.glob("*.txt"))
]


@pytest.fixture
def wanted(tiny_folder: Callable[..., str]) -> Adaptation:
    return Adaptation(backbone=tiny_folder(depth=2), steps=(2, 2), segment_length=64, held_out=0.2)


def test_a_killed_adaptation_goes_on_to_a_checkpoint_with_a_card(
    wanted: Adaptation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapting, "MOST_HELD_OUT", 8)
    out = tmp_path / "mine"
    assert finished(wanted, TEXTS, out) is None
    sizes, steps = prepare(wanted, TEXTS, out)
    with killed_in_step(2):
        adapt(out)
    # Moved files are the same documents.
    moved = [Document(Path(document.name).name, document.text) for document in TEXTS]
    assert prepare(wanted, moved, out) == (sizes, steps)
    report = adapt(out)
    assert finished(wanted, TEXTS, out) == json.loads(json.dumps(report))
    assert sizes.documents == 5 and 1 < sizes.held_out_questions <= 8 and steps == (2, 2)
    assert list(report["scores"]) == ["text loss", "answer loss", "recall@2"]
    model = SeDeM.from_pretrained(out, engine="eager")
    assert model.decoder.has_lora and model.answer(model.read(TEXTS[:1]), "Who?").citations
    card = (out / "README.md").read_text("utf-8")
    assert "| documents | 5, tokens: " in card and "| text loss | " in card
    written = card + (out / "adaptation.json").read_text("utf-8")
    assert str(tmp_path) not in written and "/home" not in written
    assert str(Path(wanted.backbone).parent) not in written
    # Each recipe is one that `sedem train` takes.
    recipe = load_recipe(Stage2Recipe, working_folder(out) / "stage2.yaml")
    assert Path(recipe.run.output, "final").is_dir()
    with pytest.raises(ConfigError, match=r"holds another adaptation \(seed was 0, is 1\)"):
        finished(wanted.with_changes(seed=1), TEXTS, out)
    shutil.rmtree(out)
    with pytest.raises(ConfigError, match=r"another adaptation \(the documents differ\)"):
        prepare(wanted, TEXTS[1:], out)


def test_another_folder_is_not_written_into(wanted: Adaptation, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already; give the name of a new folder"):
        finished(wanted, TEXTS, tmp_path)


def test_too_little_text_is_refused_with_what_is_needed(wanted: Adaptation, tmp_path: Path) -> None:
    short = [Document("a.txt", TEXTS[0].text[:300]), Document("b.txt", TEXTS[1].text[:300])]
    with pytest.raises(DataError, match=r"\d windows of 128 tokens and \d questions are left"):
        prepare(wanted, short, tmp_path / "mine")
    assert not list(tmp_path.iterdir())
