"""One call on the CPU: group after group, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_kda.backends.cpu.chunk import prepare, prepare_backward, walk, walk_backward
from flash_kda.backends.cpu.plan import Group, plan
from flash_kda.reference.gate import activate
from flash_kda.types import Inputs, gate_parameters, with_parameters

# Token rows of a call, in the order in which gradients come back.
ROWS = ("q", "k", "v", "g", "beta")


# Tiles and states are padded with zeros to a multiple of this many channels: the matrix library rounds a product
# differently depending on how its operands are aligned, and a sequence's bits must not depend on its neighbours.
ALIGN = 16


def compute_dtype(inputs: Inputs) -> torch.dtype:
    return torch.float64 if inputs.q.dtype == torch.float64 else torch.float32


def without_autocast() -> torch.autocast:
    """The products here are of one dtype, whatever torch.autocast around the call would make of them."""
    return torch.autocast("cpu", enabled=False)


def states_in(inputs: Inputs) -> Tensor:
    """States before each sequence, ``[N, HV, K, V]``, a fresh padded tensor in the dtype of computation."""
    K, V = inputs.q.shape[3], inputs.v.shape[3]
    if inputs.initial_state is None:
        return pad(torch.zeros(inputs.num_sequences, inputs.v.shape[2], K, V, dtype=compute_dtype(inputs)), 2)
    return pad(by_key(inputs.initial_state, inputs).to(compute_dtype(inputs), copy=True), 2)


def by_key(S: Tensor, inputs: Inputs) -> Tensor:
    """States from the caller's layout to ``[N, HV, K, V]``, or back: a view."""
    return S.transpose(-1, -2) if inputs.state_layout == "vk" else S


def pad(x: Tensor, dims: int) -> Tensor:
    """Zeros behind the last ``dims`` dimensions up to a multiple of ALIGN; contiguous."""
    sizes = [n for size in x.shape[: -dims - 1 : -1] for n in (0, -size % ALIGN)]
    return (F.pad(x, sizes) if any(sizes) else x).contiguous()


def states_out(S: Tensor, inputs: Inputs) -> Tensor:
    """Padded ``[N, HV, K, V]`` into the caller's shape, layout and dtype."""
    S = S[..., : inputs.q.shape[3], : inputs.v.shape[3]]
    return by_key(S, inputs).to(inputs.state_dtype).contiguous()


def rows_of(inputs: Inputs, group: Group) -> Inputs:
    """The call restricted to the token rows of a group."""
    return inputs.replace(**{name: group.take(getattr(inputs, name)) for name in ROWS})


def activated(rows: Inputs, group: Group) -> tuple[Tensor, ...]:
    """Activated q, k, v, g, beta of a group, token-major; a row past its sequence's end writes and decays nothing."""
    out = activate(rows, compute_dtype(rows))
    if (valid := group.valid) is None:
        return out
    return tuple(torch.where(valid.view(*valid.shape, *[1] * (x.ndim - 3)), x, 0.0) for x in out)


def to_tiles(x: Tensor) -> Tensor:
    """``[n, chunks, C, HV, ...]`` to ``[chunks, n * HV, C, ...]``, channels padded; a view where that can be."""
    x = x.transpose(0, 1).transpose(2, 3).flatten(1, 2)
    return pad(x, 1) if x.ndim == 4 and x.shape[-1] % ALIGN else x


