"""`sedem eval` and `sedem cost`: what they print and save, and what they refuse."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from commands import prints_json, refused, sedem, succeeds
from conftest import RECIPE
from safetensors.torch import load_file, save_file

from sedem import SeDeM
from sedem_lab.evaluation.config import Control


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def custom_questions(count: int = 5) -> Path:
    """Write custom questions; those with odd numbers have evidence."""
    path = Path("custom.jsonl")
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            text = f"Flat {number}. The rent of flat {number} is {900 + number} euros a month."
            documents = [("lease.txt", text), ("recipe.md", RECIPE)]
            entry: dict[str, Any] = {
                "id": f"q{number}",
                "documents": [{"name": name, "text": text} for name, text in documents],
                # Line separators of Unicode are ordinary characters in a line of JSON.
                "question": f"What is the rent of flat {number}?\u2028\u0085",
                "answers": [f"{900 + number} euros"],
            }
            if number % 2:
                entry["evidence"] = [{"document": "lease.txt", "start": 8, "end": len(text)}]
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
    return path


def squad() -> Path:
    """Write a set of SQuAD: four questions about two titles."""

    def paragraph(title: str, number: int) -> dict[str, Any]:
        start, height = f"{title} number {number} lies at ", f"{number * 100} metres"
        answer = {"text": height, "answer_start": len(start)}
        question = f"How high is {title} number {number}?"
        entry = {"id": f"{title}-{number}", "question": question, "answers": [answer]}
        return {"context": f"{start}{height}.", "qas": [entry]}

    titles = [
        {"title": title, "paragraphs": [paragraph(title, n) for n in (1, 2)]}
        for title in ("Hill", "Lake")
    ]
    Path("squad.json").write_text(json.dumps({"version": "1.1", "data": titles}))
    return Path("squad.json")


def read_records(out: str) -> list[dict[str, Any]]:
    content = Path(out, "predictions.jsonl").read_text(encoding="utf-8")
    assert content.endswith("\n")
    return [json.loads(line) for line in content.removesuffix("\n").split("\n")]


def check_metric(metric: dict[str, Any], count: int) -> None:
    assert set(metric) == {"mean", "interval", "n"}
    low, high = metric["interval"]
    assert 0 <= low <= metric["mean"] <= high <= 100
    assert metric["n"] == count


def test_methods_and_controls_are_listed() -> None:
    listed = [line.split()[0] for line in succeeds("eval", "--list").splitlines()]
    assert {"sedem", "full-context", "bm25", "longllmlingua"} <= set(listed)
    text = " ".join(succeeds("eval", "sedem", "--help").split())
    *controls, last = get_args(Control)
    assert f"{', '.join(controls)} or {last}" in text


def test_methods_are_evaluated_on_custom_questions_saved_and_compared(tiny_checkpoint: str) -> None:
    options = ("--data", custom_questions(), "-m", tiny_checkpoint, "--max-new-tokens", 4, "--out")
    for method in ("sedem", "full-context", "bm25"):
        result = sedem("eval", method, *options, method, "--json")
        assert "answering" in result.stderr
        metrics = json.loads(result.stdout)
        assert metrics == json.loads(Path(method, "metrics.json").read_text())
        for name in ("em", "f1", "rouge_l"):
            check_metric(metrics[name], 5)
        selection = {name for name in metrics if "@" in name or name == "mrr"}
        if method == "full-context":
            assert not selection and metrics["counts"]["ranked_every_block"] == 0
        else:
            # Only two of the five have evidence.
            check_metric(metrics["recall@1"], 2)
            assert {"recall@1", "precision@1", "mrr"} <= selection
        assert metrics["counts"]["examples"] == 5 >= metrics["counts"]["ended_by_limit"]
        assert (metrics["settings"]["method"], metrics["settings"]["schema"]) == (method, "own")
        assert {"machine", "versions", "commit"} <= set(metrics)
        shown = succeeds("eval", method, *options, method)
        assert re.search(r"^em +\d+\.\d\d +\[\d+\.\d\d, \d+\.\d\d\] +5$", shown, re.MULTILINE)
    records = read_records("sedem")
    assert [record["id"] for record in records] == [f"q{number}" for number in range(5)]
    assert records[1]["references"] == ["901 euros"]
    assert [record["labelled"] for record in records] == [False, True, False, True, False]
    assert all(record["k"] == len(record["selected"]) == 2 for record in records)

    folders = ("sedem", "bm25", "custom.jsonl")
    report = prints_json("eval", "report", *folders, "--plot", "runs.svg", "--json")
    assert [run["method"] for run in report["runs"]] == ["sedem", "bm25"]
    assert report["differences"][0]["metrics"]["f1"]["n"] == 5
    assert "<svg" in Path("runs.svg").read_text(encoding="utf-8")
    compared = sedem("eval", "report", *folders)
    assert compared.exit_code == 0
    assert re.search(r"^1  sedem +\d", compared.stdout, re.MULTILINE)
    assert compared.stderr == "note: 'custom.jsonl' holds no results of 'sedem eval --out'\n"
    refused("eval", "report", "custom.jsonl", words="'custom.jsonl' holds no results")


def test_options_controls_and_samples_of_squad(tiny_checkpoint: str) -> None:
    arguments = ("eval", "sedem", "--data", squad(), "-m", tiny_checkpoint, "--max-new-tokens", 2)

    def evaluate(*options: object) -> Any:
        return prints_json(*arguments, *options, "--json")

    metrics = evaluate()
    assert (metrics["settings"]["schema"], metrics["counts"]["examples"]) == ("squad", 4)
    check_metric(metrics["recall@2"], 4)
    assert metrics["recall@1"]["mean"] <= metrics["recall@2"]["mean"]
    assert evaluate("--limit", 2, "--option", "records=1:")["counts"]["examples"] == 2
    recalls = [evaluate("--control", c, "-k", 1)["recall@1"]["mean"] for c in ("gold", "wrong")]
    assert recalls == [100.0, 0.0]
    one, four = evaluate("--option", "distractors=0"), evaluate("--set", "batch=2")
    assert one["counts"]["blocks_mean"] < four["counts"]["blocks_mean"]
    assert one["settings"]["options"] == {"distractors": 0}
    assert (one["settings"]["batch"], four["settings"]["batch"]) == (32, 2)
    refused(*arguments, "--option", "distractors", words="option 'distractors' is not of the form")
    refused(*arguments, "--option", "colour=red", words="unknown key 'colour'; known are")
    refused(*arguments, "--set", "batch=0", words="batch is 0; input should be greater than 0")
    refused(*arguments, "--option", "split=dev", words="is a file: leave it out")


def test_boundaries_between_segments_can_be_moved(tiny_checkpoint: str) -> None:
    first = {}
    for shift in (0, 4):
        succeeds(
            "eval", "sedem", "--data", custom_questions(1), "-m", tiny_checkpoint, "-k", "all",
            "--set", f"shift={shift}", "--max-new-tokens", 2, "--out", f"run{shift}",
        )  # fmt: skip
        spans = [(b["start"], b["end"]) for b in read_records(f"run{shift}")[0]["selected"]]
        first[shift] = min(spans)
    assert first == {0: (0, 16), 4: (0, 12)}


def test_results_of_other_settings_or_files_are_not_mixed(tiny_checkpoint: str) -> None:
    shutil.copytree(tiny_checkpoint, "model")
    arguments = (
        "eval", "sedem", "--data", custom_questions(2), "-m", "model", "--max-new-tokens", 4,
        "--out", "run",
    )  # fmt: skip
    succeeds(*arguments)
    before = [path.read_bytes() for path in sorted(Path("run").iterdir())]
    words = r"'run' holds results of other settings .*; give another --out"
    refused(*arguments, "--set", "seed=1", words=words)
    path = Path("model/adapter/adapter_model.safetensors")
    save_file({n: w + 0.01 for n, w in load_file(path).items()}, path)
    succeeds("seal", "model")
    refused(*arguments, words=words)
    assert [path.read_bytes() for path in sorted(Path("run").iterdir())] == before


def test_an_evaluation_with_bad_settings_is_refused(tiny_checkpoint: str) -> None:
    data = custom_questions(2)
    for options, words in (
        (["fly"], "there is no method 'fly'; there are sedem, full-context, bm25"),
        (["sedem", "--schema", "mine"], "there is no schema 'mine'; known are own, squad"),
        (["sedem", "--option", "records=first"], "records is 'first'; it must be 'start:stop'"),
        (["sedem", "--option", "records=9:"], "there are no examples to evaluate"),
        (["sedem", "--limit", "0"], "sedem eval: limit is 0; input should be greater than 0"),
        (["sedem", "--control", "best"], "control is 'best'; input should be 'selected', 'gold'"),
        (["sedem", "--option", "records=5"], "records is '5'; it must be 'start:stop'"),
        (["sedem", "--set", "k=2"], "'k' is not a setting; give one of batch, device, dtype"),
        (["sedem", "--set", "dtype=int8"], "dtype is 'int8'; input should be 'float32' or 'bfl"),
        (["bm25", "--engine", "int8"], "engine is 'int8', but bm25 has no engine; leave it out"),
        (["sedem", "-k", "auto"], "k is 'auto', but this model was trained without guidance"),
        (["bm25", "-k", "0"], "k is 0; input should be greater than 0, or input should be 'all"),
        (["bm25", "--control", "gold"], "control is 'gold', but bm25 has no control; leave it out"),
        (["full-context", "-k", "2"], "k is 2, but full-context has no k; leave it out"),
        (["sedem", "-m", "no-such"], "checkpoint 'no-such' is neither a local folder nor"),
        (["icae"], "icae has no shipped checkpoint; train"),
    ):
        own = "-m" in options or options == ["icae"]
        arguments = options if own else [*options, "-m", tiny_checkpoint]
        refused("eval", *arguments, "--data", data, words=words)
    for words in ([], ["sedem"], ["report"]):
        result = sedem("eval", *words)
        assert (result.exit_code, result.stdout) == (2, "")


def test_data_that_cannot_be_read_is_refused(tiny_checkpoint: str) -> None:
    Path("odd.jsonl").write_text('{"text": "no question"}\n')
    Path("half.jsonl").write_text('{"documents": [], "answers": [], "question": ')
    Path("none.jsonl").write_text("")
    Path("empty").mkdir()
    for name, words in (
        ("no.jsonl", r"there is no file 'no\.jsonl'"),
        ("odd.jsonl", r"the fields of 'odd\.jsonl' fit no schema; name it"),
        ("half.jsonl", r"'half\.jsonl', line 1 is not JSON"),
        ("none.jsonl", r"none\.jsonl"),
        (".", r"'half\.jsonl', line 1 is not JSON"),
        ("empty", "folder 'empty' holds no .json, .jsonl, .parquet file"),
    ):
        refused("eval", "sedem", "--data", name, "-m", tiny_checkpoint, words=words)


def test_unanswered_questions_are_reported_at_the_end(tiny_checkpoint: str) -> None:
    data = custom_questions(3)
    data.write_text(data.read_text("utf-8").replace("flat 1?", "?" * 700), encoding="utf-8")
    shown = succeeds("eval", "sedem", "--data", data, "-m", tiny_checkpoint, "--max-new-tokens", 4)
    assert shown.splitlines()[-1].startswith(
        "1 of 3 could not be answered and count as wrong; the first, q1: the question has "
    )


# Costs


def test_costs_of_answers_are_counted_and_shown_by_part_with_their_assumptions(
    tiny_checkpoint: str, tiny_folder: Callable[..., str]
) -> None:
    result = prints_json("cost", "llama-3.2-1b", "--json")
    assert set(result) == {"backbone", "parameters", "flops"}
    parameters, flops = result["parameters"], result["flops"]
    parts = ("compressor", "decompressor", "selector", "lora")
    assert parameters["total"] == sum(parameters[part] for part in parts)
    assert parameters["backbone"] == 1_235_814_400
    share = 100 * parameters["total"] / parameters["backbone"]
    assert parameters["percent"] == pytest.approx(share, abs=0.01)
    stages = ("read", "select", "restore", "prefill", "decode")
    assert flops["total"] == pytest.approx(sum(flops[stage] for stage in stages), abs=5)
    assert set(flops["assumptions"]) >= {"context_tokens", "k", "extract_layer", "inject_layer"}
    shown = succeeds("cost", "llama-3.2-3b")
    assert re.search(r"^selector +18\.89  M parameters$", shown, re.MULTILINE)
    assert re.search(r"^read +\d+\.\d  GFLOPs$", shown, re.MULTILINE)
    assert re.search(r"^for context tokens 2048, .*k 2,", shown, re.MULTILINE)
    assert "GFLOPs" in succeeds("cost", tiny_folder())
    # Those of a checkpoint are those of its weights.
    parameters = prints_json("cost", tiny_checkpoint, "--json")["parameters"]
    model = SeDeM.from_pretrained(tiny_checkpoint)
    for part in ("compressor", "selector", "decompressor"):
        assert parameters[part] == sum(p.numel() for p in model.parts()[part].parameters())
    assert parameters["lora"] == sum(p.numel() for p in model.decoder.lora_parameters())
    for name in ("llama-9", "a/b/c", "."):
        words = rf"backbone '{re.escape(name)}' is not known; give llama"
        refused("cost", name, "--json", words=words)


def test_costs_of_a_baseline_are_shown_with_their_assumptions(
    tiny_folder: Callable[..., str],
) -> None:
    shown = succeeds("cost", "llama-3.2-1b", "--method", "icae")
    assert re.search(r"^without lora +0\.54  M parameters$", shown, re.MULTILINE)
    assert re.search(r"^encode +\d+\.\d  GFLOPs$", shown, re.MULTILINE)
    assert "memory 128, compression 4" in shown
    result = prints_json("cost", "llama-3.2-3b", "--method", "hmt", "--json")
    assert set(result) == {"backbone", "method", "parameters", "flops"}
    assert result["flops"]["total"] == result["flops"]["encode"] + result["flops"]["decode"]
    assert "GFLOPs" in succeeds("cost", tiny_folder(), "--method", "500x")
    words = "FLOPs of 'bm25' are not counted; those of icae, hmt, 500x, beacon are"
    refused("cost", tiny_folder(), "--method", "bm25", "--json", words=words)
