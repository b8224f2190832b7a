"""One forward call on the GPU: what tells calls apart, and the scratch memory and launches that follow from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

import torch
import triton.language as tl
from torch import Tensor

from flash_kda.backends.triton import common
from flash_kda.backends.triton.config import (
    CHUNK,
    LEAST_BETA,
    SEARCH,
    Config,
    Device,
    configure,
    kept_bytes,
    slots,
    workspace,
)
from flash_kda.backends.triton.launch import Launch, Plan, Scratch, on_device
from flash_kda.backends.triton.prepare import prepare
from flash_kda.backends.triton.recurrence import recurrence
from flash_kda.types import (
    ForwardTensors,
    Inputs,
    Maybe,
    Problem,
    Runner,
    Signature,
    StateLayout,
    gate_parameters,
    with_parameters,
)

GATES = {"log": common.LOG.value, "lower_bound": common.LOWER_BOUND.value, "softplus": common.SOFTPLUS.value}
# What is passed to the kernels, by the names of their parameters without ``p_``.
TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu", "S0", "S", "o")
# What the preparation leaves for the walks: scratch memory, but of a forward that keeps it for the backward.
WORKSPACE = ("tiles", "squares", "decay", "hard")

# Tokens x value heads whose tiles are in memory at a time: 1.1 GB of them at K = 128.
MOST_ROWS = 2**20

# Dtype and strides of a tensor that results go to.
Written: TypeAlias = tuple[torch.dtype, tuple[int, ...]]


def stride(x: Tensor | None, dim: int = 0) -> int:
    """A stride, 0 of what is not there."""
    return 0 if x is None or dim >= x.ndim else x.stride(dim)


def state_strides(S: tuple[int, ...] | None, layout: StateLayout) -> tuple[int, ...]:
    """Strides of states by sequence, head, v and k; zeros where there are none."""
    n, h, a, b = S or (0, 0, 0, 0)
    return (n, h, a, b) if layout == "vk" else (n, h, b, a)


def strides(call: Signature, out: Written, final: Written | None) -> dict[str, int]:
    """Strides in elements, by tensor and dimension as the kernels name them."""
    rows = {name: x.strides for name in ("q", "k", "v", "g", "beta") if (x := call.layout(name))} | {"o": out[1]}
    if call.problem.B == 1:
        # That of the only batch row is of no use, and would have kernels compiled that differ in it alone.
        rows = {name: (0, *x[1:]) for name, x in rows.items()}
    S0 = call.layout("initial_state")
    states = {
        "S0": state_strides(S0 and S0.strides, call.state_layout),
        "S": state_strides(final and final[1], call.state_layout),
    }
    return {
        **{f"{name}_{d}": step for name, x in rows.items() for d, step in zip("bth", x, strict=False)},
        **{f"{name}_{d}": step for name, x in states.items() for d, step in zip("nhvk", x, strict=True)},
    }


def scale_of(call: Signature) -> float:
    """Of two calls with 0.0 and -0.0, which are equal, either may have made the signature: both have 0.0."""
    return call.problem.K**-0.5 if call.scale is None else float(call.scale) + 0.0


def square_operand(call: Signature, config: Config) -> tl.dtype:
    """What the squares are made from: float16 where their entries are bounded, which it then holds best.

    With unit keys and beta in [0, 2] each step contracts, so no entry of T exceeds 2.
    """
    bounded = call.qk_l2norm and call.beta_is_logit and abs(scale_of(call)) <= 64.0
    return tl.float16 if config.split and bounded else tl.float32


def values(call: Signature, config: Config, out: Written, final: Written | None) -> dict[str, object]:
    """What kernels take besides tensors, by the names of their parameters; each kernel takes what it needs."""
    p = call.problem
    HV = p.HV or p.H
    return strides(call, out, final) | {
        "T": p.T,
        "N": p.N,
        "HV": HV,
        "GROUP": HV // p.H,
        "scale": scale_of(call),
        "lower_bound": float(call.lower_bound or 0.0),
        "K": p.K,
        "V": p.V,
        "C": config.C,
        "BK": config.BK,
        "BV": config.BV,
        "SEGMENTS": config.segments,
        "STAGES": config.stages,
        "SEARCH": SEARCH,
        "GATE": GATES[p.gate],
        "HAS_A_LOG": call.layout("A_log") is not None,
        "HAS_DT_BIAS": call.layout("dt_bias") is not None,
        "QK_L2NORM": call.qk_l2norm,
        "BETA_IS_LOGIT": call.beta_is_logit,
        "NEG_EIGVAL": call.allow_neg_eigval,
        "PACKED": p.packed,
        "HAS_S0": call.layout("initial_state") is not None,
        "STORE_S": final is not None,
        "TILE": tl.bfloat16 if config.split else tl.float32,
        "SQUARE": square_operand(call, config),
        "SPLIT": config.split,
        "PRECISION": "tf32" if config.split else "tf32x3",
        "LEAST_BETA": 0.0,
    }


def describe(
    call: Signature, config: Config, out: Written, final: Written | None, keeps: bool = False
) -> tuple[Scratch, list[Launch]]:
    """Scratch memory, and launches in their order. T and N are at least 1.

    A kernel finds its tensors by the names of its parameters, ``p_`` and a name of :data:`TENSORS` or of the scratch
    memory.

    Args:
        keeps: whether what is prepared is to serve the backward, too.
    """
    p, C = call.problem, config.C
    HV, N = p.HV or p.H, p.N or p.B
    chunks = slots(p, C) * HV
    bounded = p.gate == "lower_bound"
    common_values = values(call, config, out, final) | ({"LEAST_BETA": LEAST_BETA} if keeps else {})
    prepare_options = {"num_warps": config.prepare_warps}
    own = {"CHUNKS": common.ALL.value if bounded else common.EASY.value, "BC": config.BC}
    launches = [Launch(prepare, chunks, common_values | own, prepare_options)]
    if not bounded:
        own = {"CHUNKS": common.HARD.value, "BC": config.hard_BC}
        launches.append(Launch(prepare, config.hard_programs(chunks), common_values | own, prepare_options))
    programs = N * HV * math.ceil(p.V / config.BV)
    options = {"num_warps": config.recurrence_warps, "maxnreg": config.recurrence_registers}
    launches.append(Launch(recurrence, programs, common_values, options))
    return workspace(p), launches


@lru_cache
def device_facts(index: int) -> Device:
    p = torch.cuda.get_device_properties(index)
    shared = int(getattr(p, "shared_memory_per_block_optin", p.shared_memory_per_block))
    return Device(p.major * 10 + p.minor, p.multi_processor_count, shared, int(p.shared_memory_per_multiprocessor))


@lru_cache(maxsize=1024)
def plan(call: Signature, out: Written, final: Written | None, keeps: bool = False) -> Plan:
    """The plan of all calls with this signature and such results; see :data:`Planner`."""
    config = configure(call.problem, device_facts(call.device.index))
    scratch, launches = describe(call, config, out, final, keeps)
    return plan_that_keeps(call, scratch, launches) if keeps else Plan(call.device, TENSORS, scratch, launches)


def plan_that_keeps(call: Signature, scratch: Scratch, launches: Sequence[Launch]) -> Plan:
    """The plan of launches whose workspace is given."""
    own = {name: piece for name, piece in scratch.items() if name not in WORKSPACE}
    return Plan(call.device, (*TENSORS, *WORKSPACE), own, launches)


# A signature, what the results are written to, and whether the workspace is given, after the other tensors, and is to
# serve the backward: the plan of such calls.
Planner: TypeAlias = Callable[[Signature, Written, Written | None, bool], Plan]
# Memory of the workspace by :data:`WORKSPACE`, each of a row for each batch row; None for what is not needed.
Pieces: TypeAlias = Sequence[Tensor | None]


def pieces_of(memory: Tensor, p: Problem) -> Pieces:
    """The workspace in memory of ``kept_bytes``."""
    sizes = list(workspace(p).values())
    parts = memory.split([elements * dtype.itemsize for elements, dtype in sizes])
    return [
        x.view(dtype).view(p.B, -1) if elements else None for x, (elements, dtype) in zip(parts, sizes, strict=True)
    ]


def rows_of_pieces(pieces: Pieces, rows: slice) -> Pieces:
    """That of some batch rows."""
    return [None if x is None else x[rows] for x in pieces]


def is_dense(x: Tensor | None) -> bool:
    """Whether kernels read a parameter of the gate as it lies."""
    return x is None or (x.dtype == torch.float32 and x.is_contiguous())


def dense(x: Tensor | None) -> Tensor | None:
    """A parameter of the gate as the kernels read it."""
    return None if x is None else x.float().contiguous()


def _plan_for(call: Signature, out: Tensor, final: Tensor | None, planner: Planner | None, keeps: bool = False) -> Plan:
    of_final = None if final is None else (final.dtype, final.stride())
    return (planner or plan)(call, (out.dtype, out.stride()), of_final, keeps)


def launch(
    inputs: Inputs, out: Tensor, final: Tensor | None, planner: Planner | None = None, kept: Pieces | None = None
) -> bool:
    """Write the output and, if given, the final state. T and N are at least 1.

    Returns:
        Whether ``kept`` is written: not where hardware cannot copy the rows, whose kernels prepare in another order.
    """
    A_log, dt_bias = gate_parameters(inputs.gate)
    cu = inputs.cu_seqlens
    tensors = (
        *(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta),
        *(dense(A_log), dense(dt_bias), None if cu is None else cu.contiguous()),
        *(inputs.initial_state, final, out),
    )
    if kept is not None:
        found = _plan_for(inputs.signature, out, final, planner, keeps=True)
        if found.fits(copied_rows(inputs)):
            found((*tensors, *kept))
            return True
    _plan_for(inputs.signature, out, final, planner)(tensors)
    return False


def copied_rows(inputs: Inputs) -> dict[str, Tensor]:
    """The call's tensors that hardware may copy."""
    return {"q": inputs.q, "k": inputs.k, "v": inputs.v, "g": inputs.g}


