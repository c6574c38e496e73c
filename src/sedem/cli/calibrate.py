"""The command `sedem calibrate`: a confidence for a trained checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sedem.cli import output
from sedem.cli.options import EngineOption, Json, OptionEntries, parse_options

MOST = 2000
"""Questions of a sample by default: three parameters need no more, and reading takes time."""


def calibrate(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder or hub id of a trained model.")
    ],
    data: Annotated[
        str,
        typer.Option(metavar="NAME|FILE", help="Questions with evidence, or a public set."),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder of the new checkpoint.")
    ],
    schema: Annotated[
        str | None, typer.Option(metavar="NAME", help="Schema of the data. [default: detected]")
    ] = None,
    records: Annotated[
        str | None, typer.Option(metavar="START:STOP", help="Records of the set.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="Split of a set that has several.")
    ] = None,
    option: OptionEntries = None,
    limit: Annotated[
        int, typer.Option(metavar="N", help="Questions in a seeded sample of the set.")
    ] = MOST,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the sample.")] = 0,
    engine: EngineOption = "auto",
    as_json: Json = False,
) -> None:
    """Fit the confidence that the documents have the evidence.

    Every question is scored against its documents with and without those that have its evidence.
    Give questions that the model was trained on, or others that no evaluation uses. The last
    quarter is not fitted to; the figures are measured on it.
    """
    from sedem.backbone.loading import hide_bars
    from sedem.checkpoint.folder import copy_with_part, locate
    from sedem.data.question_sets import open_examples
    from sedem.evaluation.run import sample
    from sedem.model import SeDeM
    from sedem.training.calibration import calibrate as fit

    opened = open_examples(data, schema, records=records, split=split, **parse_options(option))
    examples = sample(opened.examples, limit, seed)
    hide_bars()
    folder = locate(checkpoint)
    model = SeDeM.from_pretrained(folder, engine=engine)
    with output.progress("reading") as report_progress:
        found = fit(model, examples, report_progress)
    copy_with_part(folder, out, "confidence", found.part, confidence=True)
    if as_json:
        output.print_json({"checkpoint": str(out), **found.to_dict()})
        return
    output.write(
        f"{out}: fitted to {output.count(found.fitted, 'question')} with and without evidence"
    )
    output.write(
        f"on {output.count(found.held_out, 'other question')}: AUROC {found.auroc:.3f}, "
        f"calibration error {found.calibration_error:.3f}"
    )
    if found.left_out:
        output.note(
            f"{output.count(found.left_out, 'question')} left out: no evidence is labelled, or "
            "all blocks have some"
        )
