from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from datasets import Dataset

from sedem.backbone.decoder import Backbone
from sedem.data import windows as text_module
from sedem.data.texts import read_texts
from sedem.data.windows import Tokens, Windows
from sedem.errors import DataError

Write = Callable[[str, Any], Path]

TEXTS = ["".join(chr(97 + (7 * i + j) % 26) for j in range(60 + 13 * i)) for i in range(9)]


@pytest.fixture
def path(write: Write) -> Path:
    """Nine texts of 60 to 164 letters, titled by their number."""
    return write("texts.jsonl", [{"title": str(i), "text": t} for i, t in enumerate(TEXTS)])


@pytest.fixture
def corpus(path: Path, backbone: Backbone, tmp_path: Path) -> Tokens:
    return Tokens.of(path, backbone, tmp_path / "cache")


# Reading


def test_texts_of_every_kind_of_file_are_read_in_the_order_of_their_names(
    tmp_path: Path, write: Write
) -> None:
    write("b.txt", "text of b\nand more")
    write("a.md", "# text of a")
    write("c.jsonl", [{"text": "first of c"}, {"text": "second of c", "title": "Ada"}])
    write("ignored.csv", "not,read")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "d.txt.gz").write_bytes(gzip.compress(b"text of d"))
    assert list(read_texts(tmp_path)) == [
        "# text of a",
        "text of b\nand more",
        "first of c",
        "second of c",
        "text of d",
    ]
    assert list(read_texts(tmp_path / "b.txt")) == ["text of b\nand more"]


def test_excluded_titles_are_left_out(path: Path) -> None:
    kept = list(read_texts(path, ["2", "7"]))
    assert kept == [text for i, text in enumerate(TEXTS) if i not in (2, 7)]


def test_files_that_hold_no_text_are_refused(tmp_path: Path, write: Write) -> None:
    with pytest.raises(
        DataError, match=r"table\.csv' is no text file; \.txt, \.md, \.jsonl, \.parquet are"
    ):
        list(read_texts(write("table.csv", "a,b")))
    with pytest.raises(DataError, match=r"lines\.jsonl', line 2: a string field 'text' is needed"):
        list(read_texts(write("lines.jsonl", [{"text": "a"}, {"text": 1}])))
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DataError, match=r"folder '.*empty' holds no \.txt, \.md, \.jsonl, \.parquet file"
    ):
        list(read_texts(tmp_path / "empty"))


# Tokens


def test_tokens_are_those_of_each_text(corpus: Tokens, backbone: Backbone) -> None:
    assert len(corpus) == len(TEXTS)
    for i, text in enumerate(TEXTS):
        own = corpus.tokens[corpus.bounds[i] : corpus.bounds[i + 1]]
        assert own.tolist() == backbone.token_ids(text)


def test_many_texts_are_tokenized_in_their_order(
    write: Write, backbone: Backbone, tmp_path: Path
) -> None:
    # More than are tokenized together.
    texts = [f"text number {number}" for number in range(150)]
    path = write("many.jsonl", [{"text": text} for text in texts])
    tokens = Tokens.of(path, backbone, tmp_path / "cache")
    spans = zip(tokens.bounds[:-1], tokens.bounds[1:], strict=True)
    decoded = [backbone.tokenizer.decode(tokens.tokens[a:b].tolist()) for a, b in spans]
    assert decoded == texts


def test_a_missing_corpus_is_refused(tmp_path: Path, backbone: Backbone) -> None:
    with pytest.raises(DataError, match=r"there is no file or folder '.*nowhere'"):
        Tokens.of(tmp_path / "nowhere", backbone, tmp_path)


