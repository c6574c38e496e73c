"""Whatever comes in at a border is read, or refused in one sentence, soon and in little memory."""

from __future__ import annotations

import gzip
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from hostile.borders import BORDERS, Border, altered, hostile_paths, values, yaml_texts
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sedem.answering.decoding import Decoding
from sedem.cli.options import parse_entries
from sedem.config import parse_k
from sedem.errors import ConfigError, SedemError
from sedem_lab.data.question_sets import parse_records
from sedem_lab.training.recipe import load_recipe
from sedem_lab.training.stages import Stage1Recipe

CASES = int(os.environ.get("SEDEM_HOSTILE_CASES", "25"))
SECONDS, MEGABYTES = 2, 200

each_border = pytest.mark.parametrize("border", BORDERS.values(), ids=BORDERS)
generated = settings(
    max_examples=CASES,
    deadline=None,
    derandomize=CASES < 1000,
    database=None,
    phases=(Phase.generate,),  # what fails is shown as it came: every case may take long
    suppress_health_check=list(HealthCheck),
)
folders = count()


def memory() -> float:
    """The most memory that this process has used, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextmanager
def soon_and_small() -> Iterator[None]:
    """Check that a block takes little time of the processor and little memory."""
    before, start = memory(), time.process_time()
    yield
    assert time.process_time() - start < SECONDS
    assert memory() - before < MEGABYTES


def read_or_refused(border: Border, path: Path) -> str | None:
    """Open a file; the sentence if it was refused."""
    with soon_and_small():
        try:
            border.open(path)
        except SedemError as error:
            assert len(str(error).splitlines()) == 1, str(error)
            return str(error)
    return None


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@each_border
def test_the_good_file_comes_in(border: Border, root: Path) -> None:
    if border.good in (b"", b"{}", b"PAR1"):
        pytest.skip("this border has no small file to show")
    path = border.place(root / str(next(folders)))
    path.write_bytes(border.good)
    if border.file != "a.yaml":
        border.open(path)


@each_border
def test_what_is_no_file_is_refused(border: Border, root: Path) -> None:
    folder = root / str(next(folders))
    for kind, path in hostile_paths(border.place(folder), 2**41):
        if kind == "giant" and border.file.endswith((".parquet", ".gz", ".jsonl")):
            continue  # streamed, whatever its size
        told = read_or_refused(border, path)
        optional = border.file in ("training.json", "provenance.json", "tokenizer.json")
        missing = kind in ("broken link", "file as folder", "long name", "NUL")
        assert told or (optional and missing) or path.parent != folder or path.name != border.file


@each_border
def test_an_altered_file_is_read_or_refused(border: Border, root: Path) -> None:
    path = border.place(root / str(next(folders)))

    @generated
    @given(altered(border.good))
    def check(content: bytes) -> None:
        path.write_bytes(content)
        read_or_refused(border, path)

    check()


def test_hostile_yaml_is_refused(root: Path) -> None:
    border = BORDERS["recipe"]
    path = border.place(root / str(next(folders)))

    @generated
    @given(yaml_texts)
    def check(text: str) -> None:
        path.write_text(text)
        assert read_or_refused(border, path)

    check()


@generated
@given(st.one_of(values, yaml_texts), st.sampled_from(["run.output", "a.b", "a." * 9000 + "b", ""]))
def test_hostile_overrides_are_refused(text: str, key: str) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "nano" / "stage1.yaml"
    with soon_and_small():
        try:
            load_recipe(Stage1Recipe, recipe, [f"{key}={text}"])
        except ConfigError as error:
            assert len(str(error).splitlines()) == 1


@generated
@given(values)
def test_hostile_values_of_options_are_read_or_refused(text: str) -> None:
    parse_entries([f"key={text}"])
    for parse in (parse_k, parse_records):
        for given_text in (text, f":{text}"):
            with soon_and_small():
                try:
                    parse(given_text)
                except ConfigError as error:
                    assert len(str(error).splitlines()) == 1
    if text.isdigit():
        with pytest.raises(ConfigError):
            Decoding(max_new_tokens=-int(text[:4000]))


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_file_that_expands_without_end_is_refused(ending: str, root: Path) -> None:
    import zstandard

    folder = root / str(next(folders))
    folder.mkdir()
    path = folder / f"a.jsonl{ending}"
    compress = gzip.compress if ending == ".gz" else zstandard.compress
    path.write_bytes(compress(b'{"a": "' + bytes(2**26)))
    told = read_or_refused(BORDERS["compressed"], path)
    assert told
