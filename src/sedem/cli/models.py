"""Opening the model that a command runs."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from sedem.config import DEFAULT_MODEL
from sedem.errors import BankError

if TYPE_CHECKING:
    from sedem.model import SeDeM


def open_model(name: str, engine: str = "auto", weights: str = "full") -> SeDeM:
    """Open a model without a progress bar for its weights.

    Args:
        name: folder, hub id or name of a shipped checkpoint.
        engine: what runs it.
        weights: "int8" for decoding steps with int8 matrices on a CPU.
    """
    from sedem.backbone.loading import hide_bars
    from sedem.model import SeDeM

    hide_bars()
    return SeDeM.from_pretrained(name, engine=engine, light=True, weights=weights)


def model_of(bank: str) -> str:
    """Return the model that made a bank, or the default model for a new bank.

    A bank may come from anybody, so the model that it names is opened only if it ships with sedem.

    Raises:
        BankError: the bank names another model.
    """
    from sedem.bank.parts import store_at
    from sedem.checkpoint.folder import embedded

    store = store_at(bank)
    if not store.exists():
        return DEFAULT_MODEL
    claimed = str(store.meta().made_by.get("model") or DEFAULT_MODEL)
    # The path, because a folder of the same name in the working directory would be opened instead.
    if (shipped := embedded(claimed)) is not None:
        return str(shipped)
    raise BankError(
        f"bank '{bank}' says that it was built by model '{claimed}'; sedem opens the model that a "
        f"bank names only if it ships with sedem; give -m {shlex.quote(claimed)} if you trust it"
    )
