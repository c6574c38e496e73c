"""What `sedem build --ray` does; `sedem.builders` names this module."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sedem.cli import output
from sedem_serve.ray.cluster import connected
from sedem_serve.ray.sources import Sources as Sources

if TYPE_CHECKING:
    from sedem.reading.building import Report


def build(
    address: str,
    limits: dict[str, Any],
    bank: str,
    files: Sources,
    model: str | None,
    options: dict[str, Any],
) -> Report:
    """Build on the workers of a cluster, whose address is tried before the model is opened."""
    with connected(address):
        from sedem.checkpoint.folder import model_of
        from sedem.model import SeDeM
        from sedem_serve.ray.build import Workers, build_on_ray

        name = model or model_of(bank)
        opened = SeDeM.from_pretrained(name)
        # A worker has another working folder.
        checkpoint = os.path.abspath(name) if os.path.exists(name) else name
        with output.progress("reading", of_bytes=True, speed="tokens/s") as report_progress:
            return build_on_ray(
                opened,
                Workers(address, checkpoint, **limits),
                bank,
                files,
                report_progress,
                source=opened.source,
                **options,
            )
