"""Whether torch.compile works on this machine."""

from __future__ import annotations

import torch

from sedem.errors import ConfigError


def check_compiler(device: torch.device | str, needed_by: str) -> None:
    """Compile a trivial function, so that a missing compiler is reported before any work is done.

    Args:
        device: what the code would be compiled for.
        needed_by: the setting or method that requires it, for the message.

    Raises:
        ConfigError: nothing can be compiled.
    """
    try:
        torch.compile(torch.neg)(torch.ones(1, device=device))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{needed_by} needs torch.compile, but nothing can be compiled on this machine "
            f"({reason}); install a C++ compiler, or leave {needed_by} out"
        ) from None
