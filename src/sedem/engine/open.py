"""Open the engine of a model by name."""

from __future__ import annotations

import logging

from sedem.backbone.decoder import FAMILIES
from sedem.engine.eager import Eager
from sedem.engine.interface import Engine
from sedem.engine.kept import KeptBudget
from sedem.engine.static import Static, depends_on_length
from sedem.errors import ConfigError
from sedem.modules import SedemModules

logger = logging.getLogger(__name__)

ENGINES = ("auto", "eager", "static", "graphs", "compiled")
WEIGHTS = ("full", "int8")


def open_engine(
    name: str,
    model: SedemModules,
    attention: str = "sdpa",
    budget: KeptBudget | None = None,
    weights: str = "full",
) -> Engine:
    """Open an engine for a model; all but "eager" need a model that no longer changes or moves.

    Args:
        name: "eager" is the reference; "static" has fused layers and static caches; "graphs"
            also captures them as CUDA graphs; "compiled" also compiles the layers, which takes some
            seconds at the first questions and pays off for many questions; "auto" is "graphs" on a
            GPU and "static" elsewhere or if graphs cannot be captured, and "eager" for a layout
            that the others are not proven equal on.
        model: its weights are fused and adapters merged, unless the engine is "eager".
        attention: how the backbones were opened; "eager" attention needs engine "eager".
        budget: limits on kept keys and values of independent blocks; "eager" keeps none.
        weights: "int8" rounds the decoder's matrices in decoding steps on a CPU, see `int8`; it
            needs "static", which "auto" then means.

    Raises:
        ConfigError: there is no such engine, or it cannot run this model.
    """
    if name not in ENGINES:
        raise ConfigError(f"engine is '{name}'; it can be {', '.join(ENGINES)}")
    _check_weights(weights, name, model)
    int8, on_gpu = weights == "int8", model.device.type == "cuda"
    if int8:
        name = "static"
    layouts = {b.model.config.model_type for b in (model.encoder, model.decoder)}
    unproven = ", ".join(sorted(layouts - set(FAMILIES)))
    if name == "auto":
        if unproven:
            logger.warning(
                "engine 'eager' runs this model: the fast one is unproven on %s", unproven
            )
        name = "static"
        if unproven or attention == "eager":
            name = "eager"
        elif on_gpu and not any(map(depends_on_length, (model.encoder, model.decoder))):
            name = "graphs"
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
    graphs, compiled = on_gpu and name != "static", name == "compiled"
    return Static(model, graphs=graphs, compiled=compiled, int8=int8, budget=budget)


def _check_weights(weights: str, engine: str, model: SedemModules) -> None:
    if weights not in WEIGHTS:
        raise ConfigError(f"weights are '{weights}'; they can be {', '.join(WEIGHTS)}")
    if weights == "full":
        return
    if model.device.type != "cpu":
        raise ConfigError(
            f"weights 'int8' are for a CPU, the model is on '{model.device}'; use weights 'full'"
        )
    if engine not in ("auto", "static"):
        raise ConfigError(f"weights 'int8' need engine 'static', not '{engine}'")
