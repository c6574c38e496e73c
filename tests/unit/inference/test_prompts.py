from __future__ import annotations

import pytest

from sedem.backbone.decoder import Backbone
from sedem.errors import DataError
from sedem.inference.prompts import (
    ANSWER_LIMIT,
    LONG_ANSWER_LIMIT,
    answer_ids,
    context_prompt,
    question_ids,
    question_prompt,
)


def test_answer_limits_are_those_of_the_paper() -> None:
    assert (ANSWER_LIMIT, LONG_ANSWER_LIMIT) == (64, 128)


def test_the_prompt_has_the_question_between_context_and_answer(backbone: Backbone) -> None:
    ids = question_ids(backbone, "  Who signed?\n")
    assert ids[0] == backbone.bos_token_id
    assert backbone.tokenizer.decode(ids[1:]) == "\n\nQuestion: Who signed?\nAnswer:"


def test_there_is_one_start_token(backbone: Backbone) -> None:
    assert question_ids(backbone, "Is <start> a token?").count(backbone.bos_token_id) == 1


def test_an_answer_is_a_space_its_words_and_the_end_token(backbone: Backbone) -> None:
    ids = answer_ids(backbone, " 900 euros ")
    assert ids[-1] == backbone.eos_token_id
    assert backbone.tokenizer.decode(ids[:-1]) == " 900 euros"


def test_an_answer_that_names_the_end_token_ends_once(backbone: Backbone) -> None:
    assert answer_ids(backbone, "<end> of story").count(backbone.eos_token_id) == 1


def test_prompt_and_answer_join_without_a_double_space(backbone: Backbone) -> None:
    ids = question_ids(backbone, "Who?")[1:] + answer_ids(backbone, "Me")[:-1]
    assert backbone.tokenizer.decode(ids) == question_prompt("Who?") + " Me"


def test_documents_are_separated_by_a_blank_line() -> None:
    assert context_prompt([" one\n", "two"]) == "one\n\ntwo"


@pytest.mark.parametrize("question", ["", " ", "\n\t "])
def test_an_empty_question_is_refused(backbone: Backbone, question: str) -> None:
    with pytest.raises(DataError, match="the question is empty"):
        question_ids(backbone, question)
