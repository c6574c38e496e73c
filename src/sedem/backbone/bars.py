"""Whether transformers shows its own progress bars while weights are opened."""

from __future__ import annotations

_hidden = False


def hide_bars() -> None:
    """Hide transformers' bars from now on; this does not import transformers."""
    global _hidden
    _hidden = True


def pass_on() -> None:
    """Apply the choice to transformers."""
    from transformers.utils.logging import disable_progress_bar

    if _hidden:
        disable_progress_bar()
