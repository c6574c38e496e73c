"""Your own model answers, with the weights of SmolLM2 behind real servers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from sedem import Document, Reader, SeDeM
from sedem.backbone.gguf import _published_file
from sedem.config import PUBLISHED
from sedem.untrusted import cache_folder

pytestmark = pytest.mark.slow
[(NAME, KNOWN)] = PUBLISHED.items()
SECONDS = 300


@pytest.fixture(scope="module")
def model() -> SeDeM:
    return SeDeM.from_pretrained("sedem-smol")


@pytest.fixture(params=["transformers", "llama_cpp"])
def served(request: pytest.FixtureRequest, model: SeDeM, tmp_path: Path) -> Iterator[Reader]:
    """A server of each kind, and the reader that it is."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    if request.param == "transformers":
        # It wants to be told the class of the model.
        folder = tmp_path / "smollm2"
        folder.mkdir()
        for file in (cache_folder("backbones") / KNOWN.sha256).iterdir():
            (folder / file.name).symlink_to(file)
        config = json.loads((folder / "config.json").read_text("utf-8"))
        (folder / "config.json").unlink()
        config["architectures"] = ["LlamaForCausalLM"]
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        name, start = str(folder), "from transformers.cli.transformers import main; main()"
        words = ["-c", start, "serve", name, "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen([sys.executable, *words, "--device", "cpu"])
    else:
        with _published_file(NAME, KNOWN) as file:
            name = str(tmp_path / "smollm2.gguf")
            Path(name).write_bytes(file.read_bytes())
        words = ["-m", "llama_cpp.server", "--model", name, "--port", str(port), "--n_ctx", "4096"]
        process = subprocess.Popen([sys.executable, *words])
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + SECONDS
    try:
        while process.poll() is None and time.monotonic() < until:
            try:
                # Any answer will do: not every server can list its models offline.
                urllib.request.urlopen(f"{url}/v1/models").close()
                break
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.5)
        yield Reader(f"{url}/v1", name)
    finally:
        process.terminate()
        process.wait()


def test_a_real_server_writes_the_answer(model: SeDeM, served: Reader) -> None:
    text = "The seller in contract QR-4471 is Norwick Brothers."
    bank = model.read([Document("register.txt", text)])
    stream = model.stream(bank, "Who is the seller in contract QR-4471?", reader=served)
    pieces = list(stream)
    answer = stream.answer
    assert answer is not None and not answer.cut
    assert len(pieces) > 1 and "".join(pieces).strip() == answer.text
    assert answer.model == served.name and "Norwick" in answer.text
    assert any(one.answer_spans for one in answer.citations)
