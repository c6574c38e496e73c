"""What a tokenizer's chat template puts around the words of turns, as tokens.

A template is a Jinja program; transformers runs it in Jinja's sandbox. Its only data are roles and
fixed words, which are replaced later, so no question can change the text around it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sedem.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORDS = re.compile(r"words-of-turn-(\d+)\.")
"""Placeholders for the contents of turns."""


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
        ConfigError: the tokenizer has no template, or it does not contain the words of turns once.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            f"chat_template is on, but the tokenizer of backbone '{name}' has no chat template; "
            "turn it off, or choose a backbone that was trained to follow instructions"
        )
    (before, after), _ = ids_around(tokenizer, name, ["user"])
    (*_, closing), _ = ids_around(tokenizer, name, ["user", "assistant"], reply=False)
    special = tokenizer.added_tokens_decoder
    end = [token for token in closing if token in special][:1]
    return ChatTemplate(before[before[:1] == [start] :], after, list(dict.fromkeys([*end, *ends])))


def ids_around(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    roles: Sequence[str],
    *,
    reply: bool = True,
    remedy: str = "turn chat_template off",
) -> tuple[list[list[int]], list[int]]:
    """Run a chat template on turns of some roles; thinking is off as in `read_chat_template`.

    Args:
        reply: whether a turn of the model is begun after them.
        remedy: what to do if that fails, for the message.

    Returns:
        The tokens before, between and after the words of turns, and the turns in the order in which
        their words come.

    Raises:
        ConfigError: the template rejects these roles, or does not contain the words of each once.
    """
    from jinja2 import TemplateError

    def unusable(reason: str) -> ConfigError:
        return ConfigError(
            f"the chat template of backbone '{name}' cannot be used ({reason}); {remedy}"
        )

    turns = [{"role": role, "content": f"words-of-turn-{i}."} for i, role in enumerate(roles)]
    try:
        text = tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=reply, enable_thinking=False
        )
    except (TemplateError, ValueError) as error:
        raise unusable(str(error).strip()) from None
    pieces = WORDS.split(str(text))
    order = [int(turn) for turn in pieces[1::2]]
    times = Counter(order)
    for turn, role in enumerate(roles):
        if times[turn] != 1:
            raise unusable(f"it writes the {role}'s words {times[turn]} times, not once")
    return list(tokenizer(pieces[::2], add_special_tokens=False)["input_ids"]), order
