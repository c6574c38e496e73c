"""The studies: run what is missing, print tables, draw pictures, and write the pages."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from experiments import pages
from experiments.system.scales import PAPER, SCALES, Scale
from experiments.system.stand_in import stand_in
from experiments.system.tables import Study, markdown_table
from sedem.errors import SedemError


def _study(name: str) -> Study:
    if name not in pages.STUDIES:
        raise typer.BadParameter(f"no study is called '{name}'; `list` prints their names")
    return pages.STUDIES[name]


def _scale(name: str) -> Scale:
    if name not in SCALES:
        raise typer.BadParameter(f"scale is '{name}'; it can be {', '.join(SCALES)}")
    return SCALES[name]


def _numbers(text: str, pattern: str, error: str) -> tuple[int, int]:
    if not (found := re.fullmatch(pattern, text)):
        raise typer.BadParameter(error)
    return int(found[1]), int(found[2])


ScaleOption = Annotated[str, typer.Option(help=f"One of {', '.join(SCALES)}.")]
NameArgument = Annotated[str, typer.Argument(help="A study; see `list`.")]
app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.command()
def run(
    names: Annotated[list[str] | None, typer.Argument(help="Studies. [default: all]")] = None,
    scale: ScaleOption = "nano",
    data: Annotated[Path, typer.Option(help="Folder of the data files.")] = Path("data"),
    only: Annotated[
        str | None,
        typer.Option(help="Only studies whose name contains this; if none does, only such cells."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure cells with a result too.")
    ] = False,
    at_once: Annotated[
        int | None,
        typer.Option(help="Processes at once. [default: 1; of stand-ins, as many as cores]"),
    ] = None,
    part: Annotated[
        str, typer.Option(help="Only this part of the cells, such as 2/8, for several machines.")
    ] = "1/1",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what it needs, and measure nothing.")
    ] = False,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="GiB of a GPU: a dry run fails if a training needs more. [default: prints for 80]",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE for every recipe that is trained; recorded."),
    ] = None,
    small: Annotated[
        bool, typer.Option("--stand-in", help="Tiny backbones and records: does every cell run?")
    ] = False,
) -> None:
    """Measure every missing cell; train the models that it needs first."""
    from experiments.system.measures import connected, measure_missing

    found = names or list(pages.STUDIES)
    if matching := [name for name in found if only and only in name]:
        found, only = matching, None
    if (small or dry_run) and scale != PAPER.name:
        option = "--stand-in" if small else "--dry-run"
        raise typer.BadParameter(f"{option} is of the scale {PAPER.name}, not of {scale}")
    if gpu_memory is not None and not dry_run:
        raise typer.BadParameter("--gpu-memory is of a dry run; give --dry-run, too")
    wanted = stand_in(_scale(scale)) if small else _scale(scale)
    wanted = replace(wanted, changes=tuple(changes or ()))
    if small:
        torch.set_num_threads(1)  # tiny models, and a process for every core
    if dry_run:
        from experiments.system.needs import print_needs

        words = ["python", "-m", "experiments", *sys.argv[1:]]
        command = re.sub(r" --(dry-run|gpu-memory[ =]\S+)", "", shlex.join(words))
        size = int((gpu_memory or 80) * 2**30)
        fits = print_needs(map(_study, found), wanted, data, command, size)
        raise typer.Exit(gpu_memory is not None and not fits)
    wrong = f"part is '{part}'; it must be like 2/8, the second of eight"
    number, count = _numbers(part, r"([1-9]\d*)/([1-9]\d*)", wrong)
    if number > count:
        raise typer.BadParameter(wrong)
    others = []
    if count == 1 and "WORLD_SIZE" not in os.environ:
        count = at_once or (os.cpu_count() or 1 if small else 1)
        same = [sys.executable, "-m", "experiments", *sys.argv[1:], "--part"]
        others = [subprocess.Popen([*same, f"{n}/{count}"]) for n in range(2, count + 1)]
    cells, failed = measure_missing(
        *(map(_study, found), wanted, data, only, again, (number - 1, count)),
        before_times=lambda: [other.wait() for other in others],
    )
    if number == 1 and connected().is_main_process:
        for name in failed:
            typer.echo(f"failed: {name}")
        typer.echo(f"tables: {pages.write_tables(wanted)}")
        typer.echo(f"{cells} cells, {cells - len(failed)} ran")
    raise typer.Exit(bool(failed))


@app.command()
def table(name: NameArgument, scale: ScaleOption = "nano") -> None:
    """Print our numbers, and below them the paper's and the difference."""
    study = _study(name)
    found = study.table(_scale(scale)).replace("<br>", "; ")
    shown = f"# {study.title}, {scale} scale", study.note, found
    typer.echo("\n\n".join(filter(None, shown)))


