"""What a conversation asks, and which of its texts are documents.

The question is in the last message of the user. Clients wrap it in a template of their own. Its
structure tells its parts apart: tags, rules between lines, labels such as "Question:", and a colon
that introduces what follows. A message that fits no template is a question.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sedem.backbone.prompts import Turn
from sedem.selecting.select import share_of_context
from sedem.types import Document

LONG = 400
"""Characters above which a turn, or the text next to a question, is a document."""
EDGE = 10_000
"""Characters at either end of a message in which a template's labels are searched."""
WORDS = 3
"""Minimum words of a question cut out of a paragraph, because "Dr. Who?" is only one sentence."""
TITLE_WORDS = 6
"""Maximum words of a conversation's title."""
MARKS, COLONS = ("?", "？", "؟"), (":", "：")

_STRONG = r"(?<![^\W_])(?:question|query)\w{0,2}"
_WEAK = r"(?<![^\W_])(?:q|input|request|prompt|user|human)(?![^\W_])"
"""Words that label a question only if the template ends with a label for the answer."""
_CONTEXT = r"(?<![^\W_])context\w{0,2}"
_SOURCES = r"(?<![^\W_])(?:document|source|passage|excerpt|information)\w{0,2}"
_ANSWER = r"(?<![^\W_])(?:a|(?:answer|response|assistant)\w{0,2})(?![^\W_])"


def _label(*words: str) -> re.Pattern[str]:
    """Return a pattern of labels, such as "User query: ", and headings, such as "## Query"."""
    return re.compile(
        rf"^[ \t>*_]*(#+)?[^\n:：.?!#]{{0,40}}?(?:{'|'.join(words)})[ \t*_]*(?:is as follows)?"
        r"(?(1)(?:[:：]|$)|[:：])[ \t*_]*",
        re.I | re.M,
    )


_LABELS = {
    "asks": _label(_STRONG, _WEAK),
    "holds": _label(_CONTEXT, _SOURCES),
    "ends": _label(_ANSWER),
}
_CONTEXT_LINE = re.compile(_label(_CONTEXT).pattern + "$", re.I | re.M)
_CUE = re.compile(r"\n[ \t>#*|]{0,9}\w[^\n:：.?!]{0,30}[:：][\s*]{0,9}$")
"""A label at the end, where a template waits for the answer."""
_ASKED_TAG = re.compile(r"<((?:\w+_)?(?:question|query|input|request))>(.*?)</\1>", re.S | re.I)
_CLOSING = re.compile(
    r"</((?:\w+[_-])?(?:context|document|source|passage|excerpt|knowledge|file|result)s?)>", re.I
)
_HISTORY = re.compile(
    r"<(chat[_ ]?history|conversation|history|transcript|messages)>|\|\|>|"
    r"^[ \t#*]*(?:conversation|chat history|chat|dialog(?:ue)?)[*]*[:：][ \t*]*$",
    re.I | re.M,
)
_FORM = re.compile(r'\{\s*"(title|tags|follow_ups|queries|text|prompt|emoji)"\s*:\s*([\["])')
"""The JSON that a client's own task asks for."""
_TITLE = re.compile(r"\btitle\b", re.I)
_OF_CHAT = re.compile(r"\b(?:chat|conversation|discussion|dialogue)\b", re.I)
_RULE = re.compile(r"^[^\S\n]*(?:[-_=*~]{3,}|`{3,}[^\n`]*)$", re.M)
_BREAK = re.compile(r"\n[^\S\n]*(?:(?:[-_=*~]{3,}|`{3,}[^\n`]*)[^\S\n]*)?(?:\n\s*|$)")
"""The end of a paragraph: blank lines, a rule or a fence."""
_SENTENCE = re.compile(r"[.!?…:]\s+|[。！？：]\s*|\n\s*")
"""The end of the preceding sentence."""
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_]+")
"""A word, or a character of a script that does not separate words."""
_INSTRUCTS = re.compile(r"\s*(?:use|using|answer|given|based on|you are|we have)\b", re.I)


@dataclass(frozen=True)
class Conversation:
    """What a conversation asks.

    Attributes:
        question: empty if it asks nothing that documents could answer.
        documents: texts that came with the question.
        unused: one sentence for each message that is neither.
        last: index of the question's turn.
        reply: the answer, if no document is needed for it.
        context: the question before and its answer, if the question refers back to them.
    """

    question: str
    documents: tuple[Document, ...]
    unused: tuple[str, ...]
    last: int
    reply: str | None = None
    context: str = ""


