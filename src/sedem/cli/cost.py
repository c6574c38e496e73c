"""The command `sedem cost`: of a model's answers, or of a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sedem.cli import output
from sedem.cli.options import Json
from sedem.cli.train import Overrides, RecipeFile, RecipeName, recipe_path
from sedem.durable_files import bytes_text


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


def print_cost(result: dict[str, Any]) -> None:
    """Write parameters and FLOPs of SeDeM or of a trained baseline, and what they assume."""
    parameters = dict(result["parameters"])
    percent = parameters.pop("percent" if "percent" in parameters else "percent_without_lora")
    flops = dict(result["flops"])
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


def print_training_cost(result: dict[str, Any]) -> None:
    """Write what a training run will take, and what that assumes."""
    tokens = result["tokens"]
    rows = [
        ("steps", f"{result['steps']:,}", f"of {result['examples_per_step']:,} examples"),
        ("examples", f"{result['examples']:,}", ""),
        ("tokens read frozen", f"{tokens['frozen'] / 1e9:.3f}", "billion"),
        ("positions with gradient", f"{tokens['with_gradient'] / 1e9:.3f}", "billion"),
        ("hours", f"{result['hours']:.3g}", ""),
    ]
    output.print_table(rows, left=(0, 2))
    output.write()
    rows = [(name, f"{value / 1e15:.4g}", "PFLOPs") for name, value in result["flops"].items()]
    output.print_table(rows, left=(0, 2))
    output.write()
    sizes: dict[str, int] = result["bytes"]
    names = {"memory": "memory of a GPU", "cache_on_disk": "cache on disk"}
    output.print_table([(str(names.get(n, n)), bytes_text(value)) for n, value in sizes.items()])
    told = ", ".join(f"{n.replace('_', ' ')} {v:g}" for n, v in result["assumptions"].items())
    output.write(f"for {told}; activations and logits are estimates")
