"""Code that comes with a backbone or a bank never runs, even with consent on stdin."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import commands as command_line
import pytest
import torch
from conftest import LEASE, small_config
from safetensors.torch import load_file
from typer.testing import Result

from sedem import SeDeM
from sedem.backbone.loading import open_backbone
from sedem.bank.file import BankFile
from sedem.errors import CheckpointError

ARTICLES = Path(__file__).parents[1] / "fixtures" / "articles.jsonl"
CONSENT = "y\ny\ny\ny\n"
QUESTION = "What is the rent?"
OWN_CODE = "needs code of its own, which sedem never runs; choose one whose"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a text and a set of questions."""
    monkeypatch.chdir(tmp_path)
    # transformers copies trusted code to this folder before it runs it.
    modules = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    Path("lease.txt").write_text(LEASE, encoding="utf-8")
    documents = [{"name": "lease.txt", "text": LEASE}]
    entry = {"documents": documents, "question": QUESTION, "answers": ["900 euros"]}
    Path("questions.jsonl").write_text(json.dumps(entry) + "\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def marker(here: Path) -> Path:
    """A file that the code of a hostile backbone writes."""
    return here / "ran"


@pytest.fixture
def folder(tiny_folder: Callable[..., str], here: Path) -> Path:
    """A copy of a tiny backbone that a test may change."""
    shutil.copytree(tiny_folder(), here / "backbone")
    return here / "backbone"


def edit(file: Path, **changes: object) -> None:
    """Change entries of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def make_hostile(folder: Path, marker: Path, model_type: str, tokenizer: str) -> None:
    """Give a backbone code for its configuration, its model and its tokenizer."""
    bases = {
        "configuration": ("PreTrainedConfig", "Config"),
        "modeling": ("PreTrainedModel", "Model"),
        "tokenization": ("PreTrainedTokenizerFast", "Tokenizer"),
    }
    for module, (base, name) in bases.items():
        (folder / f"{module}_own.py").write_text(
            f"from transformers import {base}\n"
            f"open({str(marker)!r}, 'a').write('{module} ')\n"
            f"class {name}({base}):\n    model_type = '{model_type}'\n"
        )
    edit(
        folder / "config.json",
        model_type=model_type,
        auto_map={
            "AutoConfig": "configuration_own.Config",
            "AutoModelForCausalLM": "modeling_own.Model",
        },
    )
    edit(
        folder / "tokenizer_config.json",
        tokenizer_class=tokenizer,
        auto_map={"AutoTokenizer": [None, "tokenization_own.Tokenizer"]},
    )


def make_pickled(folder: Path) -> None:
    """Keep the weights of a backbone in pickle format only."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def sedem(*words: object) -> Result:
    """Run the command line with consent to everything on stdin."""
    return command_line.sedem(*words, stdin=CONSENT)


def error_of(*words: object) -> str:
    """Return the one line of error of a command that fails without a prompt."""
    return command_line.error_of(*words, stdin=CONSENT)


def write_checkpoint(path: Path, backbone: Path) -> Path:
    """Save a checkpoint with untrained parts on a backbone."""
    config = small_config(str(backbone), lora_rank=0)
    opened = open_backbone(str(backbone))
    SeDeM(config, opened, opened).save_pretrained(path)
    return path


def write_recipe(backbone: Path) -> Path:
    """Write a recipe that trains on a backbone."""
    recipe = Path("recipe.yaml")
    recipe.write_text(
        "run: {output: out}\n"
        f"text: {{path: {json.dumps(str(ARTICLES))}, continuation: 8}}\n"
        "optimization: {steps: 1, batch_size: 1, learning_rates: {compressor: 1.0e-3,"
        " decompressor: 1.0e-3}}\n"
        f"model: {{encoder: {json.dumps(str(backbone))}, extract_layers: [3], inject_layer: 2,"
        " segment_length: 16, compression: 4}\n"
    )
    return recipe


@pytest.fixture
def commands(folder: Path, here: Path) -> dict[str, list[object]]:
    """The arguments of every command that opens a backbone, which a test then makes hostile."""
    checkpoint = write_checkpoint(here / "checkpoint", folder)
    built = sedem("build", "a.bank", "lease.txt", "-m", checkpoint)
    assert built.exit_code == 0, built.output
    return {
        "build": ["build", "b.bank", "lease.txt", "-m", checkpoint],
        "extend": ["build", "a.bank", "lease.txt", "-m", checkpoint],
        "ask": ["ask", "a.bank", "-m", checkpoint],
        "eval": ["eval", "sedem", "--data", "questions.jsonl", "-m", checkpoint],
        "eval raw": ["eval", "full-context", "--data", "questions.jsonl", "-m", checkpoint],
        "train": ["train", write_recipe(folder)],
        "cost": ["cost", folder],
        "cost of a checkpoint": ["cost", checkpoint],
        "cost of a baseline": ["cost", folder, "--method", "icae"],
        "data": ["data", "inspect", "questions.jsonl", "--tokenizer", folder],
    }


def test_a_custom_layout_is_refused_and_its_code_not_run(
    commands: dict[str, list[object]], folder: Path, marker: Path
) -> None:
    make_hostile(folder, marker, "own", "Tokenizer")
    for words in commands.values():
        told = error_of(*words)
        assert OWN_CODE in told and f"'{folder}'" in told
        assert command_line.error_of(*words, stdin="") == told
    assert not marker.exists()


def test_code_beside_a_known_layout_is_ignored(
    commands: dict[str, list[object]], folder: Path, marker: Path
) -> None:
    make_hostile(folder, marker, "llama", "PreTrainedTokenizerFast")
    for command in ("build", "ask", "eval", "cost", "data"):
        result = sedem(*commands[command])
        assert result.exit_code == 0, result.output
        assert "[y/N]" not in result.output
    assert not marker.exists()


def test_a_custom_tokenizer_is_refused_and_its_code_not_run(
    commands: dict[str, list[object]], folder: Path, marker: Path
) -> None:
    make_hostile(folder, marker, "llama", "Tokenizer")
    for command in ("build", "ask", "eval", "train", "data"):
        assert OWN_CODE in error_of(*commands[command])
    assert not marker.exists()


def test_weights_in_pickle_format_are_refused_by_every_command_that_reads_them(
    commands: dict[str, list[object]], folder: Path
) -> None:
    make_pickled(folder)
    for command in ("build", "ask", "eval", "train"):
        told = error_of(*commands[command])
        assert f"'{folder}' are in pickle format (pytorch_model.bin)" in told
        assert "convert them to safetensors" in told


def test_an_index_of_shards_must_not_name_pickles(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "shard.bin")
    shards = dict.fromkeys(load_file(folder / "model.safetensors"), "shard.bin")
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    with pytest.raises(CheckpointError, match=r"in pickle format \(shard\.bin\)"):
        open_backbone(str(folder))
    for damaged in ("{", "{}", "[]"):
        index.write_text(damaged)
        with pytest.raises(CheckpointError, match=r"weights of backbone .* cannot be read"):
            open_backbone(str(folder))


def test_a_repository_of_pickles_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **options: object) -> None:
        assert options["use_safetensors"] is True
        raise OSError("cannot be loaded. Please do not set `use_safetensors=True`.")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", absent)
    with pytest.raises(CheckpointError, match=r"in pickle format \(no model\.safetensors\)"):
        open_backbone(str(folder))


