"""What the campaigns of faults and of load share: their figures, their command and their page."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from sedem_lab.provenance import provenance


@dataclass
class Result:
    """The figures of a campaign: cases by kind, and one sentence for each that went wrong."""

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


@dataclass(frozen=True)
class Cases:
    """A campaign that needs nothing prepared.

    Attributes:
        run: makes a number of cases in a folder, from a seed.
        points: cases of the bounded form.
        meaning: what is shown, for the report.
    """

    run: Callable[[int, Path, int], Result]
    points: int
    meaning: str


def run_campaigns(
    campaigns: Mapping[str, Campaign],
    write_report: Callable[[str, dict[str, Any]], None],
    *,
    program: str,
    description: str,
    long: int,
) -> int:
    """Run campaigns one after the other, as the command line says; return 1 if one went wrong.

    Each is reported when it has ended, so that it is kept if a later one is stopped.
    """
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument(
        "factor", type=float, nargs="?", default=1, help=f"how much longer: {long} is the long form"
    )
    parser.add_argument("--only", choices=campaigns, help="one campaign alone")
    parser.add_argument("--seed", type=int, default=0, help="other cases")
    parser.add_argument(
        "--report", action="store_true", help="renew what was run in the report and its page"
    )
    chosen = parser.parse_args()
    wrong = False
    for name, campaign in campaigns.items():
        if chosen.only not in (None, name):
            continue
        points = max(round(campaign.points * chosen.factor), 1)
        date = datetime.now(UTC).date().isoformat()
        figures = _run(name, campaign, points, chosen.seed)
        wrong |= bool(figures["wrong"])
        if chosen.report:
            run = {"date": date, "factor": chosen.factor, "seed": chosen.seed}
            write_report(name, {**figures, "run": run})
    return int(wrong)


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


def keep(path: Path, name: str, figures: Mapping[str, Any], names: Iterable[str]) -> None:
    """Replace the entry of one campaign in a report that is committed; the others stay.

    Args:
        names: of all campaigns, in the order of the report; entries of others are left out.
    """
    entries = {**entries_of(path), name: figures}
    ordered = {name: entries[name] for name in names if name in entries}
    path.write_text(json.dumps({"campaigns": ordered}) + "\n", encoding="utf-8")


def entries_of(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of a report by campaign; none if there is no report."""
    if not path.exists():
        return {}
    entries: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["campaigns"]
    return entries


@dataclass(frozen=True)
class Report:
    """A report that is committed, and the page that shows it.

    Attributes:
        file: the report.
        page: has a table between the mark `<!-- NAME -->`, NAME being that of the file's folder,
            and `<!-- end -->`.
        kind: what a campaign is called.
        campaigns: all campaigns by name.
        packages: packages whose versions are reported.
        long: factor of the long form.
    """

    file: Path
    page: Path
    kind: str
    campaigns: Mapping[str, Campaign]
    packages: tuple[str, ...]
    long: int

    @property
    def name(self) -> str:
        """Name of the campaigns, and of their module."""
        return self.file.parent.name

    def rendered(self, page: str) -> str:
        """The page with its table renewed."""
        return with_table(page, self.name, table(self.kind, entries_of(self.file), self.campaigns))

    def run(self, description: str, about: Callable[[str], dict[str, Any]]) -> int:
        """Run the campaigns as the command line says; 1 if anything went wrong.

        Args:
            description: what the command does.
            about: what else to report about a campaign's run, given its name.
        """

        def write_report(name: str, figures: dict[str, Any]) -> None:
            run = provenance()
            figures["run"] |= {
                "machine": run["machine"],
                "versions": {package: version(package) for package in self.packages},
                "commit": run["commit"],
                **about(name),
            }
            keep(self.file, name, figures, self.campaigns)
            page = self.rendered(self.page.read_text(encoding="utf-8"))
            self.page.write_text(page, encoding="utf-8")

        # As Ctrl-C does, so that servers and clusters end, too.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        return run_campaigns(
            self.campaigns, write_report, program=f"python -m {self.name}",
            description=description, long=self.long,
        )  # fmt: skip


def cases_of(found: Mapping[str, Any]) -> int:
    """Cases of one campaign, of all kinds."""
    return sum(found["cases"].values())


def with_table(page: str, mark: str, table: str) -> str:
    """A page with what stands between `<!-- mark -->` and `<!-- end -->` replaced."""
    block = re.compile(rf"(<!-- {mark} -->)\n.*?<!-- end -->", re.DOTALL)
    return block.sub(lambda found: f"{found[1]}\n{table}\n<!-- end -->", page)


def table(kind: str, entries: Mapping[str, Mapping[str, Any]], campaigns: Mapping[str, Any]) -> str:
    """What was tried, what went wrong and what has not been run."""
    if not entries:
        return "Not run as a whole yet: it needs a machine that does nothing else."
    lines = [f"| {kind} | cases | wrong | minutes | what is shown |", "|---|---|---|---|---|"]
    for name, found in entries.items():
        total, minutes = cases_of(found), found["seconds"] / 60
        wrong, meaning = len(found["wrong"]), campaigns[name].meaning
        lines.append(
            f"| {name} | {total:,} {found['unit']} | {wrong} | {minutes:.1f} | {meaning} |"
        )
    listed = [f"- {name}: {details(found)}" for name, found in entries.items()]
    shown = [*lines, "", *listed, "", summary(entries)]
    missing = "; ".join(name for name in campaigns if name not in entries)
    return "\n".join([*shown, "", f"Not run yet: {missing}."] if missing else shown)


def details(found: Mapping[str, Any]) -> str:
    """The cases by kind, and what else was counted and measured."""
    parts = [f"{kind} {count:,}" for kind, count in found["cases"].items()]
    parts += [f"{what}: {count:,}" for what, count in found["counts"].items()]
    parts += [f"{what}: {figure}" for what, figure in found.get("figures", {}).items()]
    return ", ".join(parts)


def summary(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """How much was tried, how long it took, and on what; campaigns of one run are told together."""
    found = entries.values()
    cases, wrong = sum(map(cases_of, found)), sum(len(one["wrong"]) for one in found)
    minutes = sum(one["seconds"] for one in found) / 60
    total = f"In all {cases:,} cases, {wrong} wrong, in {minutes:.1f} minutes"
    runs: dict[str, list[str]] = {}
    for name, one in entries.items():
        runs.setdefault(_conditions(one["run"]), []).append(name)
    if len(runs) == 1:
        return f"{total} {next(iter(runs))}."
    told = [f"- {'; '.join(names)}: {conditions}." for conditions, names in runs.items()]
    return "\n".join([f"{total}:", "", *told])


def _conditions(run: Mapping[str, Any]) -> str:
    """How, when and where a campaign was run; an old entry does not say when."""
    machine = run["machine"]
    told = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    if "load_average" in run:
        told += f"; load {run['load_average']:.1f} at the start"
    return (
        f"with `FACTOR={run['factor']:g}`{', on ' + run['date'] if 'date' in run else ''}, "
        f"on {machine['processor']}, {machine['cores']} cores, "
        f"{machine['system']}; Python {machine['python']}, {told}"
    )
