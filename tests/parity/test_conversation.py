"""Replies without documents against Hugging Face's `generate` on the same chat template."""

from __future__ import annotations

import pytest
import torch
from answers import RENT, joined, prepared_for
from conftest import LEASE
from parity.test_engine import CONTEXTS, build, static

from sedem import Decoding, Document, SeDeM
from sedem.answering.conversation import conversation_request
from sedem.backbone.prompts import Turn
from sedem.selecting.plan import Request

STEPS = 24
CONVERSATIONS: list[list[Turn]] = [
    [("user", "Hello!")],
    [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Who are you?")],
]


def by_hugging_face(model: SeDeM, turns: list[Turn]) -> list[int]:
    """Tokens of a reply, with the one that ends it, if it comes within the limit."""
    prompt = model.decoder.tokenizer.apply_chat_template(
        [{"role": role, "content": words} for role, words in turns],
        add_generation_prompt=True,
        enable_thinking=False,
        return_tensors="pt",
    )
    found = model.decoder.model.generate(
        **prompt, max_new_tokens=STEPS, do_sample=False, eos_token_id=model.decoder.chat.ends
    )
    return list(found[0, prompt["input_ids"].shape[1] :].tolist())


def by_engine(model: SeDeM, requests: list[Request]) -> list[list[int]]:
    """Tokens of answers that run together."""
    prepared = [prepared_for(model, request, STEPS) for request in requests]
    inputs = [one.inputs for one in prepared if one.inputs is not None]
    with joined(model.engine, inputs, STEPS) as (logits, rows):
        tokens = [logits.argmax(-1)]
        for _ in range(STEPS - 1):
            tokens.append(rows.step(tokens[-1]).argmax(-1))
    return torch.stack(tokens, dim=1).tolist()


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_tokens_are_those_of_generate_alone_and_beside_answers_from_memory(
    chat_folder: str, context: str, engine: str
) -> None:
    model = build(chat_folder, block_context=context, guidance=context == "independent")
    expected = [by_hugging_face(model, turns) for turns in CONVERSATIONS]
    if engine == "static":
        model = static(build(chat_folder, block_context=context, guidance=context == "independent"))
    bank = model.read([Document("lease.txt", LEASE)])
    replies = [conversation_request(model, turns, STEPS)[0] for turns in CONVERSATIONS]
    for request, tokens in zip(replies, expected, strict=True):
        assert by_engine(model, [request])[0][: len(tokens)] == tokens
    _, *together = by_engine(model, [Request(bank, RENT, 3), *replies])
    for found, tokens in zip(together, expected, strict=True):
        assert found[: len(tokens)] == tokens
    answer = model.answer(None, "Hello!", decoding=Decoding(STEPS))
    ids = [token for token in expected[0] if token not in model.decoder.chat.ends]
    assert answer.answer_tokens == len(ids)
