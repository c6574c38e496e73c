"""Cost of a token, a block and a question, and banks of up to 10^12 tokens. Not in the paper.

`python -m experiments.scale_costs write` puts the unit costs into the package, for `sedem cost
--bank`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from experiments.system import unit_costs
from experiments.system.scales import Scale
from experiments.system.study import NOT_RUN, Number, Study, command, markdown_table
from sedem.config import DEFAULT_MODEL
from sedem.durable_files import bytes_text
from sedem.scale.costs import Machines, Plan, bank_cost
from sedem.scale.unit_costs import table

SIZES = tuple(10**power for power in range(7, 13))
"""Sizes of the displayed banks, in tokens."""
RATES = (1, 100, 10_000)
"""Questions per second."""
SEARCHED = 10**7
"""Tokens of one of many banks, which is searched exactly."""


def numbers(scale: Scale) -> list[Number]:
    """The measurements behind the unit costs."""
    return [figure.number(model) for model, figure in unit_costs.figures(scale)]


def render(scale: Scale) -> str:
    """Measurements with their origin, then what banks cost."""
    if scale.name != "nano":
        return NOT_RUN
    costs = [bank_cost(DEFAULT_MODEL, Plan(tokens)) for tokens in SIZES]
    machines = Machines()
    assumed = (
        f"Assumed, not measured: machines of {machines.devices} cores with "
        f"{machines.memory_gb:g} GB for keys, {machines.price:g} an hour; "
        f"{machines.storage_price:g} a TB and month; machines are busy {machines.load:.0%} of the "
        f"time; a bank is built within {machines.days:g} days, and a question scored within "
        f"{machines.score_seconds:g} s; answers of 16 tokens."
    )
    parts = [_figures(scale), assumed, _sizes(costs), _scoring(costs), _rates()]
    return "\n\n".join(parts)


def _figures(scale: Scale) -> str:
    """Each measurement with the number of its file, then the files."""
    found = table()
    files, rows = list(found["files"]), []
    for model, figure in unit_costs.figures(scale):
        number = figure.number(model)
        value, path = number.ours(scale), figure.cell.path(scale)
        shown, origin = NOT_RUN, ""
        if value is not None and path is not None:
            shown = f"{value[0]:,.{figure.digits}f}"
            origin = str(1 + [Path(file).name for file in files].index(path.name))
        rows.append([figure.title, shown, origin])
    listed = [
        f"{place}. `{file}`: {about['made_on']}; commit {about['commit']['id'][:10]}"
        + (" with changes" if about["commit"]["dirty"] else "")
        for place, (file, about) in enumerate(found["files"].items(), start=1)
    ]
    head = ["one core, sedem-nano", "measured", "file"]
    return "\n".join([markdown_table([head, *rows]), "", *listed])


def _power(tokens: int) -> str:
    return f"{tokens:.0e}".replace("e+0", "e").replace("e+", "e")


def _sizes(costs: Sequence[dict[str, Any]]) -> str:
    head = ["tokens", "blocks", "slots", "slots, int8", "keys", "pooled keys", "kept, int8"]
    head += ["text", "core days to read", "machines", "a million tokens"]
    rows = []
    for one in costs:
        sizes, build = one["bytes"], one["build"]
        shown = [sizes["slots"]["bfloat16"], sizes["slots"]["int8"], sizes["keys"]["bfloat16"]]
        shown += [sizes["pooled_keys"], sizes["kept"]["int8"], sizes["text"]]
        days = build["device_seconds"] / 86400
        row = [_power(one["tokens"]), f"{one['blocks']:,}"]
        row += [*map(bytes_text, shown), f"{days:,.3g}", f"{build['machines']:,}"]
        rows.append([*row, f"{one['money']['per_million_tokens_read']:.4f}"])
    return markdown_table([head, *rows])


def _scoring(costs: Sequence[dict[str, Any]]) -> str:
    head = ["tokens searched", "search", "% of the best 2 among candidates", "core s, exact"]
    head += ["core s, coarse", "machines for 1 question a second", "because of"]
    rows = []
    for one in costs:
        score = one["score"]
        used, recall = score[score["search"]], score["recall"]
        found = f"{recall['percent']:.0f}, {recall['how']}"
        if recall["how"] == "exact search":
            found = "all"
        seconds = (score[kind]["device_seconds_a_question"] for kind in ("exact", "coarse"))
        row = [_power(one["tokens"]), score["search"], found]
        row += [f"{spent:,.3g}" for spent in seconds]
        rows.append([*row, f"{used['machines']:,}", used["because_of"]])
    return markdown_table([head, *rows])


def _rates() -> str:
    head = ["bank", "questions a second", "machines that score", "because of"]
    head += ["machines that answer", "a million questions"]
    rows = []
    for name, searched in (("one of 1e12 tokens", None), ("many of 1e7, 1e12 in all", SEARCHED)):
        for rate in RATES:
            one = bank_cost(DEFAULT_MODEL, Plan(SIZES[-1], rate, searched))
            used = one["score"][one["score"]["search"]]
            row = [name, f"{rate:,}", f"{used['machines']:,}", used["because_of"]]
            row += [f"{one['answer']['machines']:,}"]
            rows.append([*row, f"{one['money']['per_million_questions']:,.0f}"])
    return markdown_table([head, *rows])


STUDY = Study(
    "scale_costs",
    "Unit costs, and what banks of up to 10^12 tokens cost",
    numbers,
    "The paper gives no numbers of this kind.",
    render=render,
)
app = command(STUDY)


@app.command()
def write() -> None:
    """Put the unit costs of all committed results into the package."""
    unit_costs.write()
    typer.echo(str(unit_costs.TABLE))


if __name__ == "__main__":
    app()
