"""Answer many questions over one bank in batches, and write one JSON line an answer.

    python examples/batch_questions.py questions.txt > answers.jsonl

The file has one question a line. A list of questions is answered together, which is faster than
one call a question; every answer still has its own sources.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sedem import Document, SeDeM
from sedem.demo import DOCUMENTS, QUESTIONS


def main() -> None:
    """Answer the questions of a file, or those of the demo."""
    lines = Path(sys.argv[1]).read_text("utf-8").splitlines() if sys.argv[1:] else QUESTIONS
    questions = [line.strip() for line in lines if line.strip()]

    model = SeDeM.from_pretrained("sedem-smol")
    paths = sorted(DOCUMENTS.glob("*.txt"))
    bank = model.read([Document(path.name, path.read_text("utf-8")) for path in paths])

    answers = model.answer(bank, questions, k=2)
    for question, answer in zip(questions, answers, strict=True):
        print(json.dumps({"question": question, **answer.to_dict()}, ensure_ascii=False))


if __name__ == "__main__":
    main()
