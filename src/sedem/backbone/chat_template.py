"""What a tokenizer's chat template puts around a user's words, as tokens.

A template is a Jinja program; transformers runs it in Jinja's sandbox, with two fixed messages as
its only data. The text around them is reused for all questions, so no question can change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sedem.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORDS, REPLY = "words-of-the-user", "words-of-the-model"
"""Placeholders for the contents of the two turns."""


@dataclass(frozen=True)
class ChatTemplate:
    """The tokens around a user's words.

    Attributes:
        before: those between the start token and the words.
        after: those between the words and the answer.
        ends: those that end an answer; the first one is the template's own.
    """

    before: list[int]
    after: list[int]
    ends: list[int]


def read_chat_template(
    tokenizer: PreTrainedTokenizerBase, name: str, start: int, ends: Sequence[int]
) -> ChatTemplate:
    """Run a chat template once; thinking is off if it supports `enable_thinking`.

    Args:
        start: the start token, which comes before the template, once.
        ends: tokens that also end an answer without a template.

    Raises:
        ConfigError: the tokenizer has no template, or it does not contain the user's words once.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            f"chat_template is on, but the tokenizer of backbone '{name}' has no chat template; "
            "turn it off, or choose a backbone that was trained to follow instructions"
        )
    asked = [{"role": "user", "content": WORDS}]
    answered = [*asked, {"role": "assistant", "content": REPLY}]

    def rendered(turns: list[dict[str, str]], *, prompt: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=prompt, enable_thinking=False
            )
        )

    def ids_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    from jinja2 import TemplateError

    try:
        parts = rendered(asked, prompt=True).split(WORDS)
        *_, closing = rendered(answered, prompt=False).split(REPLY)
    except (TemplateError, ValueError) as error:
        raise _unusable(name, str(error).strip()) from None
    if len(parts) != 2:
        raise _unusable(name, f"it writes the user's words {len(parts) - 1} times, not once")
    before, after = map(ids_of, parts)
    special = tokenizer.added_tokens_decoder
    end = [token for token in ids_of(closing) if token in special][:1]
    return ChatTemplate(before[before[:1] == [start] :], after, list(dict.fromkeys([*end, *ends])))


def _unusable(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"the chat template of backbone '{name}' cannot be used ({reason}); turn chat_template off"
    )
