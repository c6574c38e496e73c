"""The command `sedem cost`."""

from __future__ import annotations

from typing import Annotated

import typer

from sedem.cli import output
from sedem.cli.options import Json


def cost(
    backbone: Annotated[
        str,
        typer.Argument(
            metavar="BACKBONE", help="llama-3.2-1b, llama-3.2-3b, a folder or a hub id."
        ),
    ],
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A baseline instead of SeDeM: icae, hmt, 500x or beacon."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Count the parameters of a model and the FLOPs of an answer, without loading weights."""
    from sedem_lab.evaluation.cost import cost as count

    result = count(backbone, method=method)
    if as_json:
        output.print_json(result)
        return
    # Parameters and FLOPs of SeDeM or of a trained baseline, and what they assume.
    parameters, flops = dict(result["parameters"]), dict(result["flops"])
    percent = parameters.pop("percent" if "percent" in parameters else "percent_without_lora")
    assumptions = flops.pop("assumptions")
    added = ("added", f"{percent:.2f}", "% of the backbone")
    rows = [
        (name.replace("_", " "), f"{value / 1e6:.2f}", "M parameters")
        for name, value in parameters.items()
    ]
    output.print_table([*rows, added], left=(0, 2))
    output.write()
    rows = [(name, f"{value / 1e9:.1f}", "GFLOPs") for name, value in flops.items()]
    output.print_table(rows, left=(0, 2))
    output.write("for " + ", ".join(f"{n.replace('_', ' ')} {v}" for n, v in assumptions.items()))
