"""The command `sedem init`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from sedem.cli import output
from sedem.cli.options import BackboneName
from sedem.config import parse_k
from sedem.errors import CheckpointError


def init(
    backbone: BackboneName,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the new checkpoint.")],
    layer: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Layers to run before states are read, and before they are injected. "
            "[default: half of them]",
        ),
    ] = None,
    segment_length: Annotated[int, typer.Option(metavar="N", help="Tokens of a block.")] = 128,
    k: Annotated[
        str, typer.Option("-k", metavar="N|auto", help="Blocks to use for an answer.")
    ] = "2",
    chat_template: Annotated[
        bool | None,
        typer.Option(
            help="Put questions into the tokenizer's chat template. [default: where it has one]"
        ),
    ] = None,
) -> None:
    """Make a checkpoint that works untrained.

    It keeps the state of every token as it is, so its banks are large, and its answers are no
    better than the backbone. Training can start from it.
    """
    import torch

    from sedem.checkpoint.folder import open_named, write
    from sedem.checkpoint.untrained import untrained
    from sedem.modules import SedemModules

    if out.exists():
        raise CheckpointError(f"'{out}' exists already; give the name of a new folder")
    model = untrained(
        SedemModules,
        open_named(backbone, None, None, dtype=torch.bfloat16),
        layer=layer,
        chat_template=chat_template,
        segment_length=segment_length,
        k=parse_k(k),
    )
    config, decoder, place = model.config, model.decoder, shlex.quote(str(out))
    write(out, config, model.parts(), decoder)
    output.print_facts(
        [
            ("checkpoint", out),
            ("backbone", f"{backbone}, {decoder.depth} layers, nothing trained"),
            ("memory", f"states after layer {config.inject_layer}, injected there unchanged"),
            ("bank", f"{2 * decoder.width:,} bytes a token, in bfloat16"),
            ("answer", f"from {config.k} blocks of {config.segment_length} tokens"),
            ("prompt", f"{'in' if config.chat_template else 'without'} a chat template"),
        ]
    )
    output.write()
    output.write(f"sedem build my.bank FILE ... -m {place}")
    output.write(f"sedem ask my.bank QUESTION -m {place}")
