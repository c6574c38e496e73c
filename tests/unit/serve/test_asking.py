"""Which part of a conversation is the question, and which parts are documents."""

from __future__ import annotations

import pytest
from answers import RENT
from conftest import LEASE, RECIPE

from sedem.serve.asking import LONG, Conversation, read_conversation, split
from sedem.serve.errors import ApiError
from sedem.serve.shapes import Message

LONG_LEASE = f"{LEASE} {LEASE}"


def read(*messages: tuple[str, str], with_bank: bool = False) -> Conversation:
    return read_conversation(
        [Message(role=role, content=text) for role, text in messages],  # type: ignore[arg-type]
        with_bank=with_bank,
    )


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
    ],
)
def test_a_message_is_parted_into_question_and_document(
    text: str, question: str, beside: str
) -> None:
    assert split(text) == (question, beside)


def test_a_long_text_without_a_question_is_refused() -> None:
    # Splitting takes no longer than the text.
    assert split("? \n" * 1_000_000 + f"\n\n{RENT}")[0] == RENT
    endless = "a " * 2_000_000
    for text in (LONG_LEASE, f"{LEASE}\n\n{LONG_LEASE}", "x" * 5000 + "?", endless):
        with pytest.raises(ApiError, match="without a question; end it with a blank line") as error:
            split(text)
        assert (error.value.status, error.value.code) == (400, "no_question")


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
    assert conversation.question == text
    assert conversation.documents == ()
    assert "a bank is asked" in conversation.unused[0]


def test_short_messages_are_no_documents() -> None:
    assert len(LEASE) < LONG
    for messages in ([("user", RENT)], [("system", LEASE), ("user", RENT)]):
        conversation = read(*messages)
        assert (conversation.question, conversation.documents) == (RENT, ())
        assert conversation.last == len(messages) - 1
    with pytest.raises(ApiError, match="no user message asks anything"):
        read(("system", LONG_LEASE))
