"""Where a result was measured: machine, versions and load, as stated in tables of times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def made_on(result: Mapping[str, Any], device: str = "processor", dtype: str = "") -> str:
    """Machine and versions of a result.

    Args:
        result: a result with the records of `sedem.provenance`.
        device: the machine entry to name: "processor", or "device" for a GPU.
        dtype: the data type used; empty leaves it out.
    """
    machine = result["machine"]
    parts = [machine[device], f"{machine['cores']} cores", f"{machine['threads']} threads", dtype]
    return f"{', '.join(filter(None, parts))}; {versions_of(result)}"


def versions_of(result: Mapping[str, Any]) -> str:
    """Versions of the libraries that times depend on."""
    versions = result["versions"]
    return f"torch {versions['torch']}, transformers {versions['transformers']}"


def load_of(result: Mapping[str, Any]) -> str:
    """A sentence about the load of the machine; empty if it is not known."""
    load = result.get("load_average")
    if load is None:
        return ""
    if isinstance(load, float):
        return f"Load of the machine: {load:.1f}."
    before, after = load
    return f"Load of the machine: {before:.1f} at the start, {after:.1f} at the end."
