"""One backward call on the GPU: the chunks prepared again, two walks, the chunks' gradients, sums over value heads.

Only the inputs come from the forward. What the chunks need of each other, the state before and its gradient after each,
is made here and lives as long as the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from flash_kda.backends.triton.chunk_gradient import chunk_gradient, head_gradient
from flash_kda.backends.triton.config import Config, configure
from flash_kda.backends.triton.forward import Written, describe, device_facts, slots, values
from flash_kda.backends.triton.launch import Launch, Plan, Scratch
from flash_kda.backends.triton.prepare import prepare
from flash_kda.backends.triton.walks import walks
from flash_kda.types import Inputs, LogGate, Problem, Signature, gate_parameters

# What is passed to the kernels, by the names of their parameters without ``p_``. The preparation clears the rows of o
# past the last sequence: these are dv's.
TENSORS = (
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu", "S0", "do", "dS"),
    *("dq", "dk", "dv", "dg", "dbeta", "dS0", "dA_part", "dbias_part", "o", "dR"),
)
# What stands for a smaller beta: far below what any gradient notices, and its square is a normal number.
LEAST_BETA = 2.0**-30
# Tokens that a program of the sums over value heads takes.
ROWS = 16
# Tokens x value heads whose states and tiles are in memory at a time: 1.7 GB of them at K = V = 128.
MOST_ROWS = 2**19


@dataclass(frozen=True)
class GradientConfig:
    """How the backward's own kernels are launched; the walks have BV of the forward's configuration.

    Attributes:
        BC, BV: channels of a program, and value columns that it takes at a time, of the chunks' gradients.
        warps, walk_warps: per program. walk_stages: chunks in flight in the walks.
    """

    BC: int
    BV: int
    warps: int
    walk_warps: int
    walk_stages: int


def configure_gradient(problem: Problem, config: Config) -> GradientConfig:
    """The backward's configuration beside the forward's."""
    return GradientConfig(
        # All channels at once where registers hold them: gradients of normalised rows are then whole.
        BC=config.BK if config.split and config.BK <= 128 else min(config.BK, 64),
        # The usual V = 128 at once: nothing then waits between rounds.
        BV=2 * config.BV if config.split and problem.V > config.BV else config.BV,
        warps=8 if config.BK >= 64 else 4,
        walk_warps=config.recurrence_warps,
        walk_stages=min(config.stages, 2) if config.split else 1,
    )


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients as the kernels write them.

    Attributes:
        dq, dk, dv, dg, dbeta: like their tensors, contiguous. dS0: like the initial state, if there is one.
        dA_part, dbias_part: ``[slots, HV, BK]`` float32 parts by chunk, if the gate has A_log and dt_bias.
        dR: dv in the tiles' dtype, dv itself where that is its own.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dS0: Tensor | None
    dA_part: Tensor | None
    dbias_part: Tensor | None
    dR: Tensor


def describe_backward(call: Signature, config: Config, of_dS: Written | None) -> tuple[Scratch, list[Launch]]:
    """Scratch memory, and launches in their order. T and N are at least 1. See ``forward.describe``."""
    p, own = call.problem, configure_gradient(call.problem, config)
    HV, N, C, BK = p.HV or p.H, p.N or p.B, config.C, config.BK
    chunks = slots(p, C) * HV
    tile = torch.bfloat16 if config.split else torch.float32
    # Gradients are contiguous, dv as o is; dS0 has the strides of dS, which is None where that would be zero.
    out = (p.dtype, (p.T * HV * p.V, HV * p.V, p.V, 1))
    shape = (HV * p.K * p.V, p.K * p.V, *((p.K, 1) if call.state_layout == "vk" else (p.V, 1)))
    of_state = (p.state_dtype, shape)
    scratch, launches = describe(call, config, out, of_state)
    whole_rows = own.BC == BK and HV == p.H
    parts = 0 if whole_rows else p.B * p.T * HV * p.K
    scratch = {
        **scratch,
        "states": (chunks * p.V * BK, tile),
        "dstates": (chunks * p.V * BK, tile),
        "U": (chunks * C * p.V, tile),
        "dq_part": (parts, torch.float32),
        "dk_part": (parts, torch.float32),
    }
    given = values(call, config, out, of_state) | {
        "LEAST_BETA": LEAST_BETA,
        "HAS_DS": of_dS is not None,
        "STORE_DS0": call.layout("initial_state") is not None,
        "WALK_STAGES": own.walk_stages,
        "GRADIENT_BC": own.BC,
        "GRADIENT_BV": own.BV,
        "B": p.B,
        "H": p.H,
        "ROWS": ROWS,
        "WHOLE_ROWS": whole_rows,
        "STORE_DR": p.dtype != tile,
    }
    programs = N * HV * math.ceil(p.V / config.BV)
    prepared = [replace(x, values={**x.values, "LEAST_BETA": LEAST_BETA}) for x in launches if x.kernel is prepare]
    found = [*prepared, Launch(walks, 2 * programs, given, {"num_warps": own.walk_warps})]
    for x in prepared:
        values_ = given | {"CHUNKS": x.values["CHUNKS"]}
        found.append(Launch(chunk_gradient, chunks * (BK // own.BC), values_, {"num_warps": own.warps}))
    if not whole_rows:
        found.append(Launch(head_gradient, math.ceil(p.B * p.T / ROWS) * p.H, given, {"num_warps": 4}))
    return scratch, found


@lru_cache(maxsize=1024)
def plan(call: Signature, of_dS: Written | None) -> Plan:
    """The plan of all calls with this signature."""
    config = configure(call.problem, device_facts(call.device.index))
    return Plan(call.device, TENSORS, *describe_backward(call, config, of_dS))


# A signature, and what the gradient of the final state is, to the plan of such calls.
Planner: TypeAlias = Callable[[Signature, Written | None], Plan]


def allocate(inputs: Inputs, config: Config) -> Gradients:
    """Memory for the gradients of one round; rows past the last sequence are zero where no kernel writes them."""
    x = inputs
    new = torch.empty if x.cu_seqlens is None else torch.zeros
    parts = (slots(x.signature.problem, config.C), x.v.shape[2], config.BK)
    A_log, dt_bias = gate_parameters(x.gate)

    def empty(like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)

    def part(parameter: Tensor | None) -> Tensor | None:
        return None if parameter is None else torch.empty(parts, dtype=torch.float32, device=x.q.device)

    dv = empty(x.v)
    tile = torch.bfloat16 if config.split else torch.float32
    return Gradients(
        dq=new(x.q.shape, dtype=x.q.dtype, device=x.q.device),
        dk=new(x.k.shape, dtype=x.k.dtype, device=x.k.device),
        dv=dv,
        dg=new(x.g.shape, dtype=x.g.dtype, device=x.g.device),
        dbeta=new(x.beta.shape, dtype=x.beta.dtype, device=x.beta.device),
        dS0=None if x.initial_state is None else empty(x.initial_state),
        dA_part=part(A_log),
        dbias_part=part(dt_bias),
        dR=dv if tile == x.v.dtype else torch.empty(x.v.shape, dtype=tile, device=x.v.device),
    )


# Of q, k, v, g, beta, A_log, dt_bias (both still float32) and the initial state.
Found: TypeAlias = tuple[Tensor | None, ...]


def compute(inputs: Inputs, do: Tensor, dS: Tensor | None, planner: Planner = plan) -> Found:
    """:func:`backward` on the current device in one round of launches, where T and N are at least 1."""
    p = inputs.signature.problem
    A_log, dt_bias = gate_parameters(inputs.gate)
    cu = inputs.cu_seqlens
    do = do.contiguous()
    dS = None if dS is None else dS.contiguous()
    found = allocate(inputs, configure(p, device_facts(inputs.signature.device.index)))
    tensors = (
        *(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta),
        None if A_log is None else A_log.float().contiguous(),
        None if dt_bias is None else dt_bias.float().contiguous(),
        None if cu is None else cu.contiguous(),
        *(inputs.initial_state, do, dS),
        *(found.dq, found.dk, found.dv, found.dg, found.dbeta, found.dS0, found.dA_part, found.dbias_part, found.dv),
        found.dR,
    )
    planner(inputs.signature, None if dS is None else (dS.dtype, dS.stride()))(tensors)
    # The second stage of the sums over tokens; the first is each chunk's own.
    dA_log = None if found.dA_part is None else found.dA_part.sum((0, 2))
    dbias = None if found.dbias_part is None else found.dbias_part.sum(0)[:, : p.K]
    return found.dq, found.dk, found.dv, found.dg, found.dbeta, dA_log, dbias, found.dS0


def _rows_of_batch(inputs: Inputs, rows: slice) -> Inputs:
    """The call for some batch rows."""
    S = inputs.initial_state
    given = {name: getattr(inputs, name)[rows] for name in ("q", "k", "v", "g", "beta")}
    return inputs.replace(**given, initial_state=None if S is None else S[rows])


def _heads(inputs: Inputs, heads: slice, own: slice) -> Inputs:
    """The call for some of q's heads and their own value heads."""
    gate, S = inputs.gate, inputs.initial_state
    if not isinstance(gate, LogGate):
        A_log, dt_bias = (None if x is None else x[own] for x in gate_parameters(gate))
        gate = replace(gate, A_log=A_log, dt_bias=dt_bias)
    given = {name: getattr(inputs, name)[:, :, heads] for name in ("q", "k")}
    given |= {name: getattr(inputs, name)[:, :, own] for name in ("v", "g", "beta")}
    return inputs.replace(**given, gate=gate, initial_state=None if S is None else S[:, own])


