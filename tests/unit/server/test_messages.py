"""Which part of a conversation is the question, and which parts are documents."""

from __future__ import annotations

import pytest
from answers import RENT
from conftest import LEASE, RECIPE

from sedem.backbone.prompts import Turn
from sedem_serve.server.messages import (
    LONG,
    Conversation,
    housekeeping,
    read_conversation,
    split,
)

LONG_LEASE = f"{LEASE} {LEASE}"
FAQ = "FAQ\nQuestion: Pets?\nAnswer: Ask."
SOURCE = f"<source id='1'>{LEASE}</source>"
TALK = f"USER: {RENT}\nASSISTANT: 900 euros"
TAGGED = f"<chat_history>\n{TALK}\n</chat_history>"


def read(*turns: Turn, with_bank: bool = False) -> Conversation:
    conversation = read_conversation(turns, with_bank=with_bank)
    assert conversation is not None
    return conversation


@pytest.mark.parametrize(
    ("text", "question", "beside"),
    [
        (RENT, RENT, ""),
        (f"{LEASE}\n\n{RENT}", RENT, LEASE),
        (f"{LEASE}\n\n{RECIPE}\n \t\n{RENT}", RENT, f"{LEASE}\n\n{RECIPE}"),
        (f"{RENT}\n\n{LONG_LEASE}", RENT, LONG_LEASE),
        (f"{RENT}\n\n{LEASE}\n\n{RECIPE}", RENT, f"{LEASE}\n\n{RECIPE}"),
        (f"Who?\n\n{LEASE}\n\n{RENT}", RENT, f"Who?\n\n{LEASE}"),
        (f"{LONG_LEASE} {RENT}", RENT, LONG_LEASE),
        (f"{LONG_LEASE}\n{RENT}", RENT, LONG_LEASE),
        (f"{LONG_LEASE} And who is Dr. Smith?", "And who is Dr. Smith?", LONG_LEASE),
        (f"{LEASE}\n\nTell me the rent", "Tell me the rent", LEASE),
        # A request without a question mark, first or last
        (f"Summarise this.\n\n{LONG_LEASE}", "Summarise this.", LONG_LEASE),
        (f"Summarise this:\n\n{LEASE}\n\n{RECIPE}", "Summarise this:", f"{LEASE}\n\n{RECIPE}"),
        (f"Résume ce bail :\n\n{LEASE}", "Résume ce bail :", LEASE),
        (f"总结下面的合同：\n\n{LEASE}", "总结下面的合同：", LEASE),
        (f"Short:\n\n{LEASE}\n\nSUMMARY:", "Short:", LEASE),
        (f"{RENT} {LONG_LEASE}", RENT, LONG_LEASE),
        ("合同规定租金。" * 90 + "租金是多少？", "租金是多少？", "合同规定租金。" * 90),
        # Labels
        (f"Context: {LEASE}\n\nQuestion: {RENT}\n\nAnswer:", RENT, LEASE),
        (f"Question: {RENT}\nContext: {LEASE}\nAnswer:", RENT, LEASE),
        (f"**Question**: {RENT}\n\n**Context**:\n{LEASE}\n\n**Answer**:", RENT, LEASE),
        (f"## Context\n{LEASE}\n\n## User question\nthe rent", "the rent", LEASE),
        (f"Use the context.\n\n{LEASE}\n\nQuestion: {RENT}\nHelpful Answer:", RENT, LEASE),
        ("user: Hi\nassistant: Yes?\nuser: Pets?\nassistant:", "Pets?", ""),
        ("I have one question: may I keep a cat", "may I keep a cat", ""),
        # Of labels in other languages, the order is known.
        (f"Kontext: {LEASE}\n\nFrage: Miete\n\nAntwort:", "Frage: Miete", f"Kontext: {LEASE}"),
        (f"已知信息：\n{LEASE}\n\n问题：租金\n\n回答：", "问题：租金", f"已知信息：\n{LEASE}"),
        # Labels of a document are not those of a template.
        (f"{FAQ}\n\n{RENT}", RENT, FAQ),
        (f"Context:\n{FAQ}\n\nQuestion: {RENT}\nAnswer:", RENT, FAQ),
        ("Which voltage?\n\nData\nInput: 230 V", "Which voltage?", "Data\nInput: 230 V"),
        # Tags, rules and fences
        (f"<context>\n{LEASE}\n</context>\n\n{RENT}", RENT, LEASE),
        (f"{RENT}\n\n<context>\n{LEASE}\n</context>", RENT, LEASE),
        (f"A <source> as [id].\n<context>{SOURCE}</context>\n\nthe rent", "the rent", SOURCE),
        (f"<documents>{LEASE}</documents>\n<question>{RENT}</question>", RENT, LEASE),
        (f"<context>{LEASE}</context>", "", LEASE),
        (f"Below:\n-----\n{LEASE}\n-----\n{RENT}", RENT, f"Below:\n-----\n{LEASE}"),
        (f"```lease.md\n{LEASE}\n```\n\n{RENT}", RENT, f"```lease.md\n{LEASE}"),
        ("What does <b>rent</b> mean?", "What does <b>rent</b> mean?", ""),
    ],
)  # fmt: skip
def test_a_message_is_parted_into_question_and_document(
    text: str, question: str, beside: str
) -> None:
    assert split(text) == (question, beside)


