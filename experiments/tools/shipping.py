"""A trained model made small enough to ship: `python -m experiments.tools.shipping RUN NAME`.

The change that a short training makes to a matrix is nearly of low rank. So adapters are
approximated at a smaller rank. All matrices are kept as int8 rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from experiments.system.scales import SHIPPED
from sedem import SeDeM
from sedem.backbone.decoder import Backbone
from sedem.errors import ConfigError

app = typer.Typer(add_completion=False)


@app.command()
def ship(
    trained: Annotated[Path, typer.Argument(help="A trained checkpoint.")],
    name: Annotated[str, typer.Argument(help="Name that it ships under.")],
    rank: Annotated[int | None, typer.Option(help="Rank that adapters are kept at.")] = None,
    to: Annotated[Path, typer.Option(help="Folder of checkpoints.")] = SHIPPED.parent,
) -> None:
    """Put a trained SeDeM into checkpoints/NAME, without its backbone if that has a public name."""
    model = SeDeM.from_pretrained(trained, device="cpu", engine="eager")
    shrink(model, rank or model.config.lora_rank)
    model.save_pretrained(to / name, with_backbone=name == SHIPPED.name, int8=True)


@torch.no_grad()
def shrink(model: SeDeM, rank: int) -> None:
    """Replace adapters by the nearest ones of a rank.

    Raises:
        ConfigError: the adapters' alpha would not be an integer at this rank.
    """
    config = model.config
    # Adapters are multiplied by alpha / rank, which must not change.
    alpha, rest = divmod(config.lora_alpha * rank, config.lora_rank)
    if rest:
        raise ConfigError(
            f"rank is {rank}, but alpha {config.lora_alpha} of rank {config.lora_rank} would "
            "not stay a whole number; choose another rank"
        )
    for down, up in _factors(model.decoder):
        left, sizes, right = torch.linalg.svd(up @ down, full_matrices=False)
        # The best approximation of a rank (Eckart-Young); both factors have the same scale.
        root = sizes[:rank].sqrt()
        down.data, up.data = root[:, None] * right[:rank], left[:, :rank] * root
    adapter = model.decoder.model.peft_config["default"]
    adapter.r, adapter.lora_alpha = rank, alpha
    model.config = config.with_changes(lora_rank=rank, lora_alpha=alpha)


def _factors(decoder: Backbone) -> Iterator[tuple[Tensor, Tensor]]:
    """Both factors of every adapter: the down projection, then the up projection."""
    named = dict(decoder.model.named_parameters())
    for name, down in named.items():
        if "lora_A" in name:
            yield down, named[name.replace("lora_A", "lora_B")]


if __name__ == "__main__":
    app()
