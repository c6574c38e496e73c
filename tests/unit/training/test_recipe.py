from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sedem.errors import ConfigError
from sedem_lab.training.recipe import as_yaml, load_recipe
from sedem_lab.training.stages import Stage1Recipe, Stage2Recipe

STAGE1: dict[str, Any] = {
    "model": {"encoder": "tiny", "extract_layers": [3], "inject_layer": 2},
    "text": {"path": "texts.jsonl"},
    "optimization": {
        "learning_rates": {"compressor": 0.001, "decompressor": 0.01},
        "steps": 10,
    },
    "run": {"output": "runs/one"},
}
STAGE2: dict[str, Any] = {
    "model": STAGE1["model"],
    "data": {"training": [{"path": "a.jsonl"}, {"path": "b.json", "repeat": 2}]},
    "optimization": STAGE1["optimization"],
    "run": STAGE1["run"],
}

Save = Callable[[Any], Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Writes the entries of a recipe."""
    return lambda entries: save_at(tmp_path / "recipe.yaml", entries)


def changed(recipe: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy with one value replaced, by its dotted key."""
    first, _, rest = key.partition(".")
    old = recipe.get(first, {})
    return {**recipe, first: changed(old, rest, value) if rest else value}


def test_a_recipe_is_read_with_its_defaults(save: Save) -> None:
    recipe = load_recipe(Stage2Recipe, save(STAGE2))
    assert recipe.model.extract_layers == (3,)
    assert [source.repeat for source in recipe.data.training] == [1, 2]
    assert recipe.optimization.learning_rates == {"compressor": 0.001, "decompressor": 0.01}
    assert recipe.data.budgets == (2,)
    # The defaults are the paper's weights.
    losses = recipe.losses
    assert (losses.select, losses.margin_weight, losses.margin) == (1.0, 0.5, 2.0)
    assert (losses.selection_temperature, losses.reconstruct) == (0.07, 0.1)
    first = load_recipe(Stage1Recipe, save(STAGE1)).losses
    assert (first.context, first.distill, first.reconstruct) == (1.0, 0.5, 1.0)
    assert (first.regress, first.regress_first, first.recall) == (0.0, 0.0, 0.0)


# `test_validation.py` covers every sentence; here is what each setting accepts.

ABOVE_0 = [
    *(f"optimization.{name}" for name in ("steps", "batch_size", "accumulation", "max_grad_norm")),
    *(f"run.{name}" for name in ("log_every", "save_every", "keep")),
    *(f"text.{name}" for name in ("continuation", "windows", "evaluation_windows")),
    *("losses.distill_temperature", "losses.selection_temperature"),
    *("data.max_blocks", "data.answer_limit"),
]
FROM_0 = [
    *("optimization.warmup", "optimization.weight_decay", "text.held_out"),
    *("optimization.learning_rates.compressor", "run.eval_every", "run.workers"),
]
BOTH_WARMUPS = {"learning_rates": {"a": 1}, "steps": 9, "warmup": 3, "warmup_ratio": 0.1}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *((key, 0, f"{key} is 0; input should be greater than 0") for key in ABOVE_0),
        *((key, -1, f"{key} is -1; input should be greater") for key in FROM_0),
        ("optimization.warmup_ratio", 1, "optimization.warmup_ratio is 1; input should be less"),
        ("losses.recall", 1.5, "losses.recall is 1.5; input should be less"),
        ("optimization.learning_rates", {}, "optimization.learning_rates is {}; dictionary"),
        ("data.training", [], r"data.training is \[\]; tuple should have"),
        ("data.budgets", [], r"data.budgets is \[\]; tuple should have"),
        ("data.budgets", [2, 0], r"data.budgets\[1\] is 0; input should be greater than 0"),
        ("data.training", [{"path": "a", "repeat": 0}], r"\[0\].repeat is 0; input should be"),
        # Of another kind
        ("losses", None, "losses is None; input should be a valid dict"),
        ("optimization.schedule", "cosinus", "'linear', 'cosine' or 'constant_with_warmup'"),
        ("optimization.backbone_dtype", "int8", "backbone_dtype is 'int8'; input should be"),
        ("data.training", [{"path": "a", "label": "evidnce"}], "label is 'evidnce'; input should"),
        ("data.budgets", [1, "some"], r"budgets\[1\] is 'some'; "),
        ("losses.conditioning", "golden", "conditioning is 'golden'; input should be 'selected"),
        # Unknown keys
        ("model.extract_layer", 1, "unknown key 'extract_layer'; did you mean 'extract_layers'"),
        ("text", {}, "recipe.yaml: text.path: field required"),
        ("text.zzz", 1, "unknown key 'zzz'; known are path, field, join"),
        ("data.training", [{"path": "a", "repeats": 2}], r"\[0\].*unknown key 'repeats'.*'repeat'"),
        # Together
        ("optimization.epochs", 2, r"optimization: steps is 10 and epochs 2\.0; give exactly one"),
        ("optimization.steps", None, "steps is None and epochs None; give exactly one"),
        ("optimization", BOTH_WARMUPS, r"warmup is 3 and warmup_ratio 0\.1; give steps or a share"),
        ("run.eval_every", 5, r"run.eval_every is 5, but nothing is kept apart .* text\.held_out"),
        ("best", True, "best is true, but run.eval_every is 0"),
        ("losses.regress_first", 0.5, "losses: regress_first is 0.5 but regress is 0"),
        ("model.compression", 3, "segment_length 128 is not a multiple of compression 3"),
    ],
)
def test_a_value_that_a_setting_does_not_take_is_refused(
    save: Save, key: str, value: Any, message: str
) -> None:
    second = key.startswith(("data", "best", "losses.sel", "losses.cond"))
    kind, entries = (Stage2Recipe, STAGE2) if second else (Stage1Recipe, STAGE1)
    with pytest.raises(ConfigError, match=message):
        load_recipe(kind, save(changed(entries, key, value)))


