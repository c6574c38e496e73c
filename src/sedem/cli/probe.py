"""The command `sedem probe`: layers and a compression for a backbone that nobody has tried."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from sedem.cli import output
from sedem.cli.options import BackboneName, Json
from sedem.errors import ConfigError

COLUMNS = (
    "extract", "inject", "C", "loss", "kept", "own states", "recall loss", "bytes a token",
    "seconds",
)  # fmt: skip


def probe(
    backbone: BackboneName,
    documents: Annotated[
        list[Path],
        typer.Argument(metavar="DOCS", help="Text files and folders of them."),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder of results and picture.")
    ],
    layers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="E:I",
            help="Extraction and injection layer to try; repeatable. [default: quarters]",
        ),
    ] = None,
    compression: Annotated[
        list[int] | None,
        typer.Option(metavar="C", help="Tokens of a slot; repeatable. [default: 1, 2, 4]"),
    ] = None,
    full_grid: Annotated[
        bool, typer.Option("--full-grid", help="Try every compression with all layers.")
    ] = False,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps of one run.")] = 100,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Windows of one step.")] = 16,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of windows and weights.")] = 0,
    as_json: Json = False,
) -> None:
    """Choose layers and a compression by short runs of stage 1.

    Layers are compared at the largest compression, then compressions at the best layers. The loss
    is of held-out text, given the memory of the text before it. Finished runs are kept when the
    command is given again.
    """
    import logging

    from transformers.utils.logging import set_verbosity_error

    from sedem.backbone.loading import hide_bars
    from sedem.training.probe import PICTURE, ProbeSettings, draw, read_documents
    from sedem.training.probe import probe as run

    settings = ProbeSettings(
        layers=tuple(map(_pair, layers or ())),
        full_grid=full_grid,
        steps=steps,
        batch_size=batch_size,
        seed=seed,
    )
    if compression:
        settings = settings.with_changes(compressions=tuple(compression))
    hide_bars()
    set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    with output.progress("training") as report_progress:
        result = run(backbone, read_documents(documents), settings, out, report_progress)
    draw(result, out / PICTURE)
    if as_json:
        output.print_json(result)
        return
    _print(result, backbone)
    output.write(f"picture: {out / PICTURE}")


def _pair(text: str) -> tuple[int, int]:
    """Parse a value of --layers."""
    extract, colon, inject = text.partition(":")
    if not (colon and extract.isdecimal() and inject.isdecimal()):
        raise ConfigError(
            f"--layers is '{text}'; give an extraction and an injection layer, such as 16:10"
        )
    return int(extract), int(inject)


def _print(result: dict[str, Any], backbone: str) -> None:
    """Write the table, the ends and what is recommended."""
    from sedem.training.probe import kept

    ends, chosen = result["ends"], result["recommended"]
    output.print_table([_cells(row, kept(row, ends)) for row in result["runs"]], COLUMNS, left=())
    text, nothing = (ends["continuation"][end]["mean"] for end in ("raw_text", "nothing"))
    output.write()
    output.write(f"loss with the text itself {text:.3f}, with nothing {nothing:.3f}")
    settings = {key: chosen[key] for key in ("extract_layers", "inject_layer", "compression")}
    output.write(f"recommended: {', '.join(f'{key}: {value}' for key, value in settings.items())}")
    flags = " ".join(
        f"--set {shlex.quote(f'model.{key}={value}')}"
        for key, value in {"encoder": backbone, **settings}.items()
    )
    output.write(f"sedem train stage1 --config RECIPE {flags}")
    if kept(chosen, ends) <= 0:
        output.note("no setting helps yet after these steps; give more --steps")


def _cells(row: dict[str, Any], share: float) -> list[str]:
    return [
        str(row["extract_layers"][0]),
        str(row["inject_layer"]),
        str(row["compression"]),
        f"{row['continuation']['memory']['mean']:.3f}",
        f"{share:.0%}",
        f"{row['continuation']['true_states']['mean']:.3f}",
        f"{row['recall']['memory']['mean']:.3f}",
        f"{row['bytes_per_token']:,.0f}",
        f"{row['seconds']:.0f}",
    ]
