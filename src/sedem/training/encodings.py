"""Frozen hidden states on disk, so that a CPU can train: each text is encoded once, ever.

The folder is named after the encoder's fingerprint and type, the layers and the texts. States are
stored flat, one row a token, as bfloat16; a killed run goes on where it stopped.

Letters: S texts, T tokens of the longest of them, X extraction layers, E encoder width.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from sedem.backbone.decoder import Backbone
from sedem.durable_files import write_text
from sedem.method.encoder import encode

BATCH = 32
FLUSH = 64
"""Batches between notes of how far the encoding has come."""


class Encodings:
    """Hidden states of many texts, mapped from disk.

    Args:
        states: one row a token `[tokens, X, E]`, bfloat16 bits.
        bounds: first row of each text, and the end of the last.
    """

    def __init__(self, states: np.memmap[tuple[int, ...], np.dtype[np.int16]], bounds: list[int]):
        self.states = states
        self.bounds = bounds

    @classmethod
    def of(
        cls,
        backbone: Backbone,
        layers: tuple[int, ...],
        texts: Sequence[Sequence[int]],
        cache: Path,
        what: str,
    ) -> Encodings:
        """Encode texts, or map what an earlier run has encoded.

        Args:
            backbone: the encoder.
            layers: extraction layers.
            texts: token ids of each text.
            cache: folder of all encodings.
            what: what the progress bar calls them.
        """
        key = hashlib.sha256(f"{backbone.digest} {backbone.dtype} {layers}".encode())
        for ids in texts:
            key.update(np.asarray(ids, dtype=np.int32).tobytes() + b"|")
        folder = cache / f"states-{key.hexdigest()[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
        bounds = np.cumsum([0, *map(len, texts)]).tolist()
        shape = (bounds[-1], len(layers), backbone.width)
        path = folder / "states.bin"
        if not path.is_file():
            (folder / "done.json").unlink(missing_ok=True)
        states = np.memmap(path, np.int16, "r+" if path.is_file() else "w+", shape=shape)
        encodings = cls(states, bounds)
        encodings._fill(backbone, layers, texts, folder / "done.json", what)
        return encodings

    def __len__(self) -> int:
        """Number of texts."""
        return len(self.bounds) - 1

    def batch(self, indices: Sequence[int]) -> Tensor:
        """States of some texts `[X, S, T, E]` in bfloat16, padded on the right with zeros."""
        rows = [
            torch.from_numpy(self.states[self.bounds[i] : self.bounds[i + 1]].copy())
            for i in indices
        ]
        padded_STXE = pad_sequence([row.view(torch.bfloat16) for row in rows], batch_first=True)
        return padded_STXE.permute(2, 0, 1, 3)

    def _fill(
        self,
        backbone: Backbone,
        layers: tuple[int, ...],
        texts: Sequence[Sequence[int]],
        note: Path,
        what: str,
    ) -> None:
        order = sorted(range(len(texts)), key=lambda i: (-len(texts[i]), i))
        batches = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
        done = json.loads(note.read_text()) if note.is_file() else 0
        if done == len(batches):
            return
        bar = tqdm(total=len(batches), initial=done, desc=f"encoding {what}")
        for number in range(done, len(batches)):
            rows = [torch.tensor(texts[i]) for i in batches[number]]
            ids_ST = pad_sequence(rows, batch_first=True).to(backbone.device)
            states_XSTE = encode(backbone, ids_ST, layers).to("cpu", torch.bfloat16)
            for row, i in enumerate(batches[number]):
                own = states_XSTE[:, row, : len(texts[i])].transpose(0, 1).contiguous()
                self.states[self.bounds[i] : self.bounds[i + 1]] = own.view(torch.int16).numpy()
            bar.update()
            if (number + 1) % FLUSH == 0 or number + 1 == len(batches):
                self.states.flush()
                write_text(note, json.dumps(number + 1))
        bar.close()
