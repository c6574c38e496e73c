"""Tokenizers from others: tried first, opened without transformers, and their chat templates.

A tokenizer's file may panic its library, and its rules may make a text grow without end or
backtrack forever. A chat template is a Jinja program, which may loop or grow without end. Both run
once in a process with limits of time and memory, and what was found is kept in the cache.
transformers runs templates in Jinja's sandbox, for all usual conversations together. Their only
data are roles and fixed words, which are replaced later, so no question can change the text around
it.
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
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict
from tokenizers import Encoding, Tokenizer

from sedem.errors import CheckpointError, ConfigError, DataError, SedemError, first_line
from sedem.untrusted import (
    DOCUMENT_BYTES,
    TEMPLATE_BYTES,
    TEMPLATE_CHARACTERS,
    TEMPLATE_SECONDS,
    TOKENIZER_BYTES,
    TOKENIZER_SECONDS,
    LimitError,
    apart,
    exists,
    read_json,
    read_text,
    remembered,
    state_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
OTHER_FILES = ("special_tokens_map.json", "added_tokens.json")
"""Files that change a tokenizer; a folder with any of them is left to transformers."""
GROWTH = 64
"""How many times as long the rules may make a text."""
SAMPLES = (
    "".join(map(chr, range(32, 0x250))) * 8 + "Görlitz, 3 May 2024;\n\n\t№ 7 «late» 漢字 🥧 ",
    *(character * 5000 for character in "a 0.\n"),
    "a" * 5000 + "!",
)
WORDS = re.compile(r"words-of-turn-(\d+)\.")
"""Placeholders for the contents of turns."""
USUAL_TURNS = 64
"""Conversations of at most this many turns, without a system's, are rendered together."""
Roles = tuple[str, ...]
"""The roles of turns, and "reply" at the end if a turn of the model is begun after them."""


def check_tokenizer(folder: Path) -> None:
    """Refuse the tokenizer of a folder if it is not safe to use; one that has none passes.

    What was tried is noted in the cache, because it takes as long as opening it.

    Raises:
        ValueError: why it cannot be used, in a few words.
    """
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        return

    def find() -> str:
        call, place = f"{__name__}:_try_samples", str(file.resolve())
        apart(call, place, seconds=TOKENIZER_SECONDS, memory=TOKENIZER_BYTES)
        return "safe"

    try:
        remembered("tokenizers", state_of(file), find)
    except (LimitError, DataError) as error:
        raise ValueError(f"{TOKENIZER_FILE} {error}") from None


def _try_samples(file: str) -> None:
    """Tokenize texts: in the process."""
    try:
        tokenizer = Tokenizer.from_file(file)
    except Exception:  # opening it reports what is wrong; a panic is no Exception
        return
    rules = json.loads(tokenizer.to_str())
    if max(_growth(rules["normalizer"]), _growth(rules["decoder"])) > GROWTH:
        raise DataError(f"makes a text more than {GROWTH} times as long")
    for text in SAMPLES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        shown = tokenizer.decode(ids)
        if max(len(ids), len(shown)) > GROWTH * len(text):
            raise DataError(f"makes a text more than {GROWTH} times as long")


def _growth(rule: dict[str, Any] | None) -> float:
    """How many times as long a normalizer or a decoder may make a text by replacing parts."""
    if rule is None:
        return 1
    if rule["type"] == "Sequence":
        return prod(map(_growth, rule.get("normalizers") or rule.get("decoders") or ()))
    if rule["type"] != "Replace":
        return 1
    pattern, content = rule["pattern"], len(rule["content"])
    # A regular expression may match nothing, between any two characters.
    return max(1, content / len(pattern["String"])) if pattern.get("String") else 1 + content


# Without transformers


class LightEncodings(dict[str, Any]):
    """Tokens of several texts, as transformers returns them.

    Attributes:
        encodings: the same in the tokenizer's own form.
    """

    encodings: list[Encoding]


class LightTokenizer:
    """The part of transformers' tokenizers that sedem uses, with identical tokens."""

    is_fast = True

    def __init__(
        self, backend: Tokenizer, bos_token_id: int, eos_token_id: int, chat_template: str | None
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self.backend_tokenizer = backend
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.chat_template = chat_template

    def __call__(
        self,
        texts: list[str],
        *,
        add_special_tokens: Literal[False],
        return_attention_mask: Literal[False],
        split_special_tokens: Literal[True],
        verbose: bool,
        return_offsets_mapping: bool = False,
    ) -> LightEncodings:
        """Tokenize texts; special tokens written in them stay plain text."""
        encodings = self.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        result = LightEncodings(input_ids=[encoding.ids for encoding in encodings])
        if return_offsets_mapping:
            result["offset_mapping"] = [encoding.offsets for encoding in encodings]
        result.encodings = encodings
        return result

    def decode(
        self,
        ids: list[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: Literal[False] = False,
    ) -> str:
        """The text of tokens."""
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


class _Settings(BaseModel):
    """A tokenizer_config.json that adds nothing to tokenizer.json; any other is refused."""

    model_config = ConfigDict(strict=True, extra="forbid")

    tokenizer_class: Literal["TokenizersBackend", "PreTrainedTokenizerFast"]
    bos_token: str
    eos_token: str
    pad_token: str | None = None
    extra_special_tokens: list[str] = []
    # Entries that do not affect how text is tokenized or decoded here.
    clean_up_tokenization_spaces: bool = False
    backend: str | None = None
    chat_template: None = None  # it has a file of its own
    model_max_length: int | None = None
    unk_token: str | None = None


def open_light_tokenizer(folder: Path) -> LightTokenizer | None:
    """Open the tokenizer of a folder.

    Returns:
        None if tokenizer.json does not describe it fully or is damaged, so that opening it with
        transformers reports what is wrong.
    """
    if any(exists(folder / name) for name in OTHER_FILES):
        return None
    try:
        entries = read_json(folder / SETTINGS_FILE, CheckpointError, DOCUMENT_BYTES)
        settings = _Settings.model_validate(entries)
        backend = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        template = folder / TEMPLATE_FILE
        chat = read_text(template, CheckpointError, DOCUMENT_BYTES) if exists(template) else None
    except Exception:  # tokenizers raises nothing narrower
        return None
    special = {
        token.content: number
        for number, token in backend.get_added_tokens_decoder().items()
        if token.special
    }
    named = [settings.bos_token, settings.eos_token, settings.pad_token or settings.eos_token]
    if not special.keys() >= {*named, *settings.extra_special_tokens}:
        return None
    ends = special[settings.bos_token], special[settings.eos_token]
    return LightTokenizer(backend, *ends, chat)


# Chat templates


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


_TURNS = [("user", *("assistant", "user") * count) for count in range(USUAL_TURNS // 2)]
_USUAL: tuple[Roles, ...] = (
    ("user", "assistant"),
    *((*first, *turns, "reply") for first in ((), ("system",)) for turns in _TURNS),
)
"""The roles of what `read_chat_template` needs, and of usual conversations."""


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
