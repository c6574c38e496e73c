"""Settings refuse what cannot be, in one sentence that names the place and what is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from sedem.checkpoint.folder import EXTRA_ENTRIES
from sedem.config import (
    REMOVED,
    Flag,
    Number,
    NumberAbove0,
    NumberFrom0,
    SedemConfig,
    Settings,
    Share,
    Whole,
    WholeAbove0,
    WholeFrom0,
    explain,
    llama_1b,
    llama_1b_to_3b,
    llama_3b,
)
from sedem.errors import CheckpointError, ConfigError


class Shape(Settings):
    layers: tuple[Whole, ...]
    width: Whole = 8
    rate: Number = 0.5
    name: str | None = None

    @model_validator(mode="after")
    def _width_is_even(self) -> Self:
        if self.width % 2:
            raise ValueError(f"width is {self.width}; it must be even")
        return self


class Source(Settings):
    path: str
    repeat: WholeAbove0 = 1


class Recipe(Settings):
    shape: Shape
    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    rates: dict[str, NumberFrom0] = Field(default_factory=dict)
    schedule: Literal["linear", "cosine"] = "linear"
    steps: Whole | None = None
    warmup: WholeFrom0 = 0
    weight: Number = 1.0
    temperature: NumberAbove0 = 1.0
    recall: Share = 0.0
    bf16: Flag = True
    budget: WholeAbove0 | Literal["all"] = 1
    start: Annotated[str, Field(min_length=1)] = "here"
    best: Annotated[int, Field(lt=9)] = 1
    most: Annotated[float, Field(le=2.5)] = 1.0

    @model_validator(mode="after")
    def _warmup_ends(self) -> Recipe:
        if self.steps is not None and self.warmup > self.steps:
            raise ValueError(f"warmup is {self.warmup} but steps {self.steps}; make it shorter")
        return self


WHOLE: dict[str, Any] = {"shape": {"layers": [3]}, "sources": [{"path": "a"}, {"path": "b"}]}


def test_settings_are_built_from_nested_entries() -> None:
    entries = {**WHOLE, "rates": {"lora": "1e-4"}, "weight": 2, "budget": "all"}
    recipe = Recipe.from_entries(entries, "recipe.yaml")
    assert recipe.shape == Shape(layers=(3,))
    assert recipe.sources == (Source(path="a"), Source(path="b"))
    # YAML reads 1e-4 as text.
    assert (recipe.rates, recipe.weight) == ({"lora": 1e-4}, 2.0)
    assert isinstance(recipe.weight, float)
    again = Recipe.from_entries(recipe.to_dict(), "recipe.yaml")
    assert again == recipe
    assert again.to_dict()["shape"] == {"layers": [3], "width": 8, "rate": 0.5, "name": None}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        # Unknown and missing names.
        ({"schedul": 1}, "unknown key 'schedul'; did you mean 'schedule'?"),
        (
            {"shape": {"layers": [1], "widht": 2}},
            "shape: unknown key 'widht'; did you mean 'width'?",
        ),
        (
            {"sources": [{"path": "a"}, {"path": "b", "zzz": 2}]},
            "sources[1]: unknown key 'zzz'; known are path, repeat",
        ),
        ({"shape": {}}, "shape.layers: field required"),
        ({"sources": [{}]}, "sources[0].path: field required"),
        # The wrong type.
        ({"steps": "many"}, "steps is 'many'; input should be a valid integer"),
        ({"steps": "3"}, "steps is '3'; input should be a valid integer"),
        ({"steps": 3.0}, "steps is 3.0; input should be a valid integer"),
        ({"steps": True}, "steps is True; input should be a valid integer"),
        ({"warmup": None}, "warmup is None; input should be a valid integer"),
        (
            {"weight": "some"},
            "weight is 'some'; input should be a valid number, unable to parse string as a number",
        ),
        ({"weight": False}, "weight is False; input should be a valid number"),
        ({"bf16": 1}, "bf16 is 1; input should be a valid boolean"),
        ({"bf16": "yes"}, "bf16 is 'yes'; input should be a valid boolean"),
        ({"sources": [{"path": 7}]}, "sources[0].path is 7; input should be a valid string"),
        ({"sources": "a"}, "sources is 'a'; input should be a valid tuple"),
        (
            {"sources": ["a"]},
            "sources[0] is 'a'; input should be a valid dictionary or instance of Source",
        ),
        ({"rates": 3}, "rates is 3; input should be a valid dictionary"),
        (
            {"rates": {"lora": None}},
            "rates.lora is None; input should be a valid number",
        ),
        ({"shape": 3}, "shape is 3; input should be a valid dictionary or instance of Shape"),
        ({"shape": {"layers": 3}}, "shape.layers is 3; input should be a valid tuple"),
        (
            {"shape": {"layers": [1, "x"]}},
            "shape.layers[1] is 'x'; input should be a valid integer",
        ),
        (
            {"shape": {"layers": [1], "width": True}},
            "shape.width is True; input should be a valid integer",
        ),
        (
            {"shape": {"layers": [1], "rate": "x"}},
            "shape.rate is 'x'; input should be a valid number, unable to parse string as a number",
        ),
        ({"shape": {"layers": [1], "name": 3}}, "shape.name is 3; input should be a valid string"),
        # Out of range.
        ({"warmup": -1}, "warmup is -1; input should be greater than or equal to 0"),
        ({"temperature": 0}, "temperature is 0; input should be greater than 0"),
        ({"recall": 1.5}, "recall is 1.5; input should be less than or equal to 1"),
        ({"best": 9}, "best is 9; input should be less than 9"),
        ({"most": 3}, "most is 3; input should be less than or equal to 2.5"),
        (
            {"sources": []},
            "sources is []; tuple should have at least 1 item after validation, not 0",
        ),
        ({"start": ""}, "start is ''; string should have at least 1 character"),
        # Choices.
        ({"schedule": "cosinus"}, "schedule is 'cosinus'; input should be 'linear' or 'cosine'"),
        (
            {"budget": "al"},
            "budget is 'al'; input should be a valid integer, or input should be 'all'",
        ),
        # What settings or a dataclass refuse themselves.
        ({"steps": 3, "warmup": 4}, "warmup is 4 but steps 3; make it shorter"),
        ({"shape": {"layers": [1], "width": 3}}, "shape: width is 3; it must be even"),
    ],
)
def test_one_sentence_says_what_is_wrong(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Recipe.from_entries({**WHOLE, **changes}, "recipe.yaml")
    assert str(caught.value) == f"recipe.yaml: {sentence}"


def test_a_missing_section_and_what_is_no_mapping_are_told() -> None:
    with pytest.raises(ConfigError, match=r"^a\.json: shape: field required$"):
        Recipe.from_entries({"sources": WHOLE["sources"]}, "a.json")
    with pytest.raises(
        ConfigError,
        match=r"^a\.json: it is \[1\]; input should be a valid dictionary or instance of Recipe$",
    ):
        Recipe.from_entries([1], "a.json")


def test_the_first_of_several_problems_is_told_and_unknown_keys_before_others() -> None:
    two = {**WHOLE, "warmup": -1, "weight": "x"}
    with pytest.raises(ConfigError, match=r"warmup is -1; input should be .* equal to 0$"):
        Recipe.from_entries(two, "recipe.yaml")
    with pytest.raises(ConfigError, match=r"^recipe.yaml: unknown key 'zzz'; known are shape, "):
        Recipe.from_entries({**two, "zzz": 1}, "recipe.yaml")


def test_a_name_written_wrongly_is_one_problem() -> None:
    wrong = {"shap": WHOLE["shape"], "sources": WHOLE["sources"]}
    with pytest.raises(ConfigError, match=r"unknown key 'shap'; did you mean 'shape'\?$"):
        Recipe.from_entries(wrong, "recipe.yaml")


def test_a_long_value_is_cut() -> None:
    with pytest.raises(
        ConfigError, match=r"steps is '9{76}\.\.\.; input should be a valid integer$"
    ):
        Recipe.from_entries({**WHOLE, "steps": "9" * 500}, "recipe.yaml")


def test_settings_made_in_python_are_checked_as_well() -> None:
    with pytest.raises(ConfigError, match=r"^Source: repeat is 0; input should be greater than 0$"):
        Source(path="a", repeat=0)
    source = Source(path="a")
    with pytest.raises(ValidationError, match="frozen"):
        source.path = "b"
    assert source.with_changes(repeat=2) == Source(path="a", repeat=2)
    with pytest.raises(ConfigError, match=r"^Source: repeat is 0; input should be greater than 0$"):
        source.with_changes(repeat=0)
    with pytest.raises(ConfigError, match="unknown key 'repeats'; did you mean 'repeat'"):
        source.with_changes(repeats=2)


def test_other_models_and_types_are_explained_too() -> None:
    class Plain(BaseModel):
        sizes: list[tuple[int, str]]
        place: Source | Shape | None = None

    def told(kind: Any, value: Any) -> str:
        with pytest.raises(ValidationError) as caught:
            TypeAdapter(kind).validate_python(value)
        return explain(caught.value, "it.json")

    assert told(Flag, 1) == "it.json: it is 1; input should be a valid boolean"
    assert (
        told(Plain, {"sizes": [(1, 2)]})
        == "it.json: sizes[0][1] is 2; input should be a valid string"
    )
    nested = told(Plain, {"sizes": [], "place": {"path": "a", "repeats": 2}})
    assert nested.startswith("it.json: place.Source: unknown key 'repeats'; did you mean 'repeat'?")
    assert told(bytes, 3) == "it.json: it is 3; input should be a valid bytes"


CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
SHIPPED = [file.parent for file in CHECKPOINTS.glob("sedem*/config.json")]


def make(**changes: Any) -> SedemConfig:
    return SedemConfig(**{"encoder": "e", "extract_layers": (3,), "inject_layer": 2, **changes})


def test_the_presets_are_the_papers_settings() -> None:
    for config in (llama_1b(), llama_3b(), llama_1b_to_3b()):
        assert (config.segment_length, config.compression, config.slots) == (128, 4, 32)
        assert config.slots_per_block == 32
        assert (config.selector_heads, config.k) == (4, 2)
        assert (config.lora_rank, config.lora_alpha) == (64, 128)
        assert config.extract_layer == 14
    assert (llama_1b().inject_layer, llama_3b().inject_layer) == (6, 10)
    assert llama_1b_to_3b().inject_layer == 10
    assert llama_1b_to_3b().cross_model and not llama_1b().cross_model
    assert llama_3b(k=8, segmentation="paragraph").k == 8


def test_shapes_follow_from_settings() -> None:
    config = make(extract_layers=[4, 10, 2], inject_layer=0, lora_rank=0, segment_length=32)
    assert (config.extract_layers, config.extract_layer) == ((4, 10, 2), 10)
    assert (config.slots, config.slots_per_block) == (8, 8)
    assert config.with_changes(block_slots=3, decoder="e").slots_per_block == 3
    assert not config.with_changes(decoder="e").cross_model and config.block_slots is None
    assert make(decompressor="identity", compression=1).slots == 128


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("segment_shift", 128, "segment_shift is 128 but a segment has 128 tokens"),
        ("segment_length", 130, "segment_length 130 is not a multiple of compression 4"),
        ("decompressor", "identity", "is 'identity' and compression 4; .* to 1$"),
        ("segment_length", 0, "segment_length is 0; input should be greater than 0"),
        ("segment_length", 128.0, r"segment_length is 128\.0; input should be a valid int"),
        ("segment_length", True, "segment_length is True"),
        ("compression", 0, "compression is 0"),
        ("compression", 2.0, r"compression is 2\.0"),
        ("compressor_heads", 0, "compressor_heads is 0"),
        ("selector_heads", 0, "selector_heads is 0"),
        ("k", 0, "k is 0"),
        ("k", "most", "k is 'most'"),
        ("inject_layer", -1, "inject_layer is -1; input should be greater"),
        ("inject_layer", 1.5, r"inject_layer is 1\.5; input should be a valid int"),
        ("lora_rank", -1, "lora_rank is -1; input should be greater"),
        ("lora_rank", 8.0, r"lora_rank is 8\.0"),
        ("lora_alpha", -2, "lora_alpha is -2"),
        ("block_slots", 0, "block_slots is 0; input should be greater than 0"),
        ("block_slots", 2.5, r"block_slots is 2\.5"),
        ("decompressor_hidden", 0, "decompressor_hidden is 0; input should be greater than 0"),
        ("selector_dim", 0, "selector_dim is 0; input should be greater than 0"),
        ("selector_dim", "64", "selector_dim is '64'"),
        ("extract_layers", [], "extract_layers is .*; tuple should have"),
        ("extract_layers", [0], r"extract_layers\[0\] is 0; input should be greater than 0"),
        ("extract_layers", (3, -1), r"extract_layers\[1\] is -1; input should be greater than 0"),
        ("extract_layers", [1.5], r"extract_layers\[0\] is 1\.5; input should be a valid int"),
        ("extract_layers", "11", "extract_layers is '11'; input should be a valid tuple"),
        (
            "segmentation",
            "page",
            "segmentation is 'page'; input should be 'window', 'sentence' or 'paragraph'$",
        ),
        ("compressor", "conv", "compressor is 'conv'; input should be 'linear', 'mlp' or 'query'$"),
        ("layer_mixing", None, "layer_mixing is None; input should be 'uniform' or 'learned'$"),
        ("encoder", 3, "encoder is 3; input should be a valid str"),
        ("decoder", 3, "decoder is 3; input should be a valid str"),
    ],
)
def test_a_bad_value_is_refused_with_its_name(name: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(**{name: value})
    with pytest.raises(ConfigError, match=words):
        make().with_changes(**{name: value})


def test_a_saved_configuration_loads_as_an_equal_one(tmp_path: Path) -> None:
    config = make(extract_layers=(2, 3), decoder="d", block_slots=4, selector_dim=7)
    config.save(tmp_path, sedem_version="9")
    assert SedemConfig.load(tmp_path, extra=frozenset({"sedem_version"})) == config
    entries = json.loads((tmp_path / "config.json").read_text())
    assert entries["sedem_version"] == "9"
    assert entries["extract_layers"] == [2, 3]
    with pytest.raises(ConfigError, match=r"config\.json: unknown key 'sedem_version'"):
        SedemConfig.load(tmp_path)


SEDEM = "not a sedem configuration .* 'extract_layers'"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"has no config\.json; a sedem checkpoint is"),
        (b"", r"config\.json' is not JSON"),
        (b"{'a': 1}", r"config\.json' is not JSON"),
        (b"\xff\xfe", r"config\.json' is not UTF-8"),
        (b"[]", SEDEM),
        (b"3", SEDEM),
        (b'"extract_layers"', SEDEM),
        (b'{"hidden_size": 64}', SEDEM),
        (b'{"extract_layers": [3], "encoder": "e"}', r"config\.json: inject_layer: field required"),
    ],
)
def test_what_is_not_a_configuration_is_refused(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises((CheckpointError, ConfigError), match=words):
        SedemConfig.load(tmp_path)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("segment_lenght", "segment_length"),
        ("injectlayer", "inject_layer"),
        ("extract_layer", "extract_layers"),
        ("comprssion", "compression"),
        ("lora_r", "lora_rank"),
    ],
)
def test_an_unknown_key_names_the_nearest(written: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{written}'; did you mean '{meant}'"):
        make().with_changes(**{written: 1})


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_the_configuration_of_a_shipped_checkpoint_is_saved_as_it_was(
    folder: Path, tmp_path: Path
) -> None:
    entries = json.loads((folder / "config.json").read_bytes())
    versions = {name: value for name, value in entries.items() if name in EXTRA_ENTRIES}
    SedemConfig.load(folder, extra=EXTRA_ENTRIES).save(tmp_path, **versions)
    saved = json.loads((tmp_path / "config.json").read_bytes())
    # An older checkpoint has the defaults of newer settings.
    added = {name: value for name, value in saved.items() if name not in entries}
    assert added == {name: getattr(make(), name) for name in added}
    kept = [item for item in saved.items() if item[0] in entries]
    assert kept == [item for item in entries.items() if item[0] not in REMOVED]


@pytest.mark.parametrize(
    ("name", "other"),
    [("block_order", "score"), ("guidance_floor", -2.5), ("start_placement", "between")],
)
def test_a_removed_setting_may_only_have_the_value_that_is_left(
    tmp_path: Path, name: str, other: object
) -> None:
    make().save(tmp_path, **{name: REMOVED[name]})
    assert SedemConfig.load(tmp_path) == make()
    make().save(tmp_path, **{name: other})
    with pytest.raises(CheckpointError, match=f"has {name} {other!r}, which this version no"):
        SedemConfig.load(tmp_path)


def test_equal_configurations_have_one_hash_and_none_can_be_changed() -> None:
    config = make(extract_layers=[2, 3])
    assert config == make(extract_layers=(2, 3)) != make()
    assert hash(config) == hash(make(extract_layers=(2, 3)))
    with pytest.raises(ValidationError, match="frozen"):
        config.k = 5
