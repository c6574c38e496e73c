"""A sample of the load that `make load` puts on a server; that it finds what is wrong.

The model is tiny and random, and the server runs in this process. Times and memory mean nothing
here, because other tests share the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psutil
import pytest
import torch
from conftest import LEASE
from load.campaigns import CAMPAIGNS, REPORT
from load.failures import Fuse, make_failing
from load.target import BANK, Target
from load.wire import Shot, Wire
from servers import serving
from serving import SECRET

from sedem import Document, SeDeM, SedemConfig
from sedem.backbone.loading import open_backbone
from sedem_serve.server.settings import ServerSettings

pytestmark = pytest.mark.slow

FIGURES = ("p95 of", "p99 of", "answers a second", "memory grew", "descriptors are", "it took")
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
    settings = ServerSettings(
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
    result = campaign.put(target, campaign.sample)
    missed = [one for one in result.wrong if not any(words in one for words in FIGURES)]
    assert missed == []
    assert result.cases.total() >= campaign.sample
    assert target.busy() == 0


class Stuck(Target):
    def busy(self) -> int:
        return 1


def test_a_row_that_stays_taken_is_found(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("load.disconnects.IDLE_SECONDS", 0.1)
    wrong = CAMPAIGNS["disconnects"].put(Stuck(**vars(target)), 1).wrong
    assert "1 questions wait or run 0.1 s after all left" in wrong


def test_a_request_goes_over_the_wire_as_it_is(target: Target) -> None:
    wire = Wire(target.url, target.secret)
    assert wire.send(Shot("", "GET", b"/v1/banks")).status == 200
    assert wire.send(Shot("", "GET", b"/v1/banks", ((b"Authorization", b""),))).status == 401
    assert wire.send(Shot("", "GET", b"/a b", broken=True)).status in (0, 400)
    assert wire.send(Shot("", "GET", b"/health")).status == 200


def test_the_page_shows_the_committed_report() -> None:
    page = REPORT.page.read_text(encoding="utf-8")
    assert REPORT.rendered(page) == page
