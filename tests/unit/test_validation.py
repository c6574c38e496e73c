"""Settings refuse what cannot be, in one sentence that names the place and what is needed."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from sedem.errors import ConfigError
from sedem.validation import (
    Flag,
    Number,
    NumberAbove0,
    NumberFrom0,
    Settings,
    Share,
    Whole,
    WholeAbove0,
    WholeFrom0,
    explain,
)


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
