"""A sample of the load that `make load` puts on a server; that it finds what is wrong.

The model is tiny and random, and the server runs in this process. Times and memory mean nothing
here, because other tests share the machine.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from campaign import Result, entries_of, run_campaigns
from conftest import LEASE
from load import __main__ as command
from load import fuzz, overload, report, streams
from load.campaigns import CAMPAIGNS
from load.client import QUEUE_FULL, Reply
from load.failing import Fuse, make_failing
from load.report import PAGE, rendered
from load.target import BANK, Target
from load.wire import Outcome, Shot, Wire
from servers import serving
from serving import SECRET

from sedem import Document, SeDeM, SedemConfig
from sedem.backbone.loading import open_backbone
from sedem.serve.settings import Settings

FIGURES = ("p99 of", "answers a second", "memory grew", "it took")
"""How sentences about figures begin or go on."""


@pytest.fixture(scope="module")
def target(
    config: SedemConfig, tiny_folder: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    folder, fuse = tmp_path_factory.mktemp("load"), Fuse()
    torch.manual_seed(1)
    backbone = open_backbone(tiny_folder())
    model = SeDeM(config, backbone, backbone, name="sedem-nano").eval()
    make_failing(model.engine, fuse)
    model.read([Document("lease.txt", LEASE)]).save(folder / BANK)
    settings = Settings(
        folder=folder / "server",
        banks={BANK: folder / BANK},
        rows=4,
        waiting=8,
        max_tokens=32,
        max_body_bytes=65536,
        max_online_characters=4000,
    )
    with serving(settings, model) as served:
        yield Target(served.url, SECRET, model.name, psutil.Process(), fuse.fail)


@pytest.mark.parametrize("name", sorted(CAMPAIGNS.keys() - {"streams"}))
def test_a_sample_of_each_campaign_misses_nothing(name: str, target: Target) -> None:
    campaign = CAMPAIGNS[name]
    result = campaign.load(target, campaign.sample, 0)
    missed = [one for one in result.wrong if not any(words in one for words in FIGURES)]
    assert missed == []
    assert result.cases.total() >= campaign.sample
    assert target.busy() == 0


class Stuck(Target):
    def busy(self) -> int:
        return 1


def test_a_row_that_stays_taken_is_found(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("load.disconnects.IDLE_SECONDS", 0.1)
    wrong = CAMPAIGNS["disconnects"].load(Stuck(**vars(target)), 1, 0).wrong
    assert "1 questions wait or run 0.1 s after all left" in wrong


def replies(seconds: list[float], status: int = 200) -> list[Reply]:
    return [Reply(status, float(i), one, one) for i, one in enumerate(seconds)]


def test_a_slow_first_token_and_an_error_are_found() -> None:
    result = Result("questions")
    slow = replies([0.1] * 90 + [0.6] * 10)
    streams._judge(result, [*slow, Reply(500, 0, 1, 1, error="no")], [0.1], 10)
    assert [sentence.split(":")[0] for sentence in result.wrong] == [
        "a stream failed",
        "p99 of the time to the first token is 600 ms, more than 5 times p50, 100 ms",
    ]


def test_lost_goodput_and_slow_refusals_are_found() -> None:
    result, few = Result("questions"), replies([0.5] * 80)
    overload._judge(result, [*few, *replies([0.2] * 80, QUEUE_FULL)], 0.0, 2.0, [0.0])
    first, second = result.wrong
    assert "less than 90%" in first
    assert "200 ms, more than 100 ms" in second
    overload._judge(result, [Reply(0, 1, 1, 1, error="reset")], 0.0, 0.0, [])
    assert "neither an answer nor 429: 0 reset" in result.wrong


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(500, 0.1),
        Outcome(503, 0.1, b"{}"),
        Outcome(200, 6),
        Outcome(0, 0.1, error="reset"),
    ],
    ids=["500", "a 503 without a word", "a hang", "no response"],
)
def test_a_bad_end_of_a_request_is_found_and_shown(outcome: Outcome) -> None:
    result, shot = Result("requests"), Shot("path", "GET", b"/v1/odd")
    fuzz._judge(result, shot, outcome)
    [sentence] = result.wrong
    assert "GET /v1/odd" in sentence
    stated = Outcome(503, 0.1, b'{"error": {"code": "unavailable"}}', "1")
    fuzz._judge(result, shot, stated)
    assert len(result.wrong) == 1


def test_a_request_goes_over_the_wire_as_it_is(target: Target) -> None:
    wire = Wire(target.url, target.secret)
    assert wire.send(Shot("", "GET", b"/v1/banks")).status == 200
    assert wire.send(Shot("", "GET", b"/v1/banks", ((b"Authorization", b""),))).status == 401
    assert wire.send(Shot("", "GET", b"/a b", broken=True)).status in (0, 400)
    assert wire.send(Shot("", "GET", b"/health")).status == 200


def test_the_page_shows_the_committed_report() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert rendered(page) == page


MACHINE = {"processor": "a processor", "cores": 2, "system": "Linux", "python": "3.11"}
RUN = {"factor": 5, "seed": 0, "date": "2026-11-20", "machine": MACHINE, "versions": {"torch": "2"}}
OVERLOAD = {
    "unit": "questions",
    "cases": {"closed loop": 900, "open loop": 300},
    "counts": {"429": 7},
    "figures": {"peak": "20.0 answers/s"},
    "wrong": ["slow"],
    "seconds": 90,
    "run": RUN,
}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """A report of a run of overload in a folder of its own, and what the page shows of it."""
    monkeypatch.setattr(report, "REPORT", tmp_path / "report.json")
    monkeypatch.setattr(report, "PAGE", tmp_path / "load.md")
    monkeypatch.setattr(command, "REPORT", report.REPORT)
    report.REPORT.write_text(json.dumps({"campaigns": {"overload": OVERLOAD}}), encoding="utf-8")
    report.PAGE.write_text("<!-- load -->\n<!-- end -->", encoding="utf-8")
    report.write_page()
    return lambda: report.PAGE.read_text(encoding="utf-8")


def test_the_table_says_what_was_missed(written: Callable[[], str]) -> None:
    page = written()
    run = "with `FACTOR=5`, on 2026-11-20, on a processor, 2 cores, Linux; Python 3.11, torch 2."
    assert f"In all 1,200 cases, 1 wrong, in 1.5 minutes {run}\n" in page
    assert "| overload | 1,200 questions | 1 | 1.5 | Questions arrive at twice the rate" in page
    assert "- overload: closed loop 900, open loop 300, 429: 7, peak: 20.0 answers/s\n" in page
    assert "\nNot run yet: streams; streams, short queue; disconnects; failures; fuzz.\n" in page


def test_a_campaign_that_is_run_alone_replaces_its_own_entry_and_no_other(
    written: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fuzzed(points: int, folder: Path, seed: int) -> Result:
        return Result("requests", Counter({"path": points}))

    campaigns = {**CAMPAIGNS, "fuzz": SimpleNamespace(run=fuzzed, points=20_000)}
    monkeypatch.setattr(
        command,
        "run_campaigns",
        lambda _, *rest, **named: run_campaigns(campaigns, *rest, **named),
    )
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    for factor, cases in (("0.5", "10,000"), ("2", "40,000")):
        monkeypatch.setattr(command.sys, "argv", ["load", factor, "--only", "fuzz", "--report"])
        assert command.main() == 0
        entries = entries_of(report.REPORT)
        assert list(entries) == ["overload", "fuzz"] and entries["overload"] == OVERLOAD
        assert {"date", "seed", "machine", "versions", "settings"} < entries["fuzz"]["run"].keys()
        page = written()
        assert f"| fuzz | {cases} requests | 0 |" in page
        assert "\n- overload: with `FACTOR=5`, on 2026-11-20, on a processor" in page
        assert f"\n- fuzz: with `FACTOR={factor}`, on 2" in page
