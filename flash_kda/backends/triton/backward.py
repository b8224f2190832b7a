"""One backward call on the GPU: the chunks prepared again, two walks, the chunks' gradients, sums over value heads.

Only the inputs come from the forward, and what it prepared if that was kept. What the chunks need of each other, the
state before and its gradient after each, is made here and lives as long as the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_kda.backends.triton.chunk_gradient import chunk_gradient, head_gradient
from flash_kda.backends.triton.common import HARD
from flash_kda.backends.triton.config import (
    LEAST_BETA,
    MOST_GRADIENT_ROWS,
    Config,
    configure,
    slots,
    workspace,
)
from flash_kda.backends.triton.forward import (
    Pieces,
    Written,
    copied_rows,
    describe,
    device_facts,
    part_of,
    pieces_of,
    rows_of_pieces,
    turns_of_heads,
    values,
)
from flash_kda.backends.triton.launch import Launch, Plan, Scratch
from flash_kda.backends.triton.prepare import prepare
from flash_kda.backends.triton.walks import walks
from flash_kda.types import Inputs, Problem, Signature, gate_parameters

# What is passed to the kernels, by the names of their parameters without ``p_``: to all, to the preparation and the
# walks, and to the chunks and heads after them. The preparation clears the rows of o past the last sequence: dv's.
_LEFT = ("states", "dstates", "U", "U_bits", "dR_bits", "hard")
_SHARED = ("q", "k", "g", "beta", "A_log", "dt_bias", "cu", "do", "dR", *_LEFT)
WALKS = (*_SHARED, "v", "S0", "dS", "o", "dv", "dS0")
CHUNKS = (*_SHARED, "dq", "dk", "dg", "dbeta", "dA_part", "dbias_part")
# Tokens that a program of the sums over value heads takes.
ROWS = 16
MOST_ROWS = MOST_GRADIENT_ROWS


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


# What the kernels of one half need: scratch memory of their own, and the launches in their order.
Half: TypeAlias = tuple[Scratch, list[Launch]]


def _tile(config: Config) -> torch.dtype:
    return torch.bfloat16 if config.split else torch.float32


def left_for_chunks(p: Problem, config: Config) -> Scratch:
    """What the walks leave for the chunks, and ``hard``, the preparation's."""
    chunks, tile = slots(p, config.C) * (p.HV or p.H), _tile(config)
    bits = (chunks * 4 * p.V if config.split else 0, torch.int32)
    return {
        "states": (chunks * p.V * config.BK, tile),
        "dstates": (chunks * p.V * config.BK, tile),
        "U": (chunks * config.C * p.V, tile),
        "U_bits": bits,
        "dR_bits": bits,
        "hard": workspace(p)["hard"],
    }