def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the texts that are tokenized from now on."""
    counts: list[int] = []
    tokenize = Backbone.tokenize

    def counted(self: Backbone, texts: list[str], **options: Any) -> dict[str, Any]:
        counts.append(len(texts))
        return tokenize(self, texts, **options)

    monkeypatch.setattr(Backbone, "tokenize", counted)
    return counts


def test_a_corpus_is_tokenized_once(
    path: Path, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = tokenized(monkeypatch)
    first = Tokens.of(path, backbone, tmp_path / "cache")
    assert counts == [9]
    second = Tokens.of(path, backbone, tmp_path / "cache")
    assert counts == [9]
    assert first.tokens.tolist() == second.tokens.tolist()
    assert first.bounds.tolist() == second.bounds.tolist()


def test_tokenizing_that_was_cut_off_is_done_again(
    path: Path, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Tokens.of(path, backbone, tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / "bounds.npy").unlink()
    np.save(folder / "tokens.npy", whole.tokens[:5])
    counts = tokenized(monkeypatch)
    again = Tokens.of(path, backbone, tmp_path / "cache")
    assert counts == [9]
    assert again.bounds.tolist() == whole.bounds.tolist()
    assert len(again.tokens) == whole.bounds[-1]


def test_the_cache_knows_files_titles_and_tokenizers(
    path: Path, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    Tokens.of(path, backbone, cache)
    assert len(Tokens.of(path, backbone, cache, ["0"])) == 8
    path.write_text(json.dumps({"text": "another text"}) + "\n")
    assert len(Tokens.of(path, backbone, cache)) == 1
    backbone.vocabulary = "another tokenizer"
    counts = tokenized(monkeypatch)
    Tokens.of(path, backbone, cache)
    assert counts == [1]
    assert len(list(cache.iterdir())) == 4


def test_a_file_that_changes_inside_a_folder_is_noticed(backbone: Backbone, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("before")
    assert Tokens.of(folder, backbone, tmp_path / "cache").bounds.tolist() == [0, 6]
    (folder / "a.txt").write_text("much later")
    assert Tokens.of(folder, backbone, tmp_path / "cache").bounds.tolist() == [0, 10]


def interrupted(texts: Iterable[str], after: int) -> Iterator[str]:
    for number, text in enumerate(texts):
        if number == after:
            raise KeyboardInterrupt
        yield text


@pytest.mark.parametrize("after", [1, 20, 70, 149])
@pytest.mark.parametrize("limit", [None, 1000])
def test_a_run_that_was_killed_goes_on_where_it_was(
    write: Write,
    backbone: Backbone,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
    limit: int | None,
) -> None:
    path = write("many.jsonl", [{"text": "x" * (i % 13)} for i in range(150)])
    monkeypatch.setattr(text_module, "PART", 100)
    monkeypatch.setattr(text_module, "TOKENIZED_TOGETHER", 8)
    whole = Tokens.of(path, backbone, tmp_path / "whole", limit=limit)
    read = text_module.read_texts
    with monkeypatch.context() as killed:
        killed.setattr(text_module, "read_texts", lambda *a: interrupted(read(*a), after))
        if limit is None or after < 149:
            with pytest.raises(KeyboardInterrupt):
                Tokens.of(path, backbone, tmp_path / "cache", limit=limit)
    counts = tokenized(monkeypatch)
    again = Tokens.of(path, backbone, tmp_path / "cache", limit=limit)
    assert again.tokens.dtype == whole.tokens.dtype
    assert again.tokens.tolist() == whole.tokens.tolist()
    assert again.bounds.tolist() == whole.bounds.tolist()
    if 20 <= after < 149:
        # At most a part and what was tokenized with it is done again.
        assert sum(counts) <= len(whole) - after + 100 // 6 + 2 * 8
    (folder,) = (tmp_path / "cache").iterdir()
    assert {file.name for file in folder.iterdir()} == {"tokens.npy", "bounds.npy"}


def test_a_run_killed_while_parts_are_joined_goes_on(
    path: Path, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Tokens.of(path, backbone, tmp_path / "whole")
    with monkeypatch.context() as killed:
        killed.setattr(text_module, "_join_parts", lambda *a: interrupted([], 0).__next__())
        with pytest.raises(StopIteration):
            Tokens.of(path, backbone, tmp_path / "cache")
    counts = tokenized(monkeypatch)
    again = Tokens.of(path, backbone, tmp_path / "cache")
    assert counts == []
    assert again.tokens.tolist() == whole.tokens.tolist()


def test_tokens_stop_at_their_limit_and_cut_the_last_text(
    path: Path, backbone: Backbone, tmp_path: Path
) -> None:
    every = Tokens.of(path, backbone, tmp_path / "cache")
    some = Tokens.of(path, backbone, tmp_path / "cache", limit=100)
    assert some.tokens.tolist() == every.tokens[:100].tolist()
    assert some.bounds.tolist() == [0, 60, 100]
    exact = Tokens.of(path, backbone, tmp_path / "cache", limit=60)
    assert exact.bounds.tolist() == [0, 60]
    more = Tokens.of(path, backbone, tmp_path / "cache", limit=10_000)
    assert more.bounds.tolist() == every.bounds.tolist()


def test_a_corpus_without_tokens_is_refused(
    write: Write, backbone: Backbone, tmp_path: Path
) -> None:
    for content in ([], [{"text": ""}]):
        with pytest.raises(
            DataError, match=r"empty\.jsonl' has no tokens; give a corpus with text"
        ):
            Tokens.of(write("empty.jsonl", content), backbone, tmp_path / "cache")


def test_a_corpus_that_ends_early_is_no_short_corpus(
    path: Path, backbone: Backbone, tmp_path: Path
) -> None:
    zstandard = pytest.importorskip("zstandard")
    packed = tmp_path / "texts.jsonl.zst"
    whole = zstandard.compress(path.read_bytes() * 100)
    packed.write_bytes(whole[:-9])
    with pytest.raises(DataError, match=r"texts\.jsonl\.zst' cannot be read: .*ended before"):
        Tokens.of(packed, backbone, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("bounds.npy"))


def test_parquet_files_hold_texts_in_a_column(tmp_path: Path, backbone: Backbone) -> None:
    rows = [{"text": t, "meta": {"set": "a"}, "title": str(i)} for i, t in enumerate(TEXTS)]
    folder = tmp_path / "texts"
    folder.mkdir()
    Dataset.from_list(rows[:4]).to_parquet(folder / "a.parquet")
    (folder / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[4:]))
    assert list(read_texts(folder)) == TEXTS
    assert list(read_texts(folder / "a.parquet", ["1"])) == [TEXTS[0], *TEXTS[2:4]]
    Dataset.from_list([{"words": "a"}]).to_parquet(folder / "c.parquet")
    with pytest.raises(DataError, match=r"c\.parquet', row 1: a string field 'text' is needed"):
        list(read_texts(folder))


def test_a_set_of_the_hub_is_streamed_at_one_commit(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    commits = iter(["first", "second"])
    given = 0

    def load_dataset(*names: str, **options: Any) -> Iterator[dict[str, Any]]:
        nonlocal given
        asked.append((names, options))
        rows = Dataset.from_list([{"text": text} for text in TEXTS]).to_iterable_dataset()
        for row in rows:
            given += 1
            if given == 5:
                raise ConnectionError("reset by peer")
            yield row

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(text_module, "commit", lambda home: f"{home.repository} {next(commits)}")
    monkeypatch.setattr(text_module, "PART", 1)
    monkeypatch.setattr(text_module, "TOKENIZED_TOGETHER", 1)
    source = "hub:DKYoon/SlimPajama-6B"
    with pytest.raises(DataError, match=r"'DKYoon/SlimPajama-6B' cannot be had .*reset by peer"):
        Tokens.of(source, backbone, tmp_path / "cache", limit=500)
    tokens = Tokens.of(source, backbone, tmp_path / "cache", limit=500)
    every = "".join(TEXTS)
    assert backbone.tokenizer.decode(tokens.tokens.tolist()) == every[:500]
    revision = "DKYoon/SlimPajama-6B first"
    options = {"split": "train", "revision": revision, "streaming": True}
    assert asked == [(("DKYoon/SlimPajama-6B",), options)] * 2
    # What is there needs no hub.
    Tokens.of(source, backbone, tmp_path / "cache", limit=500)
    assert len(asked) == 2


# Windows


def text_of(corpus: Tokens, start: int) -> int:
    return int(np.searchsorted(corpus.bounds, start, side="right")) - 1


def test_a_window_is_context_and_what_comes_after_it(corpus: Tokens, backbone: Backbone) -> None:
    windows = Windows(corpus, 16, 8, seed=0)
    for index in range(len(windows)):
        window = windows[index]
        assert window["context"].shape == (16,) and window["continuation"].shape == (8,)
        whole = np.concatenate([window["context"], window["continuation"]])
        start = windows.starts[index]
        assert whole.tolist() == corpus.tokens[start : start + 24].tolist()
        letters = backbone.tokenizer.decode(whole.tolist())
        assert letters in TEXTS[text_of(corpus, start)]


def test_windows_do_not_overlap_and_stay_within_their_text(corpus: Tokens) -> None:
    starts = np.sort(Windows(corpus, 16, 8, seed=3).starts)
    assert (np.diff(starts) >= 24).all()
    for start in starts:
        assert start + 24 <= corpus.bounds[text_of(corpus, start) + 1]


def test_windows_use_up_every_text_that_is_long_enough(corpus: Tokens) -> None:
    windows = Windows(corpus, 16, 8, seed=0)
    per_text = np.bincount([text_of(corpus, start) for start in windows.starts], minlength=9)
    lengths = np.diff(corpus.bounds)
    assert (per_text >= lengths // 24 - 1).all()
    assert (per_text <= lengths // 24).all()


def test_a_text_hardly_longer_than_a_window_gives_one(corpus: Tokens) -> None:
    # The first text has 60 tokens, so that no offset must cost its only window.
    for seed in range(20):
        starts = Windows(corpus, 40, 19, seed, range(1)).starts
        assert len(starts) == 1 and starts[0] in (0, 1)


def test_a_seed_decides_offsets_and_order(corpus: Tokens) -> None:
    once, again = Windows(corpus, 16, 8, seed=5), Windows(corpus, 16, 8, seed=5)
    other = Windows(corpus, 16, 8, seed=6)
    assert once.starts.tolist() == again.starts.tolist()
    assert set(once.starts.tolist()) != set(other.starts.tolist())
    assert once.starts.tolist() != sorted(once.starts.tolist())


def test_an_item_does_not_depend_on_what_was_asked_for_before(corpus: Tokens) -> None:
    forward, backward = Windows(corpus, 16, 8, seed=0), Windows(corpus, 16, 8, seed=0)
    items = [forward[i]["context"].tolist() for i in range(len(forward))]
    assert [backward[i]["context"].tolist() for i in reversed(range(len(backward)))] == items[::-1]


def test_held_out_texts_are_kept_apart(corpus: Tokens) -> None:
    seen, kept = Windows(corpus, 16, 8, 0, range(7)), Windows(corpus, 16, 8, 0, range(7, 9))
    assert {text_of(corpus, start) for start in seen.starts} == set(range(7))
    assert {text_of(corpus, start) for start in kept.starts} == {7, 8}


def test_texts_that_are_too_short_are_an_error(corpus: Tokens) -> None:
    assert len(Windows(corpus, 100, 64, seed=0)) == 1
    with pytest.raises(DataError, match="no text is 165 tokens long; give longer texts or shorter"):
        Windows(corpus, 100, 65, seed=0)
    with pytest.raises(DataError, match="no text is 24 tokens long"):
        Windows(corpus, 16, 8, 0, range(0))
