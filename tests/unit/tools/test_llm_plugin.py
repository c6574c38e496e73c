"""`llm` uses a bank as a model, as tools of another model, and as fragments."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# No plugin but this one: `llm` loads those of the environment when it is imported.
os.environ["LLM_LOAD_PLUGINS"] = ""

import llm
import pytest
from click.testing import CliRunner
from conftest import LEASE
from llm import cli, plugins
from unit.tools.conftest import place

import sedem
from sedem import Document, MemoryBank, SeDeM
from sedem_serve.tools import llm_plugin
from sedem_serve.tools.llm_plugin import Sedem

QUESTION = "What is the rent?"


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SeDeM]:
    """`llm` with this plugin alone, in a folder with a bank of sedem-nano."""
    model = SeDeM.from_pretrained("sedem-nano")
    model.read([Document("lease.txt", LEASE)]).save(tmp_path / "lease.bank")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
    monkeypatch.setattr(SeDeM, "from_pretrained", lambda *names, **options: model)
    plugins.pm.register(llm_plugin, "sedem")
    yield model
    plugins.pm.unregister(llm_plugin)
    llm_plugin.opened.cache_clear()


def test_one_entry_point_names_the_plugin() -> None:
    project = Path(sedem.__file__).parents[2] / "pyproject.toml"
    points = tomllib.loads(project.read_text("utf-8"))["project"]["entry-points"]
    assert points["llm"] == {"sedem": llm_plugin.__name__}


def test_the_command_asks_a_bank(plugin: SeDeM) -> None:
    result = CliRunner().invoke(
        cli.cli, ["-m", "sedem/lease.bank", QUESTION, "-o", "k", "1", "-o", "max_tokens", "8"]
    )
    assert result.exit_code == 0, result.output
    bank = MemoryBank.open("lease.bank")
    decoding = sedem.Decoding(max_new_tokens=8)
    answer = plugin.answer(bank, QUESTION, k=1, decoding=decoding)
    assert result.output.strip() == answer.text
    logged = CliRunner().invoke(cli.cli, ["logs", "list", "--json", "-n", "1"])
    [entry] = json.loads(logged.output)
    assert entry["model"] == "sedem/lease.bank"
    assert entry["response_json"]["results"][0]["id"].startswith("lease/lease.txt:")


def test_banks_of_other_folders_are_models(
    plugin: SeDeM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(llm.UnknownModelError):
        llm.get_model("sedem/lease.bank")
    monkeypatch.setenv("SEDEM_BANKS", str(tmp_path))
    assert llm.get_model("sedem/lease.bank").can_stream


class Scripted(llm.Model):
    """A model that calls one tool and says what it returned."""

    model_id = "scripted"
    supports_tools = True

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[str]:
        if prompt.tool_results:
            yield prompt.tool_results[0].output
        else:
            arguments = {"question": prompt.prompt, "k": 1}
            response.add_tool_call(llm.ToolCall(name="Sedem_search", arguments=arguments))


def test_any_model_searches_and_reads_a_bank(plugin: SeDeM) -> None:
    assert llm.get_tools()["Sedem"] is Sedem
    found = json.loads(Scripted().chain(QUESTION, tools=[Sedem("lease.bank")]).text())
    [passage] = found["results"]
    assert passage["text"] == LEASE[place(passage["id"])[1]]
    tools = {tool.name: tool for tool in Sedem("lease.bank").tools()}
    assert tools.keys() == {"Sedem_read", "Sedem_search"}
    assert all(tool.description for tool in tools.values())
    read = tools["Sedem_read"].implementation(document=passage["id"])
    assert json.loads(read)["text"] == LEASE


def test_documents_are_fragments(plugin: SeDeM) -> None:
    [fragment] = llm.get_fragment_loaders()["sedem"]("lease.bank")
    assert (str(fragment), fragment.source) == (LEASE, "sedem:lease.bank/lease.txt")