@app.command("list")
def list_studies() -> None:
    """Print the name and the title of every study."""
    for name, study in pages.STUDIES.items():
        typer.echo(f"{name:20} {study.title}")


@app.command()
def page() -> None:
    """Write the tables and pictures of README.md, the model card and docs/."""
    for path in pages.PAGES:
        pages.write(path)


@app.command()
def probe(
    backbone: Annotated[str, typer.Argument(help="Folder or hub id of a backbone.")],
    documents: Annotated[list[Path], typer.Argument(help="Text files and folders of them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of results.")],
    layers: Annotated[
        list[str] | None,
        typer.Option(help="Extraction and injection layer, such as 16:10. [default: quarters]"),
    ] = None,
    compression: Annotated[
        list[int] | None, typer.Option(help="Tokens of a slot. [default: 1, 2, 4]")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of one run.")] = 100,
    batch_size: Annotated[int, typer.Option(help="Windows of one step.")] = 16,
) -> None:
    """Choose layers and a compression for a new backbone by short runs of stage 1."""
    from experiments.system import probe
    from sedem_lab.data.corpus import read_texts

    for path in documents:
        if not path.exists():
            raise typer.BadParameter(f"there is no file or folder '{path}'")
    given: dict[str, Any] = {"compressions": tuple(compression)} if compression else {}
    given["layers"] = tuple(
        _numbers(pair, r"(\d+):(\d+)", f"layers are '{pair}'; give two, such as 16:10")
        for pair in layers or ()
    )
    settings = probe.ProbeSettings(steps=steps, batch_size=batch_size, **given)
    texts = (text for path in documents for text in read_texts(path))
    result = probe.probe(backbone, texts, settings, out, lambda name: typer.echo(name, err=True))
    ends, chosen = result["ends"], result["recommended"]
    rows = ["extract, inject, C, loss, kept, own states, recall loss, bytes a token".split(", ")]
    for row in result["runs"]:
        place = row["extract_layers"][0], row["inject_layer"], row["compression"]
        memory, own = (row["continuation"][name]["mean"] for name in ("memory", "true_states"))
        losses = f"{memory:.3f}", f"{probe.kept(row, ends):.0%}", f"{own:.3f}"
        recall = f"{row['recall']['memory']['mean']:.3f}", f"{row['bytes_per_token']:,.0f}"
        rows.append([*map(str, place), *losses, *recall])
    typer.echo(markdown_table(rows))
    text, nothing = (ends["continuation"][end]["mean"] for end in ("raw_text", "nothing"))
    typer.echo(f"loss with the text itself {text:.3f}, with nothing {nothing:.3f}")
    wanted = {key: chosen[key] for key in ("extract_layers", "inject_layer", "compression")}
    sets = {"encoder": backbone, **wanted}.items()
    shown = " ".join(f"--set {shlex.quote(f'model.{key}={value}')}" for key, value in sets)
    typer.echo(f"sedem train RECIPE {shown}")
    if probe.kept(chosen, ends) <= 0:
        typer.echo("no setting helps yet after these steps; give more --steps", err=True)


if __name__ == "__main__":
    try:
        app()
    except SedemError as error:
        sys.exit(f"Error: {error}")
