"""The command `sedem cost`: of a model's answers, of a training run, or of a bank of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sedem.cli import bank_cost, output
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
            help="Training: TFLOP/s that a GPU sustains. [default: 400] Bank: the same, to count "
            "times from FLOPs instead of taking what was measured.",
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
    bank: bank_cost.BankTokens = None,
    checkpoint: bank_cost.Checkpoint = None,
    questions_per_second: bank_cost.Questions = None,
    searched: bank_cost.Searched = None,
    document_tokens: bank_cost.DocumentTokens = None,
    answer_tokens: bank_cost.AnswerTokens = None,
    machine: bank_cost.MachineOptions = None,
    simulate: bank_cost.Simulate = None,
    as_json: Json = False,
) -> None:
    """Count what answers, a training run or a bank take.

    BACKBONE gives an answer's FLOPs, a recipe the training's, with memory and hours, --bank the
    bytes, the machines and the money of a bank. No weights are loaded.
    """
    of_bank = (checkpoint, questions_per_second, searched, document_tokens, answer_tokens)
    if bank is not None:
        others = (backbone, method, recipe, config, overrides, examples, context)
        if any(value is not None for value in others) or gpus != 1:
            raise typer.BadParameter("--bank takes no BACKBONE and no training options")
        options = bank_cost.BankOptions(bank, *of_bank, machine, simulate, tflops)
        bank_cost.bank_cost_command(options, as_json)
        return
    if any(value is not None for value in (*of_bank, machine, simulate)):
        raise typer.BadParameter("options of a bank need --bank TOKENS")
    if backbone is None:
        _training_cost(recipe, config, overrides, tflops, gpus, examples, context, as_json)
        return
    if recipe is not None or config is not None:
        raise typer.BadParameter("give either BACKBONE or a recipe; a recipe names its backbones")
    from sedem.evaluation.cost import cost as count
    from sedem.evaluation.overhead import baseline_cost

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
        raise typer.BadParameter("give a BACKBONE, --recipe NAME, --config FILE or --bank TOKENS")
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
