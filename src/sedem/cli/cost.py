"""The command `sedem cost`: of a model's answers, or of a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sedem.cli import output
from sedem.cli.options import Json
from sedem.cli.report import print_cost, print_training_cost
from sedem.cli.train import Overrides, RecipeFile, RecipeName, recipe_path


def cost(
    backbone: Annotated[
        str | None,
        typer.Argument(
            metavar="BACKBONE", help="llama-3.2-1b, llama-3.2-3b, a folder or a hub id."
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A baseline instead of SeDeM: icae, hmt, 500x or beacon."
        ),
    ] = None,
    recipe: RecipeName = None,
    config: RecipeFile = None,
    overrides: Overrides = None,
    tflops: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Training: TFLOP/s that a GPU sustains. [default: 400]",
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(metavar="N", min=1, help="Training: number of GPUs.")] = 1,
    examples: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Training: examples of an epoch, if not known."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Training: mean tokens of a question's documents. [default: 2048]",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Count what answers or a training run take.

    BACKBONE gives an answer's FLOPs, a recipe the training's, with memory and hours. No weights are
    loaded.
    """
    if backbone is None:
        _training_cost(recipe, config, overrides, tflops, gpus, examples, context, as_json)
        return
    if recipe is not None or config is not None:
        raise typer.BadParameter("give either BACKBONE or a recipe; a recipe names its backbones")
    from sedem.evaluation.baseline_cost import baseline_cost
    from sedem.evaluation.cost import cost as count

    result = baseline_cost(method, backbone) if method else count(backbone)
    if as_json:
        output.print_json(result)
    else:
        print_cost(result)


def _training_cost(
    recipe: str | None,
    config: Path | None,
    overrides: list[str] | None,
    tflops: float | None,
    gpus: int,
    examples: int | None,
    context: int | None,
    as_json: bool,
) -> None:
    if recipe is None and config is None:
        raise typer.BadParameter("give a BACKBONE, --recipe NAME or --config FILE")
    path = recipe_path(recipe, config)
    from sedem.bench.training_cost import TFLOPS, Assumed, training_cost
    from sedem.evaluation.cost import Workload

    workload = Workload() if context is None else Workload(context=context)
    assumed = Assumed(tflops or TFLOPS, gpus, examples, workload)
    result = training_cost(path, overrides or [], assumed)
    if as_json:
        output.print_json(result)
    else:
        print_training_cost(result)
