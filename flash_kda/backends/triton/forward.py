"""One forward call on the GPU: workspace and the two launches."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from flash_kda.backends.triton import common
from flash_kda.backends.triton.config import SEARCH, Config, Device, configure
from flash_kda.backends.triton.launch import run
from flash_kda.backends.triton.prepare import prepare
from flash_kda.backends.triton.recurrence import recurrence
from flash_kda.types import Inputs, LowerBoundGate, gate_parameters

GATES = {"log": common.LOG.value, "lower_bound": common.LOWER_BOUND.value, "softplus": common.SOFTPLUS.value}


@lru_cache
def device_facts(index: int) -> Device:
    p = torch.cuda.get_device_properties(index)
    shared = int(getattr(p, "shared_memory_per_block_optin", p.shared_memory_per_block))
    return Device(p.major * 10 + p.minor, p.multi_processor_count, shared, int(p.shared_memory_per_multiprocessor))


def options(inputs: Inputs, config: Config) -> dict[str, object]:
    """Compile-time arguments that both kernels share."""
    A_log, dt_bias = gate_parameters(inputs.gate)
    return {
        "K": inputs.q.shape[3],
        "V": inputs.v.shape[3],
        "C": config.C,
        "BK": config.BK,
        "SEGMENTS": config.segments,
        "GATE": GATES[inputs.gate.kind],
        "HAS_A_LOG": A_log is not None,
        "HAS_DT_BIAS": dt_bias is not None,
        "QK_L2NORM": inputs.qk_l2norm,
        "BETA_IS_LOGIT": inputs.beta_is_logit,
        "NEG_EIGVAL": inputs.allow_neg_eigval,
        "PACKED": inputs.cu_seqlens is not None,
        "TILE": tl.bfloat16 if config.split else tl.float32,
        "SPLIT": config.split,
        "PRECISION": "tf32" if config.split else "tf32x3",
    }


def square_operand(inputs: Inputs, config: Config) -> tl.dtype:
    """What the squares are made from: float16 where their entries are bounded, which it then holds best.

    With unit keys and beta in [0, 2] each step contracts, so no entry of T exceeds 2.
    """
    bounded = inputs.qk_l2norm and inputs.beta_is_logit and abs(inputs.scale) <= 64.0
    return tl.float16 if config.split and bounded else tl.float32


def slots(inputs: Inputs, C: int) -> int:
    """Chunks in the workspace: an upper bound that needs no lengths when sequences are packed."""
    B, T = inputs.q.shape[:2]
    return B * math.ceil(T / C) if inputs.cu_seqlens is None else T // C + 1 + inputs.num_sequences


def state_strides(S: Tensor, layout: str) -> tuple[int, int, int, int]:
    """Strides by sequence, head, v and k."""
    n, h, a, b = S.stride()
    return (n, h, a, b) if layout == "vk" else (n, h, b, a)


def launch(inputs: Inputs, config: Config, out: Tensor, final: Tensor | None) -> None:
    """Write the output and, if given, the final state. T and N are at least 1."""
    q, k, v, g, beta, gate = inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.gate
    T, HV, V = q.shape[1], v.shape[2], v.shape[3]
    C, BK, N = config.C, config.BK, inputs.num_sequences
    chunks = slots(inputs, C) * HV
    tile_dtype = torch.bfloat16 if config.split else torch.float32
    tiles = q.new_empty(chunks * 3 * C * BK, dtype=tile_dtype)
    squares = q.new_empty(chunks * 2 * config.square_elements, dtype=tile_dtype)
    decay = q.new_empty(chunks * BK, dtype=torch.float32)
    A_log, dt_bias = gate_parameters(gate)
    # An argument that a kernel does not read still needs a pointer: decay stands in for those that are absent.
    A_log = decay if A_log is None else A_log.float().contiguous()
    dt_bias = decay if dt_bias is None else dt_bias.float().contiguous()
    cu = decay if inputs.cu_seqlens is None else inputs.cu_seqlens.contiguous()
    row_strides = (*q.stride()[:3], *k.stride()[:3])
    gate_strides = (*g.stride()[:3], *beta.stride())
    lower_bound = gate.lower_bound if isinstance(gate, LowerBoundGate) else 0.0
    numbers = (T, N, HV, HV // q.shape[2], inputs.scale, float(lower_bound))
    shared = options(inputs, config)
    bounded = gate.kind == "lower_bound"
    hard = decay if bounded else q.new_empty(chunks, dtype=torch.int8)
    easy_and_hard = ((common.EASY.value, config.BC), (common.HARD.value, config.hard_BC))
    for which, BC in ((common.ALL.value, config.BC),) if bounded else easy_and_hard:
        tensors: tuple[Tensor, ...] = (q, k, g, beta, A_log, dt_bias, cu, tiles, squares, decay, hard, out)
        strides: tuple[int, ...] = (*row_strides, *gate_strides, *out.stride()[:3])
        constants = {"BC": BC, "SEARCH": SEARCH, "CHUNKS": which, "SQUARE": square_operand(inputs, config)}
        run(prepare, chunks, tensors, strides, numbers, shared | constants, config.prepare_warps)
    S0 = inputs.initial_state
    S0_strides = (0, 0, 0, 0) if S0 is None else state_strides(S0, inputs.state_layout)
    S_strides = (0, 0, 0, 0) if final is None else state_strides(final, inputs.state_layout)
    states = (decay if S0 is None else S0, decay if final is None else final)
    tensors = (q, k, v, g, beta, A_log, dt_bias, cu, tiles, squares, decay, *states, out)
    strides = (*row_strides, *v.stride()[:3], *gate_strides, *S0_strides, *S_strides, *out.stride()[:3])
    constants = {"BV": config.BV, "HAS_S0": S0 is not None, "STORE_S": final is not None, "STAGES": config.stages}
    programs = N * HV * math.ceil(V / config.BV)
    warps, registers = config.recurrence_warps, config.recurrence_registers
    run(recurrence, programs, tensors, strides, numbers, shared | constants, warps, registers)


def forward(inputs: Inputs, out: Tensor | None, final: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Output ``[B, T, HV, V]`` in v's dtype and final state (None unless asked for), into the tensors given."""
    if out is None:
        out = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=inputs.v.device)
    if final is None and inputs.output_final_state:
        final = torch.empty(inputs.state_shape, dtype=inputs.state_dtype, device=inputs.v.device)
    if inputs.num_sequences == 0 or inputs.q.shape[1] == 0:
        out.zero_()
        if final is not None:
            final.zero_() if inputs.initial_state is None else final.copy_(inputs.initial_state)
        return out, final
    device = inputs.q.device
    with torch.cuda.device(device):
        launch(inputs, configure(inputs.problem, device_facts(device.index)), out, final)
    return out, final
