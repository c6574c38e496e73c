"""Evaluate SeDeM and the frozen backbone on the same questions, and compare them.

    python examples/compare_with_full_context.py OUT

Both methods get the same questions, prompt, answer limit and metrics. SeDeM answers from two blocks
of hidden-state memory; the frozen backbone reads every document as text. OUT receives a folder a
run. Four questions show how it works; they decide nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sedem import Document
from sedem.demo import DOCUMENTS
from sedem_lab.data.examples import Evidence, Example
from sedem_lab.evaluation.compare import compare
from sedem_lab.evaluation.config import MethodSettings
from sedem_lab.evaluation.readers import open_method
from sedem_lab.evaluation.run import evaluate, read_predictions

FACTS = (
    ("What is the weight of shipment HK-2093?", "3175 kg"),
    ("Who is the mayor of Belholm?", "Jonas Wenrick"),
    ("When was Thea Karbach born?", "22 June 1911"),
    ("Who is the seller in contract QR-4471?", "Norwick Brothers"),
)


def make_examples() -> list[Example]:
    """Questions about one document, with the span of each answer as evidence."""
    register = DOCUMENTS / "harbour-register.txt"
    document = Document(register.name, register.read_text("utf-8"))
    examples = []
    for number, (question, answer) in enumerate(FACTS):
        start = document.text.index(answer)
        evidence = (Evidence(0, start, start + len(answer)),)
        examples.append(Example(f"fact-{number}", (document,), question, (answer,), evidence))
    return examples


def main() -> None:
    """Run both methods, print their scores and the paired difference."""
    out = Path(sys.argv[1] if sys.argv[1:] else "runs/comparison")
    examples = make_examples()
    records = {}
    for name, k in (("full-context", None), ("sedem", 2)):
        settings = MethodSettings(checkpoint="sedem-smol", k=k, max_new_tokens=16)
        method = open_method(name, settings)
        metrics = evaluate(method, examples, {"method": name, "k": k}, out / name)
        print(f"{name}: F1 {metrics['f1']['mean']:.1f}")
        path = out / name / "predictions.jsonl"
        records[name] = list(read_predictions(path.read_bytes(), path))
    difference = compare(records["full-context"], records["sedem"])["f1"]
    low, high = difference.interval
    print(f"sedem minus full-context: {difference.mean:+.1f} F1 ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
