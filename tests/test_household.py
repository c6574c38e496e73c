"""The household papers, which nobody trains on, hold the answers to their questions."""

from __future__ import annotations

import json
from pathlib import Path

from sedem.data.documents import read_documents

PAPERS = Path(__file__).parent / "household"


def test_every_answer_stands_in_one_of_the_papers() -> None:
    papers = read_documents(sorted(p for p in PAPERS.iterdir() if p.suffix in (".txt", ".md")))
    lines = (PAPERS / "questions.jsonl").read_text("utf-8").splitlines()
    questions = [json.loads(line) for line in lines]
    assert len(questions) == 22 and len(papers) == 8
    for asked in questions:
        assert any(asked["answers"][0] in paper.text for paper in papers), asked["question"]
