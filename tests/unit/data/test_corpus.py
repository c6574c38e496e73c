from __future__ import annotations

import gzip
import json
import time
from collections import namedtuple
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from datasets import Dataset
from processes import in_two_processes
from unit.data.conftest import Write

from sedem import durable_files
from sedem.backbone.decoder import Backbone
from sedem.errors import ConfigError, DataError
from sedem_lab.data import corpus as tokenized_corpus
from sedem_lab.data.corpus import TokenizedCorpus, read_texts
from sedem_lab.data.windows import Windows


def test_texts_of_every_kind_of_file_are_read_in_the_order_of_their_names(
    tmp_path: Path, write: Write
) -> None:
    write("b.txt", "text of b\nand more")
    write("a.md", "# text of a")
    write("c.jsonl", [{"text": "first of c"}, {"text": "second of c", "title": "Ada"}])
    write("ignored.csv", "not,read")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "d.txt.gz").write_bytes(gzip.compress(b"text of d"))
    Dataset.from_list([{"text": "e", "title": "Bo"}]).to_parquet(tmp_path / "inner" / "e.parquet")
    texts = ["# text of a", "text of b\nand more", "first of c", "second of c", "text of d", "e"]
    assert list(read_texts(tmp_path)) == texts
    assert list(read_texts(tmp_path, ["Ada", "Bo"])) == [*texts[:3], texts[4]]
    assert list(read_texts(tmp_path / "b.txt")) == [texts[1]]


def test_files_that_hold_no_text_are_refused(tmp_path: Path, write: Write) -> None:
    (tmp_path / "empty").mkdir()
    Dataset.from_list([{"words": "a"}]).to_parquet(tmp_path / "c.parquet")
    for path, message in (
        (
            write("a.csv", "a,b"),
            r"a\.csv' is not a text file; give \.txt, \.md, \.jsonl, \.parquet,",
        ),
        (
            write("b.jsonl", [{"text": "a"}, {"text": 1}]),
            r"b\.jsonl', line 2: a string field 'text'",
        ),
        (tmp_path / "c.parquet", r"c\.parquet', row 1: a string field 'text' is needed"),
        (tmp_path / "empty", r"'.*empty' holds no \.txt, \.md, \.jsonl, \.parquet file"),
    ):
        with pytest.raises(DataError, match=message):
            list(read_texts(path))


