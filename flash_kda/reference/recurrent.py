"""The recurrence, token by token: it defines every right answer."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from flash_kda.reference.gate import activate
from flash_kda.types import Inputs


def spans(inputs: Inputs) -> list[tuple[int, int, int]]:
    """(batch row, first token, one past the last token) of each sequence."""
    B, T = inputs.q.shape[:2]
    if inputs.cu_seqlens is None:
        return [(b, 0, T) for b in range(B)]
    ends = inputs.cu_seqlens.tolist()
    return [(0, start, end) for start, end in pairwise(ends)]


def used_rows(inputs: Inputs) -> Inputs:
    """The call without the rows past the last packed sequence, which must reach nothing, not even by a gradient."""
    if inputs.cu_seqlens is None:
        return inputs
    end = int(inputs.cu_seqlens[-1])
    return inputs.replace(**{name: getattr(inputs, name)[:, :end] for name in ("q", "k", "v", "g", "beta")})


def initial_states(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """States before each sequence as ``[N, HV, K, V]`` in ``dtype``, whatever the caller's layout."""
    if inputs.initial_state is None:
        N, HV, K, V = inputs.num_sequences, inputs.v.shape[2], inputs.q.shape[3], inputs.v.shape[3]
        return inputs.q.new_zeros(N, HV, K, V, dtype=dtype)
    S = inputs.initial_state.to(dtype)
    return S.transpose(-1, -2) if inputs.state_layout == "vk" else S


def final_states(inputs: Inputs, states: list[Tensor]) -> Tensor | None:
    """Stack the states ``[HV, K, V]`` after each sequence into the caller's layout and dtype; None if not asked for."""
    if not inputs.output_final_state:
        return None
    if not states:
        return inputs.q.new_zeros(inputs.state_shape, dtype=inputs.state_dtype)
    S = torch.stack(states).to(inputs.state_dtype)
    return (S.transpose(-1, -2) if inputs.state_layout == "vk" else S).contiguous()


def kda_recurrent(inputs: Inputs, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor | None]:
    """KDA by its definition (docs/derivation.md section 1), differentiable by autograd.

    Args:
        inputs: a checked call.
        dtype: in which everything is computed, float64 or float32.

    Returns:
        Output ``[B, T, HV, V]`` in v's dtype and final state as :func:`flash_kda.kda` returns them.
    """
    q, k, v, g, beta = activate(used_rows(inputs), dtype)
    S0 = initial_states(inputs, dtype)
    B, T = inputs.v.shape[:2]
    rows = [[v.new_zeros(v.shape[2:])] * T for _ in range(B)]
    states = []
    for n, (b, start, end) in enumerate(spans(inputs)):
        S = S0[n]
        for t in range(start, end):
            S = g[b, t].exp()[..., None] * S
            delta = v[b, t] - torch.einsum("hk,hkv->hv", k[b, t], S)
            S = S + torch.einsum("hk,hv->hkv", k[b, t], beta[b, t, :, None] * delta)
            rows[b][t] = torch.einsum("hk,hkv->hv", q[b, t], S)
        states.append(S)
    o = torch.stack([torch.stack(r) for r in rows]) if B * T else torch.zeros_like(v)
    return o.to(inputs.v.dtype), final_states(inputs, states)
