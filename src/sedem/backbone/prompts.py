"""Prompts, the same for every method, so that methods never differ in them."""

from __future__ import annotations

from collections.abc import Sequence

from sedem.backbone.decoder import Backbone
from sedem.backbone.tokenizer import ids_around
from sedem.errors import DataError
from sedem.untrusted import check_unicode

Turn = tuple[str, str]
"""A role, "system", "user" or "assistant", and the words."""

QUESTION = "Question: "
"""Precedes a question in its prompt."""
NEXT_QUESTION = f"\n{QUESTION.strip()}"
"""How a model without training goes on after an answer, with a question of its own."""
EMPTY = "the question is empty; ask something, such as 'Who signed the lease?'"
SEPARATOR = "\n\n"
"""Separates documents from each other, and a context from the question."""


def question_words(question: str, *, chat: bool) -> str:
    """Return the words that ask, in a user's turn or after a context, whether text or states."""
    return f"{'' if chat else SEPARATOR}{QUESTION}{question.strip()}\nAnswer:"


def context_prompt(texts: Sequence[str]) -> str:
    """Join documents into one context, for methods that read text."""
    return SEPARATOR.join(text.strip() for text in texts)


def question_ids(
    backbone: Backbone, question: str, texts: Sequence[str] = (), *, chat: bool = False
) -> list[int]:
    """Return the decoder tokens of a question: the start token, texts and the prompt.

    Args:
        chat: whether texts and question go in the user's turn of the chat template.

    Raises:
        DataError: the question is empty or not Unicode text.
    """
    check_question(question)
    (ids,) = all_question_ids(backbone, [question], chat=chat)
    return with_texts(backbone, ids, texts, chat=chat)


def located_question(
    backbone: Backbone, question: str, *, chat: bool = False
) -> tuple[list[int], slice, list[tuple[int, int]]]:
    """Return `question_ids` without texts, which of the tokens are the question's own, and where.

    The last are the characters of each own token in the stripped question; a token may begin before
    it.
    """
    check_question(question)
    words = question_words(question, chat=chat)
    tokens = backbone.tokenize([words], offsets=True)
    start = words.index(QUESTION) + len(QUESTION)
    end = start + len(question.strip())
    spans = tokens["offset_mapping"][0]
    inside = [n for n, (a, b) in enumerate(spans) if a < end and b > start]
    first = context_place(backbone, chat=chat)
    ids = _in_prompt(backbone, tokens["input_ids"][0], chat=chat)
    own = slice(first + inside[0], first + inside[-1] + 1)
    return ids, own, [(spans[n][0] - start, spans[n][1] - start) for n in inside]


def check_question(question: str) -> None:
    """Raise a DataError if a question is empty or not Unicode text."""
    check_unicode(question, "the question")
    if not question.strip():
        raise DataError(EMPTY)


def with_texts(
    backbone: Backbone, ids: list[int], texts: Sequence[str], *, chat: bool = False
) -> list[int]:
    """Return the tokens of a question with texts inserted before it; see `question_ids`."""
    if not texts:
        return ids
    place = context_place(backbone, chat=chat)
    return [*ids[:place], *context_ids(backbone, texts, chat=chat), *ids[place:]]


def context_ids(backbone: Backbone, texts: Sequence[str], *, chat: bool = False) -> list[int]:
    """Return the tokens of texts that are read before a question."""
    if not texts:
        return []
    return backbone.token_ids(context_prompt(texts) + (SEPARATOR if chat else ""))


def context_place(backbone: Backbone, *, chat: bool = False) -> int:
    """Return the number of prompt tokens before its texts: the start token, and those of a turn."""
    return 1 + (len(backbone.chat.before) if chat else 0)


def answer_ids(backbone: Backbone, answer: str, *, chat: bool = False) -> list[int]:
    """Return the target tokens of an answer: a space, the answer and the end token.

    With a chat template there is no space, and the end token is that of the model's turn.
    """
    return all_answer_ids(backbone, [answer], chat=chat)[0]


def end_ids(backbone: Backbone, *, chat: bool = False) -> list[int]:
    """Return the tokens that end an answer."""
    return backbone.chat.ends if chat else [backbone.eos_token_id]


def all_question_ids(
    backbone: Backbone, questions: Sequence[str], *, chat: bool = False
) -> list[list[int]]:
    """Return `question_ids` of several questions, tokenized together."""
    words = [question_words(question, chat=chat) for question in questions]
    tokens = backbone.tokenize(words)["input_ids"]
    return [_in_prompt(backbone, ids, chat=chat) for ids in tokens]


def _in_prompt(backbone: Backbone, ids: Sequence[int], *, chat: bool) -> list[int]:
    before, after = (backbone.chat.before, backbone.chat.after) if chat else ([], [])
    return [backbone.bos_token_id, *before, *ids, *after]


def all_answer_ids(
    backbone: Backbone, answers: Sequence[str], *, chat: bool = False
) -> list[list[int]]:
    """Return `answer_ids` of several answers, tokenized together."""
    space = "" if chat else " "
    tokens = backbone.tokenize([space + answer.strip() for answer in answers])["input_ids"]
    end, *_ = end_ids(backbone, chat=chat)
    return [[*ids, end] for ids in tokens]


def conversation_ids(backbone: Backbone, turns: Sequence[Turn]) -> list[int]:
    """Return the decoder tokens of a conversation, up to where the next turn's words begin.

    Raises:
        ConfigError: the chat template rejects this sequence of roles.
    """
    roles, texts = zip(*turns, strict=True)
    remedy = "ask a bank, or send turns that it accepts"
    (ids, *rest), order = ids_around(backbone.chat_tokenizer, backbone.name, roles, remedy=remedy)
    words = backbone.tokenize([text.strip() for text in texts])["input_ids"]
    for turn, after in zip(order, rest, strict=True):
        ids += [*words[turn], *after]
    backbone.check_ids(ids)
    start = backbone.bos_token_id
    return [start, *ids[ids[:1] == [start] :]]
