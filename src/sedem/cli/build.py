"""The `build` command: documents into a bank, on this machine or on the workers of a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sedem.cli import output
from sedem.cli.models import model_of, open_model
from sedem.cli.options import BankPlace, Model
from sedem.errors import ConfigError, DataError

if TYPE_CHECKING:
    from sedem.reading.building import Report

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C has ended."""


def build(
    bank: BankPlace,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Files (.txt, .md, .html, .pdf, .docx), folders of them, or patterns such as "
            "'reports/**/*.pdf'; with --ray also .jsonl, .parquet and places such as "
            "s3://BUCKET/FOLDER.",
        ),
    ],
    model: Model = None,
    encoding: Annotated[
        str, typer.Option(metavar="NAME", help="Encoding of text and HTML files.")
    ] = "utf-8",
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going",
            help="Skip files that cannot be read; they are listed, and the exit status is 1.",
        ),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="How a new bank stores slots: bfloat16, int8 or fp8. [default: bfloat16]",
        ),
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Also store the selector's keys, as bfloat16, int8 or fp8: a larger bank, "
            "faster answers.",
        ),
    ] = None,
    no_text: Annotated[
        bool,
        typer.Option(
            "--no-text",
            help="Keep no texts in a new bank, only their SHA-256; sources are read from the "
            "files, if these are still there and unchanged.",
        ),
    ] = False,
    no_words: Annotated[
        bool, typer.Option("--no-words", help="Make a new bank without an index of words.")
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Read on the workers of a Ray cluster: HOST:PORT, ray://HOST:PORT, auto for the "
            "one that runs here, local for one that is started here.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="With --ray, the most workers. [default: one a GPU, or a CPU]"
        ),
    ] = None,
    worker_cpus: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="With --ray, CPUs of a worker. [default: 1]"),
    ] = None,
) -> None:
    """Read files into a new or existing bank.

    Unchanged files are skipped; a changed file replaces its old version. Files are read one after
    the other, and every commit is durable: an interrupted build resumes when its command is given
    again. A file that cannot be read ends the build; what was read before it is in the bank. With
    --ray, other machines read and this one commits; the bank is the same.
    """
    if ray is None and (workers or worker_cpus):
        raise ConfigError("--workers and --worker-cpus are for a Ray cluster; give --ray ADDRESS")
    options = {"dtype": dtype, "keys": keys, "no_text": no_text, "words": not no_words}
    files = _files(sources, encoding, keep_going, on_ray=ray is not None)
    try:
        if ray is None:
            report = _build_here(bank, files, model, options)
        else:
            limits = {"most": workers, "cpus": worker_cpus or 1}
            report = _build_on_ray(ray, limits, bank, files, model, options)
    except KeyboardInterrupt:
        output.error("interrupted; run it again to continue after the last commit")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        for failure in files.failed:
            output.error(failure)
    output.write(
        f"{bank}: {report.added} added, {report.replaced} replaced, {report.unchanged} unchanged; "
        f"the bank holds {output.count(report.documents, 'document')} "
        f"in {output.count(report.blocks, 'block')}"
    )
    if files.failed:
        raise typer.Exit(1)


def _files(sources: list[str], encoding: str, keep_going: bool, on_ray: bool) -> Any:
    """The files to read; torch is not imported for it, so a wrong name is told at once."""
    from sedem.bank.parts import is_remote
    from sedem.data.documents import DocumentFiles

    if on_ray:
        from sedem.ray.sources import Sources

        return Sources(sources, encoding, keep_going)
    for source in filter(is_remote, sources):
        raise DataError(
            f"'{source}' is in an object store; read it with --ray, such as --ray local"
        )
    return DocumentFiles([Path(source) for source in sources], encoding, keep_going=keep_going)


def _build_here(bank: str, files: Any, model: str | None, options: dict[str, Any]) -> Report:
    """Build on this machine."""
    from sedem.reading.building import build_bank

    opened = open_model(model or model_of(bank))
    with output.progress("reading", of_bytes=True) as report_progress:
        return build_bank(
            opened,
            opened.engine,
            bank,
            files,
            lambda done: report_progress(done, sum(files.sizes.values())),
            size=lambda document: files.sizes[document.name],
            source=opened.source,
            **options,
        )


def _build_on_ray(
    address: str,
    limits: dict[str, Any],
    bank: str,
    files: Any,
    model: str | None,
    options: dict[str, Any],
) -> Report:
    """Build on the workers of a cluster, whose address is tried before the model is opened."""
    from sedem.ray.cluster import connected

    with connected(address):
        from sedem.ray.build import Workers, build_on_ray

        name = model or model_of(bank)
        opened = open_model(name)
        # A worker has another working folder.
        checkpoint = os.path.abspath(name) if os.path.isdir(name) else name
        with output.progress("reading", of_bytes=True, speed="tokens/s") as report_progress:
            return build_on_ray(
                opened,
                Workers(address, checkpoint, **limits),
                bank,
                files,
                report_progress,
                source=opened.source,
                **options,
            )