def part_of(inputs: Inputs, at: tuple[slice, slice], initial_state: Tensor | None) -> Inputs:
    """The call for some batch rows and tokens."""
    rows = {name: getattr(inputs, name)[at] for name in ("q", "k", "v", "g", "beta")}
    return inputs.replace(**rows, initial_state=initial_state)


def turns_of_heads(inputs: Inputs, count: int) -> Iterator[tuple[Inputs, slice]]:
    """The call for so many of q's heads at a time with their own value heads, and which of these they are."""
    S, H = inputs.initial_state, inputs.q.shape[2]
    group = inputs.v.shape[2] // H
    for first in range(0, H, count):
        heads, own = slice(first, first + count), slice(first * group, (first + count) * group)
        A_log, dt_bias = (None if x is None else x[own] for x in gate_parameters(inputs.gate))
        given = {name: getattr(inputs, name)[:, :, heads] for name in ("q", "k")}
        given |= {name: getattr(inputs, name)[:, :, own] for name in ("v", "g", "beta")}
        gate = with_parameters(inputs.gate, A_log, dt_bias)
        yield inputs.replace(**given, gate=gate, initial_state=None if S is None else S[:, own]), own


def _is_whole(p: Problem) -> bool:
    return p.B * p.T * (p.HV or p.H) <= MOST_ROWS


