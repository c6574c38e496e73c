"""Frozen hidden states cached on disk, so that a CPU can train: each text is encoded only once.

The folder is named by a hash of the encoder's fingerprint, its type, the layers and the texts.
States are stored flat, one row per token, as bfloat16. An interrupted encoding resumes.

Letters: S texts, T tokens of the longest of them, X extraction layers, E encoder width.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from sedem.backbone.decoder import Backbone
from sedem.durable_files import build_once, bytes_text, reserve, write_text
from sedem.method.compressor import encode
from sedem_lab.training.example_dataset import Ragged

logger = logging.getLogger(__name__)

BATCH = 32
FLUSH = 64
"""Number of batches after which progress is written to disk."""
STATES = "states.bin"
DONE = "done.json"


class StateCache(Ragged):
    """Hidden states of many texts, memory-mapped from disk.

    A row is a text: for each token, the bits of bfloat16 numbers `[X, E]`.
    """

    @classmethod
    def open(
        cls,
        backbone: Backbone,
        layers: tuple[int, ...],
        texts: Ragged,
        cache: Path,
        label: str,
    ) -> StateCache:
        """Map the states of texts, and encode those that no earlier run has encoded.

        Args:
            texts: token ids of each text.
            cache: folder that contains a folder for every set of texts.
            label: name of the texts on the progress bar.

        Raises:
            ConfigError: the disk is too full for the states.
        """
        key = hashlib.sha256(f"{backbone.digest} {backbone.dtype} {layers}".encode())
        for ids in texts:
            key.update(ids.astype(np.int32).tobytes() + b"|")
        folder = cache / f"states-{key.hexdigest()[:16]}"
        count = int(texts.bounds[-1])
        shape = (count, len(layers), backbone.width)
        size = math.prod(shape) * np.dtype(np.int16).itemsize
        # Texts of similar length are encoded together, to reduce padding.
        order = sorted(range(len(texts)), key=lambda i: (-len(texts[i]), i))
        batches = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]

        def is_complete(folder: Path) -> bool:
            path = folder / STATES
            whole = path.is_file() and path.stat().st_size == size
            return whole and _batches_done(folder) == len(batches)

        def build(partial: Path) -> None:
            """Encode the batches that are not yet recorded as done."""
            if not (partial / STATES).is_file():
                (partial / DONE).unlink(missing_ok=True)
            room = f"{bytes_text(size)} for the frozen states of {count:,} tokens of {label}"
            logger.info("%s, in '%s'", room, cache)
            reserve(partial / STATES, size, f"data.cache_states ({room})")
            values = np.memmap(partial / STATES, np.int16, "r+", shape=shape)
            states = cls(values, texts.bounds)
            done, total = _batches_done(partial), len(batches)
            for number in tqdm(range(done, total), f"encoding {label}", total, initial=done):
                rows = [torch.from_numpy(texts[i].astype(np.int64)) for i in batches[number]]
                ids_ST = pad_sequence(rows, batch_first=True).to(backbone.device)
                states_XSTE = encode(backbone, ids_ST, layers).to("cpu", torch.bfloat16)
                for row, i in enumerate(batches[number]):
                    own_TXE = states_XSTE[:, row, : len(texts[i])].transpose(0, 1).contiguous()
                    states[i][:] = own_TXE.view(torch.int16).numpy()
                if (number + 1) % FLUSH == 0 or number + 1 == total:
                    values.flush()
                    write_text(partial / DONE, json.dumps(number + 1))

        build_once(folder, is_complete, build, f"the frozen states of {label}")
        return cls(np.memmap(folder / STATES, np.int16, "r", shape=shape), texts.bounds)

    def batch(self, indices: Sequence[int]) -> Tensor:
        """States of texts by their indices `[X, S, T, E]`: bfloat16, zero-padded on the right."""
        rows = [torch.from_numpy(self[i].copy()).view(torch.bfloat16) for i in indices]
        padded_STXE = pad_sequence(rows, batch_first=True)
        return padded_STXE.permute(2, 0, 1, 3)


def _batches_done(folder: Path) -> int:
    note = folder / DONE
    return json.loads(note.read_text()) if note.is_file() else 0
