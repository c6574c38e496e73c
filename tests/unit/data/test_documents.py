"""Files, folders and patterns as documents, one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile.borders import hostile_paths

from sedem import Document
from sedem.data.documents import DocumentFiles, files_in, read_document, source_text
from sedem.errors import DataError
from sedem.untrusted import DOCUMENT_BYTES


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("texts/deep").mkdir(parents=True)
    Path("texts/deep/a.txt").write_text("First.")
    Path("texts/b.MD").write_text("Second.")
    Path("texts/c.csv").write_text("1,2")
    return tmp_path


def test_folders_and_patterns_give_files_of_known_types_in_order_and_once() -> None:
    found = files_in([Path("texts"), Path("texts/**/*.txt"), Path("x.txt"), Path("./x.txt")])
    assert found == [Path("texts/b.MD"), Path("texts/deep/a.txt"), Path("x.txt")]
    for source in ("texts/*.csv", "none/*", "deep/[ab].txt"):
        with pytest.raises(DataError, match=r"holds no file that can be read \(\.txt, "):
            files_in([Path(source)])


def test_a_file_whose_name_looks_like_a_pattern_is_a_file() -> None:
    Path("a[1].txt").write_text("Third.")
    assert list(DocumentFiles([Path("a[1].txt")])) == [Document("a[1].txt", "Third.")]


def test_a_file_is_read_when_its_turn_comes() -> None:
    files = DocumentFiles([Path("texts")])
    assert files.sizes == {"texts/b.MD": 7, "texts/deep/a.txt": 6}
    stream = iter(files)
    assert next(stream) == Document("texts/b.MD", "Second.")
    Path("texts/deep/a.txt").write_text("Changed.")
    assert next(stream).text == "Changed."


def test_missing_files_and_unknown_types_are_refused_before_any_file_is_read() -> None:
    for name, words in (("no.txt", "there is no file 'no.txt'"), ("texts/c.csv", "type '.csv'")):
        with pytest.raises(DataError, match=words):
            DocumentFiles([Path("texts"), Path(name)])
    with pytest.raises(DataError, match="is a folder; give its files"):
        read_document(Path("texts"))


def test_files_that_cannot_be_read_are_passed_over_on_request() -> None:
    Path("bad.txt").write_bytes(b"\xff\xfe\xfd")
    files = DocumentFiles([Path("no.txt"), Path("bad.txt"), Path("texts")], keep_going=True)
    assert [document.text for document in files] == ["Second.", "First."]
    assert [sentence.split("'")[1] for sentence in files.failed] == ["no.txt", "bad.txt"]
    assert list(files.sizes) == ["texts/b.MD", "texts/deep/a.txt"]
    with pytest.raises(DataError, match=r"'bad\.txt' is not utf-8 text.*latin-1$"):
        list(DocumentFiles([Path("bad.txt")]))
    with pytest.raises(DataError, match=r"'bad\.txt' is not utf-8 text.*with --keep-going$"):
        list(DocumentFiles([Path("bad.txt"), Path("texts")]))


def test_the_text_of_a_source_is_none_if_it_cannot_be_read(tmp_path: Path) -> None:
    assert source_text("texts/deep/a.txt") == "First."
    for name in ("texts/none.txt", "texts/c.csv", "texts", "\0.txt", "x" * 5000 + ".txt"):
        assert source_text(name) is None
    for kind, path in hostile_paths(tmp_path / "hostile.txt", DOCUMENT_BYTES + 1):
        assert source_text(str(path)) is None, kind
