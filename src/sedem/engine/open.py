"""Which engine runs a model."""

from __future__ import annotations

from sedem.engine.eager import Eager
from sedem.engine.interface import Engine
from sedem.engine.static import Static
from sedem.errors import ConfigError
from sedem.method.modules import SedemModules

ENGINES = ("auto", "eager", "static", "graphs")


def open_engine(name: str, model: SedemModules, attention: str = "sdpa") -> Engine:
    """The engine of a name for a model, which stays where it is and as it is from then on.

    Args:
        name: "eager" is the reference; "static" has fused layers and static caches; "graphs"
            captures them as CUDA graphs; "auto" is "graphs" on a GPU and "static" elsewhere.
        model: whose weights are fused and merged, unless the engine is "eager".
        attention: as the backbones were opened; all but "eager" have attention of their own.

    Raises:
        ConfigError: there is no such engine, or it cannot run this model.
    """
    if name not in ENGINES:
        raise ConfigError(f"engine is '{name}'; it can be {', '.join(ENGINES)}")
    on_gpu = model.device.type == "cuda"
    if name == "auto":
        name = "eager" if attention == "eager" else "graphs" if on_gpu else "static"
    if name == "eager":
        return Eager(model)
    if attention == "eager":
        raise ConfigError(f"engine '{name}' has no eager attention; take engine 'eager'")
    if name == "graphs" and not on_gpu:
        raise ConfigError(
            f"engine 'graphs' needs a CUDA device, the model is on '{model.device}'; take 'static'"
        )
    return Static(model, graphs=name == "graphs")
