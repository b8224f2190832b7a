"""What happens to the inputs before the recurrence: normalisation, gate, beta. The one torch definition of each."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_kda.types import Gate, Inputs, LowerBoundGate, SoftplusGate

L2NORM_EPS = 1e-6


def l2norm(x: Tensor) -> Tensor:
    """``x * rsqrt(sum(x^2) + 1e-6)`` over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)


def _exp_minus_abs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Where x is negative, and ``e^-|x|`` in (0, 1] with the right derivative at 0."""
    negative = x < 0
    return negative, torch.where(negative, x, -x).exp()


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + e^-x)``, precise at both ends.

    Spelled out because torch.sigmoid rounds differently in its vector loop and in the remainder after it, so that an
    element's bits would depend on where in a batch it lies.
    """
    negative, z = _exp_minus_abs(x)
    return torch.where(negative, z, 1.0) / (1 + z)


def softplus(x: Tensor) -> Tensor:
    """``log(1 + e^x)``, precise at both ends; spelled out for the reason given in :func:`sigmoid`."""
    negative, z = _exp_minus_abs(x)
    return torch.where(negative, 0.0, x) + torch.log1p(z)


def decay(g: Tensor, gate: Gate) -> Tensor:
    """Natural-log decay of raw gates ``[..., HV, K]``, in g's dtype. The equations stand in the gate classes."""
    if not isinstance(gate, (LowerBoundGate, SoftplusGate)):
        return g
    x = g if gate.dt_bias is None else g + gate.dt_bias.to(g.dtype).reshape(g.shape[-2:])
    A = None if gate.A_log is None else gate.A_log.to(g.dtype).exp()[:, None]
    if isinstance(gate, LowerBoundGate):
        return gate.lower_bound * sigmoid(x if A is None else A * x)
    y = softplus(x)
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
        beta = sigmoid(beta)
    if inputs.allow_neg_eigval:
        beta = 2 * beta
    return q * inputs.scale, k, v, decay(g, inputs.gate), beta
