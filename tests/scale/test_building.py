"""A host that is lost in the middle of a build; starting hosts takes a minute."""

from __future__ import annotations

from pathlib import Path

import pytest
from scale.building import (
    build_alone,
    build_and_lose,
    differences,
    write_checkpoint,
    write_documents,
)
from scale.hosts import hosts, not_permitted

from sedem.reading import building as building


@pytest.mark.slow
def test_a_host_that_is_lost_costs_what_it_was_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := not_permitted():
        pytest.skip(reason)
    monkeypatch.setattr(building, "COMMIT", 10_000)
    checkpoint = write_checkpoint(tmp_path)
    documents = write_documents(tmp_path / "texts")
    build_alone(checkpoint, documents, tmp_path / "alone.bank")
    with hosts(2) as cluster:
        cluster.connect()
        loss = build_and_lose(cluster, checkpoint, tmp_path / "texts", tmp_path / "a.bank", 4)
        assert [host.alive for host in cluster.hosts] == [False, True]
    assert loss.busy and loss.commits == 30
    assert differences(tmp_path / "a.bank", tmp_path / "alone.bank") == []
