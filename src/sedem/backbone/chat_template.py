"""What a tokenizer's chat template puts around the words of turns, as tokens.

A template is a Jinja program from others, which may loop or grow without end. transformers runs it
in Jinja's sandbox, in a process with limits of time and memory, once for all usual conversations.
Its only data are roles and fixed words, which are replaced later, so no question can change the
text around it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache, partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from sedem.durable_files import remembered
from sedem.errors import ConfigError, SedemError, first_line
from sedem.untrusted import (
    TEMPLATE_BYTES,
    TEMPLATE_CHARACTERS,
    TEMPLATE_SECONDS,
    apart,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORDS = re.compile(r"words-of-turn-(\d+)\.")
"""Placeholders for the contents of turns."""
USUAL_TURNS = 64
"""Conversations of at most this many turns, without a system's, are rendered together."""
Roles = tuple[str, ...]
"""The roles of turns, and "reply" at the end if a turn of the model is begun after them."""


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

    def unusable(reason: str) -> ConfigError:
        return ConfigError(
            f"the chat template of backbone '{name}' cannot be used ({reason}); {remedy}"
        )

    try:
        # A tokenizer may have several templates; without a default one this is an error.
        given = tokenizer.get_chat_template(), json.dumps(tokenizer.special_tokens_map, default=str)
        wanted = (*roles, "reply") if reply else (*roles,)
        usual = _USUAL if wanted in _USUAL else (wanted,)
        text, problem = dict(zip(usual, _rendered(*given, usual), strict=True))[wanted]
    except (SedemError, ValueError) as error:
        raise unusable(str(error).strip()) from None
    if problem:
        raise unusable(problem)
    pieces = WORDS.split(text)
    order = [int(turn) for turn in pieces[1::2]]
    times = Counter(order)
    for turn, role in enumerate(roles):
        if times[turn] != 1:
            raise unusable(f"it writes the {role}'s words {times[turn]} times, not once")
    return list(tokenizer(pieces[::2], add_special_tokens=False)["input_ids"]), order


def _usual() -> tuple[Roles, ...]:
    """Return the roles of what `read_chat_template` needs, and of usual conversations."""
    turns = [("user", *("assistant", "user") * count) for count in range(USUAL_TURNS // 2)]
    some = [(*first, *rest, "reply") for first in ((), ("system",)) for rest in turns]
    return ("user", "assistant"), *some


_USUAL = _usual()


@lru_cache(maxsize=64)
def _rendered(template: str, special: str, wanted: tuple[Roles, ...]) -> list[tuple[str, str]]:
    """Return the text of each conversation, or why the template does not render it.

    The process takes seconds to start, so what it found is kept in the cache; some templates write
    the date.
    """
    day = str(date.today()) if "strftime" in template else ""
    seen = json.dumps([template, special, wanted, version("transformers"), day])
    limited = partial(apart, seconds=TEMPLATE_SECONDS, memory=TEMPLATE_BYTES)
    find = partial(limited, f"{__name__}:_render", template, special, wanted)
    return json.loads(remembered("templates", seen, find))


def _render(template: str, special: str, wanted: list[list[str]]) -> str:
    """Render conversations, and return their texts as JSON: in the process."""
    from transformers.utils.chat_template_utils import render_jinja_template

    found: list[tuple[str, str]] = []
    for roles in wanted:
        said = [role for role in roles if role != "reply"]
        turns = [{"role": role, "content": f"words-of-turn-{i}."} for i, role in enumerate(said)]
        reply = said != roles
        try:
            (text,), _ = render_jinja_template(
                [turns],
                chat_template=template,
                add_generation_prompt=reply,
                **{**json.loads(special), "enable_thinking": False},
            )
            problem = "" if len(text) <= TEMPLATE_CHARACTERS else "it writes too much"
            found.append(("" if problem else text, problem))
        except MemoryError:
            raise
        except Exception as error:  # whatever the program does
            found.append(("", first_line(error)))
    return json.dumps(found)