def test_a_text_that_asks_nothing_is_said_to_ask_nothing() -> None:
    for text in (LONG_LEASE, f"{LONG_LEASE}\n\n{LONG_LEASE}", "x" * 5000 + "?", "a " * 100_000):
        assert split(text.strip()) == ("", text.strip())
        reply = read(("user", text)).reply
        assert reply is not None and f"{len(text.strip()):,} characters that asks nothing" in reply
        # To a bank, it is a question.
        assert split(text.strip(), with_bank=True) == (text.strip(), "")


@pytest.mark.parametrize(
    "text",
    [
        "? \n" * 200_000, "<context>" * 50_000, "</context>" * 50_000, "question:\n" * 50_000,
        "\n" + " " * 500_000 + "x", "-" * 500_000, "*" * 500_000 + ":", "<query>" * 80_000,
        "||>" * 100_000 + "title", "\n# " * 200_000, "title chat\n\n" + "user: a\n" * 50_000,
    ],
    ids=lambda text: repr(text[:9]),
)  # fmt: skip
def test_splitting_takes_no_longer_than_the_text(text: str) -> None:
    # A pattern that backtracks over the text would not come to an end.
    conversation = read(("user", f"{text}\n\n{RENT}"))
    assert conversation.question == RENT or conversation.reply is not None


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        (f'### Task:\nTitle it: {{ "title": "t" }}\n{TAGGED}', '{"title": "What is the rent"}'),
        (f'### Task:\nTag it: {{"tags": ["t"]}}\n{TAGGED}', '{"tags": []}'),
        (f'{{"queries": ["q"]}}\n<chat_history>\n{TALK}\nUSER: 租金？', '{"queries": ["租金？"]}'),
        (f'{{"text": ""}}\n{TAGGED}\n<text>The</text>', '{"text": ""}'),
        (f"Write a title.\n\nConversation:\n{TALK}", "What is the rent"),
        (f'Write a title.\n||>User:\n"{RENT}"\n||>Response:\n"900"\n||>Title:', "What is the rent"),
        ("A title for the chat, please.\n\nThe rent, in euros, is 90", "The rent, in euros, is 90"),
        ("Write a title.\n\nConversation:\n用户：租金是多少？\n助手：900", "租金是多少"),
        ("Write a title.\n\nConversation:\n", "Conversation"),
        (f"Chat History:\n{TALK}\nFollow Up Input: Pets?\nStandalone question:", "Pets?"),
        ("What is the title of the conversation in chapter 3?", None),
        (f"What title does the chat have?\n\n{LONG_LEASE}", None),
        (f"Summarise it.\n\nConversation:\n{TALK}", None),
        (f"Context: {LEASE}\nQuestion: Which title has this conversation\nAnswer:", None),
        (RENT, None),
    ],
)  # fmt: skip
def test_tasks_that_clients_set_for_themselves_have_an_honest_reply(
    text: str, reply: str | None
) -> None:
    assert housekeeping(text) == reply


