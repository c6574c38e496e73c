"""Makes files for studies and users: evaluation data, and trained models small enough to ship.

`python -m experiments.tools exact-facts ARTICLES`, `household`, or `shipping RUN NAME`.
"""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer

from experiments.system.scales import FACTS, HOUSEHOLD, ROOT, SHIPPED
from sedem import SeDeM
from sedem.errors import ConfigError
from sedem.types import Document
from sedem_lab.data.articles import paragraphs, read_articles
from sedem_lab.data.custom_questions import to_entry
from sedem_lab.data.examples import Evidence, Example
from sedem_lab.data.facts import EXACT_FACTS

EXAMPLES, FILLERS, SEED = 1000, 300, 0
PAPERS = ROOT / "tests" / "household"
app = typer.Typer(add_completion=False, help=__doc__)


def _write(path: Path, examples: Iterable[Example]) -> None:
    with lzma.open(path, "wt", encoding="utf-8", preset=9 | lzma.PRESET_EXTREME) as file:
        for example in examples:
            file.write(json.dumps(to_entry(example), ensure_ascii=False) + "\n")


@app.command()
def exact_facts(articles: Path) -> None:
    """Make data/exact-facts-evaluation.jsonl.xz, and print the titles of the articles it quotes.

    ARTICLES is a JSON-lines file with `title` and `text`. No training of sedem-nano reads its last
    300 articles. They provide the 300 real paragraphs that hide the invented ones.
    """
    pool = [
        (title, paragraph)
        for title, text in read_articles(articles, slice(-300, None))
        for paragraph in paragraphs(text, 250, 650)
    ]
    chosen = sorted(random.Random(SEED).sample(range(len(pool)), FILLERS))
    fillers = [pool[index][1] for index in chosen]
    _write(FACTS, EXACT_FACTS.generate("evaluation", EXAMPLES, fillers, seed=SEED).examples)
    for title in sorted({pool[index][0] for index in chosen}):
        typer.echo(title)


@app.command()
def household() -> None:
    """Make data/household.jsonl.xz from tests/household."""
    _write(HOUSEHOLD, household_examples())


def household_examples() -> list[Example]:
    """Every question, with all papers; the evidence is where an answer first stands."""
    files = sorted(path for path in PAPERS.iterdir() if path.suffix in (".txt", ".md"))
    # As they are: reading a file writes its tables in another way.
    papers = [Document(path.name, path.read_text(encoding="utf-8")) for path in files]
    examples = []
    for n, line in enumerate((PAPERS / "questions.jsonl").read_text("utf-8").splitlines()):
        asked = json.loads(line)
        answer = asked["answers"][0]
        number = next(i for i, paper in enumerate(papers) if answer in paper.text)
        start = papers[number].text.index(answer)
        evidence = (Evidence(number, start, start + len(answer)),)
        own = asked["question"], tuple(asked["answers"]), evidence
        examples.append(Example(f"household-{n}", tuple(papers), *own))
    return examples


@app.command()
def shipping(
    trained: Annotated[Path, typer.Argument(help="A trained checkpoint.")],
    name: Annotated[str, typer.Argument(help="Name that it ships under.")],
    rank: Annotated[int | None, typer.Option(help="Rank that adapters are kept at.")] = None,
    to: Annotated[Path, typer.Option(help="Folder of checkpoints.")] = SHIPPED.parent,
) -> None:
    """Put a trained SeDeM into checkpoints/NAME, without its backbone if that has a public name.

    The change that a short training makes to a matrix is nearly of low rank. So adapters are
    approximated at a smaller rank. All matrices are kept as int8 rows.
    """
    model = SeDeM.from_pretrained(trained, device="cpu", engine="eager")
    shrink(model, rank or model.config.lora_rank)
    model.save_pretrained(to / name, with_backbone=name == SHIPPED.name, int8=True)


@torch.no_grad()
def shrink(model: SeDeM, rank: int) -> None:
    """Replace adapters by the nearest ones of a rank."""
    config = model.config
    # Adapters are multiplied by alpha / rank, which must not change.
    alpha, rest = divmod(config.lora_alpha * rank, config.lora_rank)
    if rest:
        raise ConfigError(
            f"rank is {rank}, but alpha {config.lora_alpha} of rank {config.lora_rank} would "
            "not stay a whole number; choose another rank"
        )
    named = dict(model.decoder.model.named_parameters())
    for name, down in named.items():
        if "lora_A" in name:
            up = named[name.replace("lora_A", "lora_B")]
            left, sizes, right = torch.linalg.svd(up @ down, full_matrices=False)
            # The best approximation of a rank (Eckart-Young); both factors have the same scale.
            root = sizes[:rank].sqrt()
            down.data, up.data = root[:, None] * right[:rank], left[:, :rank] * root
    adapter = model.decoder.model.peft_config["default"]
    adapter.r, adapter.lora_alpha = rank, alpha
    model.config = config.with_changes(lora_rank=rank, lora_alpha=alpha)


if __name__ == "__main__":
    app()
