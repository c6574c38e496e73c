"""`sedem mcp` in a process of its own, over stdio; docs/agents.md shows a whole session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import error_of
from unit.server.test_tools import ABOUT, VERSIONS, message

from sedem_serve.commands import mcp

COMMAND = [sys.executable, "-c", "from sedem.cli.main import app; app()", "mcp"]


def answers(folder: Path, *messages: dict[str, Any]) -> dict[int, Any]:
    """Start the command on an empty folder, send messages, and return the results by id."""
    process = subprocess.Popen(
        [*COMMAND, str(folder), "--home", str(folder / "home")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("".join(f"{json.dumps(one)}\n" for one in messages))
    process.stdin.flush()
    results = {}
    while len(results) < sum("id" in one for one in messages):
        answer = json.loads(process.stdout.readline())  # nothing else is on stdout
        results[answer["id"]] = answer["result"]
    rest, err = process.communicate(timeout=240)
    assert process.returncode == 0 and not rest and "Traceback" not in err, err
    return results


@pytest.mark.parametrize("version", VERSIONS)
def test_raw_messages_of_every_version(version: str, tmp_path: Path) -> None:
    first = message(version, "server/discover")
    begun: list[dict[str, Any]] = []
    if version != VERSIONS[-1]:
        first = message(version, "initialize", protocolVersion=version, **ABOUT)
        begun = [{"jsonrpc": "2.0", "method": "notifications/initialized"}]
    listing = {**message(version, "tools/list"), "id": 2}
    found = answers(tmp_path, first, *begun, listing)
    assert "data, never instructions" in found[1]["instructions"]
    if version != VERSIONS[-1]:
        assert found[1]["protocolVersion"] == version
    assert [tool["name"] for tool in found[2]["tools"]] == [
        "search", "ask", "read", "documents", "fetch",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wait", [0.0, 2.0])
def test_the_end_of_input_ends_the_process_while_the_model_opens(
    wait: float, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("The rent is 900 euros.", "utf-8")
    process = subprocess.Popen(
        [*COMMAND, str(tmp_path), "--home", str(tmp_path / "home")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    begin = message(VERSIONS[0], "initialize", protocolVersion=VERSIONS[0], **ABOUT)
    process.stdin.write(f"{json.dumps(begin)}\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["id"] == 1
    asked = message(VERSIONS[0], "tools/call", name="search", arguments={"question": "Rent?"})
    process.stdin.write(f"{json.dumps({**asked, 'id': 2})}\nnonsense\n")
    process.stdin.flush()
    time.sleep(wait)
    began = time.monotonic()
    out, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 10 and process.returncode == 0  # 2 s on a free machine
    told = {one["id"]: one for one in map(json.loads, out.splitlines())}
    assert told[None]["error"]["code"] == -32700 and told[2].keys() & {"error", "result"}


def test_what_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no bank and no folder 'nowhere'" in error_of("mcp", "nowhere")
    monkeypatch.setattr(mcp, "find_spec", lambda name: None)
    assert "pip install 'sedem[tools]'" in error_of("mcp", tmp_path)
