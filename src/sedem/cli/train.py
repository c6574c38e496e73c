"""The commands of `sedem train`: the stages of SeDeM and the baselines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from sedem.cli.evaluate import METHOD, MethodOrVerb
from sedem.cli.output import write

RecipeOption = Annotated[
    Path, typer.Option("--config", metavar="FILE", help="The recipe, a YAML file.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a value, such as run.output=DIR; repeatable."
    ),
]
PrintConfig = Annotated[
    bool,
    typer.Option("--print-config", help="Print the recipe with every value, and do not train."),
]

train_app = typer.Typer(
    cls=MethodOrVerb,
    no_args_is_help=True,
    rich_markup_mode=None,
    subcommand_metavar="stage1|stage2|METHOD ...",
    help="Train SeDeM or a baseline from a recipe.",
    epilog="An interrupted run resumes when its command is given again.",
)


@train_app.command()
def stage1(
    config: RecipeOption, overrides: Overrides = None, print_config: PrintConfig = False
) -> None:
    """Train compressor and decompressor on text.

    An interrupted run resumes when its command is given again.
    """
    _train_stage("stage1", config, overrides, print_config)


@train_app.command()
def stage2(
    config: RecipeOption, overrides: Overrides = None, print_config: PrintConfig = False
) -> None:
    """Train selection and answering on questions.

    An interrupted run resumes when its command is given again.
    """
    _train_stage("stage2", config, overrides, print_config)


@train_app.command(METHOD)
def baseline(
    context: typer.Context,
    config: RecipeOption,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
) -> None:
    """Train a baseline on text or questions.

    An interrupted run resumes when its command is given again.
    """
    from sedem.training.baseline import train_baseline
    from sedem.training.baseline_recipe import load_baseline_recipe

    recipe = load_baseline_recipe(str(context.info_name), config, overrides or ())
    _train(recipe, train_baseline, print_config)


def _train_stage(stage: str, config: Path, overrides: list[str] | None, print_config: bool) -> None:
    from sedem.training.recipe import load_recipe
    from sedem.training.stages import STAGES

    kind, train = STAGES[stage]
    _train(load_recipe(kind, config, overrides or ()), train, print_config)


def _train(recipe: Any, train: Callable[[Any], Path], print_config: bool) -> None:
    """Train by a recipe and write the folder of the final checkpoint, or only write the recipe."""
    import logging

    from sedem.training.recipe import as_yaml

    if print_config:
        typer.echo(as_yaml(recipe), nl=False)
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    write(str(train(recipe)))