def test_a_backbone_with_adapters_is_refused(folder: Path) -> None:
    opened = open_backbone(str(folder))
    opened.add_lora(2, 4)
    opened.save_lora(folder, str(folder))
    with pytest.raises(CheckpointError, match=r"holds adapters .*merge them and save"):
        open_backbone(str(folder))


def test_cost_does_not_fetch_the_attention_that_a_configuration_names(folder: Path) -> None:
    edit(folder / "config.json", attn_implementation="owner/kernel")
    assert sedem("cost", folder).exit_code == 0


# The model that a bank names


def claim(bank: Path, model: object) -> None:
    """Change the model that a bank names as its builder."""
    with BankFile(bank).writing() as connection:
        told = connection.execute("SELECT made_by FROM bank").get
        made_by = json.dumps({**json.loads(told), "model": model})
        connection.execute("UPDATE bank SET made_by = ?", (made_by,))


BANK_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("ask", "a.bank"),
    ("ask", "a.bank", QUESTION, "--json"),
    ("build", "a.bank", "lease.txt"),
)


MODELS = (
    ("owner/name", "-m owner/name if"),
    ("a b'; rm -rf $HOME", """-m 'a b'"'"'; rm -rf $HOME' if"""),
    ("\x1b]0;title\x07\n\u202e", r"model '\x1b]0;title\x07\n\u202e'; "),
    ("../checkpoint", "-m ../checkpoint if"),
    ("x" * 5000, f"model '{'x' * 150}"),
    (["sedem-nano"], "model '['sedem-nano']'"),
)
"""What a bank names as its model, and a part of the sentence about it."""


def test_a_bank_that_names_a_hostile_model_is_refused_and_the_name_quoted(
    commands: dict[str, list[object]], folder: Path, marker: Path, here: Path
) -> None:
    checkpoint = here / "checkpoint"
    make_hostile(folder, marker, "own", "Tokenizer")
    for words in BANK_COMMANDS:
        told = error_of(*words)
        assert f"bank 'a.bank' says that it was built by model '{checkpoint}'; " in told
        assert told.endswith(f"; give -m {checkpoint} if you trust it")
        assert OWN_CODE in error_of(*words, "-m", "checkpoint")
    for model, shown in MODELS:
        claim(Path("a.bank"), model)
        for words in BANK_COMMANDS:
            told = error_of(*words)
            assert shown in told and told.isprintable()
    # The name of a shipped model is not looked up in the working directory.
    checkpoint.rename("sedem-nano")
    claim(Path("a.bank"), "sedem-nano")
    for words in BANK_COMMANDS:
        assert "was built by model" in error_of(*words)
    assert not marker.exists()