def test_long_messages_are_documents_and_short_ones_are_reported() -> None:
    conversation = read(
        ("system", LONG_LEASE),
        ("user", "Hello"),
        ("assistant", RECIPE * 4),
        ("tool", RECIPE * 4),
        ("user", f"{RECIPE * 2}\n\n{RENT}"),
    )
    assert conversation.question == RENT
    assert [(d.name, d.text) for d in conversation.documents] == [
        ("message 1", LONG_LEASE),
        ("message 4", RECIPE * 4),
        ("message 5", RECIPE * 2),
    ]
    assert [one[:9] for one in conversation.unused] == ["message 2", "message 3"]


def test_with_a_bank_messages_are_no_documents() -> None:
    text = f"{LONG_LEASE}\n\n{RENT}"
    conversation = read(("system", LONG_LEASE), ("user", text), with_bank=True)
    assert conversation.question == RENT
    assert conversation.documents == ()
    why = "a bank is asked, and only the last question counts"
    assert conversation.unused == (
        f"message 1 (system) was not used: {why}",
        f"message 2 (user) was used only in part: {why}",
    )
    short = f"I have a cat.\n\n{RENT}"
    assert read(("user", short), with_bank=True).question == short


@pytest.mark.parametrize(
    ("question", "context"),
    [
        ("And what does he charge?", "Who repairs the boiler?\nHanno."),
        ("When did they meet Anna?", "Who repairs the boiler?\nHanno."),
        ("What about its price?", "Who repairs the boiler?\nHanno."),
        ("What is the rent?", ""),
    ],
)
def test_a_question_that_refers_back_brings_the_turns_before_it(
    question: str, context: str
) -> None:
    turns = (
        ("user", "Is there a cat?"),
        ("assistant", "No."),
        ("user", "Who repairs the boiler?"),
        ("assistant", "Hanno."),
        ("user", question),
    )
    conversation = read(*turns, with_bank=True)
    assert (conversation.question, conversation.context) == (question, context)
    unused = [one[:9] for one in conversation.unused]
    assert unused == [f"message {n}" for n in range(1, 3 if context else 5)]
    assert read(("user", question), with_bank=True).context == ""


def test_documents_of_templates_are_found_in_other_messages() -> None:
    for text in (
        f"Answer from this:\n<context>\n{LEASE}\n</context>\nBe brief.",
        f"You are kind.\nContext:\n{LEASE}",
        f"Use this.\n----------\n{LEASE}\n----------",
        f"Here are the documents for the context:\n\n{LEASE}",
    ):
        conversation = read(("system", text), ("user", RENT))
        assert [document.text for document in conversation.documents] == [LEASE]
        rest = "was used only in part: the rest is no question and no document"
        assert conversation.unused == (f"message 1 (system) {rest}",)
    conversation = read(("system", "Use short words. ---"), ("user", RENT))
    assert conversation.documents == () and "message 1 (system)" in conversation.unused[0]


def test_short_messages_are_no_documents() -> None:
    assert len(LEASE) < LONG
    for messages in ([("user", RENT)], [("system", LEASE), ("user", RENT)]):
        conversation = read(*messages)
        assert (conversation.question, conversation.documents) == (RENT, ())
        assert conversation.last == len(messages) - 1
    # Some clients send their tasks as the system.
    assert read(("system", "Pets?")).question == "Pets?"
    assert read_conversation([("assistant", "Hi"), ("user", " ")], with_bank=False) is None