def read_conversation(turns: Sequence[Turn], *, with_bank: bool) -> Conversation | None:
    """Find the question of a conversation, and its documents.

    Args:
        turns: roles, as clients name them, and words.
        with_bank: whether a bank is asked, so that turns are no documents.

    Returns:
        What it asks; None if nobody but the assistant says anything.
    """
    said = [i for i, (role, words) in enumerate(turns) if words.strip() and role != "assistant"]
    by_user = [i for i in said if turns[i][0] == "user"]
    if not said:
        return None
    last = (by_user or said)[-1]
    text = turns[last][1].strip()
    reply = housekeeping(text)
    question, beside = ("", "") if reply is not None else split(text, with_bank=with_bank)
    if not question and reply is None:
        reply = (
            f"The last message is a text of {len(text):,} characters that asks nothing. Send it "
            "again with a blank line and a question after it."
        )
    why = f"it is not the last question, and a document needs more than {LONG} characters"
    if with_bank:
        why = "a bank is asked, and only the last question counts"
    before: list[int] = []
    if share_of_context(question):
        # The question before, and what was answered.
        asked = max((i for i in by_user if i < last), default=last)
        before = [i for i in range(asked, last) if turns[i][0] in ("user", "assistant")]
    texts, unused = dict[int, str](), list[str]()
    for index, (role, words) in enumerate(turns):
        document = beside if index == last else document_of(role, words)
        if document and not with_bank:
            texts[index] = document
        used = (question if index == last else "") + texts.get(index, "")
        if used and len("".join(used.split())) < len("".join(words.split())):
            rest = why if with_bank else "the rest is no question and no document"
            unused.append(f"message {index + 1} ({role}) was used only in part: {rest}")
        elif index not in (*before, last) and words.strip() and not used:
            unused.append(unused_turn(index, role, why))
    documents = [Document(f"message {index + 1}", texts[index]) for index in sorted(texts)]
    context = "\n".join(turns[i][1][:LONG] for i in before if i not in texts)
    return Conversation(question, tuple(documents), tuple(unused), last, reply, context)


def unused_turn(index: int, role: str, why: str) -> str:
    """Return the sentence about a turn that is not used."""
    return f"message {index + 1} ({role}) was not used: {why}"


# The question in a message


def split(text: str, *, with_bank: bool = False) -> tuple[str, str]:
    """Split a message, without white space around it, into its question and its documents.

    The question is what a template marks as such. Without a template, it is the last paragraph, or
    the first one if only that ends with a question mark or a colon; in a long paragraph, the last
    or first sentence if it ends with a question mark.

    Returns:
        The question, empty if nothing is asked, and the documents, which may be empty.
    """
    found = _tagged(text) or _labelled(text)
    if found is None and with_bank and len(text) <= LONG:
        return text, ""
    if found is None:
        cue = _cue(text)
        body = text[: cue.start()].rstrip() if cue else text
        found = _by_paragraph(body) or _by_sentence(body)
    return found or ((text, "") if with_bank else ("", text))


def _tagged(text: str) -> tuple[str, str] | None:
    """Split a message with tags around its documents; the question follows or precedes them."""
    inside = _between_tags(text)
    if inside is None:
        return None
    head, document, tail = (part.strip() for part in inside)
    for outside in (tail, head):
        if asked := _ASKED_TAG.search(outside, max(0, len(outside) - EDGE)):
            return asked[2].strip(), document
        if labelled := _labelled(outside):
            return labelled[0], document
    if tail and len(tail) <= LONG:
        return tail, document
    outside = tail or head
    found = outside and (_by_paragraph(outside) or (outside, ""))
    return (found[0], document) if found else ("", document)


def _between_tags(text: str) -> tuple[str, str, str] | None:
    """Return what precedes a template's documents, the documents, and what follows them."""
    closing = None
    for closing in _CLOSING.finditer(text):  # noqa: B007
        pass
    if closing is None:
        return None
    tag = rf"<{re.escape(closing[1])}(?:[ \t][^<>\n]*)?>"
    opening = re.search(rf"^[ \t]*{tag}", text, re.I | re.M) or re.search(tag, text, re.I)
    if opening is None or opening.start() > closing.start():
        return None
    return text[: opening.start()], text[opening.end() : closing.start()], text[closing.end() :]


def _labelled(text: str) -> tuple[str, str] | None:
    """Split a message whose question has a label, before or after a labelled context."""
    cue = _cue(text)
    body = text[: cue.start()] if cue else text
    # The labels near both ends: where they start and end, and their kind
    ranges = [(0, EDGE), (len(body) - EDGE, len(body))]
    labels = sorted(
        (label.start(), label.end(), kind)
        for kind, pattern in _LABELS.items()
        for edge in ([(0, len(body))] if len(body) <= 2 * EDGE else ranges)
        for label in pattern.finditer(body, *edge)
    )
    kinds = [*(kind for _, _, kind in labels), "", ""]
    asks = [at for at, kind in enumerate(kinds) if kind == "asks"]
    if not asks:
        return None
    leads = kinds[asks[0] + 1] == "holds" and "holds" not in kinds[: asks[0]]
    at = asks[0] if leads else asks[-1]
    (start, end, _), following = labels[at], kinds[at + 1]
    stop = labels[at + 1][0] if following else len(body)
    question = body[end:stop].strip()
    strong = re.search(_STRONG, body[start:end], re.I) is not None
    alone = strong and len(question) <= LONG and not _BREAK.search(question)
    ends = (following == "" and (cue or alone)) or (following == "ends" and cue)
    if not question or not (leads or ends):
        return None
    beside = _context(body[:start] + body[stop:])
    # Short turns before the user's last one are a conversation, not a document.
    return question, beside if strong or len(beside) > LONG else ""


