from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from sedem.backbone.decoder import Backbone
from sedem.data.corpus import TokenizedCorpus
from sedem.data.windows import Windows
from sedem.errors import DataError


def text_of(corpus: TokenizedCorpus, start: int) -> int:
    return int(np.searchsorted(corpus.bounds, start, side="right")) - 1


def test_a_window_is_context_and_what_comes_after_it(
    corpus: TokenizedCorpus, backbone: Backbone, texts: list[str]
) -> None:
    windows = Windows(corpus, 16, 8, seed=0)
    for index in range(len(windows)):
        window = windows[index]
        assert window["context"].shape == (16,) and window["continuation"].shape == (8,)
        whole = np.concatenate([window["context"], window["continuation"]])
        start = windows.starts[index]
        assert whole.tolist() == corpus.tokens[start : start + 24].tolist()
        letters = backbone.tokenizer.decode(whole.tolist())
        assert letters in texts[text_of(corpus, start)]


def test_windows_use_up_every_text_that_is_long_enough(corpus: TokenizedCorpus) -> None:
    windows = Windows(corpus, 16, 8, seed=0)
    per_text = np.bincount([text_of(corpus, start) for start in windows.starts], minlength=9)
    lengths = np.diff(corpus.bounds)
    assert (per_text >= lengths // 24 - 1).all()
    assert (per_text <= lengths // 24).all()


def test_a_text_hardly_longer_than_a_window_gives_one(corpus: TokenizedCorpus) -> None:
    # The first text has 60 tokens, so that no offset must cost its only window.
    for seed in range(20):
        starts = Windows(corpus, 40, 19, seed, range(1)).starts
        assert len(starts) == 1 and starts[0] in (0, 1)


def test_every_epoch_cuts_its_texts_elsewhere(corpus: TokenizedCorpus) -> None:
    windows = Windows(corpus, 16, 8, seed=4)
    first = windows.starts.tolist()
    drawn = []
    for epoch in range(4):
        windows.epoch = epoch
        drawn.append(windows.starts.tolist())
        starts = np.sort(windows.starts)
        assert (np.diff(starts) >= 24).all()
        assert all(start + 24 <= corpus.bounds[text_of(corpus, start) + 1] for start in starts)
        assert [text_of(corpus, start) for start in windows.starts] == [
            text_of(corpus, start) for start in first
        ]
    assert drawn[0] == first == Windows(corpus, 16, 8, seed=4).starts.tolist() != sorted(first)
    assert set(first) != set(Windows(corpus, 16, 8, seed=6).starts.tolist())
    for earlier, later in pairwise(drawn):
        assert np.mean(np.asarray(earlier) != later) > 0.7
    windows.epoch = 2
    assert windows.starts.tolist() == drawn[2]
    assert windows[3]["context"].tolist() == corpus.tokens[drawn[2][3] :][:16].tolist()


def test_a_limit_takes_the_first_windows_in_every_epoch(corpus: TokenizedCorpus) -> None:
    few, windows = Windows(corpus, 16, 8, 0, limit=5), Windows(corpus, 16, 8, 0)
    for epoch in range(3):
        few.epoch = windows.epoch = epoch
        assert len(few) == 5 and few.starts.tolist() == windows.starts[:5].tolist()


def test_held_out_texts_are_kept_apart(corpus: TokenizedCorpus) -> None:
    seen, kept = Windows(corpus, 16, 8, 0, range(7)), Windows(corpus, 16, 8, 0, range(7, 9))
    assert {text_of(corpus, start) for start in seen.starts} == set(range(7))
    assert {text_of(corpus, start) for start in kept.starts} == {7, 8}


def test_texts_that_are_too_short_are_an_error(corpus: TokenizedCorpus) -> None:
    assert len(Windows(corpus, 100, 64, seed=0)) == 1
    with pytest.raises(DataError, match="no text is 165 tokens long; give longer texts or shorter"):
        Windows(corpus, 100, 65, seed=0)
    with pytest.raises(DataError, match="no text is 24 tokens long"):
        Windows(corpus, 16, 8, 0, range(0))
