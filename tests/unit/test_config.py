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
INTEGER, NUMBER = "input should be a valid integer", "input should be a valid number"
UNREADABLE = f"{NUMBER}, unable to parse string as a number"
MAPPING = "input should be a valid dictionary or instance of"


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


def shaped(**changes: Any) -> dict[str, Any]:
    return {"shape": {"layers": [1], **changes}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        # Unknown and missing names.
        ({"schedul": 1}, "unknown key 'schedul'; did you mean 'schedule'?"),
        (shaped(widht=2), "shape: unknown key 'widht'; did you mean 'width'?"),
        (
            {"sources": [{"path": "a"}, {"zzz": 2}]},
            "sources[1]: unknown key 'zzz'; known are path, ",
        ),
        ({"shape": {}}, "shape.layers: field required"),
        ({"sources": [{}]}, "sources[0].path: field required"),
        ({"shap": {}, "shape": None}, "unknown key 'shap'; did you mean 'shape'?"),
        # The wrong type.
        ({"steps": "many"}, f"steps is 'many'; {INTEGER}"),
        ({"steps": "3"}, f"steps is '3'; {INTEGER}"),
        ({"steps": 3.0}, f"steps is 3.0; {INTEGER}"),
        ({"steps": True}, f"steps is True; {INTEGER}"),
        ({"steps": "9" * 500}, f"steps is '{'9' * 76}...; {INTEGER}"),
        ({"warmup": None}, f"warmup is None; {INTEGER}"),
        ({"weight": "some"}, f"weight is 'some'; {UNREADABLE}"),
        ({"weight": False}, f"weight is False; {NUMBER}"),
        ({"bf16": 1}, "bf16 is 1; input should be a valid boolean"),
        ({"bf16": "yes"}, "bf16 is 'yes'; input should be a valid boolean"),
        ({"sources": [{"path": 7}]}, "sources[0].path is 7; input should be a valid string"),
        ({"sources": "a"}, "sources is 'a'; input should be a valid tuple"),
        ({"sources": ["a"]}, f"sources[0] is 'a'; {MAPPING} Source"),
        ({"rates": 3}, "rates is 3; input should be a valid dictionary"),
        ({"rates": {"lora": None}}, f"rates.lora is None; {NUMBER}"),
        ({"shape": 3}, f"shape is 3; {MAPPING} Shape"),
        (shaped(layers=3), "shape.layers is 3; input should be a valid tuple"),
        (shaped(layers=[1, "x"]), f"shape.layers[1] is 'x'; {INTEGER}"),
        (shaped(width=True), f"shape.width is True; {INTEGER}"),
        (shaped(rate="x"), f"shape.rate is 'x'; {UNREADABLE}"),
        (shaped(name=3), "shape.name is 3; input should be a valid string"),
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
        ({"budget": "al"}, f"budget is 'al'; {INTEGER}, or input should be 'all'"),
        # What settings or a dataclass refuse themselves.
        ({"steps": 3, "warmup": 4}, "warmup is 4 but steps 3; make it shorter"),
        (shaped(width=3), "shape: width is 3; it must be even"),
        # The first of several problems, but unknown keys before others.
        ({"warmup": -1, "weight": "x"}, "warmup is -1; input should be greater than or equal to 0"),
        ({"warmup": -1, "zzz": 1}, "unknown key 'zzz'; known are shape, "),
    ],
)
def test_one_sentence_says_what_is_wrong(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Recipe.from_entries({**WHOLE, **changes}, "recipe.yaml")
    found, expected = str(caught.value), f"recipe.yaml: {sentence}"
    assert found == expected or (sentence.endswith(", ") and found.startswith(expected))


def test_a_missing_section_and_what_is_no_mapping_are_told() -> None:
    for entries, words in (
        ({"sources": WHOLE["sources"]}, "shape: field required"),
        ([1], f"it is [1]; {MAPPING} Recipe"),
    ):
        with pytest.raises(ConfigError) as caught:
            Recipe.from_entries(entries, "a.json")
        assert str(caught.value) == f"a.json: {words}"


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


POSITIVE = "segment_length compression compressor_heads selector_heads block_slots selector_dim"


@pytest.mark.parametrize(
    ("names", "value", "words"),
    [
        ("segment_shift", 128, "128 but a segment has 128 tokens"),
        ("decompressor", "identity", "'identity' and compression 4; .* to 1$"),
        ("decompressor", "none", "'none' and inject_layer 2; .* to 0$"),
        ("read_once", True, "true, which needs independent blocks and one backbone"),
        (f"{POSITIVE} decompressor_hidden k", 0, "0; input should be greater than 0"),
        ("inject_layer lora_rank lora_alpha", -1, "-1; input should be greater than or equal to 0"),
        (
            "segment_length compression lora_rank inject_layer",
            8.0,
            "8.0; input should be a valid i",
        ),
        ("block_slots inject_layer", 2.5, "2.5; input should be a valid int"),
        ("segment_length", True, "True; input should be a valid int"),
        ("k", "most", "'most'; input should be"),
        ("selector_dim", "64", "'64'; input should be a valid int"),
        ("extract_layers", [], ".*; tuple should have"),
        ("extract_layers", "11", "'11'; input should be a valid tuple"),
        ("segmentation", "page", "'page'; input should be 'window', 'sentence' or 'paragraph'$"),
        ("compressor", "conv", "'conv'; input should be 'linear', 'mlp' or 'query'$"),
        ("layer_mixing", None, "None; input should be 'uniform' or 'learned'$"),
        ("encoder decoder", 3, "3; input should be a valid str"),
    ],
)
def test_a_bad_value_is_refused_with_its_name(names: str, value: object, words: str) -> None:
    for name in names.split():
        for refuse in (make, make().with_changes):
            with pytest.raises(ConfigError, match=f"{name} is {words}"):
                refuse(**{name: value})


def test_bad_layers_lengths_and_names_are_refused() -> None:
    for name, value, words in (
        ("segment_length", 130, "segment_length 130 is not a multiple of compression 4"),
        ("extract_layers", [0], r"extract_layers\[0\] is 0; input should be greater than 0"),
        ("extract_layers", (3, -1), r"extract_layers\[1\] is -1; input should be greater than 0"),
        ("extract_layers", [1.5], r"extract_layers\[0\] is 1\.5; input should be a valid int"),
        ("segment_lenght", 1, "'segment_lenght'; did you mean 'segment_length'"),
        ("injectlayer", 1, "'injectlayer'; did you mean 'inject_layer'"),
        ("extract_layer", 1, "'extract_layer'; did you mean 'extract_layers'"),
        ("comprssion", 1, "'comprssion'; did you mean 'compression'"),
        ("lora_r", 1, "'lora_r'; did you mean 'lora_rank'"),
    ):
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
