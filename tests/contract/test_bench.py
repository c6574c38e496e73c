"""`sedem bench`: its table, its JSON and plots, and its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import sedem

from sedem import SeDeM
from sedem.bench import command


def test_a_bench_is_printed_saved_and_plotted(
    model: SeDeM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.decoder.add_lora(4, 8)
    model.save_pretrained(tmp_path / "tiny")
    words = (
        "bench", "sedem", "full-context", "-m", tmp_path / "tiny", "--context", 40, "--context",
        600, "--runs", 1, "--answer-tokens", 3, "--device", "cpu", "--out", tmp_path / "out",
    )  # fmt: skip
    result = sedem(*words, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert document == json.loads((tmp_path / "out" / "bench.json").read_text())
    assert list(document["results"]) == ["sedem", "full-context"]
    assert document["cold_start"] is None
    assert "times of the CPU" in result.stderr
    assert (tmp_path / "out" / "ttft.svg").is_file() and (tmp_path / "out" / "ttft.png").is_file()
    monkeypatch.setattr(command, "measure_cold_start", lambda *_: {"imports": 2.0, "all": 3.0})
    again = sedem(*words, "--cold-start")
    assert "processor seconds: imports 2.00, all 3.00" in again.stderr
    table = again.stdout.splitlines()
    assert [line.split()[:2] for line in table[1:]] == [
        ["40", "sedem"], ["40", "full-context"], ["600", "sedem"], ["600", "full-context"]
    ]  # fmt: skip
    assert " of 600" in table[4] and "all" in table[3]


def test_baselines_are_benched_on_random_weights_of_a_folder(
    tiny_folder: Callable[..., str],
) -> None:
    folder = tiny_folder(max_position_embeddings=2048)
    result = sedem(
        "bench", "sedem", "icae", "--backbone", folder, "--context", 200, "--runs", 1,
        "--answer-tokens", 3, "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert f"{folder} on random weights" in result.stderr and "left out" not in result.stderr
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:]] == [
        ["200", "sedem"], ["200", "icae"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "there is no method 'nothing'; there are sedem"),
        (["--context", "0"], "contexts[0] is 0; a context can have 1 to"),
        (["sedem", "-k", "none"], "k is 'none'"),
        (["sedem", "--runs", "0"], "runs is 0"),
        (["sedem", "--text", "nowhere.txt"], "there is no file or folder 'nowhere.txt'"),
        (["sedem", "-m", "/nowhere/at/all"], "checkpoint '/nowhere/at/all' is not a local folder"),
        (["--backbone", "/nowhere"], "there is no shape '/nowhere'; there are llama-3.2-1b"),
        (["sedem", "--out", "/dev/null/out"], "'/dev/null/out' cannot be a folder for results"),
    ],
)
def test_an_impossible_bench_is_an_error_of_one_line(words: list[str], message: str) -> None:
    result = sedem("bench", *words)
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert not result.stdout
