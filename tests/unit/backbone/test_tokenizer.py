"""A tokenizer opened without transformers is the same one; a chat template is run once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import CHAT_TEMPLATE, TURN, TURN_END, byte_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sedem.backbone.decoder import Backbone
from sedem.backbone.tokenizer import ChatTemplate, open_light_tokenizer, read_chat_template
from sedem.errors import ConfigError

NANO = Path(__file__).parents[3] / "checkpoints" / "sedem-nano" / "backbone"
TEXTS = [
    "The rent is 900 euros.\n\n\tIt is due on day 1.",
    "<|begin_of_text|> in a text is text, <|end_of_text|>too",
    "na\u00efve \u4f60\u597d \U0001f600\u200d\U0001f525 e\u0301 \x00 \u202e",
    "",
    "  ",
]


def test_its_tokenizer_cuts_and_decodes_as_that_of_transformers() -> None:
    light, full = open_light_tokenizer(NANO), AutoTokenizer.from_pretrained(str(NANO))
    assert light is not None
    options = {
        "add_special_tokens": False,
        "return_attention_mask": False,
        "split_special_tokens": True,
        "verbose": False,
    }
    mine = light(TEXTS, return_offsets_mapping=True, **options)
    theirs = full(TEXTS, return_offsets_mapping=True, **options)
    assert mine == dict(theirs)
    assert [e.ids for e in mine.encodings] == [e.ids for e in theirs.encodings]
    ends = [light.bos_token_id, light.eos_token_id]
    assert ends == [full.bos_token_id, full.eos_token_id]
    for ids in mine["input_ids"]:
        for skip in (False, True):
            framed = [ends[0], *ids, ends[1]]
            assert light.decode(framed, skip_special_tokens=skip) == full.decode(
                framed, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("added_tokens.json", "{}"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", '{"tokenizer_class": "LlamaTokenizer"}'),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "TokenizersBackend", "bos_token": "<new>", "eos_token": "<new>"}',
        ),
    ],
)
def test_another_tokenizer_is_left_to_transformers(tmp_path: Path, name: str, text: str) -> None:
    folder = tmp_path / "backbone"
    shutil.copytree(NANO, folder)
    assert open_light_tokenizer(folder) is not None
    (folder / name).write_text(text)
    assert open_light_tokenizer(folder) is None


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    made = byte_tokenizer()
    made.add_special_tokens({"additional_special_tokens": [TURN, TURN_END]})
    return made


def read(tokenizer: PreTrainedTokenizerFast, template: Any) -> ChatTemplate:
    tokenizer.chat_template = template
    return read_chat_template(tokenizer, "tiny", 0, [1])


def test_the_start_token_is_left_to_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    """So the same prompt comes from a template that writes it and from one that does not."""
    found = read(tokenizer, CHAT_TEMPLATE)
    assert found.before[0] == 258
    assert found == read(tokenizer, CHAT_TEMPLATE.removeprefix("{{ bos_token }}"))


def test_thinking_is_off(tokenizer: PreTrainedTokenizerFast) -> None:
    assert "<think>" in CHAT_TEMPLATE
    assert tokenizer.decode(read(tokenizer, CHAT_TEMPLATE).after) == "</turn>\n<turn>assistant\n"


def test_what_ends_a_turn_of_the_model_ends_an_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    assert read(tokenizer, CHAT_TEMPLATE).ends == [259, 1]
    # Without a token of its own, the end token.
    plain = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    assert read(tokenizer, plain).ends == [1]


def test_all_ends_of_the_generation_settings_count(chat_backbone: Backbone) -> None:
    chat_backbone.model.generation_config.eos_token_id = [1, 7]
    assert chat_backbone.chat.ends == [259, 1, 7]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "the tokenizer of backbone 'tiny' has no chat template; turn it off, or choose"),
        ("{{ messages[0].role }}", r"it writes the user's words 0 times, not once"),
        ("{{ messages[0].content * 2 }}", r"it writes the user's words 2 times, not once"),
        ("{{ raise_exception('a system turn is needed') }}", "a system turn is needed"),
        ("{% if %}", "cannot be used"),
        ({"rag": CHAT_TEMPLATE, "tools": CHAT_TEMPLATE}, "cannot be used"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(
    tokenizer: PreTrainedTokenizerFast, template: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        read(tokenizer, template)
    assert "turn" in str(error.value) and "off" in str(error.value)
