"""One forward call on the GPU: what tells calls apart, and the scratch memory and launches that follow from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TypeAlias

import torch
import triton.language as tl
from torch import Tensor

from flash_kda.backends.triton import common
from flash_kda.backends.triton.config import CHUNK, SEARCH, Config, Device, configure
from flash_kda.backends.triton.launch import Launch, Plan, Scratch
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


def slots(p: Problem, C: int) -> int:
    """Chunks in the workspace: an upper bound that needs no lengths when sequences are packed."""
    return p.T // C + 1 + (p.N or 0) if p.packed else p.B * math.ceil(p.T / C)


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
        "OVERLAPS": False,
    }


def describe(call: Signature, config: Config, out: Written, final: Written | None) -> tuple[Scratch, list[Launch]]:
    """Scratch memory, and launches in their order. T and N are at least 1.

    A kernel finds its tensors by the names of its parameters, ``p_`` and a name of :data:`TENSORS` or of the scratch
    memory.
    """
    p, C = call.problem, config.C
    HV, N = p.HV or p.H, p.N or p.B
    chunks = slots(p, C) * HV
    bounded = p.gate == "lower_bound"
    tile_dtype = torch.bfloat16 if config.split else torch.float32
    scratch = {
        "tiles": (chunks * 3 * C * config.BK, tile_dtype),
        "squares": (chunks * 2 * config.square_elements, tile_dtype),
        "decay": (chunks * config.BK, torch.float32),
        "hard": (0 if bounded else chunks, torch.int8),
    }
    common_values = values(call, config, out, final)
    prepare_options = {"num_warps": config.prepare_warps}
    own = {"CHUNKS": common.ALL.value if bounded else common.EASY.value, "BC": config.BC}
    launches = [Launch(prepare, chunks, common_values | own, prepare_options)]
    if not bounded:
        own = {"CHUNKS": common.HARD.value, "BC": config.hard_BC}
        launches.append(Launch(prepare, config.hard_programs(chunks), common_values | own, prepare_options))
    programs = N * HV * math.ceil(p.V / config.BV)
    options = {"num_warps": config.recurrence_warps, "maxnreg": config.recurrence_registers}
    launches.append(Launch(recurrence, programs, common_values, options))
    return scratch, launches


@lru_cache
def device_facts(index: int) -> Device:
    p = torch.cuda.get_device_properties(index)
    shared = int(getattr(p, "shared_memory_per_block_optin", p.shared_memory_per_block))
    return Device(p.major * 10 + p.minor, p.multi_processor_count, shared, int(p.shared_memory_per_multiprocessor))


@lru_cache(maxsize=1024)
def plan(call: Signature, out: Written, final: Written | None) -> Plan:
    """The plan of all calls with this signature and such results."""
    config = configure(call.problem, device_facts(call.device.index))
    return Plan(call.device, TENSORS, *describe(call, config, out, final))


# A signature, and what the results are written to, to the plan of such calls.
Planner: TypeAlias = Callable[[Signature, Written, Written | None], Plan]


def is_dense(x: Tensor | None) -> bool:
    """Whether kernels read a parameter of the gate as it lies."""
    return x is None or (x.dtype == torch.float32 and x.is_contiguous())


def dense(x: Tensor | None) -> Tensor | None:
    """A parameter of the gate as the kernels read it."""
    return None if x is None else x.float().contiguous()


def _plan_for(call: Signature, out: Tensor, final: Tensor | None, planner: Planner | None) -> Plan:
    of_final = None if final is None else (final.dtype, final.stride())
    return (planner or plan)(call, (out.dtype, out.stride()), of_final)


def launch(inputs: Inputs, out: Tensor, final: Tensor | None, planner: Planner | None = None) -> None:
    """Write the output and, if given, the final state. T and N are at least 1."""
    A_log, dt_bias = gate_parameters(inputs.gate)
    cu = inputs.cu_seqlens
    tensors = (
        *(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta),
        *(dense(A_log), dense(dt_bias), None if cu is None else cu.contiguous()),
        *(inputs.initial_state, final, out),
    )
    _plan_for(inputs.signature, out, final, planner)(tensors)


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


def launch_in_parts(inputs: Inputs, out: Tensor, final: Tensor | None, planner: Planner | None) -> None:
    """:func:`launch`, in several calls where the workspace of one would have more than MOST_ROWS rows.

    Batch rows come first, then tokens, with the state handed on in float32. Of packed sequences heads take turns, down
    to one head of q: where a sequence ends is known on the device alone.
    """
    p = inputs.signature.problem
    HV, S = p.HV or p.H, inputs.initial_state
    if _is_whole(p):
        launch(inputs, out, final, planner)
    elif p.packed:
        for part, own in turns_of_heads(inputs, max(1, MOST_ROWS // (p.T * (HV // p.H)))):
            launch(part, out[:, :, own], None if final is None else final[:, own], planner)
    elif p.B > 1:
        count = max(1, MOST_ROWS // (p.T * HV))
        for rows in (slice(b, b + count) for b in range(0, p.B, count)):
            part = part_of(inputs, (rows, slice(None)), None if S is None else S[rows])
            launch_in_parts(part, out[rows], None if final is None else final[rows], planner)
    else:
        count = max(1, MOST_ROWS // (HV * CHUNK)) * CHUNK
        for tokens in (slice(t, t + count) for t in range(0, p.T, count)):
            is_last = tokens.stop >= p.T
            after = final if is_last else torch.empty(inputs.state_shape, dtype=torch.float32, device=out.device)
            launch(part_of(inputs, (slice(None), tokens), S), out[:, tokens], after, planner)
            S = after


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


def forward(
    inputs: Inputs, out: Tensor | None, final: Tensor | None, planner: Planner | None = None
) -> tuple[Tensor, Tensor | None]:
    """Output ``[B, T, HV, V]`` in v's dtype and final state (None unless asked for), into the tensors given."""
    signature, S0 = inputs.signature, inputs.initial_state
    problem, device = signature.problem, signature.device
    out, final = _results(inputs.v, S0, _state_of(inputs), out, final)
    if problem.N == 0 or problem.T == 0:
        out.zero_()
        if final is not None:
            final.zero_() if S0 is None else final.copy_(S0)
    elif device.index == torch.cuda.current_device():
        launch_in_parts(inputs, out, final, planner)
    else:
        with torch.cuda.device(device):
            launch_in_parts(inputs, out, final, planner)
    return out, final


def runner(inputs: Inputs, planner: Planner | None = None) -> Runner | None:
    """Calls of this call's form as a function of their tensors; None where a call is no single :func:`launch`."""
    call, state = inputs.signature, _state_of(inputs)
    problem, device, index = call.problem, call.device, call.device.index
    if problem.N == 0 or problem.T == 0 or not _is_whole(problem):
        return None
    cu = inputs.cu_seqlens
    convert = not (all(map(is_dense, gate_parameters(inputs.gate))) and (cu is None or cu.is_contiguous()))
    found: Plan | None = None

    def run(tensors: ForwardTensors, A_log: Maybe, dt_bias: Maybe) -> tuple[Tensor, Maybe]:
        nonlocal found
        q, k, v, g, beta, S0, cu, out, final = tensors
        out, final = _results(v, S0, state, out, final)
        if convert:
            A_log, dt_bias, cu = dense(A_log), dense(dt_bias), None if cu is None else cu.contiguous()
        if found is None:
            found = _plan_for(call, out, final, planner)
        given = (q, k, v, g, beta, A_log, dt_bias, cu, S0, final, out)
        if torch.cuda.current_device() == index:
            found(given)
        else:
            with torch.cuda.device(device):
                found(given)
        return out, final

    return run