def _cue(text: str) -> re.Match[str] | None:
    """Find the label at the end of a text where a template waits for the answer."""
    return _CUE.search(text, max(0, len(text) - 100))


def _context(text: str) -> str:
    """Return the documents in a template's text, without its instructions if they stand out."""
    text = text.strip()
    label = _LABELS["holds"].search(text, 0, EDGE)
    rules = [*_RULE.finditer(text)]
    if label is not None and (label.start() == 0 or _INSTRUCTS.match(text)):
        text = text[label.end() :]
    elif rules and _INSTRUCTS.match(text):
        text = text[rules[0].end() : rules[-1].start() if len(rules) > 1 else None]
    elif _INSTRUCTS.match(text) and (end := _BREAK.search(text)):
        text = text[end.end() :]
    return text.strip()


def document_of(role: str, text: str) -> str | None:
    """Return the document in a turn other than the last; None if it has none."""
    if role == "assistant":
        return None
    if inside := _between_tags(text):
        return inside[1].strip() or None
    ruled = _INSTRUCTS.match(text) and _RULE.search(text)
    if role in ("system", "developer") and (ruled or _CONTEXT_LINE.search(text)):
        return _context(text) or None
    return text if len(text) > LONG else None


def _by_paragraph(text: str) -> tuple[str, str] | None:
    """Split a message into the paragraph that asks, at its end or beginning, and the others."""
    breaks = list(_BREAK.finditer(text)) if "\n" in text else []
    breaks = [one for one in breaks if one.end() < len(text)]
    if not breaks:
        return (text, "") if len(text) <= LONG else None
    first, last = text[: breaks[0].start()], text[breaks[-1].end() :]
    by_first, by_last = (first, text[breaks[0].end() :]), (last, text[: breaks[-1].start()])
    if len(last) <= LONG and last.endswith(MARKS):
        return by_last
    introduces = first.endswith(COLONS) and not _LABELS["holds"].fullmatch(first)
    if len(first) <= LONG and (first.endswith(MARKS) or introduces):
        return by_first
    if len(last) <= LONG:
        return by_last
    return by_first if len(first) <= LONG else None


def _by_sentence(text: str) -> tuple[str, str] | None:
    """Split a long paragraph into the sentence that asks, at its beginning or end, and the rest."""
    # Only the ends are searched: a text may have millions of characters.
    edge = max(0, len(text) - LONG)
    starts = [edge + sentence.end() for sentence in _SENTENCE.finditer(text[edge:])]
    starts = [start for start in starts if len(_WORD.findall(text[start:])) >= WORDS]
    if starts and text.endswith(MARKS):
        return text[starts[-1] :], text[: starts[-1]].rstrip()
    end = _SENTENCE.search(text[:LONG])
    first = text[: end.end()].strip() if end else ""
    asks = first.endswith(MARKS) and len(_WORD.findall(first)) >= WORDS
    return (first, text[len(first) :].strip()) if asks else None


# Replies without documents


def housekeeping(text: str) -> str | None:
    """Return the reply to a task that a client sets for itself; None if a message is no such task.

    A title is the beginning of the conversation, and a question that is to be rephrased stays as it
    is. Other lists and texts stay empty: they would be inventions.
    """
    cue, history = _cue(text), _HISTORY.search(text, 0, EDGE)
    if cue and re.search(_STRONG, cue[0], re.I) and (asked := _labelled(text)):
        return asked[0]
    instruction = text[: history.start()] if history else _BREAK.split(text[:EDGE], maxsplit=1)[0]
    titles = _TITLE.search(instruction) if not instruction.strip().endswith(MARKS) else None
    if history is None:
        of_chat = titles and instruction != text and _OF_CHAT.search(instruction)
        return _title(text[len(instruction) :]) if of_chat else None
    talk = text[history.end() :]
    if history[1] and (end := talk.rfind(f"</{history[1]}>")) >= 0:
        talk = talk[:end]
    if form := _FORM.search(text, 0, EDGE):
        key, kind = form.groups()
        value: str | list[str] = _title(talk) if key == "title" else ""
        if kind == "[":
            value = [_turns(talk)[-1]] if key == "queries" else []
        return json.dumps({key: value}, ensure_ascii=False)
    return _title(talk) if titles else None


def _turns(talk: str) -> list[str]:
    """Return what the user says in a conversation that is written down."""
    parts = re.split(r"^\W*(\w{1,12}) ?[:：]", talk, flags=re.M)
    said = dict(enumerate(parts[2::2]))
    by_user = [said[i] for i, role in enumerate(parts[1::2]) if re.fullmatch(_WEAK, role, re.I)]
    return [one.strip().strip("\"'") for one in by_user or said.values() or [talk]]


def _title(talk: str) -> str:
    """Return the first words of a conversation."""
    words = _turns(talk)[0].split()[:TITLE_WORDS]
    return " ".join(words)[:60].strip("\"'.,:;?!？。 ") or "Conversation"
