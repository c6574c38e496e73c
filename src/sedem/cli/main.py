"""The `sedem` command: demo, build, ask, init and bank; other packages add the others.

Each command imports what it needs when it runs, so `--help` is fast.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import entry_points, version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from sedem.cli import bank as bank_commands
from sedem.cli import init, output
from sedem.cli.options import (
    AnswerOption,
    AskedPlace,
    BankPlace,
    BudgetOption,
    ConditionOption,
    EngineOption,
    HopsOption,
    Json,
    Model,
    ReaderModelOption,
    ReaderOption,
    SelectionOption,
    reader_at,
)
from sedem.config import DEFAULT_MODEL, FOLDER_BANKS, NO_BARS, parse_hops, parse_k
from sedem.durable_files import write_text
from sedem.errors import ConfigError, DataError, SedemError, first_line, printable

if TYPE_CHECKING:
    from sedem.answering.running import Estimate
    from sedem.bank.memory_bank import MemoryBank, Snapshot
    from sedem.model import SeDeM
    from sedem.reading.followed import FollowedBank
    from sedem.types import Answer, Citation

SNIPPET = 100
"""Characters of a source that are shown."""
SHARED = 3
"""Words that a source shares with the question, the rarest, that are shown."""
_SPACES = re.compile(r"\s+")

ORDER = (
    "demo", "build", "ask", "bank", "data", "init", "train", "calibrate", "seal",
    "push", "eval", "bench", "cost", "serve", "mcp",
)  # fmt: skip
"""The commands as the help lists them."""


INTERRUPTED = 130
"""Exit status of a command that Ctrl-C has ended."""


COMMANDS = "sedem.commands"
"""The group of entry points by which packages add commands: a function or a Typer app each."""
BUILDERS = "sedem.builders"
"""The group of those that read documents on other machines."""


class Commands(TyperGroup):
    """Has the commands of other packages too; reports errors as one line, with exit code 1."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands in the order of the help, those of others last."""
        names = {*super().list_commands(ctx), *entry_points(group=COMMANDS).names}
        known = [name for name in ORDER if name in names]
        return known + sorted(names.difference(known))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; those of this distribution take precedence."""
        if (command := super().get_command(ctx, cmd_name)) is not None:
            return command
        points = entry_points(group=COMMANDS, name=cmd_name)
        for point in sorted(points, key=lambda point: getattr(point.dist, "name", "") != "sedem"):
            try:
                found = point.load()
            except Exception as error:  # whatever the code of others raises
                found = _broken(
                    f"command '{cmd_name}' cannot be imported from '{point.value}' "
                    f"({first_line(error)}); update or uninstall its package"
                )
            if not isinstance(found, typer.Typer):
                alone = typer.Typer()
                alone.command()(found)
                found = alone
            # As those of this package: help is plain text, and `sedem` itself has completion.
            found.rich_markup_mode, found._add_completion = None, False
            return typer.main.get_command(found)
        return None

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except SedemError as error:
            output.error(str(error))
            raise typer.Exit(1) from None
        except BrokenPipeError:
            raise
        except OSError as error:
            # Such as a full disk, a name that is too long or a folder that may not be read.
            place = f"'{error.filename}': " if error.filename else ""
            output.error(f"{place}{error.strerror or error}")
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bank_commands.bank_app, name="bank")
app.command()(init.init)


def _broken(problem: str) -> Callable[[typer.Context], None]:
    """Return a command that raises an error when it runs, so that the help can list it."""

    def broken(context: typer.Context) -> None:
        raise ConfigError(problem)

    broken.__doc__ = f"(error: {problem})"
    return broken


def _show_version(wanted: bool) -> None:
    if wanted:
        output.write(f"sedem {version('sedem')}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Read documents once into a memory bank, then answer questions from it."""
    os.environ.setdefault(NO_BARS, "1")  # transformers has one for its weights


@app.command()
def demo(k: BudgetOption = None) -> None:
    """Read bundled documents and ask about them."""
    from sedem.demo import DOCUMENTS, QUESTIONS
    from sedem.model import SeDeM
    from sedem.reading.documents import read_documents

    model = SeDeM.from_pretrained(DEFAULT_MODEL)
    documents = [
        type(document)(Path(document.name).name, document.text)
        for document in read_documents(sorted(DOCUMENTS.glob("*.txt")))
    ]
    with output.progress("reading") as report_progress:
        bank = model.read(documents, progress=report_progress)
    output.write(
        f"read {output.count(len(documents), 'document')}, "
        f"{sum(len(d.text) for d in documents):,} characters, "
        f"into {output.count(len(bank), 'block')}"
    )
    output.write()
    for question in QUESTIONS:
        output.write(f"? {question}")
        print_answer(model, bank, question, parse_k(k))
    output.write(
        f"{model.name} is a small model and often wrong; the spans it answered from are exact."
    )