@pytest.mark.parametrize("on_the_hub", [False, True])
def test_shards_are_read_in_the_order_of_a_seed(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch, on_the_hub: bool
) -> None:
    """Local files stand in for the shards on the hub; each is of one source."""
    files = [
        write(f"{shard}.jsonl", [{"text": f"{shard} {line}"} for line in range(3)])
        for shard in "abcdefgh"
    ]
    source: str | Path = "hub:owner/set" if on_the_hub else tmp_path
    load = datasets.load_dataset

    def load_dataset(repository: str, **options: Any) -> Any:
        paths = [str(file) for file in files]
        return load("json", data_files=paths, split="train", streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    in_order, shuffled = list(read_texts(source)), list(read_texts(source, shard_seed=1))
    assert shuffled != in_order == sorted(in_order)
    assert sorted(shuffled) == in_order
    assert shuffled == list(read_texts(source, shard_seed=1))
    assert shuffled != list(read_texts(source, shard_seed=2))
    for shard in "abcdefgh":
        assert [text[2:] for text in shuffled if text[0] == shard] == ["0", "1", "2"]


def test_many_texts_are_tokenized_in_their_order(
    write: Write, backbone: Backbone, tmp_path: Path
) -> None:
    # More than are tokenized together.
    texts = [f"text number {number}" for number in range(150)]
    path = write("many.jsonl", [{"text": text} for text in texts])
    corpus = TokenizedCorpus.open(path, backbone, tmp_path / "cache")
    assert len(corpus) == len(texts)
    for i, text in enumerate(texts):
        own = corpus.tokens[corpus.bounds[i] : corpus.bounds[i + 1]]
        assert own.tolist() == backbone.token_ids(text)


def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the texts that are tokenized from now on."""
    counts: list[int] = []
    tokenize = Backbone.tokenize

    def counted(self: Backbone, texts: list[str], **options: Any) -> dict[str, Any]:
        counts.append(len(texts))
        return tokenize(self, texts, **options)

    monkeypatch.setattr(Backbone, "tokenize", counted)
    return counts


def test_a_corpus_is_tokenized_once_and_again_only_if_something_changes(
    path: Path, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, counts = tmp_path / "cache", tokenized(monkeypatch)
    first = TokenizedCorpus.open(path, backbone, cache)
    second = TokenizedCorpus.open(path, backbone, cache)
    assert counts == [9]
    tokens = first.tokens.tolist()
    assert second.tokens.tolist() == tokens
    assert first.bounds.tolist() == second.bounds.tolist()
    # A run that was killed before it wrote the bounds is not complete.
    (folder,) = cache.glob("corpus-*")
    (folder / "bounds.npy").unlink()
    again = TokenizedCorpus.open(path, backbone, cache)
    assert counts == [9, 9]
    assert again.bounds.tolist() == second.bounds.tolist()
    assert again.tokens.tolist() == tokens
    assert len(TokenizedCorpus.open(path, backbone, cache, ["0"])) == 8
    path.write_text(json.dumps({"text": "another text"}) + "\n")
    assert len(TokenizedCorpus.open(path, backbone, cache)) == 1
    backbone.vocabulary = "another tokenizer"
    counts.clear()
    TokenizedCorpus.open(path, backbone, cache)
    assert counts == [1]
    assert len(list(cache.glob("corpus-*"))) == 4


def test_the_cache_knows_the_files_of_a_folder_and_their_order(
    backbone: Backbone, tmp_path: Path
) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for name in "abcd":
        (folder / f"{name}.txt").write_text(name * 8)
    first, other = (
        TokenizedCorpus.open(folder, backbone, tmp_path / "cache", limit=8, shard_seed=seed)
        for seed in (None, 1)
    )
    assert first.tokens.tolist() == backbone.token_ids("a" * 8)
    assert other.tokens.tolist() != first.tokens.tolist()
    (folder / "a.txt").write_text("much later")
    found = TokenizedCorpus.open(folder, backbone, tmp_path / "cache", limit=8)
    assert found.tokens.tolist() == backbone.token_ids("much lat")


def test_short_texts_are_joined_until_they_are_long_enough(
    write: Write, backbone: Backbone, tmp_path: Path
) -> None:
    abstracts = ["  We show a.\n", "We show b.", "We do not show c.", "d"]
    path = write("abstracts.jsonl", [{"abstract": text, "text": "no"} for text in abstracts])
    cache = tmp_path / "cache"
    joined = TokenizedCorpus.open(path, backbone, cache, field="abstract", join=20)
    texts = ["We show a.\n\nWe show b.", "We do not show c.\n\nd"]
    found = [
        backbone.tokenizer.decode(joined.tokens[start:end].tolist())
        for start, end in pairwise(joined.bounds)
    ]
    assert found == texts
    # What is read, and how it is joined, decides which tokens are kept.
    assert len(TokenizedCorpus.open(path, backbone, cache, field="abstract", join=12)) == 3
    assert len(TokenizedCorpus.open(path, backbone, cache, field="abstract")) == 4
    assert TokenizedCorpus.open(path, backbone, cache).tokens.tolist() == 4 * backbone.token_ids(
        "no"
    )
    with pytest.raises(DataError, match=r"line 1.*: a string field 'body' is needed"):
        TokenizedCorpus.open(path, backbone, cache, field="body")


def interrupted(texts: Iterable[str], after: int) -> Iterator[str]:
    for number, text in enumerate(texts):
        if number == after:
            raise KeyboardInterrupt
        yield text


@pytest.mark.parametrize(("after", "limit"), [(20, None), (149, None), (20, 500)])
def test_a_killed_run_continues_where_it_stopped(
    write: Write,
    backbone: Backbone,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
    limit: int | None,
) -> None:
    path = write("many.jsonl", [{"text": "x" * (i % 13)} for i in range(150)])
    monkeypatch.setattr(tokenized_corpus, "PART", 100)
    monkeypatch.setattr(tokenized_corpus, "TOKENIZED_TOGETHER", 8)
    whole = TokenizedCorpus.open(path, backbone, tmp_path / "whole", limit=limit)
    read = tokenized_corpus.read_texts
    with monkeypatch.context() as killed:
        killed.setattr(tokenized_corpus, "read_texts", lambda *a: interrupted(read(*a), after))
        with pytest.raises(KeyboardInterrupt):
            TokenizedCorpus.open(path, backbone, tmp_path / "cache", limit=limit)
    counts = tokenized(monkeypatch)
    again = TokenizedCorpus.open(path, backbone, tmp_path / "cache", limit=limit)
    assert again.tokens.tolist() == whole.tokens.tolist()
    assert again.bounds.tolist() == whole.bounds.tolist()
    # At most a part and what was tokenized with it is done again.
    assert sum(counts) <= 150 - after + 100 // 6 + 2 * 8
    (folder,) = (tmp_path / "cache").glob("corpus-*")
    assert {file.name for file in folder.iterdir()} == {"tokens.bin", "bounds.npy"}


def test_two_processes_tokenize_a_corpus_once(
    write: Write, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("many.jsonl", [{"text": "x" * (i % 13)} for i in range(160)])
    monkeypatch.setattr(tokenized_corpus, "PART", 100)
    monkeypatch.setattr(tokenized_corpus, "TOKENIZED_TOGETHER", 8)
    whole = TokenizedCorpus.open(path, backbone, tmp_path / "whole")
    read = tokenized_corpus.read_texts

    def slowly(*inputs: Any) -> Iterator[str]:
        for text in read(*inputs):
            time.sleep(0.002)
            yield text

    monkeypatch.setattr(tokenized_corpus, "read_texts", slowly)
    counts = tokenized(monkeypatch)

    def ask() -> tuple[int, list[int], list[int]]:
        found = TokenizedCorpus.open(path, backbone, tmp_path / "cache")
        return sum(counts), found.bounds.tolist(), found.tokens.tolist()

    results = in_two_processes(ask)
    assert sorted(result[0] for result in results) == [0, 160]
    for _, bounds, tokens in results:
        assert bounds == whole.bounds.tolist()
        assert tokens == whole.tokens.tolist()


def test_a_full_disk_is_noticed_before_anything_is_tokenized(
    path: Path, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(durable_files.shutil, "disk_usage", lambda _: usage(0, 0, 40))
    counts = tokenized(monkeypatch)
    with pytest.raises(
        ConfigError, match=r"tokenizing '.*' needs 624 bytes, but the disk of .* has 40 bytes free"
    ):
        TokenizedCorpus.open(path, backbone, tmp_path / "cache")
    assert counts == []
    # 20 tokens of two bytes.
    TokenizedCorpus.open(path, backbone, tmp_path / "cache", limit=20)


def test_tokens_stop_at_their_limit_and_cut_the_last_text(
    path: Path, backbone: Backbone, tmp_path: Path
) -> None:
    every = TokenizedCorpus.open(path, backbone, tmp_path / "cache")
    some = TokenizedCorpus.open(path, backbone, tmp_path / "cache", limit=100)
    assert some.tokens.tolist() == every.tokens[:100].tolist()
    assert some.bounds.tolist() == [0, 60, 100]
    exact = TokenizedCorpus.open(path, backbone, tmp_path / "cache", limit=60)
    assert exact.bounds.tolist() == [0, 60]
    more = TokenizedCorpus.open(path, backbone, tmp_path / "cache", limit=10_000)
    assert more.bounds.tolist() == every.bounds.tolist()


def test_a_corpus_that_is_missing_or_without_tokens_is_refused(
    write: Write, backbone: Backbone, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"there is no file or folder '.*nowhere'"):
        TokenizedCorpus.open(tmp_path / "nowhere", backbone, tmp_path)
    for content in ([], [{"text": ""}]):
        with pytest.raises(
            DataError, match=r"empty\.jsonl' has no tokens; give a corpus with text"
        ):
            TokenizedCorpus.open(write("empty.jsonl", content), backbone, tmp_path / "cache")


def test_a_set_of_the_hub_is_streamed_at_one_commit(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str]
) -> None:
    asked: list[Any] = []
    commits = iter(["first", "second"])
    given = 0

    def load_dataset(*names: str, **options: Any) -> Iterator[dict[str, Any]]:
        nonlocal given
        asked.append((names, options))
        rows = Dataset.from_list([{"text": text} for text in texts]).to_iterable_dataset()
        for row in rows:
            given += 1
            if given == 5:
                raise ConnectionError("reset by peer")
            yield row

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(
        tokenized_corpus, "commit", lambda home: f"{home.repository} {next(commits)}"
    )
    monkeypatch.setattr(tokenized_corpus, "PART", 1)
    monkeypatch.setattr(tokenized_corpus, "TOKENIZED_TOGETHER", 1)
    source = "hub:DKYoon/SlimPajama-6B"
    with pytest.raises(DataError, match=r"'DKYoon/SlimPajama-6B' cannot be read .*reset by peer"):
        TokenizedCorpus.open(source, backbone, tmp_path / "cache", limit=500)
    tokens = TokenizedCorpus.open(source, backbone, tmp_path / "cache", limit=500)
    every = "".join(texts)
    assert backbone.tokenizer.decode(tokens.tokens.tolist()) == every[:500]
    revision = "DKYoon/SlimPajama-6B first"
    options = {"split": "train", "revision": revision, "streaming": True}
    assert asked == [(("DKYoon/SlimPajama-6B",), options)] * 2
    # What is there needs no hub.
    TokenizedCorpus.open(source, backbone, tmp_path / "cache", limit=500)
    assert len(asked) == 2


# Windows


def text_of(corpus: TokenizedCorpus, start: int) -> int:
    return int(np.searchsorted(corpus.bounds, start, side="right")) - 1


def test_windows_are_context_and_what_comes_after_it_and_use_up_every_text(
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


def test_a_limit_takes_the_first_windows_and_held_out_texts_are_kept_apart(
    corpus: TokenizedCorpus,
) -> None:
    few, windows = Windows(corpus, 16, 8, 0, limit=5), Windows(corpus, 16, 8, 0)
    for epoch in range(3):
        few.epoch = windows.epoch = epoch
        assert len(few) == 5 and few.starts.tolist() == windows.starts[:5].tolist()
    for texts in (range(7), range(7, 9)):
        starts = Windows(corpus, 16, 8, 0, texts).starts
        assert {text_of(corpus, start) for start in starts} == set(texts)


def test_texts_that_are_too_short_are_an_error(corpus: TokenizedCorpus) -> None:
    assert len(Windows(corpus, 100, 64, seed=0)) == 1
    with pytest.raises(DataError, match="no text is 165 tokens long; give longer texts or shorter"):
        Windows(corpus, 100, 65, seed=0)
    with pytest.raises(DataError, match="no text is 24 tokens long"):
        Windows(corpus, 16, 8, 0, range(0))