def launch_in_parts(
    inputs: Inputs, out: Tensor, final: Tensor | None, planner: Planner | None, kept: Pieces | None = None
) -> bool:
    """:func:`launch`, in several calls where the workspace of one would have more than MOST_ROWS rows.

    Batch rows come first, then tokens, with the state handed on in float32. Of packed sequences heads take turns, down
    to one head of q: where a sequence ends is known on the device alone. What is kept may go in parts by batch rows.
    """
    p = inputs.signature.problem
    HV, S = p.HV or p.H, inputs.initial_state
    if _is_whole(p):
        return launch(inputs, out, final, planner, kept)
    if p.B > 1:
        count = max(1, MOST_ROWS // (p.T * HV))
        are_kept = []
        for rows in (slice(b, b + count) for b in range(0, p.B, count)):
            part = part_of(inputs, (rows, slice(None)), None if S is None else S[rows])
            of_part = None if kept is None else rows_of_pieces(kept, rows)
            of_final = None if final is None else final[rows]
            are_kept.append(launch_in_parts(part, out[rows], of_final, planner, of_part))
        return all(are_kept)
    if p.packed:
        for part, own in turns_of_heads(inputs, max(1, MOST_ROWS // (p.T * (HV // p.H)))):
            launch(part, out[:, :, own], None if final is None else final[:, own], planner)
    else:
        count = max(1, MOST_ROWS // (HV * CHUNK)) * CHUNK
        for tokens in (slice(t, t + count) for t in range(0, p.T, count)):
            is_last = tokens.stop >= p.T
            after = final if is_last else torch.empty(inputs.state_shape, dtype=torch.float32, device=out.device)
            launch(part_of(inputs, (slice(None), tokens), S), out[:, tokens], after, planner)
            S = after
    return False


def _results(
    v: Tensor, S0: Tensor | None, state: tuple[tuple[int, ...], torch.dtype] | None, out: Maybe, final: Maybe
) -> tuple[Tensor, Tensor | None]:
    """The tensors given for the results, or new ones; ``state`` is shape and dtype of a final state that is wanted."""
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if final is None and state is not None:
        if S0 is None:
            final = torch.empty(state[0], dtype=state[1], device=v.device)
        else:
            final = torch.empty_like(S0, memory_format=torch.contiguous_format)
    return out, final


def _state_of(inputs: Inputs) -> tuple[tuple[int, ...], torch.dtype] | None:
    return (inputs.state_shape, inputs.state_dtype) if inputs.output_final_state else None


def _write(
    inputs: Inputs, out: Tensor, final: Tensor | None, planner: Planner | None, kept: Pieces | None = None
) -> bool:
    """:func:`launch_in_parts` of any T and N, on the call's device."""
    signature, S0 = inputs.signature, inputs.initial_state
    problem, device = signature.problem, signature.device
    if problem.N == 0 or problem.T == 0:
        out.zero_()
        if final is not None:
            final.zero_() if S0 is None else final.copy_(S0)
        return False
    if device.index == torch.cuda.current_device():
        return launch_in_parts(inputs, out, final, planner, kept)
    with torch.cuda.device(device):
        return launch_in_parts(inputs, out, final, planner, kept)


def forward(
    inputs: Inputs, out: Tensor | None, final: Tensor | None, planner: Planner | None = None
) -> tuple[Tensor, Tensor | None]:
    """Output ``[B, T, HV, V]`` in v's dtype and final state (None unless asked for), into the tensors given."""
    out, final = _results(inputs.v, inputs.initial_state, _state_of(inputs), out, final)
    _write(inputs, out, final, planner)
    return out, final


def forward_of_gradients(inputs: Inputs, planner: Planner | None = None) -> tuple[Tensor, Maybe, Maybe]:
    """:func:`forward`, and its workspace where the backward is not to prepare it again; otherwise None."""
    p, device = inputs.signature.problem, inputs.signature.device
    out, final = _results(inputs.v, inputs.initial_state, _state_of(inputs), None, None)
    size = 0 if inputs.recompute else kept_bytes(p)
    if not size:
        _write(inputs, out, final, planner)
        return out, final, None
    kept = torch.empty(size, dtype=torch.uint8, device=device)
    is_kept = _write(inputs, out, final, planner, pieces_of(kept, p))
    return out, final, kept if is_kept else None


def runner(inputs: Inputs, planner: Planner | None = None) -> Runner | None:
    """Calls of this call's form as a function of their tensors; None where a call is no single :func:`launch`."""
    call, state = inputs.signature, _state_of(inputs)
    problem = call.problem
    if problem.N == 0 or problem.T == 0 or not _is_whole(problem):
        return None
    cu = inputs.cu_seqlens
    convert = not (all(map(is_dense, gate_parameters(inputs.gate))) and (cu is None or cu.is_contiguous()))
    found: Callable[..., None] | None = None

    def run(tensors: ForwardTensors, A_log: Maybe, dt_bias: Maybe) -> tuple[Tensor, Maybe]:
        nonlocal found
        q, k, v, g, beta, S0, cu, out, final = tensors
        out, final = _results(v, S0, state, out, final)
        if convert:
            A_log, dt_bias, cu = dense(A_log), dense(dt_bias), None if cu is None else cu.contiguous()
        if found is None:
            found = on_device(call.device, _plan_for(call, out, final, planner))
        found((q, k, v, g, beta, A_log, dt_bias, cu, S0, final, out))
        return out, final

    return run
