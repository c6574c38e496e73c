"""Print an answer while it is generated, then its sources and times.

python examples/stream.py "What is the weight of shipment HK-2093?"
"""

from __future__ import annotations

import sys

from sedem import Decoding, Document, SeDeM
from sedem.demo import DOCUMENTS


def main() -> None:
    """Stream one answer about the bundled documents."""
    question = " ".join(sys.argv[1:]) or "What is the weight of shipment HK-2093?"
    model = SeDeM.from_pretrained("sedem-smol")
    register = DOCUMENTS / "harbour-register.txt"
    bank = model.read([Document(register.name, register.read_text("utf-8"))])

    pieces = model.stream(bank, question, decoding=Decoding(max_new_tokens=32))
    for piece in pieces:
        print(piece, end="", flush=True)
    print()

    answer = pieces.answer  # complete once the stream has ended
    print(f"ended by: {answer.finish_reason}")
    print(f"first token after {answer.timings['ttft_ms']:.0f} ms")
    print("from:", *(f"{c.document}:{c.start}-{c.end}" for c in answer.citations))


if __name__ == "__main__":
    main()
