"""Makes data/household.jsonl.xz from tests/household: `python -m experiments.tools.household`."""

from __future__ import annotations

import json
import lzma

from experiments.system.scales import HOUSEHOLD, ROOT
from sedem.types import Document
from sedem_lab.data.custom_questions import to_entry
from sedem_lab.data.examples import Evidence, Example

PAPERS = ROOT / "tests" / "household"


def examples() -> list[Example]:
    """Every question, with all papers; the evidence is where an answer first stands."""
    files = sorted(path for path in PAPERS.iterdir() if path.suffix in (".txt", ".md"))
    # As they are: reading a file writes its tables in another way.
    papers = [Document(path.name, path.read_text(encoding="utf-8")) for path in files]
    lines = (PAPERS / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        Example(f"household-{n}", tuple(papers), asked["question"], tuple(asked["answers"]), found)
        for n, asked in enumerate(map(json.loads, lines))
        for found in [_evidence(papers, asked["answers"][0])]
    ]


def _evidence(papers: list[Document], answer: str) -> tuple[Evidence, ...]:
    index = next(n for n, paper in enumerate(papers) if answer in paper.text)
    start = papers[index].text.index(answer)
    return (Evidence(index, start, start + len(answer)),)


def make() -> None:
    """Write the file."""
    with lzma.open(HOUSEHOLD, "wt", encoding="utf-8", preset=9 | lzma.PRESET_EXTREME) as file:
        for example in examples():
            file.write(json.dumps(to_entry(example), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    make()