def _join(parts: list[Found], of_rows: int, of_parameters: int | None, of_states: int) -> Found:
    """The whole from its parts, along these dimensions; parameters without one are added in order."""
    dims = (*(of_rows,) * 5, *(of_parameters,) * 2, of_states)
    by_tensor = [list(x) for x in zip(*parts, strict=True)]
    parts.clear()
    found: list[Tensor | None] = []
    for dim in dims:
        # One after the other, so that at most one is there twice.
        x = [d for d in by_tensor.pop(0) if d is not None]
        found.append(None if not x else torch.cat(x, dim) if dim is not None else torch.stack(x).sum(0))
    return tuple(found)


def compute_in_parts(inputs: Inputs, do: Tensor, dS: Tensor | None, planner: Planner = plan) -> Found:
    """:func:`compute`, in several rounds where the memory of one would have more than MOST_ROWS rows.

    Batch rows come first, then heads, of which a round has no fewer than keep every multiprocessor walking. Tokens stay
    together.
    """
    p = inputs.signature.problem
    HV, N = p.HV or p.H, p.N or p.B
    group = HV // p.H
    parts: list[Found] = []
    if p.B > 1:
        count = max(1, MOST_ROWS // (p.T * HV))
        if count >= p.B:
            return compute(inputs, do, dS, planner)
        for rows in (slice(b, b + count) for b in range(0, p.B, count)):
            of_rows = None if dS is None else dS[rows]
            parts.append(compute_in_parts(_rows_of_batch(inputs, rows), do[rows], of_rows, planner))
        return _join(parts, 0, None, 0)
    device = device_facts(inputs.signature.device.index)
    walks = N * group * math.ceil(p.V / configure(p, device).BV)
    count = max(1, MOST_ROWS // (p.T * group), math.ceil(device.multiprocessors / walks))
    if count >= p.H:
        return compute(inputs, do, dS, planner)
    for first in range(0, p.H, count):
        heads, own = slice(first, first + count), slice(first * group, (first + count) * group)
        of_heads = None if dS is None else dS[:, own]
        parts.append(compute(_heads(inputs, heads, own), do[:, :, own], of_heads, planner))
    return _join(parts, 2, 0, 1)


def backward(inputs: Inputs, do: Tensor | None, dS: Tensor | None, planner: Planner = plan) -> Found:
    """Gradients of q, k, v, g, beta, A_log, dt_bias ``[HV, K]`` and initial_state, each in its tensor's dtype.

    Args:
        do: of the output ``[B, T, HV, V]``. dS: of the final states, in the call's layout. None means zero.
    """
    p, device, S0 = inputs.signature.problem, inputs.signature.device, inputs.initial_state
    if p.N == 0 or p.T == 0:
        zeros = (None if x is None else torch.zeros_like(x) for x in (*inputs[:5], *gate_parameters(inputs.gate)))
        if S0 is None:
            return *zeros, None
        return *zeros, torch.zeros_like(S0) if dS is None else dS.to(S0.dtype)
    if do is None:
        do = torch.zeros(inputs.v.shape, dtype=inputs.v.dtype, device=device)
    with torch.cuda.device(device):
        found = compute_in_parts(inputs, do, dS, planner)
    of_parameters = zip(found[5:7], gate_parameters(inputs.gate), strict=True)
    converted = (None if d is None or x is None else d.to(x.dtype) for d, x in of_parameters)
    return *found[:5], *converted, found[7]
