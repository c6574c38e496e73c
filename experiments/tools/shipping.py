"""Trained models made small enough to ship: `python -m experiments.tools.shipping [NAME...]`.

The change that a short training makes to a matrix is nearly of low rank. So adapters, and the
difference of Activation Beacon's projections from the frozen ones, are approximated at a small
rank. Other matrices are kept as int8 rows. docs/results-nano.md shows the loss in answer quality.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from experiments.system.models import GUIDED
from experiments.system.scales import NANO, SHIPPED
from sedem import SeDeM
from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import open_backbone
from sedem.baselines.registry import TRAINED, reader_class
from sedem.baselines.trained import TrainedReader
from sedem.errors import ConfigError
from sedem.evaluation.registry import default_checkpoint

RANK = 8
NAMED_BACKBONE = "sedem-nano/backbone"
CARD = """# {name}

The trained baseline `{method}` on the backbone of sedem-nano: {what}.
It serves comparisons at nano scale (`sedem eval {method} --data questions.jsonl`)
and has had little training: its scores show how far that goes, not what the method can do.

| | |
|---|---|
{trainings}
| kept | {kept} |

`docs/results-nano.md` of sedem has its scores, as trained and as stored here. Trained on texts of
Wikipedia (CC BY-SA 3.0), SQuAD and HotpotQA (CC BY-SA 4.0), MuSiQue (CC BY 4.0),
2WikiMultiHopQA and COVID-QA (Apache-2.0). Weights: Apache-2.0.
"""

app = typer.Typer(add_completion=False)


@app.command()
def ship(
    names: Annotated[
        list[str] | None, typer.Argument(help="sedem, or trained baselines. [default: the latter]")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder of the nano recipes' runs.")] = NANO.runs,
    rank: Annotated[int, typer.Option(help="Rank that updates of matrices are kept at.")] = RANK,
    to: Annotated[Path, typer.Option(help="Folder of checkpoints.")] = SHIPPED.parent,
) -> None:
    """Put trained models into checkpoints/NAME-nano."""
    for name in names or TRAINED:
        if name == "sedem":
            ship_sedem(runs / GUIDED[-1] / "final", to / SHIPPED.name)
        else:
            ship_baseline(name, runs / f"{name}-questions", rank, to / default_checkpoint(name))


def ship_sedem(trained: Path, place: Path) -> None:
    """Write SeDeM with its backbone, with matrices as int8 rows."""
    model = SeDeM.from_pretrained(trained, device="cpu", engine="eager")
    model.save_pretrained(place, with_backbone=True, int8=True)


def ship_baseline(method: str, run: Path, rank: int, place: Path) -> None:
    """Write a trained baseline without its backbone, together with a card."""
    trained = reader_class(method).from_pretrained(run / "final")
    small = shrunk(trained, open_backbone(str(SHIPPED / "backbone")), rank)
    small.save_pretrained(place, int8=True)
    (place / "README.md").write_text(card(small, run), encoding="utf-8")


def card(small: TrainedReader, run: Path) -> str:
    """The model card of a small checkpoint."""
    rows: list[str] = []
    before: Path | None = run
    while before is not None:
        summary = json.loads((before / "training.json").read_text(encoding="utf-8"))
        trained = sum(summary["trained_parameters"].values())
        rows.append(
            f"| `recipes/nano/{before.name}.yaml` | {summary['steps']:,} steps, "
            f"{summary['examples_seen']:,} examples, {summary['tokens_seen']:,} tokens, "
            f"{trained:,} trained parameters |"
        )
        start = summary["recipe"].get("start_from")
        before = before.with_name(Path(start).parent.name) if start else None
    method, config = small.name, small.config
    update = config.lora_rank or getattr(config, "rank", 0)
    kept = ["matrices as int8 rows"]
    if update:
        what = "adapters" if config.lora_rank else "the projections' difference from the frozen"
        kept.append(f"{what} at rank {update}")
    return CARD.format(
        name=default_checkpoint(method),
        method=method,
        what=TRAINED[method][1],
        trainings="\n".join(reversed(rows)),
        kept="; ".join(kept),
    )


@torch.no_grad()
def shrunk(trained: TrainedReader, backbone: Backbone, rank: int) -> TrainedReader:
    """The nearest reader whose updates of frozen matrices have a given rank.

    Args:
        trained: has adapters of a larger rank, or is a Beacon with projections of its own.

    Raises:
        ConfigError: the adapters' alpha would not be an integer at this rank.
    """
    config: Any = trained.config.with_changes(backbone=NAMED_BACKBONE)
    if config.lora_rank:
        # Adapters are multiplied by alpha / rank, which must not change.
        alpha, rest = divmod(config.lora_alpha * rank, config.lora_rank)
        if rest:
            raise ConfigError(
                f"rank is {rank}, but alpha {config.lora_alpha} of rank {config.lora_rank} would "
                "not stay a whole number; choose another rank"
            )
        config = config.with_changes(lora_rank=rank, lora_alpha=alpha)
    if trained.name == "beacon":
        config = config.with_changes(rank=rank)
    small = type(trained)(config, backbone)
    for (down, up), narrow in zip(_factors(trained.backbone), _factors(backbone), strict=True):
        _fill(narrow, up @ down)
    if trained.name == "beacon":
        small.parts()["token"].load_state_dict(trained.parts()["token"].state_dict())
        pairs = zip(trained.projections(), small.projections(), strict=True)
        for (own, frozen), (update, _) in pairs:
            _fill((update[0].weight, update[1].weight), own.weight - frozen.weight)
    else:
        small.parts().load_state_dict(trained.parts().state_dict())
    return small


def _factors(backbone: Backbone) -> Iterator[tuple[Tensor, Tensor]]:
    """Both factors of every adapter: the down projection, then the up projection."""
    named = dict(backbone.model.named_parameters())
    for name, down in named.items():
        if "lora_A" in name:
            yield down, named[name.replace("lora_A", "lora_B")]


def _fill(factors: tuple[Tensor, Tensor], update: Tensor) -> None:
    """Set two factors so that their product is nearest to an update (Eckart-Young).

    The scale is split between both factors.
    """
    down, up = (factor.zero_() for factor in factors)
    left, sizes, right = torch.linalg.svd(update.float(), full_matrices=False)
    rank = min(len(down), len(sizes))
    root = sizes[:rank].sqrt()
    down[:rank] = root[:, None] * right[:rank]
    up[:, :rank] = left[:, :rank] * root


if __name__ == "__main__":
    app()
