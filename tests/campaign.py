"""What the campaigns of faults and of load share: their figures, their command and their page."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass
class Result:
    """The figures of a campaign.

    Attributes:
        unit: what is counted, in the plural.
        cases: number of cases by their kind.
        counts: what else was counted.
        figures: what was measured, with its unit.
        wrong: one sentence for each case that went wrong.
    """

    unit: str
    cases: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    figures: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def count(self, what: str, number: int = 1) -> None:
        """Count something."""
        self.counts[what] += number

    def require(self, fulfilled: bool, sentence: str) -> None:
        """Note a sentence as wrong unless something is fulfilled."""
        if not fulfilled:
            self.wrong.append(sentence)

    @contextmanager
    def case(self, kind: str, where: str) -> Iterator[None]:
        """Count a case; an error inside the `with` block is noted and does not end the campaign."""
        self.cases[kind] += 1
        try:
            yield
        except Exception as error:
            told = str(error)
            self.wrong.append(told if where in told else f"{where}: {type(error).__name__}: {told}")


class Campaign(Protocol):
    """A kind of case.

    Attributes:
        run: makes a number of cases in a folder, from a seed.
        points: cases of the bounded form.
    """

    @property
    def run(self) -> Callable[[int, Path, int], Result]: ...

    @property
    def points(self) -> int: ...


def run_campaigns(
    campaigns: Mapping[str, Campaign],
    write_report: Callable[[dict[str, Any]], None],
    *,
    program: str,
    description: str,
    long: int,
) -> int:
    """Run campaigns one after the other, as the command line says.

    Args:
        campaigns: the campaigns by name.
        write_report: is given factor, seed and the figures of each campaign.
        program: how the command is called.
        description: what it does.
        long: factor of the long form.

    Returns:
        1 if anything went wrong.
    """
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument(
        "factor", type=float, nargs="?", default=1, help=f"how much longer: {long} is the long form"
    )
    parser.add_argument("--only", choices=campaigns, help="one campaign alone")
    parser.add_argument("--seed", type=int, default=0, help="other cases")
    parser.add_argument("--report", action="store_true", help="write the report and its page")
    chosen = parser.parse_args()
    figures = {}
    for name, campaign in campaigns.items():
        if chosen.only in (None, name):
            points = max(round(campaign.points * chosen.factor), 1)
            figures[name] = _run(name, campaign, points, chosen.seed)
    if chosen.report:
        write_report({"factor": chosen.factor, "seed": chosen.seed, "campaigns": figures})
    return int(any(one["wrong"] for one in figures.values()))


def _run(name: str, campaign: Campaign, points: int, seed: int) -> dict[str, Any]:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = campaign.run(points, Path(folder), seed)
    seconds = round(time.monotonic() - started)
    print(
        f"{name}: {result.cases.total():,} {result.unit}, {len(result.wrong)} wrong, {seconds} s",
        flush=True,
    )
    for what, figure in result.figures.items():
        print(f"  {what}: {figure}", flush=True)
    for sentence in result.wrong:
        print(f"  {sentence}", file=sys.stderr, flush=True)
    return {
        "unit": result.unit,
        "cases": dict(result.cases),
        "counts": dict(result.counts),
        "figures": result.figures,
        "wrong": result.wrong,
        "seconds": seconds,
    }


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report that is committed."""
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def cases_of(found: Mapping[str, Any]) -> int:
    """Cases of one campaign, of all kinds."""
    return sum(found["cases"].values())


def with_table(page: str, mark: str, table: str) -> str:
    """A page with what stands between `<!-- mark -->` and `<!-- end -->` replaced."""
    block = re.compile(rf"(<!-- {mark} -->)\n.*?<!-- end -->", re.DOTALL)
    return block.sub(lambda found: f"{found[1]}\n{table}\n<!-- end -->", page)


def details(found: Mapping[str, Any]) -> str:
    """The cases by kind, and what else was counted and measured."""
    parts = [f"{kind} {count:,}" for kind, count in found["cases"].items()]
    parts += [f"{what}: {count:,}" for what, count in found["counts"].items()]
    parts += [f"{what}: {figure}" for what, figure in found.get("figures", {}).items()]
    return ", ".join(parts)


def summary(report: Mapping[str, Any]) -> str:
    """How much was tried, how long it took, and on what."""
    campaigns = report["campaigns"].values()
    cases, wrong = sum(map(cases_of, campaigns)), sum(len(found["wrong"]) for found in campaigns)
    minutes = sum(found["seconds"] for found in campaigns) / 60
    machine = report["machine"]
    told = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    return (
        f"In all {cases:,} cases, {wrong} wrong, in {minutes:.1f} minutes with "
        f"`FACTOR={report['factor']:g}`, on {machine['processor']}, {machine['cores']} cores, "
        f"{machine['system']}; Python {machine['python']}, {told}."
    )
