"""`sedem cost --bank TOKENS`: its options, and how the cost of a bank is written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

import typer

from sedem.cli.output import count, note, print_json, print_table, write
from sedem.config import DEFAULT_MODEL
from sedem.durable_files import bytes_text
from sedem.errors import ConfigError

TIMES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
MOST = 10**15
_NUMBER = re.compile(r"(\d[\d_,]*(?:\.\d+)?)(?:[eE]\+?(\d{1,2}))?([KMBGT]?)", re.ASCII)
NOT_MEASURED = "not measured"

BankTokens = Annotated[
    str | None,
    typer.Option(
        "--bank",
        metavar="TOKENS",
        help="The cost of a bank of so many tokens: 12000000, 1e9, 10M, 2.5B or 1T.",
    ),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Bank: its model, a shipped one, a folder, a hub id or llama-3.2-1b. "
        "[default: sedem-nano]",
    ),
]
Questions = Annotated[
    float | None,
    typer.Option(
        "--questions-per-second", metavar="Q", help="Bank: questions a second. [default: 1]"
    ),
]
Searched = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Bank: tokens that a question searches, if there are many banks. [default: all]",
    ),
]
DocumentTokens = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Bank: tokens of a document, whose last block may be short. [default: every block "
        "is full]",
    ),
]
AnswerTokens = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Bank: tokens of an answer. [default: 16]")
]
MachineOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--machine",
        metavar="KEY=NUMBER",
        help="Bank: what is assumed of a machine: devices (cores or GPUs), memory_gb (for keys), "
        "price (an hour), storage_price (a TB and month), load (0 to 1), days (to build in), "
        "score_seconds (for one question); repeatable.",
    ),
]
Simulate = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Bank: simulate the queues, and find the engines with which 99 of 100 questions have "
        "their first token after so many seconds.",
    ),
]


@dataclass(frozen=True)
class BankOptions:
    """What the command line says about a bank; None means the default.

    Attributes:
        bank: tokens, as text.
        checkpoint: the model.
        questions: a second.
        searched: tokens that a question searches, as text.
        document_tokens: tokens of a document, as text.
        answer_tokens: tokens of an answer.
        machine: KEY=NUMBER entries.
        simulate: seconds to the first token.
        tflops: rate at which FLOPs are counted.
    """

    bank: str | None
    checkpoint: str | None
    questions: float | None
    searched: str | None
    document_tokens: str | None
    answer_tokens: int | None
    machine: list[str] | None
    simulate: float | None
    tflops: float | None


def parse_tokens(text: str) -> int:
    """A number of tokens, such as 12000000, 12_000_000, 1e9, 10M, 2.5B (or G) or 1T.

    Raises:
        ConfigError: the text is something else, no whole number, or not within 1 and 10^15.
    """
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise ConfigError(
            f"'{text}' is not a token count; give one like 12000000, 1e9, 10M, 2.5B or 1T"
        )
    digits, exponent, unit = found.groups()
    number = Fraction(re.sub("[_,]", "", digits)) * 10 ** int(exponent or 0) * TIMES[unit]
    if number.denominator != 1 or not 1 <= number <= MOST:
        raise ConfigError(f"'{text}' is {float(number):g} tokens; give a whole number up to 1e15")
    return int(number)


def parse_machine(entries: list[str] | None) -> dict[str, Any]:
    """Parse KEY=NUMBER entries of `--machine` into arguments of `Machines`.

    Raises:
        ConfigError: a key is unknown, or a value is no number.
    """
    from dataclasses import fields

    from sedem.scale.costs import Machines

    kinds = {field.name: int if field.name == "devices" else float for field in fields(Machines)}
    found: dict[str, Any] = {}
    for entry in entries or ():
        key, _, text = entry.partition("=")
        if key not in kinds:
            raise ConfigError(f"--machine {entry}: give {', '.join(kinds)}, each as KEY=NUMBER")
        try:
            found[key] = kinds[key](text)
        except ValueError:
            whole = "whole " if kinds[key] is int else ""
            raise ConfigError(f"--machine {entry}: '{text}' is no {whole}number") from None
    return found


def bank_cost_command(options: BankOptions, as_json: bool) -> None:
    """Print what a bank costs.

    Raises:
        ConfigError: an option is out of range, or the model is unknown.
    """
    assert options.bank is not None
    from sedem.evaluation.cost import Workload
    from sedem.scale.costs import Machines, Plan, bank_cost

    tokens, texts = parse_tokens(options.bank), (options.searched, options.document_tokens)
    searched, document = (None if text is None else parse_tokens(text) for text in texts)
    workload = Workload() if options.answer_tokens is None else Workload(
        answer=options.answer_tokens
    )  # fmt: skip
    rate = 1.0 if options.questions is None else options.questions
    plan = Plan(tokens, rate, searched, document, workload)
    machines = Machines(**parse_machine(options.machine))
    result = bank_cost(options.checkpoint or DEFAULT_MODEL, plan, machines, tflops=options.tflops)
    if options.simulate is not None:
        from sedem.scale.sizing import sized

        result["simulation"] = sized(result, options.simulate)
    if as_json:
        print_json(result)
    else:
        print_bank_cost(result)


def print_bank_cost(result: dict[str, Any]) -> None:
    """Write the size, the machines and the money of a bank, and what is assumed."""
    write(f"{result['model']}: {result['tokens']:,} tokens in {count(result['blocks'], 'block')}")
    write(f"unit costs: {result['basis']}" + ("" if result["is_measured"] else "; at least"))
    write()
    _print_bytes(result["bytes"])
    write()
    _print_machines(result)
    write()
    money = result["money"]
    rows = [
        ("cost of reading 1M tokens", _number(money["per_million_tokens_read"])),
        ("cost of 1M questions", _number(money["per_million_questions"])),
        ("cost a month of slots, keys and text", _number(money["storage_per_month"])),
    ]
    print_table(rows)
    if "simulation" in result:
        write()
        _print_simulation(result["simulation"])
    write()
    assumed = result["assumptions"].items()
    told = ", ".join(f"{n.replace('_', ' ')} {v:,}" for n, v in assumed if v is not None)
    write(f"assumed, not measured: {told}")
    _print_notes(result)


def _print_bytes(sizes: dict[str, Any]) -> None:
    rows = []
    for name, what in (("slots", "slots"), ("keys", "keys"), ("kept", "kept keys and values")):
        rows += [(what, dtype, bytes_text(size)) for dtype, size in sizes[name].items()]
    rows.append(("pooled keys", "bfloat16", bytes_text(sizes["pooled_keys"])))
    for name, what in (("text", "text"), ("catalog", "open catalog")):
        shown = NOT_MEASURED if sizes[name] is None else bytes_text(sizes[name])
        rows.append((what, "", shown))
    print_table(rows, ("bank", "type", "size"), left=(0, 1))


def _print_machines(result: dict[str, Any]) -> None:
    build, score, answer = result["build"], result["score"], result["answer"]
    rows = [
        (
            "read, per million tokens",
            _seconds(build["device_seconds"], result["tokens"] / 1e6),
            _machines(build["machines"]),
            "the days to build in",
        )
    ]
    for search in ("exact", "coarse"):
        one = score[search]
        mark = "*" if search == score["search"] else ""
        seconds = _seconds(one["device_seconds_a_question"])
        because = one["because_of"] or f"memory: {one['machines_for_memory']:,}"
        rows.append((f"score, {search}{mark}", seconds, _machines(one["machines"]), because))
    seconds = _seconds(answer["device_seconds_a_question"])
    rows.append(("answer", seconds, _machines(answer["machines"]), "the questions a second"))
    headings = ("work", "device seconds", "machines", "because of")
    print_table(rows, headings, left=(0, 3))


def _print_simulation(simulation: dict[str, Any]) -> None:
    write(
        f"simulated: first token within {simulation['first_token_s']:g} s for 99 of 100 questions; "
        f"{count(simulation['partitions'], 'partition')}"
    )
    rows = []
    for name in ("poisson", "bursts"):
        found = simulation[name]
        if found["engines"] is None:
            rows.append((name, f"{found['scorers']:,}", "no number is enough", *["-"] * 4))
            continue
        times = (found[f"{what}_p{part}_s"] for what in ("first", "end") for part in (50, 99))
        machines = (f"{found['scorers']:,}", f"{found['engines']:,}")
        rows.append((name, *machines, *(f"{time:.3g}" for time in times)))
    headings = (
        "arrivals",
        "scorers a part",
        "engines",
        "first p50, s",
        "first p99, s",
        "end p50, s",
        "end p99, s",
    )
    print_table(rows, headings)


def _print_notes(result: dict[str, Any]) -> None:
    score = result["score"]
    recall = score["recall"]
    if score["search"] == "exact":
        note(
            f"* sedem scores every block of a bank of up to {score['exact_up_to_blocks']:,} "
            f"blocks ({score['exact_up_to_tokens']:,} tokens)"
        )
    else:
        note(
            f"* above {score['exact_up_to_blocks']:,} blocks pooled keys choose "
            f"{score['candidates']:,} candidates; about {recall['percent']:.0f} % of the best "
            f"blocks are among them ({recall['how']}); `sedem serve --ray` scores exactly with "
            f"{score['parts_for_exact']:,} partitions or more"
        )
    if result["not_measured"]:
        note(
            f"not measured for '{result['model']}': {', '.join(result['not_measured'])}; "
            "--tflops X gives lower bounds from FLOPs"
        )


def _seconds(value: float | None, parts: float = 1.0) -> str:
    return NOT_MEASURED if value is None else f"{value / parts:,.3g}"


def _machines(value: int | None) -> str:
    return NOT_MEASURED if value is None else f"{value:,}"


def _number(value: float | str | None) -> str:
    if value is None:
        return NOT_MEASURED
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"
