"""Short causal convolution over time, one filter per channel, with an explicit state."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flash_kda.reference.layer import convolution


class ShortConvolution(nn.Module):
    """``y_t = silu(bias + sum_w weight[:, 0, w] * x_{t - W + 1 + w})`` in every channel; nothing before the start.

    Parameters are named and shaped as those of a depthwise ``nn.Conv1d``: ``weight [D, 1, W]`` and ``bias [D]``.

    Args:
        channels: D.
        width: W, how many tokens a filter sees, the current one included.
        bias: whether there is a bias.
    """

    def __init__(self, channels: int, width: int = 4, bias: bool = False) -> None:
        super().__init__()
        if channels < 1:
            raise ValueError(f"channels: got {channels}, expected 1 or more")
        if width < 1:
            raise ValueError(f"width: got {width}, expected 1 or more")
        self.channels, self.width = channels, width
        # nn.Conv1d's own initialisation: uniform within 1 / sqrt(fan in), and the fan in is the width.
        bound = width**-0.5
        self.weight = nn.Parameter(torch.empty(channels, 1, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias else None

    def forward(
        self, x: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Convolve sequences that may continue earlier ones.

        Args:
            x: ``[B, T, D]``; B is 1 with ``cu_seqlens``.
            state: ``[N, W - 1, D]``, the last W - 1 inputs before each sequence, oldest first; None means zeros.
            cu_seqlens: ``[N + 1]`` boundaries of packed sequences. A filter never sees another sequence; rows from
                ``cu_seqlens[-1]`` on give zeros and reach nothing.

        Returns:
            ``[B, T, D]`` in x's dtype, and the state after each sequence ``[N, W - 1, D]`` in float32 (float64 for
            float64 x). Inputs are never changed.

        Raises:
            ValueError: x or state has another shape.
        """
        if x.ndim != 3 or x.shape[-1] != self.channels:
            raise ValueError(f"x: got shape {tuple(x.shape)}, expected [B, T, D] with D = {self.channels}")
        N = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        expected = (N, self.width - 1, self.channels)
        dtype = torch.promote_types(x.dtype, torch.float32)
        if state is None:
            state = x.new_zeros(expected, dtype=dtype)
        elif tuple(state.shape) != expected:
            raise ValueError(f"state: got shape {tuple(state.shape)}, expected [N, W - 1, D] = {expected}")
        before = state.to(dtype)
        if cu_seqlens is None:
            T = x.shape[1]
            padded = torch.cat([before, x.to(dtype)], 1)
            shifted = [padded[:, w : w + T] for w in range(self.width)]
            after = padded[:, T:]
        else:
            shifted, after = self._packed(x.to(dtype), before, cu_seqlens)
        y = F.silu(convolution(shifted, self.weight[:, 0], self.bias))
        if cu_seqlens is not None:
            inside = torch.arange(x.shape[1], device=x.device) < cu_seqlens[-1]
            y = torch.where(inside[:, None], y, 0.0)
        return y.to(x.dtype), after

    def _packed(self, x: Tensor, before: Tensor, cu_seqlens: Tensor) -> tuple[list[Tensor], Tensor]:
        """For each tap the rows it multiplies ``[1, T, D]``, and the states after; no value is read on the host."""
        T, W, N = x.shape[1], self.width, before.shape[0]
        rows = torch.cat([before.flatten(0, 1), x[0]])
        starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()

        def locate(sequence: Tensor, offset: Tensor) -> Tensor:
            """Row of the token at ``offset`` of a sequence; negative offsets lie in the state before it."""
            in_x = N * (W - 1) + starts[sequence] + offset
            return torch.where(offset < 0, sequence * (W - 1) + W - 1 + offset, in_x)

        n = torch.arange(N, device=x.device)
        last = torch.arange(1 - W, 0, device=x.device)
        after = rows[locate(n[:, None].expand(N, W - 1), (ends - starts)[:, None] + last)]
        if N == 0:
            return [x] * W, after
        t = torch.arange(T, device=x.device)
        # A row past the end takes the last sequence's place, so that its index is valid; its output is dropped.
        sequence = torch.searchsorted(ends, t, right=True).clamp(max=N - 1)
        offset = torch.minimum(t, ends[-1] - 1) - starts[sequence]
        return [rows[locate(sequence, offset - shift).clamp(min=0)][None] for shift in range(W - 1, -1, -1)], after
