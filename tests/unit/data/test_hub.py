"""Reading sets by name; small sets in the hub's shape replace the hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest
from datasets import Dataset
from huggingface_hub.errors import OfflineModeIsEnabled

from sedem.errors import ConfigError, DataError
from sedem_lab.data.hub import HOMES
from sedem_lab.data.question_sets import identify, open_examples, sniff

Write = Callable[[str, Any], Path]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def columns(objects: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Objects as the hub stores a list of them."""
    return {name: [entry[name] for entry in objects] for name in objects[0]}


def squad_rows(native: dict[str, Any]) -> list[dict[str, Any]]:
    """SQuAD's flat rows."""
    return [
        {**qa, "title": a["title"], "context": p["context"], "answers": columns(qa["answers"])}
        for a in native["data"]
        for p in a["paragraphs"]
        for qa in p["qas"]
    ]


def hotpot_rows(native: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """HotpotQA's columns of titles and sentences."""
    names = {"supporting_facts": ("title", "sent_id"), "context": ("title", "sentences")}
    return [
        {name: value for name, value in record.items() if name != "_id"}
        | {"id": record["_id"]}
        | {
            field: columns([dict(zip(pair, entry, strict=True)) for entry in record[field]])
            for field, pair in names.items()
        }
        for record in native
    ]


def wiki_rows(native: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """2Wiki's JSON strings."""
    fields = ("context", "supporting_facts", "evidences")
    return [{**r, **{field: json.dumps(r[field]) for field in fields}} for r in native]


def qasper_rows(native: dict[str, Any]) -> list[dict[str, Any]]:
    """QASPER's dict of lists."""
    rows = []
    for identity, paper in native.items():
        answers = [columns([{"answer": a["answer"]} for a in qa["answers"]]) for qa in paper["qas"]]
        questions = {"question": [qa["question"] for qa in paper["qas"]], "answers": answers}
        text = columns(paper["full_text"])
        rows.append({**paper, "id": identity, "full_text": text, "qas": questions})
    return rows


SOURCES: dict[str, tuple[str, Callable[[Any], list[dict[str, Any]]]]] = {
    "squad": ("squad.json", squad_rows),
    "hotpotqa": ("hotpotqa-native.json", hotpot_rows),
    "2wikimultihopqa": ("2wikimultihopqa.json", wiki_rows),
    "musique": ("musique.jsonl", list),
    "qasper": ("qasper.json", qasper_rows),
    "govreport": ("govreport.jsonl", list),
}
ASKED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "squad": (("rajpurkar/squad",), {}),
    "hotpotqa": (("hotpotqa/hotpot_qa", "distractor"), {"revision": "refs/convert/parquet"}),
    "2wikimultihopqa": (
        ("parquet",),
        {"data_files": {"train": "hf://datasets/xanhho/2WikiMultihopQA/train.parquet"}},
    ),
    "musique": (("dgslibisey/MuSiQue",), {}),
    "qasper": (("allenai/qasper", "qasper"), {"revision": "refs/convert/parquet"}),
    "govreport": (("ccdv/govreport-summarization", "document"), {}),
}


def hub_rows(fixtures: Path, name: str) -> list[dict[str, Any]]:
    file, shape = SOURCES[name]
    text = (fixtures / file).read_text(encoding="utf-8")
    lines = file.endswith(".jsonl")
    return shape([json.loads(line) for line in text.splitlines()] if lines else json.loads(text))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A hub that holds `rows` and notes what it is asked for."""
    kept = SimpleNamespace(rows=[], asked=[])

    def load_dataset(*names: str, streaming: bool = False, **options: Any) -> Any:
        kept.asked.append((names, {**options, "streaming": streaming}))
        path = tmp_path / f"hub-{len(kept.asked)}.parquet"
        Dataset.from_list(kept.rows).to_parquet(path)
        rows = Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return kept


@pytest.mark.parametrize(("streaming", "revision"), [(False, None), (True, None), (False, COMMIT)])
@pytest.mark.parametrize("name", SOURCES)
def test_a_name_and_a_file_give_the_same_examples(
    fixtures: Path, hub: SimpleNamespace, name: str, streaming: bool, revision: str | None
) -> None:
    hub.rows = hub_rows(fixtures, name)
    file = open_examples(fixtures / SOURCES[name][0])
    named = open_examples(name, split="train", streaming=streaming, revision=revision)
    assert file.examples and named.examples == file.examples
    assert (named.name, named.dropped, named.noted) == (file.name, file.dropped, file.noted)
    names, options = ASKED[name]
    if revision and name == "2wikimultihopqa":
        files = {"train": f"hf://datasets/xanhho/2WikiMultihopQA@{COMMIT}/train.parquet"}
        options = {"data_files": files}
    elif revision:
        options = {**options, "revision": COMMIT}
    assert hub.asked == [(names, {**options, "split": "train", "streaming": streaming})]


@pytest.mark.parametrize("name", SOURCES)
def test_a_downloaded_copy_gives_the_same_examples_in_any_form(
    fixtures: Path, write: Write, tmp_path: Path, name: str
) -> None:
    rows = hub_rows(fixtures, name)
    shards = tmp_path / "copy"
    shards.mkdir()
    half = (len(rows) + 1) // 2
    Dataset.from_list(rows[:half]).to_parquet(shards / "part-0.parquet")
    write("copy/part-1.jsonl", rows[half:])
    Dataset.from_list(rows).to_parquet(tmp_path / "copy.parquet")
    copies = [tmp_path / "copy.parquet", shards, write("a-v0.3.jsonl", rows), write("a.json", rows)]
    expected = open_examples(fixtures / SOURCES[name][0]).examples
    for path in copies:
        assert sniff(path) == name
        assert open_examples(path).examples == expected


def test_validation_is_the_default_and_2wikis_dev(fixtures: Path, hub: SimpleNamespace) -> None:
    hub.rows = hub_rows(fixtures, "2wikimultihopqa")
    open_examples("2wikimultihopqa")
    files = {"validation": "hf://datasets/xanhho/2WikiMultihopQA/dev.parquet"}
    options = {"data_files": files, "split": "validation", "streaming": False}
    assert hub.asked == [(("parquet",), options)]


def test_records_stop_a_stream(hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(100):
            given.append(number)
            yield {
                "id": str(number),
                "question": "Where?",
                "answer": "Here",
                "context": {"title": ["T"], "sentences": [["It is here."]]},
                "supporting_facts": {"title": ["T"], "sent_id": [0]},
            }

    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: rows())
    found = open_examples("hotpotqa", records="2:5", streaming=True)
    assert [example.id for example in found.examples] == ["2", "3", "4"]
    assert given == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="counts from the end, which a stream does not know"):
        open_examples("hotpotqa", records="-3:", streaming=True)
    assert [e.id for e in open_examples("hotpotqa", records="-3:").examples] == ["97", "98", "99"]


def test_names_splits_and_revisions_that_do_not_exist_are_refused(fixtures: Path) -> None:
    file = fixtures / "squad.json"
    for source, options, error, message in (
        ("hotpot", {}, DataError, f"no public set of that name; .*{', '.join(HOMES)}"),
        ("covidqa", {}, DataError, r"covidqa cannot be loaded from the hub .*give its path"),
        ("squad", {"split": "test"}, ConfigError, "split of squad is 'test'; it can be train or v"),
        (file, {"split": "train"}, ConfigError, r"split is 'train', but '.*' is a file: leave it"),
        (file, {"revision": COMMIT}, ConfigError, r"revision is '0123.*', but '.*' is a file: lea"),
    ):
        with pytest.raises(error, match=message):
            open_examples(source, **options)  # type: ignore[arg-type]


def test_a_path_wins_over_a_name(
    fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "musique").write_bytes((fixtures / "squad.json").read_bytes())
    assert open_examples("musique").name == "squad"
    assert identify("musique")["data"] == "musique"


def test_an_unreachable_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class TransportError(Exception):
        """What a transport raises: no child of anything known."""

    def unreachable(*names: str, **options: Any) -> Any:
        raise TransportError("Name or service not known\nand more")

    def broken(*names: str, **options: Any) -> Iterator[dict[str, Any]]:
        yield {"title": "Ada", "text": "one"}
        raise ConnectionError("reset by peer")

    for load_dataset, words in ((unreachable, "not known"), (broken, "reset by peer")):
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(
            DataError, match=rf"'rajpurkar/squad' cannot be read.*\(.*{words}\); go online"
        ) as caught:
            open_examples("squad", "cloze", streaming=True)
        assert "\n" not in str(caught.value)


# What decides the content


def test_a_name_is_identified_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def dataset_info(self: Any, repository: str, *, revision: str | None = None) -> Any:
        return SimpleNamespace(sha=f"commit of {revision}")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    assert identify("musique") == {
        "data": "dgslibisey/MuSiQue", "split": "validation", "revision": "commit of None"
    }  # fmt: skip
    found = identify("qasper", "train")
    assert found["split"] == "train"
    assert found["revision"] == "commit of refs/convert/parquet"
    with pytest.raises(ConfigError, match="it can be train or validation"):
        identify("qasper", "dev")


@pytest.mark.parametrize("folder", [COMMIT, f"{COMMIT}{COMMIT[:24]}", "default"])
def test_without_the_hub_a_name_is_identified_by_the_local_copy(
    monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    def dataset_info(self: Any, repository: str, **options: Any) -> Any:
        raise OfflineModeIsEnabled("offline mode is enabled")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    copy = SimpleNamespace(cache_files=[{"filename": f"/cache/0.0.0/{folder}/squad.arrow"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: copy)
    found = identify("squad", "train")
    if folder == COMMIT:
        assert found == {"data": "rajpurkar/squad", "split": "train", "revision": COMMIT}
    else:
        assert found["revision"] is None
        assert found["revision_unknown"] == (
            "the hub is out of reach and the local copy names no commit"
        )

    def load_dataset(*names: str, **options: Any) -> Any:
        raise ConnectionError("Couldn't reach 'rajpurkar/squad' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"cannot be read from the hub \(Couldn't reach.*go online"):
        identify("squad")


def test_a_file_is_identified_by_its_digest(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("one")
    known = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    assert identify(tmp_path / "a.jsonl") == {"data": "a.jsonl", "data_sha256": known}
    before = identify(tmp_path)
    assert before["data"] == tmp_path.name
    (tmp_path / "b.jsonl").write_text("two")
    assert identify(tmp_path)["data_sha256"] != before["data_sha256"]
    with pytest.raises(DataError, match="there is no file 'nowhere' and no public set"):
        identify("nowhere")
