"""What finds evidence is measured on tiny sets, without and with an embedding."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import LEASE, RECIPE, small_config
from torch import Tensor

from experiments.pages import STUDIES
from experiments.shipped import FINDERS
from experiments.system import finding
from experiments.system.cells import Cell
from experiments.system.finding import BOTH, questions_of
from experiments.system.measures import measure
from experiments.system.scales import HOTPOT, NANO, SMOL, SQUAD
from sedem import SeDeM
from sedem.backbone.loading import open_backbone

ANSWERS = ("900 euros", "six weeks")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two articles of SQuAD, and two questions of HotpotQA with a paragraph in common."""
    answers = [{"text": text, "answer_start": LEASE.index(text)} for text in ANSWERS]
    asked = {"id": "1", "question": "Is the rent 900 euros?", "answers": [*answers, answers[0]]}
    lease, recipe = {"context": LEASE, "qas": [asked]}, {"context": RECIPE, "qas": []}
    articles = [
        {"title": "A", "paragraphs": [recipe, lease]},
        {"title": "B", "paragraphs": [recipe]},
    ]
    paragraphs = {"Cocoa": ["It is a bean.", " It grows."], "Rent": ["It is due."], "Tea": ["Hot."]}

    def record(*titles: str) -> str:
        sentences = [paragraphs[title] for title in titles]
        facts = {"title": [titles[0], titles[1], titles[1]], "sent_id": [1, 0, 7]}
        context = {"title": titles, "sentences": sentences}
        return json.dumps({"question": "Why?", "context": context, "supporting_facts": facts})

    lines = [record("Cocoa", "Rent"), record("Cocoa", "Tea")]
    for name, text in (
        (SQUAD["source"], json.dumps({"data": articles})),
        (HOTPOT, "\n".join(lines)),
    ):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_evidence_lies_in_whole_documents(data: Path) -> None:
    texts, ((_, spans),) = questions_of(Cell(questions="squad-articles"), NANO, data)
    assert texts == [f"{RECIPE}\n\n{LEASE}", RECIPE]
    assert [texts[one.document][one.start : one.end] for one in spans] == [*ANSWERS]
    texts, asked = questions_of(Cell(questions="hotpotqa"), NANO, data)
    assert texts == ["Cocoa\nIt is a bean. It grows.", "Rent\nIt is due.", "Tea\nHot."]
    found = [[texts[one.document][one.start : one.end] for one in spans] for _, spans in asked]
    assert found == [[" It grows.", "It is due."], [" It grows.", "Hot."]]
    texts, asked = questions_of(Cell(questions="household", limit=5), NANO, data)
    assert len(texts) == 8 and len(asked) == 5


def test_ways_are_measured_and_an_embedding_is_left_out_or_joined(
    data: Path, tiny_folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data)
    monkeypatch.delenv(finding.VARIABLE, raising=False)
    monkeypatch.setattr(finding, "PACKAGE", "no_such_package")
    config, folder = small_config(tiny_folder(), second_hop=True), data / "tiny"
    backbone = open_backbone(config.encoder)
    SeDeM(config, backbone, backbone).save_pretrained(folder)
    scale, study = replace(NANO, stand_in=True, shipped={SMOL: folder}), STUDIES["finding"]
    (cell,) = (one for one in study.cells(scale) if one.questions == "squad-articles")
    measure(cell, scale, data, study.name)
    result = cell.read(scale)
    assert result is not None and "MiniLM" in result["left_out"]
    assert set(result["ways"]) == {way for way in FINDERS if "MiniLM" not in way}
    assert "MiniLM: set MINILM to the folder of all-MiniLM-L6-v2" in study.table(scale)
    words, both = result["ways"]["words"], result["ways"][BOTH]
    assert words["recall@1"]["mean"] == result["ways"]["BM25"]["recall@1"]["mean"] == 100
    # No block of 16 characters has both answers.
    assert words["whole@1"]["mean"] == 0
    assert both["bytes"] == pytest.approx(words["bytes"] + 4 * backbone.width * 2, rel=1e-4)

    def embedder(folder: Path) -> Callable[[Sequence[str]], Tensor]:
        """An embedding that knows the answer."""
        return lambda texts: torch.tensor([[float("900" in text), 0.1] for text in texts])

    (data / finding.WEIGHTS).touch()
    monkeypatch.setenv(finding.VARIABLE, str(data))
    monkeypatch.setattr(finding, "embedder", embedder)
    measure(cell, scale, data, study.name)
    result = cell.read(scale)
    assert result is not None and not result["left_out"] and set(result["ways"]) == {*FINDERS}
    ways, joined = result["ways"], f"{BOTH}, and MiniLM"
    assert ways["MiniLM"]["recall@1"]["mean"] == ways[joined]["recall@1"]["mean"] == 100
    assert ways[joined]["bytes"] == pytest.approx(both["bytes"] + 2 * 4, rel=1e-4)
    assert set(result["change"]) == {*FINDERS} - {BOTH}
