"""The command `sedem adapt`: a checkpoint trained on one's own documents, without labels."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from sedem.cli import output
from sedem.cli.options import Json, LayerOption
from sedem.errors import ConfigError


def adapt(
    backbone: Annotated[
        str,
        typer.Argument(
            metavar="BACKBONE", help="Folder or hub id of a backbone, or of a sedem checkpoint."
        ),
    ],
    documents: Annotated[
        list[Path],
        typer.Argument(metavar="DOC", help="Files as for 'sedem build', or folders of them."),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder of the new checkpoint.")
    ],
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Steps of both stages, of 8 windows or questions each. "
            "[default: by the size of the documents]",
        ),
    ] = None,
    compression: Annotated[
        int | None,
        typer.Option("-C", "--compression", metavar="N", help="Tokens of a slot. [default: 4]"),
    ] = None,
    layer: LayerOption = None,
    segment_length: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of a block. [default: 128]")
    ] = None,
    held_out: Annotated[
        float,
        typer.Option(metavar="X", help="Share of the documents that only measures the result."),
    ] = 0.1,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of everything that is drawn.")] = 0,
    encoding: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Encoding of the files. [default: found out by file]"),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="cpu or cuda. [default: a GPU if there is one]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train on your own documents, without any labels.

    Questions are cut from the documents. Data, recipes and runs lie in DIR.work; if it is killed,
    run the same command again. A checkpoint keeps its layers, its compression and its blocks.
    """
    budget = _steps(steps)
    _use(device)
    from sedem.reading.documents import files_in, read_documents
    from sedem_lab.training import adapt as adapting

    wanted = adapting.Adaptation(
        backbone=backbone,
        steps=budget,
        compression=compression,
        layer=layer,
        segment_length=segment_length,
        held_out=held_out,
        seed=seed,
    )
    texts = read_documents(files_in(documents), encoding)
    report = adapting.finished(wanted, texts, out)
    if report is not None:
        output.note(f"'{out}' is finished; nothing is left to do")
    else:
        sizes, (one, two) = adapting.prepare(wanted, texts, out)
        used = output.count(sizes.questions, "question")
        if sizes.questions_not_used:
            used += f" of {sizes.questions + sizes.questions_not_used:,}"
        output.note(
            f"{output.count(sizes.documents, 'document')}, {sizes.tokens:,} tokens, {used}; "
            f"{one:,} and {two:,} steps; files in '{adapting.working_folder(out)}'"
        )
        report = adapting.adapt(out)
    if as_json:
        output.print_json({"checkpoint": str(out), **report})
    else:
        _print(report, out, adapting.working_folder(out))


def _steps(text: str | None) -> tuple[int, int] | None:
    """Parse the value of --steps."""
    if text is None:
        return None
    try:
        one, two = map(int, text.split(","))
    except ValueError:
        raise ConfigError(
            f"steps is '{text}'; give the steps of stage 1 and stage 2, such as 300,200"
        ) from None
    return one, two


def _use(device: str | None) -> None:
    """Choose the device, before torch looks for one."""
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"device is '{device}'; it can be cpu or cuda")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("device is 'cuda', but torch finds no GPU; leave it out, or use cpu")


def _print(report: dict[str, Any], out: Path, work: Path) -> None:
    sizes, (one, two), place = report["sizes"], report["steps"], shlex.quote(str(out))
    output.print_facts(
        [
            ("checkpoint", out),
            ("documents", f"{sizes['documents']:,}, {sizes['tokens']:,} tokens"),
            ("questions", f"{sizes['questions']:,}, cut from the documents"),
            ("steps", f"{one:,} of stage 1, {two:,} of stage 2"),
        ]
    )
    output.write()
    rows = [
        (name, *(f"{value:.{3 if 'loss' in name else 1}f}" for value in values))
        for name, values in report["scores"].items()
    ]
    output.print_table(rows, ("on held-out documents", "before", "after"))
    output.write()
    output.write(f"sedem build my.bank FILE ... -m {place}")
    output.write(f"sedem ask my.bank QUESTION -m {place}")
    if work.is_dir():
        output.note(f"'{work}' has the questions, recipes and runs; remove it when you like")