def describe_backward(call: Signature, config: Config, of_dS: Written | None) -> tuple[Half, Half]:
    """Up to the walks, and from the chunks on. T and N are at least 1. See ``forward.describe``.

    In two halves, so that the tiles' memory is free again before dq, dk and dg take theirs.
    """
    p, own = call.problem, configure_gradient(call.problem, config)
    HV, N, C, BK = p.HV or p.H, p.N or p.B, config.C, config.BK
    chunks = slots(p, C) * HV
    # Gradients are contiguous, dv as o is; dS0 has the strides of dS, which is None where that would be zero.
    out = (p.dtype, (p.T * HV * p.V, HV * p.V, p.V, 1))
    shape = (HV * p.K * p.V, p.K * p.V, *((p.K, 1) if call.state_layout == "vk" else (p.V, 1)))
    of_state = (p.state_dtype, shape)
    scratch, launches = describe(call, config, out, of_state, keeps=True)
    whole_rows = own.BC == BK and HV == p.H
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
        "STORE_DR": p.dtype != _tile(config),
    }
    prepared = [x for x in launches if x.kernel is prepare]
    programs = 2 * N * HV * math.ceil(p.V / config.BV)
    first = [*prepared, Launch(walks, programs, given, {"num_warps": own.walk_warps})]
    second = []
    for x in prepared:
        which, blocks = x.values["CHUNKS"], chunks * (BK // own.BC)
        count = config.hard_programs(blocks) if which == HARD.value else blocks
        second.append(Launch(chunk_gradient, count, given | {"CHUNKS": which}, {"num_warps": own.warps}))
    if not whole_rows:
        second.append(Launch(head_gradient, math.ceil(p.B * p.T / ROWS) * p.H, given, {"num_warps": 4}))
    parts = 0 if whole_rows else p.B * p.T * HV * p.K
    tiles = {name: piece for name, piece in scratch.items() if name != "hard"}
    return (tiles, first), ({"dq_part": (parts, torch.float32), "dk_part": (parts, torch.float32)}, second)


class Plans(NamedTuple):
    """Those of a backward call.

    Attributes:
        walk: prepares the chunks, and walks. finish: from the chunks on.
        walk_kept: walks over what the forward prepared, which is passed after the other tensors; None if the
            forward prepares for other kernels.
    """

    walk: Plan
    walk_kept: Plan | None
    finish: Plan


def plan_of_kept(call: Signature, tiles: Scratch, launches: list[Launch]) -> Plan:
    """The last of the launches up to the walks alone, which are the walks; no scratch memory is left to allocate."""
    return Plan(call.device, (*WALKS, *tiles), {}, launches[-1:])


@lru_cache(maxsize=1024)
def plan(call: Signature, of_dS: Written | None) -> Plans:
    """The plans of all calls with this signature."""
    config = configure(call.problem, device_facts(call.device.index))
    first, second = describe_backward(call, config, of_dS)
    return Plans(Plan(call.device, WALKS, *first), plan_of_kept(call, *first), Plan(call.device, CHUNKS, *second))


# A signature, and what the gradient of the final state is, to the plans of such calls.
Planner: TypeAlias = Callable[[Signature, Written | None], Plans]


# Of q, k, v, g, beta, A_log, dt_bias (both still float32) and the initial state.
Found: TypeAlias = tuple[Tensor | None, ...]


def compute(
    inputs: Inputs, do: Tensor, dS: Tensor | None, kept: Pieces | None = None, planner: Planner = plan
) -> Found:
    """:func:`backward` on the current device in one round of launches, where T and N are at least 1."""
    x, p, device = inputs, inputs.signature.problem, inputs.signature.device
    config = configure(p, device_facts(device.index))
    A_log, dt_bias = (None if y is None else y.float().contiguous() for y in gate_parameters(x.gate))
    do, dS = do.contiguous(), None if dS is None else dS.contiguous()
    plans = planner(x.signature, None if dS is None else (dS.dtype, dS.stride()))
    if kept is not None and (plans.walk_kept is None or not plans.walk.fits(copied_rows(x) | {"do": do})):
        # Other kernels than the forward's are to run, which have an order of rows of their own.
        kept = None

    # No kernel writes the rows past the last sequence, but the preparation those of dv.
    new = torch.empty if x.cu_seqlens is None else torch.zeros
    dv = (torch.empty if kept is None else new)(x.v.shape, dtype=p.dtype, device=device)
    dR = dv if p.dtype == _tile(config) else torch.empty(x.v.shape, dtype=_tile(config), device=device)
    dS0 = None if x.initial_state is None else torch.empty(x.state_shape, dtype=p.state_dtype, device=device)
    pieces = left_for_chunks(p, config).values()
    left = [torch.empty(n, dtype=dtype, device=device) if n else None for n, dtype in pieces]
    cu = None if x.cu_seqlens is None else x.cu_seqlens.contiguous()
    if kept is not None:
        *tiles, left[-1] = kept
    shared = (x.q, x.k, x.g, x.beta, A_log, dt_bias, cu, do, dR, *left)
    given = (*shared, x.v, x.initial_state, dS, dv, dv, dS0)
    if kept is not None and plans.walk_kept is not None:
        plans.walk_kept((*given, *tiles))
    else:
        plans.walk(given)

    by_row = [new(y.shape, dtype=y.dtype, device=device) for y in (x.q, x.k, x.g, x.beta)]
    shape = (slots(p, config.C), x.v.shape[2], config.BK)
    parts = [None if y is None else torch.empty(shape, dtype=torch.float32, device=device) for y in (A_log, dt_bias)]
    plans.finish((*shared, *by_row, *parts))
    # The second stage of the sums over tokens; the first is each chunk's own.
    dA_log = None if parts[0] is None else parts[0].sum((0, 2))
    dbias = None if parts[1] is None else parts[1].sum(0)[:, : p.K]
    dq, dk, dg, dbeta = by_row
    return dq, dk, dv, dg, dbeta, dA_log, dbias, dS0


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


def compute_in_parts(
    inputs: Inputs, do: Tensor, dS: Tensor | None, kept: Pieces | None = None, planner: Planner = plan
) -> Found:
    """:func:`compute`, in several rounds where the memory of one would have more than MOST_ROWS rows.

    Batch rows come first, then heads, of which a round has no fewer than keep every multiprocessor walking. Tokens stay
    together. A round of some heads prepares again.
    """
    p = inputs.signature.problem
    HV, N = p.HV or p.H, p.N or p.B
    group = HV // p.H
    parts: list[Found] = []
    if p.B > 1:
        count = max(1, MOST_ROWS // (p.T * HV))
        if count >= p.B:
            return compute(inputs, do, dS, kept, planner)
        for rows in (slice(b, b + count) for b in range(0, p.B, count)):
            S = None if inputs.initial_state is None else inputs.initial_state[rows]
            some = part_of(inputs, (rows, slice(None)), S)
            of_some = None if kept is None else rows_of_pieces(kept, rows)
            parts.append(compute_in_parts(some, do[rows], None if dS is None else dS[rows], of_some, planner))
        return _join(parts, 0, None, 0)
    device = device_facts(inputs.signature.device.index)
    walks = N * group * math.ceil(p.V / configure(p, device).BV)
    count = max(1, MOST_ROWS // (p.T * group), math.ceil(device.multiprocessors / walks))
    if count >= p.H:
        return compute(inputs, do, dS, kept, planner)
    for part, own in turns_of_heads(inputs, count):
        parts.append(compute(part, do[:, :, own], None if dS is None else dS[:, own], planner=planner))
    return _join(parts, 2, 0, 1)


def backward(
    inputs: Inputs, do: Tensor | None, dS: Tensor | None, kept: Tensor | None = None, planner: Planner = plan
) -> Found:
    """Gradients of q, k, v, g, beta, A_log, dt_bias ``[HV, K]`` and initial_state, each in its tensor's dtype.

    Args:
        do: of the output ``[B, T, HV, V]``. dS: of the final states, in the call's layout. None means zero.
        kept: what the forward kept; None if the chunks are to be prepared again.
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
        found = compute_in_parts(inputs, do, dS, None if kept is None else pieces_of(kept, p), planner)
    of_parameters = zip(found[5:7], gate_parameters(inputs.gate), strict=True)
    converted = (None if d is None or x is None else d.to(x.dtype) for d, x in of_parameters)
    return *found[:5], *converted, found[7]
