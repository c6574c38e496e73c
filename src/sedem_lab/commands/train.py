"""The commands of `sedem train`: both stages of SeDeM, and the baselines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from sedem.cli.output import print_table, write
from sedem_lab.commands.evaluate import METHOD, MethodOrVerb

RecipeName = Annotated[
    str | None,
    typer.Option("--recipe", metavar="NAME", help="A recipe that ships with sedem: nano/stage1."),
]
RecipeBackbone = Annotated[
    str | None,
    typer.Option(
        "--backbone", metavar="NAME", help="Backbone of a --recipe that has several; see --list."
    ),
]
RecipeFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A recipe of yours, a YAML file.")
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

COMMANDS = {
    "stage1": "Train compressor and decompressor on text.",
    "stage2": "Train selection and answering on questions.",
    METHOD: "Train a baseline on text or questions.",
}

train_app = typer.Typer(
    cls=MethodOrVerb,
    rich_markup_mode=None,
    subcommand_metavar="stage1|stage2|METHOD ...",
    help="Train SeDeM or a baseline from a recipe.",
    epilog="An interrupted run resumes when its command is given again.",
)


@train_app.callback(invoke_without_command=True)
def trainings(
    context: typer.Context,
    list_recipes: Annotated[
        bool, typer.Option("--list", help="List the recipes that ship with sedem.")
    ] = False,
    launch_file: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Print the path of a file for 'accelerate launch': eight-gpus, two-machines, ...",
        ),
    ] = None,
) -> None:
    """Train SeDeM or a baseline from a recipe."""
    if launch_file is not None:
        from sedem_lab.training.shipped_recipes import launch_file as shipped

        write(str(shipped(launch_file)))
    elif list_recipes:
        from sedem_lab.training.shipped_recipes import backbones_of, shipped_recipes, what_trains

        rows = [
            (
                name,
                f"sedem train {what_trains(path)} --recipe {name}",
                ", ".join(backbones_of(name)),
            )
            for name, path in shipped_recipes().items()
        ]
        print_table(rows, ("recipe", "command", "--backbone"), left=(0, 1, 2))
    elif context.invoked_subcommand is None:
        raise typer.BadParameter("give stage1, stage2 or a METHOD, and --recipe; or --list")


def train(
    context: typer.Context,
    recipe: RecipeName = None,
    backbone: RecipeBackbone = None,
    config: RecipeFile = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
) -> None:
    """Train by a recipe and write the folder of the final checkpoint, or only print the recipe."""
    import logging

    from sedem_lab.training.baseline import load_baseline_recipe, train_baseline
    from sedem_lab.training.recipe import as_yaml, load_recipe
    from sedem_lab.training.run_setup import processes
    from sedem_lab.training.stages import STAGES

    path, name = recipe_path(recipe, config, backbone), str(context.info_name)
    run: Callable[[Any], Path] = train_baseline
    if name in STAGES:
        kind, run = STAGES[name]
        loaded: Any = load_recipe(kind, path, overrides or ())
    else:
        loaded = load_baseline_recipe(name, path, overrides or ())
    if print_config:
        typer.echo(as_yaml(loaded), nl=False)
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    folder = run(loaded)
    if processes().is_main_process:
        write(str(folder))


for command, what in COMMANDS.items():
    train_app.command(
        command, help=f"{what}\n\nAn interrupted run resumes when its command is given again."
    )(train)


def recipe_path(recipe: str | None, config: Path | None, backbone: str | None = None) -> Path:
    """The recipe that a command names, by `--recipe` and `--backbone` or by `--config`."""
    if recipe is not None and config is None:
        from sedem_lab.training.shipped_recipes import shipped_recipe

        return shipped_recipe(recipe, backbone)
    if config is None or recipe is not None or backbone is not None:
        raise typer.BadParameter(
            "give either --recipe NAME ('sedem train --list' lists them), with or without "
            "--backbone NAME, or --config FILE"
        )
    return config
