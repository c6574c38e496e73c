"""The commands of `sedem bank`: list, show, check, edit and copy a bank."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sedem.cli.options import BankPlace, Json, Model
from sedem.cli.output import note, print_facts, print_json, print_table, progress, report, write
from sedem.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sedem.bank.care import DamagedDocument
    from sedem.bank.file import BankFile
    from sedem.engine.interface import Engine
    from sedem.model import SeDeM

bank_app = typer.Typer(no_args_is_help=True, help="List, show, check, edit and copy a bank.")


@bank_app.command("ls")
def list_documents(bank: BankPlace, as_json: Json = False) -> None:
    """List the documents of a bank."""
    import numpy as np

    from sedem.bank.memory_bank import MemoryBank

    opened = MemoryBank.open(bank)
    named = opened.documents
    counts = np.bincount(opened.blocks.documents, minlength=len(named)).tolist()
    documents = [
        {"document": name, "characters": named.characters(index), "blocks": counts[index]}
        for index, name in enumerate(named.names)
    ]
    if as_json:
        print_json(documents)
        return
    rows = [
        (f"{entry['characters']:,}", f"{entry['blocks']:,}", str(entry["document"]))
        for entry in documents
    ]
    print_table(rows, ("characters", "blocks", "document"), left=(2,))


@bank_app.command()
def show(bank: BankPlace, as_json: Json = False) -> None:
    """Show a bank's model, size and storage."""
    from sedem.reading.building import describe

    facts = describe(bank)
    if as_json:
        print_json(facts)
        return
    unfinished = facts.pop("unfinished")
    print_facts(facts.items())
    for name in unfinished:
        note(f"reading '{name}' was interrupted; run its build again to continue")


@bank_app.command()
def verify(
    bank: BankPlace,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Set a damaged file aside, read damaged documents again and drop the rest.",
        ),
    ] = False,
    sources: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="File of a document whose text is damaged too; repeatable.",
        ),
    ] = None,
    drop: Annotated[
        bool,
        typer.Option("--drop", help="Read nothing again: drop every damaged document."),
    ] = False,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Check a bank against its checksums, and repair it.

    A repair copies everything intact into a new file, which takes the place of the damaged one. A
    document that lost a part is read again from the text in the bank, or from a file of the same
    name and content. The damaged file gets the ending .damaged; sedem never deletes it.
    Meanwhile, no other process can use the bank.
    """
    from sedem.bank.care import examine_all
    from sedem.bank.memory_bank import store_at

    store = store_at(bank)
    if not repair:
        if sources or drop:
            raise ConfigError("--from and --drop belong to --repair; add it")
        damage = examine_all(store)
        facts = {"problems": damage.problems, "documents": damage.documents}
        report(as_json, facts, *(f"{bank}: {one}" for one in damage.problems or ["all is well"]))
        if damage.problems:
            raise typer.Exit(1)
        return
    from sedem.bank.care import repair as repair_bank
    from sedem.bank.file import BankFile
    from sedem.checkpoint.folder import model_of
    from sedem.model import SeDeM
    from sedem.reading.building import reading_again
    from sedem.reading.documents import read_documents

    if not isinstance(store, BankFile):
        raise ConfigError(
            "--repair is for banks in one file; remove damaged documents with 'sedem bank rm "
            f"{bank} DOCUMENT...', and build them again"
        )

    def opened(new: BankFile) -> tuple[SeDeM, Engine]:
        found = SeDeM.from_pretrained(model or model_of(str(new.path)))
        return found, found.engine

    def again(new: BankFile, lost: Sequence[DamagedDocument]) -> Iterable[str]:
        if drop:
            return ()
        with progress("characters read again") as report_progress:
            return reading_again(opened, documents, report_progress)(new, lost)

    documents = read_documents(sources or [])
    done = asdict(repair_bank(store, again))
    lines = list(done["problems"] or ["all is well"])
    for what in ("set_aside", "repaired", "read_again", "dropped"):
        lines += [f"{what.replace('_', ' ')} '{name}'" for name in done[what]]
    report(as_json, done, *(f"{bank}: {line}" for line in lines))


@bank_app.command("rm")
def remove(
    bank: BankPlace,
    documents: Annotated[
        list[str], typer.Argument(metavar="DOCUMENT", help="Names of the documents.")
    ],
) -> None:
    """Remove documents from a bank.

    All of them are removed in one commit, or none. 'sedem bank compact' gives their space back.
    """
    from sedem.bank.memory_bank import store_at

    store_at(bank).remove(*documents)
    for name in dict.fromkeys(documents):
        write(f"{bank}: removed '{name}'")


@bank_app.command()
def compact(
    bank: BankPlace,
    keep: Annotated[
        float | None,
        typer.Option(
            "--keep",
            metavar="HOURS",
            min=0,
            help="For a bank in parts: keep files that are younger. [default: 24]",
        ),
    ] = None,
) -> None:
    """Reclaim the space of removed documents.

    Answers stay the same. Of a bank in parts, it deletes the files that the bank does not need any
    more, and what a killed writer has left.
    """
    from datetime import timedelta

    from sedem.bank.file import BankFile
    from sedem.bank.memory_bank import store_at
    from sedem.bank.parts import KEEP

    store = store_at(bank)
    if not isinstance(store, BankFile):
        sizes = store.compact(KEEP if keep is None else timedelta(hours=keep))
    elif keep is None:
        sizes = store.compact()
    else:
        raise ConfigError(f"--keep is for banks in parts; '{bank}' is one file: leave it out")
    write(f"{bank}: {sizes.bytes_before:,} bytes before, {sizes.bytes_after:,} bytes now")


@bank_app.command()
def copy(
    bank: BankPlace,
    target: Annotated[
        str, typer.Argument(metavar="DEST", help="New file of the copy, or s3://BUCKET/NAME.")
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Check all of the copy before it appears.")
    ] = False,
    parts: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Write N parts, which many machines can serve, into a folder."
        ),
    ] = None,
) -> None:
    """Copy a bank as of one commit, even while it is written.

    Bank and copy may each be a file or in an object store; a bank in parts becomes one file. Use
    --check for a bank that goes to somebody, or comes from somebody.
    """
    from sedem.bank.copies import copy_bank, split

    if check and parts:
        raise ConfigError("--check is for a copy in one file; check parts by 'sedem bank verify'")
    size = split(bank, target, parts) if parts else copy_bank(bank, target, check=check)
    write(f"{target}: {size:,} bytes from {bank}")
