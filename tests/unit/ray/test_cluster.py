"""Addresses of clusters; no cluster is started here."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sedem.cli.main import app
from sedem.errors import ConfigError
from sedem_serve.ray.cluster import _reason, connected


@pytest.mark.parametrize(
    "address", ["", "nowhere", "10.0.0.1", ":6379", "ray://host", "h:0", "h:x"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{address}' is not a Ray cluster address; 'local'"):
        connected(address).__enter__()


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nobody_listens_is_told_at_once(scheme: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{free.getsockname()[1]}"
    sentence = rf"no Ray cluster answers at '{address}' \(Connection refused\); start one with"
    with pytest.raises(ConfigError, match=sentence):
        connected(address).__enter__()


def test_what_ray_says_is_told_in_a_sentence() -> None:
    refused = _reason("h:1", RuntimeError("RPC error: InvalidAuthToken: missing"))
    assert refused.startswith("the Ray cluster at 'h:1' asks for a token; set RAY_AUTH_MODE=token")
    version = _reason("h:1", RuntimeError("Version mismatch: 2.1\nmore"))
    assert version.startswith("the Ray cluster at 'h:1' cannot be used (Version mismatch: 2.1);")
    assert _reason("auto", ConnectionError("none")).startswith(
        "no Ray cluster runs on this machine"
    )
    assert _reason("local", OSError("full")) == (
        "no Ray cluster can be started on this machine (full)"
    )


def test_the_command_ends_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for words, sentence in [
        ([str(tmp_path / "a.txt"), "--ray", "nowhere"], "'nowhere' is not a Ray cluster address"),
        ([str(tmp_path / "a.txt"), "--workers", "2"], "are for a Ray cluster; give --ray"),
        (["s3://bucket/folder"], "read it with --ray"),
    ]:
        run = CliRunner().invoke(app, ["build", str(tmp_path / "b"), *words])
        assert run.exit_code == 1 and sentence in " ".join(run.stderr.split())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"Ray, which is not installed; run pip install"):
        connected("local").__enter__()
