"""D_psi: from memory slots to decoder states (section 3.3); variants: soft tokens (7.1), identity.

Letters: J slots, C states per slot, D decoder width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sedem.config import SedemConfig


class Decompressor(nn.Module):
    """A shared two-layer MLP from each slot to C decoder states (section 3.3, equation 8).

    The output of the last layer is multiplied by a fixed vector, the spread of the decoder's own
    states at the injection layer. This is W_2 and b_2 of the paper in other units. The function
    class is the same, but optimizer steps match the size of the states, whose norms are hundreds.

    Args:
        hidden: width of the hidden layer; the paper's parameter count implies D.
    """

    spread: Tensor

    def __init__(self, d_dec: int, compression: int, hidden: int) -> None:
        super().__init__()
        self.states_per_slot = compression
        self.norm = nn.LayerNorm(d_dec)
        self.w_1 = nn.Linear(d_dec, hidden)
        self.w_2 = nn.Linear(hidden, compression * d_dec)
        self.register_buffer("spread", torch.ones(d_dec))

    def forward(self, memory_JD: Tensor) -> Tensor:
        """H-hat, the restored states `[..., J * C, D]` of slots `[..., J, D]`."""
        activation = F.gelu(self.w_1(self.norm(memory_JD)))
        states_JCD = self.w_2(activation).unflatten(-1, (self.states_per_slot, -1)) * self.spread
        return states_JCD.flatten(-3, -2)

    @torch.no_grad()
    def calibrate(self, states_PD: Tensor) -> None:
        """Set spread and bias so that outputs start at the mean and scale of decoder states.

        Args:
            states_PD: a sample of decoder states at the injection layer.
        """
        self.spread.copy_(_spread(states_PD))
        centre_D = states_PD.float().mean(0) / self.spread
        self.w_2.bias.copy_(centre_D.repeat(self.states_per_slot))


class IdentityDecompressor(nn.Module):
    """The identity: each slot is used as one decoder state, so C is 1. Ours.

    With a compressor that starts as the identity too, it needs no training: states read after a
    layer are injected after the same layer.
    """

    spread: Tensor
    states_per_slot = 1

    def __init__(self, d_dec: int) -> None:
        super().__init__()
        self.register_buffer("spread", torch.ones(d_dec))

    def forward(self, memory_JD: Tensor) -> Tensor:
        """H-hat, the slots `[..., J, D]` themselves."""
        return memory_JD

    @torch.no_grad()
    def calibrate(self, states_PD: Tensor) -> None:
        """Set the spread, the unit of the regression loss; states do not change.

        Args:
            states_PD: a sample of decoder states at the injection layer.
        """
        self.spread.copy_(_spread(states_PD))


class SoftTokenDecompressor(nn.Module):
    """No decompression: each slot is one soft token at the decoder's input (section 7.1).

    The compressor maps into the decoder's embedding space. Two fixed vectors give each slot the
    mean and scale of the decoder's own embeddings, because states of a middle layer are hundreds of
    times larger.
    """

    spread: Tensor
    centre: Tensor
    states_per_slot = 1

    def __init__(self, d_dec: int) -> None:
        super().__init__()
        self.register_buffer("spread", torch.ones(d_dec))
        self.register_buffer("centre", torch.zeros(d_dec))

    def forward(self, memory_JD: Tensor) -> Tensor:
        """Soft tokens `[..., J, D]` of slots `[..., J, D]`."""
        return F.layer_norm(memory_JD, memory_JD.shape[-1:]) * self.spread + self.centre

    @torch.no_grad()
    def calibrate(self, states_PD: Tensor) -> None:
        """Set the two vectors to the mean and scale of embeddings."""
        states_PD = states_PD.float()
        self.spread.copy_(states_PD.std(0))
        self.centre.copy_(states_PD.mean(0))


def build_decompressor(
    config: SedemConfig, d_dec: int
) -> Decompressor | IdentityDecompressor | SoftTokenDecompressor:
    """Build the decompressor that a configuration describes."""
    if config.decompressor == "none":
        return SoftTokenDecompressor(d_dec)
    if config.decompressor == "identity":
        return IdentityDecompressor(d_dec)
    return Decompressor(d_dec, config.compression, config.decompressor_hidden or d_dec)


def _spread(states_PD: Tensor) -> Tensor:
    return states_PD.float().std(0).clamp_min(1e-6)
