"""Contexts have exactly as many tokens as were asked for, whatever the text."""

from __future__ import annotations

import pytest

from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import open_backbone
from sedem.bench.contexts import DOCUMENT, context, source
from sedem.errors import DataError
from sedem.inference.checkpoint import BACKBONE, locate


@pytest.fixture(scope="module")
def nano() -> Backbone:
    return open_backbone(str(locate("sedem-nano") / BACKBONE))


@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 2048, 20_000])
def test_the_demos_text_is_cut_to_the_token(nano: Backbone, tokens: int) -> None:
    documents = context(source(None)[0], nano, tokens)
    counts = [len(nano.token_ids(document.text)) for document in documents]
    assert sum(counts) == tokens
    assert counts[:-1] == [DOCUMENT] * (len(documents) - 1)
    assert len({document.name for document in documents}) == len(documents)


def test_a_short_text_goes_round(backbone: Backbone) -> None:
    (document,) = context("One two three. ", backbone, 100)
    assert len(backbone.token_ids(document.text)) == 100
    assert document.text.startswith("One two three. One two three. ")


def test_a_text_that_gives_no_piece_is_refused(backbone: Backbone) -> None:
    with pytest.raises(DataError, match="cannot be cut to 3 tokens"):
        context("   ", backbone, 3)
