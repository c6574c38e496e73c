"""Makes data/exact-facts-evaluation.jsonl.xz: `python -m experiments.tools.exact_facts ARTICLES`.

ARTICLES is a JSON-lines file with `title` and `text`. No training of sedem-nano reads its last 300
articles. They provide the 300 real paragraphs that hide the invented ones.
"""

from __future__ import annotations

import json
import lzma
import random
import sys
from pathlib import Path

from experiments.system.scales import FACTS
from sedem_lab.data.articles import paragraphs, read_articles
from sedem_lab.data.custom_questions import to_entry
from sedem_lab.data.facts import generate

EXAMPLES, FILLERS, SEED = 1000, 300, 0


def make(articles: Path) -> list[str]:
    """Write the file; return the titles of the articles it quotes."""
    pool = [
        (title, paragraph)
        for title, text in read_articles(articles, slice(-300, None))
        for paragraph in paragraphs(text, 250, 650)
    ]
    chosen = sorted(random.Random(SEED).sample(range(len(pool)), FILLERS))
    fillers = [pool[index][1] for index in chosen]
    examples = generate("evaluation", EXAMPLES, fillers, seed=SEED).examples
    with lzma.open(FACTS, "wt", encoding="utf-8", preset=9 | lzma.PRESET_EXTREME) as file:
        for example in examples:
            file.write(json.dumps(to_entry(example), ensure_ascii=False) + "\n")
    return sorted({pool[index][0] for index in chosen})


if __name__ == "__main__":
    for quoted in make(Path(sys.argv[1])):
        print(quoted)