def from_tiles(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of :func:`to_tiles`, a view of the shape of ``like``."""
    x = x.unflatten(1, (like.shape[0], -1)).transpose(2, 3).transpose(0, 1)
    return x[..., : like.shape[-1]]


def forward_group(inputs: Inputs, group: Group, S: Tensor, keep: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[n, chunks, C, HV, V]``, next states ``[n, HV, K, V]``, and what :func:`walk` keeps."""
    rows = rows_of(inputs, group)
    q, k, v, g, beta = (to_tiles(x) for x in activated(rows, group))
    o, S_next, kept = walk(S.flatten(0, 1), v, prepare(q, k, g, beta), keep)
    o, S_next = from_tiles(o, rows.v), S_next.view_as(S)
    if group.C > 1 and (members := spoilt(S, S_next)):
        # A product of matrices carries a NaN or inf to earlier rows of its chunk (0 * NaN is NaN). The sequences where
        # one came up take this group again one token at a time, which cannot look ahead.
        single = replace(group, spans=tuple(group.spans[i] for i in members), chunks=group.tokens, C=1)
        o_single, S_next[members], _ = forward_group(inputs, single, S[members])
        o[members] = o_single.reshape(len(members), *o.shape[1:])
    return o, S_next, kept


def rows_like(x: Tensor, inputs: Inputs) -> Tensor:
    """A dense buffer for what the groups put; rows that no sequence holds are zero."""
    covered = inputs.cu_seqlens is None
    return torch.empty(x.shape, dtype=x.dtype) if covered else torch.zeros(x.shape, dtype=x.dtype)


def spoilt(S: Tensor, S_next: Tensor) -> list[int]:
    """The sequences ``[n, HV, K, V]`` in whose states a NaN or inf came up."""
    if bool(S_next.sum().isfinite()):  # which it is only if every term is
        return []
    before, after = (x.isfinite().flatten(1).sum(1) for x in (S, S_next))
    return [int(i) for i in (after < before).nonzero()]


def forward(inputs: Inputs, keep_states: bool = False) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output in v's dtype, padded states after each sequence ``[N, HV, K, V]``, and those kept.

    What is kept is one state per chunk: a tensor ``[chunks, n * HV, K, V]`` for each group.
    """
    o = rows_like(inputs.v, inputs)
    S = states_in(inputs)
    kept = []
    with without_autocast():
        for groups in plan(inputs):
            for group in groups:
                rows, S[group.sequences], states = forward_group(inputs, group, S[group.sequences], keep_states)
                if keep_states:
                    kept.append(states)
                group.put(o, rows)
    return o, S, kept


def backward(inputs: Inputs, kept: list[Tensor], do: Tensor, dS: Tensor) -> dict[str, Tensor]:
    """Gradients by name of q, k, v, g, beta, A_log, dt_bias (where the gate has them) and ``states``.

    Args:
        kept: the states before the chunks of each group, from :func:`forward`.
        do: ``[B, T, HV, V]``. dS: gradient of the final states, in the caller's layout.
    """
    grads = {name: rows_like(getattr(inputs, name), inputs) for name in ROWS}
    parameters = _gate_parameters(inputs)
    grads |= {name: torch.zeros(x.shape, dtype=torch.float64) for name, x in parameters.items()}
    dS = pad(by_key(dS, inputs).to(compute_dtype(inputs), copy=True), 2)
    before = iter(kept)
    with without_autocast():
        for groups in plan(inputs):
            for group, states in reversed([(group, next(before)) for group in groups]):
                d, dS[group.sequences] = _backward_group(inputs, group, states, do, dS[group.sequences])
                for name in ROWS:
                    group.put(grads[name], d[name])
                for name in parameters:
                    grads[name] += d[name]
    for name, x in parameters.items():
        grads[name] = grads[name].to(x.dtype)
    dS = dS[..., : inputs.q.shape[3], : inputs.v.shape[3]]
    return grads | {"states": by_key(dS, inputs)}


def _gate_parameters(inputs: Inputs) -> dict[str, Tensor]:
    named = zip(("A_log", "dt_bias"), gate_parameters(inputs.gate), strict=True)
    return {name: x for name, x in named if x is not None}


def _backward_group(
    inputs: Inputs, group: Group, states: Tensor, do: Tensor, dS: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of a group's rows and of the gate's parameters, and that of the states before it."""
    with torch.enable_grad():
        # Autograd runs through the elementwise part only: normalisation, gate, sigmoid.
        leaves = {name: group.take(getattr(inputs, name)).detach().requires_grad_() for name in ROWS}
        parameters = {name: x.detach().requires_grad_() for name, x in _gate_parameters(inputs).items()}
        gate = with_parameters(inputs.gate, parameters.get("A_log"), parameters.get("dt_bias"))
        outputs = activated(inputs.replace(**leaves, gate=gate), group)
    q, k, v, g, beta = (to_tiles(x.detach()) for x in outputs)
    do_tiles = to_tiles(group.take(do).to(v.dtype)).contiguous()
    p = prepare(q, k, g, beta, keep=True)
    dS0, dv, d = walk_backward(states, v, p, do_tiles, dS.flatten(0, 1))
    dq, dk, dg = prepare_backward(q, k, p, d)
    tiles = tuple(from_tiles(x, y) for x, y in zip((dq, dk, dv, dg, d.beta), outputs, strict=True))
    wanted = leaves | parameters
    found = torch.autograd.grad(outputs, list(wanted.values()), tiles)
    return dict(zip(wanted, found, strict=True)), dS0.view_as(dS)
