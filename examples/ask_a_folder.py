"""Ask a folder of texts: read it once into a bank, then answer questions with their sources.

    python examples/ask_a_folder.py FOLDER "What is the rent?" "When is it due?"

The first run reads the .txt and .md files and saves the bank; later runs only open it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sedem import Document, MemoryBank, SeDeM
from sedem.demo import DOCUMENTS


def read_folder(folder: Path) -> list[Document]:
    """The .txt and .md files of a folder and its subfolders, named by their relative paths."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".md"))
    return [Document(str(path.relative_to(folder)), path.read_text("utf-8")) for path in paths]


def main() -> None:
    """Build or open the bank, then print each answer above the spans that it came from."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=DOCUMENTS)
    parser.add_argument("questions", nargs="*", default=["In what year was Ulysses launched?"])
    parser.add_argument("--bank", type=Path, default=Path("folder.bank"))
    parser.add_argument("--model", default="sedem-smol", help="checkpoint folder or hub id")
    parser.add_argument("-k", type=int, default=2, help="blocks to answer from")
    arguments = parser.parse_args()

    model = SeDeM.from_pretrained(arguments.model)
    if not arguments.bank.exists():
        bank = model.read(read_folder(arguments.folder))
        bank.save(arguments.bank)
        print(f"read {len(bank.documents)} documents into {len(bank)} blocks")
    bank = MemoryBank.open(arguments.bank)

    for question in arguments.questions:
        answer = model.answer(bank, question, k=arguments.k)
        print(f"\n{question}\n{answer.text}")
        for citation in answer.citations:
            place = f"{citation.document}:{citation.start}-{citation.end}"
            print(f"  [{citation.rank}] {place}  {' '.join(citation.text.split())[:80]}...")


if __name__ == "__main__":
    main()