@pytest.mark.parametrize(
    ("kind", "entries", "change", "message"),
    [
        (Stage2Recipe, changed(STAGE2, "data.cache_states", True),
         "optimization.shard_backbone=true",
         "shard_backbone is true, .* but with data.cache_states each .* leave one"),
        (Stage2Recipe, changed(STAGE2, "data.conditions", {"memory": 1, "text": 1}),
         "optimization.shard_backbone=true",
         "shard_backbone is true, .* but with data.conditions other than memory each"),
        (Stage2Recipe, STAGE2, "data.sentences=0.5",
         "data.sentences is 0.5, but data.conditions has no text, so no batch would read them"),
        (Stage2Recipe, STAGE2, "optimization.keep_start=0.5",
         "keep_start is 0.5, but nothing is trained at the start; give start_from"),
        (Stage1Recipe, STAGE1, "optimization.keep_start=0.5",
         "keep_start is 0.5, but nothing is trained at the start; give start_from"),
        (Stage1Recipe, changed(STAGE1, "text.continuation", 129), "losses.recall=0.5",
         "continuation is 129, more than segment_length 128"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(
    save: Save, kind: Any, entries: Any, change: str, message: str
) -> None:
    load_recipe(kind, save(entries))
    with pytest.raises(ConfigError, match=message):
        load_recipe(kind, save(entries), [change])


def test_set_replaces_values_at_any_depth(save: Save) -> None:
    recipe = load_recipe(
        Stage1Recipe,
        save(STAGE1),
        [
            "optimization.steps=null",
            "optimization.epochs=3",
            "optimization.learning_rates={a: 1e-4, b: 1.0e-4, c: 1E-4}",
            "optimization.learning_rates.decompressor=0.0001",
            "model.extract_layers=[1, 3]",
            "losses.recall=0.5",
            "text.exclude_titles=[Trier, 'Black Death']",
            "data_root=elsewhere",
            "optimization.bf16=false",
        ],
    )
    assert (recipe.optimization.steps, recipe.optimization.epochs) == (None, 3.0)
    # An exponent needs neither a point nor a small letter.
    rates = recipe.optimization.learning_rates
    assert rates == dict.fromkeys(("a", "b", "c", "decompressor"), 1e-4)
    assert recipe.model.extract_layers == (1, 3)
    assert recipe.losses.recall == 0.5
    assert recipe.text.exclude_titles == ("Trier", "Black Death")
    assert recipe.data_root == "elsewhere"
    assert recipe.optimization.bf16 is False


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimization.steps", "'optimization.steps' is not of the form key=value"),
        ("=5", "'=5' is not of the form key=value"),
        ("optimization.steps.more=5", "'steps' has a value, not keys"),
        ("optimization.steps=[5", r"'optimization.steps=\[5' has a value that is not YAML"),
    ],
)
def test_an_invalid_override_is_refused(save: Save, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(Stage1Recipe, save(STAGE1), [override])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a recipe: it has no keys"),
        (b"- 1\n- 2\n", "is not a recipe: it has no keys"),
        (b"model: {encoder: [", "recipe.yaml' is not YAML"),
        (b"model: \xff\xfe", r"recipe\.yaml' is not UTF-8 text"),
    ],
)
def test_a_file_without_a_recipe_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(content)
    heir = save_at(tmp_path / "heir.yaml", {"base": "recipe.yaml"})
    for path in (tmp_path / "recipe.yaml", heir):
        with pytest.raises(ConfigError, match=message):
            load_recipe(Stage1Recipe, path)


# Inheritance

WHOLE: dict[str, Any] = {
    **STAGE1,
    "text": {"path": "texts.jsonl", "exclude_titles": ["Trier", "Maldives"], "windows": 9},
}


def save_at(path: Path, entries: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(entries))
    return path


