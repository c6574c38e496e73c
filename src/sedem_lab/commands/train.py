"""The command `sedem train`: both stages of SeDeM, and the baselines."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from sedem.cli.output import note, print_table, write

RECIPE = "A recipe that ships with sedem, such as nano/stage1, or a YAML file of yours."
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a value of the recipe, such as run.output=DIR; repeatable.",
    ),
]

train_app = typer.Typer()


@train_app.command()
def train(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help=RECIPE)] = None,
    overrides: Overrides = None,
    print_config: Annotated[
        bool,
        typer.Option("--print-config", help="Print the recipe with every value, and do not train."),
    ] = False,
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
    """Train SeDeM or a baseline from a recipe.

    The recipe says what is trained: a stage of SeDeM, or a baseline on text or questions. The
    folder of the final checkpoint is printed. An interrupted run resumes when its command is given
    again.
    """
    from sedem_lab.training import shipped_recipes as shipped
    from sedem_lab.training.recipe import as_yaml, what_trains

    if launch_file is not None:
        write(str(shipped.launch_file(launch_file)))
        return
    if list_recipes:
        rows = [
            (name, what_trains(path), ", ".join(shipped.backbones_of(name)))
            for name, path in shipped.shipped_recipes().items()
        ]
        print_table(rows, ("recipe", "trains", "backbones"), left=(0, 1, 2))
        default = shipped.DEFAULT_BACKBONE
        note(f"the backbone is {default}, unless named as in paper/llama-3.2-3b/stage1")
        return
    if recipe is None:
        raise typer.BadParameter("give a recipe, by a name of 'sedem train --list' or as a file")
    import logging

    from sedem_lab.training.run_setup import processes
    from sedem_lab.training.stages import load_run

    loaded, run = load_run(recipe_path(recipe), overrides or ())
    if print_config:
        typer.echo(as_yaml(loaded), nl=False)
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    folder = run(loaded)
    if processes().is_main_process:
        write(str(folder))


def recipe_path(recipe: str) -> Path:
    """The file of a recipe, which is one of the user's or one that ships with sedem."""
    if recipe.endswith((".yaml", ".yml")) or os.path.isfile(recipe):
        return Path(recipe)
    from sedem_lab.training.shipped_recipes import shipped_recipe

    return shipped_recipe(recipe)
