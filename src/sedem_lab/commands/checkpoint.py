"""The commands that change or share a checkpoint: `sedem calibrate`, `seal` and `push`."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from sedem.cli import output
from sedem.cli.options import (
    Json,
    OptionEntries,
    data_options,
)
from sedem.config import WAYS, check_choice, parse_hops
from sedem_lab.commands.train import RECIPE, Overrides, recipe_path

MOST, SEED = 2000, 0
"""Questions of a sample by default, and its seed: a few parameters need no more questions, and
reading takes time."""


def calibrate(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder or hub id of a trained model.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder of the new checkpoint.")
    ],
    data: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Questions with evidence, or a public set."),
    ] = None,
    schema: Annotated[
        str | None, typer.Option(metavar="NAME", help="Schema of the data. [default: detected]")
    ] = None,
    option: OptionEntries = None,
    recipe: Annotated[str | None, typer.Option(metavar="NAME|FILE", help=RECIPE)] = None,
    overrides: Overrides = None,
    limit: Annotated[
        int, typer.Option(metavar="N", help="Questions in a seeded sample of a set.")
    ] = MOST,
    selection: Annotated[
        str, typer.Option(metavar="NAME", help="What to select by: states, words or both.")
    ] = "both",
    answer: Annotated[
        str, typer.Option(metavar="NAME", help="How to answer: free, span or auto.")
    ] = "auto",
    hops: Annotated[
        str,
        typer.Option(metavar="1|2|auto", help="How often to select, if a second hop is trained."),
    ] = "1",
    read_once: Annotated[
        bool,
        typer.Option("--read-once", help="Let the decoder's states of a question select, too."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Fit the weight of words, a second hop, the confidence and the choice of quotations.

    Every question is scored against its documents with and without those that have its evidence,
    and answered. Give questions that neither training nor an evaluation uses, in a file or as
    data.calibration of the recipe. The second hop is trained on data.hops of a recipe, if it has
    any, and --read-once on its data.training. The last quarter is not fitted to; the figures are
    measured on it.
    """
    from sedem.checkpoint.folder import copy_with_parts, locate
    from sedem.model import SeDeM
    from sedem_lab.data.question_sets import open_examples
    from sedem_lab.evaluation.run import sample
    from sedem_lab.training.calibration import K, recipe_examples, samples
    from sedem_lab.training.calibration import calibrate as fit
    from sedem_lab.training.recipe import load_recipe
    from sedem_lab.training.stages import Stage2Recipe

    ways: dict[str, Any] = {"selection": selection, "answer": answer, "hops": parse_hops(hops)}
    for name, value in ways.items():
        check_choice(name, value, WAYS[name])
    teach: dict[str, Any] = {}
    if (data is None) == (recipe is None):
        raise typer.BadParameter("give either --data or --recipe")
    if recipe is not None:
        used = load_recipe(Stage2Recipe, recipe_path(recipe), overrides or ())
        examples = recipe_examples(used, limit, SEED)
        teach["two_steps"] = [*chain(*samples(used, used.data.hops, limit, SEED))]
        if read_once:
            teach["read_once"] = [*chain(*samples(used, used.data.training, limit, SEED))]
    elif read_once:
        raise typer.BadParameter("--read-once needs a recipe, from whose data.training it learns")
    elif data is not None:
        opened = open_examples(data, schema, **data_options(option))
        examples = sample(opened.examples, limit, SEED)
    folder = locate(checkpoint)
    model = SeDeM.from_pretrained(folder)
    with output.progress("reading, answering") as report_progress:
        found = fit(model, examples, progress=report_progress, **teach, **ways)
    copy_with_parts(folder, out, found.parts, **found.settings)

    def listed(values: dict[str, float], word: str = "", digits: int = 3) -> str:
        return ", ".join(f"{value:.{digits}f} {word}{name}" for name, value in values.items())

    lines = [
        f"{out}: fitted to {output.count(found.fitted, 'question')} with and without evidence",
        f"on {output.count(found.held_out, 'other question')}: AUROC {found.auroc:.3f}, "
        f"calibration error {found.calibration_error:.3f}",
        f"declined below {found.settings['min_confidence']}: {listed(found.declined)}",
        f"the best block is evidence: {listed(found.recall, 'by ')}",
    ]
    if found.all_found:
        shares = listed(found.all_found, "with ")
        lines.append(f"all evidence is among {K} blocks, by hops: {shares}")
    if found.f1:
        lines.append(f"F1: {listed(found.f1, digits=1)}")
    output.report(as_json, {"checkpoint": str(out), **found.to_dict()}, *lines)
    if found.left_out and not as_json:
        output.note(
            f"{output.count(found.left_out, 'question')} left out: no evidence is labelled, or "
            "all blocks have some"
        )


LISTED = 10
"""Names of files that `seal` lists."""


def seal(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Its folder.")],
) -> None:
    """Accept the files of a checkpoint as they are.

    Their sizes and hashes are written to its manifest, against which every opening checks them.
    Do this after a change by hand, and to a checkpoint that has no manifest.
    """
    from sedem.checkpoint.folder import MANIFEST, seal

    left_out = seal(checkpoint)
    output.write(f"{checkpoint / MANIFEST}: written")
    if left_out:
        listed = ", ".join(left_out[:LISTED])
        more = f" and {len(left_out) - LISTED:,} more" if left_out[LISTED:] else ""
        output.note(f"no part of a checkpoint, so left out: {listed}{more}")


def push(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder, such as runs/mine/final.")
    ],
    repository: Annotated[str, typer.Argument(metavar="REPO", help="As OWNER/NAME.")],
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository private.")
    ] = False,
    with_backbone: Annotated[
        bool,
        typer.Option("--with-backbone", help="Include a backbone that is a local folder."),
    ] = False,
) -> None:
    """Upload a checkpoint to the Hugging Face hub, with a model card.

    The card tells the budget, data and scores of its training. A card already in the folder or
    repository is kept.
    """
    from sedem.checkpoint.folder import locate
    from sedem.checkpoint.hub import push_folder

    folder = locate(checkpoint)
    output.write(push_folder(folder, repository, private=private, with_backbone=with_backbone))
