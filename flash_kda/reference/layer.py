"""What the layer has around the recurrence: a short convolution before it, a norm after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def convolution(window: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """``bias + sum_w weight[:, w] * window[w]`` in every channel, in the dtype of ``window``.

    Args:
        window: for each tap, oldest first, the rows that it multiplies ``[..., D]``.
        weight: ``[D, W]``. bias: ``[D]``.
    """
    dtype = window[0].dtype
    taps = weight.to(dtype).unbind(-1)
    # Tap by tap, in one order whatever the number of rows: few products, and no transposition to channels first.
    y = taps[0] * window[0]
    for tap, rows in zip(taps[1:], window[1:], strict=True):
        y = torch.addcmul(y, tap, rows)
    return y if bias is None else y + bias.to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