@app.command()
def build(
    bank: BankPlace,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Files (text, PDF, Office, web pages, tables, mail, source code), folders of "
            "them, or patterns such as 'reports/**/*.pdf'; with --ray also .jsonl, .parquet and "
            "places such as s3://BUCKET/FOLDER.",
        ),
    ],
    model: Model = None,
    encoding: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Encoding of text and HTML files. [default: found out by file]"
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict/--keep-going",
            help="End at a file that cannot be read, or leave it out and list it.",
        ),
    ] = False,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Also read files and folders of this name or path, such as '.notes' or '*.xyz', "
            "that folders are read without; repeatable.",
        ),
    ] = None,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune", help="Remove documents whose files were deleted from the given folders."
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

    Unchanged files are skipped; a changed file replaces its old version. Documents whose files were
    deleted or renamed are named, and stay unless --prune is given. Files are read one after
    the other, and every commit is durable: an interrupted build resumes when its command is given
    again. Files that cannot be read are left out and listed; so is what is no document in a folder,
    such as hidden files, programs, lock files and empty files. With --ray, other machines read and
    this one commits; the bank is the same.
    """
    if ray is None and (workers or worker_cpus):
        raise ConfigError("--workers and --worker-cpus are for a Ray cluster; give --ray ADDRESS")
    if ray is not None and prune:
        raise ConfigError("--prune compares the bank with files of this machine; leave --ray out")
    from sedem.bank.file import is_remote
    from sedem.bank.memory_bank import store_at
    from sedem.reading.documents import DocumentFiles, Record, told_left_out

    options: dict[str, Any] = {"dtype": dtype, "keys": keys, "words": not no_words}
    reading: dict[str, Any] = {
        "encoding": encoding, "strict": strict, "include": include or (),
    }  # fmt: skip
    record, gone, paths = Record(bank), list[str](), [Path(source) for source in sources]
    if not os.path.exists(bank):
        record.forget()  # it is of an earlier bank
    # Before the model is opened, so that a wrong name is told at once.
    if ray is None:
        for source in filter(is_remote, sources):
            raise DataError(
                f"'{source}' is in an object store; read it with --ray, such as --ray local"
            )
        files: Any = DocumentFiles(paths, **reading, name_of=record.name_of)
    else:
        files = _on_ray().Sources(sources, **reading)
    try:
        if ray is not None:
            limits = {"most": workers, "cpus": worker_cpus or 1}
            report = _on_ray().build(ray, limits, bank, files, model, options)
        else:
            from sedem.checkpoint.folder import model_of
            from sedem.model import SeDeM
            from sedem.reading.building import build_bank, held_by

            opened = SeDeM.from_pretrained(model or model_of(bank))
            with output.progress("reading", of_bytes=True) as report_progress:
                report = build_bank(
                    opened,
                    opened.engine,
                    bank,
                    files,
                    lambda done: report_progress(done, sum(files.sizes.values())),
                    size=lambda document: files.sizes[document.name],
                    source=opened.source,
                    failed=files.fail,
                    **options,
                )
            if not report.documents:
                raise DataError(
                    "nothing could be read; give at least one document with words in it"
                )
            # Documents whose files are gone are named, or removed if that is wanted.
            store = store_at(bank)
            gone = record.gone([*store.digests()], paths, files.paths)
            record.save()
            if gone and prune:
                store.remove(*gone)
                documents, blocks = held_by(store)
                report = replace(report, documents=documents, blocks=blocks)
    except DataError:
        if files.sizes or not files.failed:
            raise
        # Why nothing was read is the error, told once.
        raise DataError(files.failed.pop()) from None
    except KeyboardInterrupt:
        if os.path.exists(bank):
            record.save()
        output.error("interrupted; run it again to continue after the last commit")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        for failure in files.failed:
            output.error(failure)
        for note in [*files.notes, *filter(None, [record.told(bank)])]:
            output.note(note)
    what = "removed" if prune else "with --prune, it would remove"
    output.write(
        f"{bank}: {report.added} added, {report.replaced} replaced, {report.unchanged} unchanged; "
        f"the bank holds {output.count(report.documents, 'document')} "
        f"in {output.count(report.blocks, 'block')}"
        f"{told_left_out({'the file is gone': gone} if gone else {}, what)}"
        f"{told_left_out(files.left_out)}"
    )


def _on_ray() -> Any:
    """The module that builds on the machines of a cluster, of another package."""
    (builder,) = entry_points(group=BUILDERS, name="ray")
    return builder.load()


@app.command()
def ask(
    bank: AskedPlace,
    question: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="QUESTION",
            help="With or without quotes. Without it, one question a line from stdin.",
        ),
    ] = None,
    k: BudgetOption = None,
    condition: ConditionOption = None,
    selection: SelectionOption = None,
    hops: HopsOption = None,
    answer: AnswerOption = None,
    min_confidence: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Decline to answer if the confidence, from 0 to 1, is below X; 0 always answers. "
            "[default: the model's]",
        ),
    ] = None,
    document: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Answer from this document of the bank alone; repeatable."
        ),
    ] = None,
    reader: ReaderOption = None,
    reader_model: ReaderModelOption = None,
    as_json: Json = False,
    model: Model = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", help="Limit of an answer in tokens.")
    ] = 64,
    engine: EngineOption = "auto",
) -> None:
    """Answer questions from a bank, or from a folder of documents, with sources.

    A folder is read into a bank under ~/.sedem/folders, and later only what is new in it. What
    cannot be read is named when it is new, and tried again when it changes, or an hour later.

    The sources are the spans that the answer was conditioned on; the words of a quoted answer are
    marked in theirs. Control characters are shown as
    escapes; --json has every text exactly. A question on stdin that cannot be asked is reported,
    the others are answered, and the exit status is 1.

    With --reader, your own model writes the answer, and -k is the number of passages it is given.
    """
    chosen_k, chosen_hops = parse_k(k), parse_hops(hops)
    own = reader_at(reader, reader_model) if reader or reader_model else None
    from sedem.answering.decoding import Decoding
    from sedem.bank.memory_bank import MemoryBank
    from sedem.checkpoint.folder import model_of
    from sedem.model import SeDeM

    decoding = Decoding(max_new_tokens=max_new_tokens)
    followed = _folder(bank, model)
    name = model or (DEFAULT_MODEL if followed else model_of(bank))
    opened: Any = None if followed else MemoryBank.open(bank)
    answering = SeDeM.from_pretrained(name, engine=engine)
    if followed is not None:
        opened = _caught_up(followed, answering)
    opened.check_made_by(answering.fingerprint())
    options: dict[str, Any] = {
        "k": chosen_k,
        "decoding": decoding,
        "condition": condition,
        "selection": selection,
        "hops": chosen_hops,
        "answer": answer,
        "min_confidence": min_confidence,
        "documents": document or None,
        "reader": own,
    }

    def checked(found: Answer) -> Answer:
        """Say which sources have no file any more; the answer does not wait for it."""
        from sedem.reading.documents import Record

        return (Record(bank) if followed is None else followed.record).with_notes(found)

    failed = False
    questions = iter([" ".join(question)]) if question else output.questions_from_stdin()
    for number, one in enumerate(questions, start=1):
        try:
            if as_json:
                found = answering.answer(opened, one, **options)
                output.print_json(checked(found).to_dict())
            else:
                print_answer(answering, opened, one, checked=checked, **options)
        except DataError as error:
            if question:
                raise
            # A bad question of a batch costs itself alone.
            failed = True
            output.error(f"question {number}: {error}")
            if as_json:
                output.print_json({"question": one, "error": str(error)})
    if failed:
        raise typer.Exit(1)


def _folder(place: str, model: str | None) -> FollowedBank | None:
    """Return the bank that follows a folder of documents; None if a place is none."""
    if not Path(place).expanduser().is_dir():
        return None
    from sedem.reading.followed import FollowedBank
    from sedem.reading.places import banks_at

    (bank,) = banks_at([place], FOLDER_BANKS, model or DEFAULT_MODEL)
    return bank if isinstance(bank, FollowedBank) else None


def _caught_up(followed: FollowedBank, model: SeDeM) -> Snapshot:
    """Read what is new in a folder, and return its bank."""
    from sedem.reading.documents import UNKNOWN

    total, read = followed.waiting, model.reads_into()
    with output.progress("reading") as report_progress:
        while followed.catch_up(read, briefly=True):
            report_progress(total - followed.waiting, total)
        if total:
            report_progress(total, total)
    unread = *followed.unreadable(), *followed.left_out([UNKNOWN]), *followed.remarks()
    left_out = [printable(one) for one in unread]
    trouble = [*filter(None, [followed.reading()])]
    if (snapshot := followed.snapshot()) is None:
        told = "; ".join([*left_out, *trouble])
        raise DataError(told or f"'{followed.folder}' holds no file that can be read")
    # What was left out is told when it is new; later, it is only counted.
    file = followed.path.with_suffix(".told")
    known = file.read_text("utf-8").splitlines() if file.is_file() else []
    news = [one for one in left_out if one not in known]
    for sentence in (*news, *trouble):
        output.note(sentence)
    if news:
        write_text(file, "\n".join(left_out))
    elif left_out:
        output.note(f"{output.count(len(left_out), 'note')} on what was not read: see '{file}'")
    return snapshot


# Answers


def print_answer(
    model: SeDeM,
    bank: MemoryBank,
    question: str,
    k: int | str | None,
    checked: Callable[[Answer], Answer] = lambda answer: answer,
    **options: Any,
) -> None:
    """Write an answer piece by piece, then what is known about it and its sources.

    Args:
        checked: returns the answer with further notes.
    """
    from sedem.types import joint

    def estimated(told: Estimate) -> None:
        output.note(
            f"reading {output.count(told.blocks, 'block')} takes about {told.seconds:,.0f} s"
        )

    stream = model.stream(bank, question, k=k, estimated=estimated, **options)
    for piece in stream:
        typer.echo(printable(piece, keep="\n"), nl=False)
    assert stream.answer is not None
    output.write()
    answer, facts = checked(stream.answer), []
    if answer.model != model.name:
        facts.append(
            f"written by {Path(answer.model).name} from {output.count(answer.k, 'passage')}"
        )
    elif (model.config.k if k is None else k) == "auto":
        facts.append(f"from {answer.k:,} of {output.count(answer.blocks, 'block')}")
    if (probability := joint(answer.answer_confidence, answer.confidence)) is not None:
        other = "" if answer.alternative is None else f"; perhaps: {printable(answer.alternative)}"
        facts.append(f"{answer.certainty} ({probability:.2f}{other})")
    if answer.confidence is not None:
        facts.append(f"source found ({answer.confidence:.2f})")
    if facts:
        output.write(f"  {', '.join(facts)}")
    if answer.unsupported:
        output.write(f"  not in the sources: {' '.join(answer.unsupported)}")
    if answer.sentences:
        read = [f"{document}:{start}-{end}" for document, start, end in answer.sentences]
        output.write(f"  decided by the text of {printable(', '.join(read))}")
    # The spans that it was conditioned on, best first, and what was truncated. A reader is given
    # more than it names.
    notes = dict.fromkeys(answer.cut)
    named = [one for one in answer.citations if one.answer_spans]
    for citation in named if named and answer.model != model.name else answer.citations:
        shown = _snippet(citation)
        words = "".join(f", {word}" for word in citation.words[:SHARED])
        score = "" if citation.score is None else f" ({citation.score:.1f}{words})"
        page = "" if citation.page is None else f", page {citation.page:,}"
        place = f"{citation.document}{page}:{citation.start}-{citation.end}"
        also = f" (also in {', '.join(citation.also)})" if citation.also else ""
        output.write(f"  [{citation.rank}] {place}{printable(also)}{score}  {shown}".rstrip())
    for sentence in notes:
        output.write(f"  note: {sentence}")
    output.write()


def _snippet(citation: Citation) -> str:
    """The beginning of a span, or what is around the answer's words, which are marked."""
    text, start = citation.text, citation.start
    if not citation.answer_spans or not text:
        line = " ".join(text.split())
        return line if len(line) <= SNIPPET else f"{line[: SNIPPET - 3]}..."
    edges = [edge - start for span in citation.answer_spans for edge in span]
    pieces = [_SPACES.sub(" ", text[a:b]) for a, b in pairwise([0, *edges, len(text)])]
    words, (before, *between, after) = pieces[1::2], pieces[::2]
    room = max(0, SNIPPET - len("".join(words))) // (len(words) + 1)
    before, after = before.lstrip(), after.rstrip()
    if len(before) > room:
        before = f"...{before[len(before) - room :]}"
    if len(after) > room:
        after = f"{after[:room]}..."
    between = [
        one if len(one) <= room else f"{one[: room // 2]}...{one[len(one) - room // 2 :]}"
        for one in between
    ]
    rest = (f"{gap}**{word}**" for gap, word in zip([before, *between], words, strict=True))
    return f"{''.join(rest)}{after}"
