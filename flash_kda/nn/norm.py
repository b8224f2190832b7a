"""Root-mean-square normalisation, plain and gated."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flash_kda.reference.layer import rms_norm


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float32 or better, returned in x's dtype.

    Args:
        hidden_size: size of the last dimension; ``weight`` is ``[hidden_size]``.
        eps: added to the mean square.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        if hidden_size < 1:
            raise ValueError(f"hidden_size: got {hidden_size}, expected 1 or more")
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def _scaled(self, x: Tensor) -> Tensor:
        # A low-precision mean square loses the small entries, so at least float32 inside.
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        return rms_norm(y, self.weight, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden_size]`` to the same shape and dtype."""
        return self._scaled(x).to(x.dtype)


class GatedRMSNorm(RMSNorm):
    """``rms_norm(x) * sigmoid(gate)``, with the same arguments and parameters as :class:`RMSNorm`."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """``x`` and ``gate`` ``[..., hidden_size]`` to the same shape, in x's dtype.

        Raises:
            ValueError: ``gate`` is missing or has another shape than ``x``.
        """
        if gate is None or gate.shape != x.shape:
            got = None if gate is None else tuple(gate.shape)
            raise ValueError(f"gate: got {got}, expected the shape of x, {tuple(x.shape)}")
        y = self._scaled(x)
        return (y * torch.sigmoid(gate.to(y.dtype))).to(x.dtype)
