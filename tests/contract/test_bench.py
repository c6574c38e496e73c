"""`sedem bench`: its table, its JSON and picture, and its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import sedem

from sedem import SeDeM


def test_a_bench_is_printed_and_drawn(model: SeDeM, tmp_path: Path) -> None:
    model.decoder.add_lora(4, 8)
    model.save_pretrained(tmp_path / "tiny")
    words = (
        "bench", "sedem", "full-context", "-m", tmp_path / "tiny", "--context", 40, "--context",
        600, "--runs", 1, "--plot", tmp_path / "times.svg",
    )  # fmt: skip
    result = sedem(*words, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert list(document["results"]) == ["sedem", "full-context"]
    assert "times of the CPU" in result.stderr
    assert (tmp_path / "times.svg").is_file()
    table = sedem(*words).stdout.splitlines()
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
        (["--context", "0"], "contexts[0] is 0; input should be greater than or equal to 1"),
        (["sedem", "-k", "none"], "k is 'none'"),
        (["sedem", "--runs", "0"], "runs is 0"),
        (["sedem", "-m", "/nowhere/at/all"], "checkpoint '/nowhere/at/all' is not a local folder"),
        (["--backbone", "/nowhere"], "backbone '/nowhere' is not known; give llama-3.2-1b"),
        (["sedem", "--plot", "a.gif"], "no picture can be drawn as 'a.gif'; name a .svg"),
        (["sedem", "--plot", "/nowhere/a.svg"], "no picture can be drawn as '/nowhere/a.svg'"),
    ],
)
def test_an_impossible_bench_is_an_error_of_one_line(words: list[str], message: str) -> None:
    result = sedem("bench", *words)
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert not result.stdout
