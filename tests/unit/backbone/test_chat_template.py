from __future__ import annotations

from typing import Any

import pytest
from conftest import CHAT_TEMPLATE, TURN, TURN_END, byte_tokenizer
from transformers import PreTrainedTokenizerFast

from sedem.backbone.chat_template import ChatTemplate, read_chat_template
from sedem.backbone.decoder import Backbone
from sedem.errors import ConfigError


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
