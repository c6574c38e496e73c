"""A server on a Ray cluster of this machine: the same routes, and the answers of one machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from scale.campaigns import local_cluster
from scale.serving import (
    BANK,
    MODEL,
    TOKENS,
    Counts,
    Server,
    body_of,
    compare,
    kill_replica,
    same,
    served,
    streamed,
    under_load,
)
from serving import KEYS
from synthetic import synthetic_bank
from typer.testing import CliRunner

from sedem import MemoryBank
from sedem.answering.decoding import Decoding
from sedem.cli.main import app
from sedem.errors import ConfigError
from sedem_serve.ray import serving
from sedem_serve.ray.serving import Machines
from sedem_serve.server.settings import ServerSettings

SECONDS = 120.0
clustered = pytest.mark.slow
"""A test that asks the server. Its cluster is many processes; test_replicas has one."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two partitions and one engine, on a cluster of its own."""
    folder = tmp_path_factory.mktemp("served")
    with local_cluster(4), served(folder, Machines(partitions=2)) as running:
        yield running


@clustered
def test_routes_page_and_keys_are_those_of_one_machine(server: Server) -> None:
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/ready").json() == {"status": "ready"}
    assert "<html" in server.client.get("/").text
    assert httpx.get(server.client.base_url.join("/v1/models"), timeout=60).status_code == 401
    models = [one["id"] for one in server.client.get("/v1/models").json()["data"]]
    assert models == [MODEL, f"{MODEL}@{BANK}"]
    refused = server.client.post("/v1/chat/completions", json=body_of("rent?", k=0))
    assert refused.status_code == 400 and "at least 1" in refused.text


@clustered
def test_answers_are_those_of_one_machine(server: Server) -> None:
    assert compare(server, 6) == Counts(asked=6, same=6)
    for fields in ({"k": "all"}, {"documents": [2, 5]}, {"ranking": True}):
        found = server.ask("storm over the harbour", **fields)
        options = {name: value for name, value in fields.items() if name != "ranking"}
        wanted = server.model.answer(
            MemoryBank.open(server.place),
            "storm over the harbour",
            **{"k": 2, **options},
            decoding=Decoding(TOKENS),
        )
        assert same(found, wanted)
    text, error = streamed(server, "the captain and the ledger")
    assert (text, error) == (server.expected("the captain and the ledger").text, None)
    body = {"question": "cocoa"}
    found = server.client.post(f"/v1/banks/{BANK}/scores", json=body).json()
    scores = torch.tensor([one["score"] for one in found["data"]])
    assert torch.equal(scores, server.model.scores(MemoryBank.open(server.place), "cocoa"))


@clustered
def test_a_text_that_comes_with_a_question_is_answered_by_one_engine(server: Server) -> None:
    text = "The lease of the harbour house was signed by Ada Finch on 3 May. " * 8
    body = body_of(f"{text}\n\nWho signed the lease?") | {"model": MODEL}
    response = server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert response.json()["sedem"]["citations"]


@clustered
def test_documents_are_added_while_questions_run(server: Server) -> None:
    question = "the garden of the captain"
    before = server.expected(question)
    bank = MemoryBank.open(server.place)
    bank.append(synthetic_bank(server.model, 6, seed=23))
    after = server.expected(question)
    assert after.blocks == before.blocks + 24
    seen: list[int] = []
    until = time.monotonic() + SECONDS
    while (not seen or seen[-1] != after.blocks) and time.monotonic() < until:
        found = server.ask(question)
        assert same(found, before) or same(found, after), "half of a version was asked"
        seen.append(found["sedem"]["blocks"])
    # Once the new version is seen, the last one is not any more.
    assert seen[-1] == after.blocks and seen == sorted(seen)


@clustered
@pytest.mark.parametrize("name", ["selector-1", "engine"])
def test_a_replica_is_killed_under_load_and_no_answer_is_wrong(server: Server, name: str) -> None:
    counts = under_load(server, 8, lambda: kill_replica(name), at_once=2)
    assert counts.wrong == 0 and counts.same >= 3
    assert compare(server, 2) == Counts(asked=2, same=2)


def test_more_replicas_than_cpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 4.0})
    with pytest.raises(ConfigError, match="need 10 CPUs, the cluster has 4"):
        machines = Machines(partitions=4, engines=2, copies=2)
        serving.serving(ServerSettings(folder=tmp_path), machines, KEYS).__enter__()
    with pytest.raises(ConfigError, match="engines is 0"):
        Machines(engines=0)


def test_options_of_a_cluster_need_ray() -> None:
    for flag in ("--partitions", "--engines", "--copies"):
        result = CliRunner().invoke(app, ["serve", flag, "2"])
        assert result.exit_code == 1
        assert result.stderr == f"error: {flag} belongs to --ray; add it\n"
