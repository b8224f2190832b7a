"""What happens to the inputs before the recurrence: normalisation, gate, beta. The one torch definition of each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_kda.types import Gate, Inputs, LowerBoundGate, SoftplusGate

L2NORM_EPS = 1e-6


def l2norm(x: Tensor) -> Tensor:
    """``x * rsqrt(sum(x^2) + 1e-6)`` over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)


def decay(g: Tensor, gate: Gate) -> Tensor:
    """Natural-log decay of raw gates ``[..., HV, K]``, in g's dtype. The equations stand in the gate classes."""
    if not isinstance(gate, LowerBoundGate | SoftplusGate):
        return g
    x = g if gate.dt_bias is None else g + gate.dt_bias.to(g.dtype).reshape(g.shape[-2:])
    A = None if gate.A_log is None else gate.A_log.to(g.dtype).exp()[:, None]
    if isinstance(gate, LowerBoundGate):
        return gate.lower_bound * torch.sigmoid(x if A is None else A * x)
    # -log(sigmoid(-x)) is softplus(x) to full precision at both ends; F.softplus is linear above its threshold.
    y = -F.logsigmoid(-x)
    return -y if A is None else -A * y


def activate(inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q (scaled), k ``[B, T, HV, K]``, v, log decay and beta as the recurrence takes them, all in ``dtype``.

    Grouped value heads are spelled out here: value head i gets query/key head ``i // (HV / H)``.
    """
    q, k, v, g, beta = (x.to(dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
    if inputs.qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    group = v.shape[-2] // q.shape[-2]
    if group > 1:
        q, k = q.repeat_interleave(group, dim=-2), k.repeat_interleave(group, dim=-2)
    if inputs.beta_is_logit:
        beta = torch.sigmoid(beta)
    if inputs.allow_neg_eigval:
        beta = 2 * beta
    return q * inputs.scale, k, v, decay(g, inputs.gate), beta