def test_a_recipe_inherits_from_its_base(tmp_path: Path) -> None:
    save_at(tmp_path / "shared" / "base.yaml", WHOLE)
    middle = {
        "base": "../shared/base.yaml",
        "optimization": {"learning_rates": {"decompressor": 0.5}, "seed": 3},
        "text": {"exclude_titles": ["Trier"]},
    }
    save_at(tmp_path / "large" / "middle.yaml", middle)
    last = {"base": "middle.yaml", "run": {"output": "runs/two"}, "optimization": {"seed": 4}}
    path = save_at(tmp_path / "large" / "last.yaml", last)
    recipe = load_recipe(Stage1Recipe, path, ["text.held_out=5"])
    # Mappings are merged at every depth; lists are replaced.
    assert recipe.optimization.learning_rates == {"compressor": 0.001, "decompressor": 0.5}
    assert (recipe.optimization.steps, recipe.optimization.seed) == (10, 4)
    assert recipe.text.exclude_titles == ("Trier",)
    assert (recipe.text.windows, recipe.text.held_out) == (9, 5)
    assert recipe.run.output == "runs/two"
    # The base itself is unchanged.
    assert load_recipe(Stage1Recipe, tmp_path / "shared" / "base.yaml").optimization.seed == 0


def test_null_removes_an_inherited_key(tmp_path: Path) -> None:
    base = {**WHOLE, "losses": {"regress": 0.5}, "data": {"training": []}}
    save_at(tmp_path / "base.yaml", base)
    own = {
        "base": "base.yaml",
        "data": None,
        "text": {"windows": None},
        "losses": {"regress": None},
    }
    recipe = load_recipe(Stage1Recipe, save_at(tmp_path / "own.yaml", own))
    assert recipe.text.windows is None
    assert recipe.losses.regress == 0.0
    # Without an inherited value, null is a value like any other.
    wrong = {"base": "base.yaml", "data": None, "optimization": {"warmup": None}}
    with pytest.raises(ConfigError, match=r"optimization\.warmup is None; input should be a"):
        load_recipe(Stage1Recipe, save_at(tmp_path / "wrong.yaml", wrong))


def test_a_written_recipe_is_complete_and_the_same(tmp_path: Path) -> None:
    save_at(tmp_path / "base.yaml", WHOLE)
    path = save_at(tmp_path / "own.yaml", {"base": "base.yaml", "run": {"output": "runs/two"}})
    recipe = load_recipe(Stage1Recipe, path)
    text = as_yaml(recipe)
    entries = yaml.safe_load(text)
    assert "base" not in entries
    assert entries["model"]["encoder"] == "tiny"
    assert entries["run"] == {
        "output": "runs/two", "log_every": 50, "save_every": 500, "eval_every": 0, "keep": 2,
        "workers": 0, "trackers": ["tensorboard"], "push_to": None,
    }  # fmt: skip
    (tmp_path / "written.yaml").write_text(text)
    assert load_recipe(Stage1Recipe, tmp_path / "written.yaml") == recipe


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a": "b.yaml", "b": "c.yaml", "c": "a.yaml"},
            r"a\.yaml' inherits from itself \('a\.yaml' -> 'b\.yaml' -> 'c\.yaml' -> 'a\.yaml'\)",
        ),
        ({"a": "a.yaml"}, r"inherits from itself \('a\.yaml' -> 'a\.yaml'\); remove one of"),
        ({"a": "b.yaml", "b": "b.yaml"}, r"inherits from itself \('b\.yaml' -> 'b\.yaml'\)"),
        ({"a": "no.yaml"}, r"there is no recipe '.*no\.yaml', which '.*a\.yaml' names as its base"),
        ({"a": None}, r"base is None; the path of one recipe is needed"),
        ({}, r"there is no recipe '.*a\.yaml'; recipes/ has"),
    ],
)
def test_an_invalid_base_is_refused(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    for name, base in files.items():
        save_at(tmp_path / f"{name}.yaml", {"base": base})
    with pytest.raises(ConfigError, match=message):
        load_recipe(Stage1Recipe, tmp_path / "a.yaml")


def test_a_base_cannot_be_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key 'base'"):
        load_recipe(Stage1Recipe, save_at(tmp_path / "own.yaml", WHOLE), ["base=other.yaml"])


@pytest.mark.parametrize("native", [False, True])
def test_auto_is_bfloat16_only_where_the_machine_multiplies_it(
    save: Save, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr("sedem_lab.training.recipe.multiplies_bfloat16", lambda: native)
    given = changed(STAGE1, "optimization.backbone_dtype", "auto")
    optimization = load_recipe(Stage1Recipe, save(given)).optimization
    assert optimization.bf16 is native  # auto is the default
    assert optimization.backbone_dtype == ("bfloat16" if native else "float32")

    said = changed(
        changed(given, "optimization.bf16", True), "optimization.backbone_dtype", "bfloat16"
    )
    optimization = load_recipe(Stage1Recipe, save(said)).optimization
    assert optimization.bf16 and optimization.backbone_dtype == "bfloat16"
