"""Contexts have exactly the requested number of tokens, for any text."""

from __future__ import annotations

import pytest

from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import open_backbone
from sedem.bench.contexts import DOCUMENT, context, source
from sedem.checkpoint.folder import locate
from sedem.checkpoint.portable import BACKBONE
from sedem.errors import DataError


@pytest.fixture(scope="module")
def nano() -> Backbone:
    return open_backbone(str(locate("sedem-nano") / BACKBONE))


@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 2048, 20_000])
def test_the_demo_text_is_cut_to_the_exact_length(nano: Backbone, tokens: int) -> None:
    documents = context(source(None)[0], nano, tokens)
    counts = [len(nano.token_ids(document.text)) for document in documents]
    assert sum(counts) == tokens
    assert counts[:-1] == [DOCUMENT] * (len(documents) - 1)
    assert len({document.name for document in documents}) == len(documents)


def test_a_short_text_is_repeated(backbone: Backbone) -> None:
    (document,) = context("One two three. ", backbone, 100)
    assert len(backbone.token_ids(document.text)) == 100
    assert document.text.startswith("One two three. One two three. ")


def test_a_text_without_words_is_rejected(backbone: Backbone) -> None:
    with pytest.raises(DataError, match="cannot be cut to 3 tokens"):
        context("   ", backbone, 3)
