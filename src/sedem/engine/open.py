"""Opening the engine of a model by name."""

from __future__ import annotations

import logging

from sedem.backbone.decoder import FAMILIES
from sedem.engine.eager import Eager
from sedem.engine.interface import Engine
from sedem.engine.kept import KeptBudget
from sedem.engine.static import Static
from sedem.errors import ConfigError
from sedem.method.modules import SedemModules

logger = logging.getLogger(__name__)

ENGINES = ("auto", "eager", "static", "graphs")


def open_engine(
    name: str, model: SedemModules, attention: str = "sdpa", budget: KeptBudget | None = None
) -> Engine:
    """Open an engine for a model; all but "eager" need a model that no longer changes or moves.

    Args:
        name: "eager" is the reference; "static" has fused layers and static caches; "graphs"
            also captures them as CUDA graphs; "auto" is "graphs" on a GPU and "static" elsewhere,
            and "eager" for a layout that the others have not been proven equal on.
        model: its weights are fused and adapters merged, unless the engine is "eager".
        attention: how the backbones were opened; "eager" attention needs engine "eager".
        budget: how many keys and values of independent blocks are kept; "eager" keeps none.

    Raises:
        ConfigError: there is no such engine, or it cannot run this model.
    """
    if name not in ENGINES:
        raise ConfigError(f"engine is '{name}'; it can be {', '.join(ENGINES)}")
    on_gpu = model.device.type == "cuda"
    layouts = {b.model.config.model_type for b in (model.encoder, model.decoder)}
    unproven = ", ".join(sorted(layouts - set(FAMILIES)))
    if name == "auto":
        if unproven:
            logger.warning(
                "engine 'eager' runs this model: the fast one is unproven on %s", unproven
            )
        slow = unproven or attention == "eager"
        name = "eager" if slow else "graphs" if on_gpu else "static"
    if name == "eager":
        return Eager(model)
    if unproven:
        raise ConfigError(
            f"engine '{name}' is proven equal on the layouts {', '.join(FAMILIES)}, not on "
            f"{unproven}; use engine 'eager'"
        )
    if attention == "eager":
        raise ConfigError(f"engine '{name}' has no eager attention; use engine 'eager'")
    if name == "graphs" and not on_gpu:
        raise ConfigError(
            f"engine 'graphs' needs a CUDA device, the model is on '{model.device}'; use 'static'"
        )
    return Static(model, graphs=name == "graphs", budget=budget)
