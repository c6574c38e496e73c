"""Ask a server of sedem with OpenAI's client: the sources first, then the answer as it comes.

sedem serve --bank lease=lease.bank
export OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=...
python examples/ask_the_server.py lease "What is the rent?"
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main() -> None:
    """Stream one answer from a bank."""
    bank, question = sys.argv[1], " ".join(sys.argv[2:])
    chunks = OpenAI().chat.completions.create(
        model=f"sedem-smol@{bank}",
        messages=[{"role": "user", "content": question}],
        max_tokens=16,
        stream=True,
        extra_body={"k": "auto"},
    )
    for chunk in chunks:
        details = (chunk.model_extra or {}).get("sedem", {})
        if "timings" in details:  # the last part repeats the citations, and has all the rest
            print(f"\nfrom {details['k']} of {details['blocks']} blocks")
            continue
        for citation in details.get("citations", []):
            place = f"{citation['document']}:{citation['start']}-{citation['end']}"
            print(f"[{citation['rank']}] {place} ({citation['score']:.1f})")
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)


if __name__ == "__main__":
    main()
