"""One forward call on the GPU: what tells calls apart, and the scratch memory and launches that follow from it."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flash_kda.backends.triton import common
from flash_kda.backends.triton.config import SEARCH, Config, Device, configure
from flash_kda.backends.triton.launch import Launch, Plan, Scratch
from flash_kda.backends.triton.prepare import prepare
from flash_kda.backends.triton.recurrence import recurrence
from flash_kda.types import Inputs, LowerBoundGate, Problem, Signature, gate_parameters

GATES = {"log": common.LOG.value, "lower_bound": common.LOWER_BOUND.value, "softplus": common.SOFTPLUS.value}


# What is passed to the kernels, by the names of their parameters without ``p_``.
TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu", "S0", "S", "o")


class Call(NamedTuple):
    """All that the launches of a call follow from: everything but the addresses of its tensors.

    Attributes:
        out, final: dtype and strides of the results; None for a final state that is not wanted.
    """

    signature: Signature
    scale: float
    lower_bound: float
    qk_l2norm: bool
    beta_is_logit: bool
    allow_neg_eigval: bool
    out: tuple[torch.dtype, tuple[int, ...]]
    final: tuple[torch.dtype, tuple[int, ...]] | None


def strides(call: Call) -> dict[str, int]:
    """Strides in elements, by tensor and dimension as the kernels name them; 0 for a state that is absent."""
    of = call.signature
    steps = {name: x.strides for name in ("q", "k", "v", "g", "beta") if (x := of.layout(name))} | {"o": call.out[1]}
    S0 = of.layout("initial_state")
    states = {"S0": S0.strides if S0 else (0,) * 4, "S": call.final[1] if call.final else (0,) * 4}
    found = {f"{name}_{d}": step for name, x in steps.items() for d, step in zip("bth", x, strict=False)}
    if of.problem.B == 1:
        # Without use, and they would tell apart the kernels for different T.
        found |= {f"{name}_b": 0 for name in steps}
    dimensions = "nhvk" if of.state_layout == "vk" else "nhkv"
    return found | {f"{name}_{d}": step for name, x in states.items() for d, step in zip(dimensions, x, strict=True)}


def square_operand(call: Call, config: Config) -> tl.dtype:
    """What the squares are made from: float16 where their entries are bounded, which it then holds best.

    With unit keys and beta in [0, 2] each step contracts, so no entry of T exceeds 2.
    """
    bounded = call.qk_l2norm and call.beta_is_logit and abs(call.scale) <= 64.0
    return tl.float16 if config.split and bounded else tl.float32


def slots(p: Problem, C: int) -> int:
    """Chunks in the workspace: an upper bound that needs no lengths when sequences are packed."""
    return p.T // C + 1 + (p.N or 0) if p.packed else p.B * math.ceil(p.T / C)


def describe(call: Call, config: Config) -> tuple[Scratch, list[Launch]]:
    """Scratch memory, and launches in their order. T and N are at least 1.

    A kernel finds what it takes by the names of its parameters: tensors of the call and pieces of the scratch memory
    with ``p_`` before the name, everything else among the launch's values.
    """
    p, C, BK = call.signature.problem, config.C, config.BK
    HV, N = p.HV or p.H, p.N or p.B
    chunks = slots(p, C) * HV
    tile_dtype = torch.bfloat16 if config.split else torch.float32
    scratch = {
        "decay": (chunks * BK, torch.float32),
        "tiles": (chunks * 3 * C * BK, tile_dtype),
        "squares": (chunks * 2 * config.square_elements, tile_dtype),
    }
    values = strides(call) | {
        "T": p.T,
        "N": N,
        "HV": HV,
        "GROUP": HV // p.H,
        "scale": call.scale,
        "lower_bound": call.lower_bound,
        "K": p.K,
        "V": p.V,
        "C": C,
        "BK": BK,
        "SEGMENTS": config.segments,
        "GATE": GATES[p.gate],
        "HAS_A_LOG": call.signature.layout("A_log") is not None,
        "HAS_DT_BIAS": call.signature.layout("dt_bias") is not None,
        "QK_L2NORM": call.qk_l2norm,
        "BETA_IS_LOGIT": call.beta_is_logit,
        "NEG_EIGVAL": call.allow_neg_eigval,
        "PACKED": p.packed,
        "TILE": tl.bfloat16 if config.split else tl.float32,
        "SPLIT": config.split,
        "PRECISION": "tf32" if config.split else "tf32x3",
        # The preparation's own.
        "SEARCH": SEARCH,
        "SQUARE": square_operand(call, config),
        # The recurrence's own.
        "BV": config.BV,
        "HAS_S0": call.signature.layout("initial_state") is not None,
        "STORE_S": call.final is not None,
        "STAGES": config.stages,
    }
    preparations = [(common.ALL.value, config.BC)]
    if p.gate != "lower_bound":
        scratch["hard"] = (chunks, torch.int8)
        preparations = [(common.EASY.value, config.BC), (common.HARD.value, config.hard_BC)]
    launches = [
        Launch(prepare, chunks, values | {"CHUNKS": which, "BC": BC}, {"num_warps": config.prepare_warps})
        for which, BC in preparations
    ]
    options = {"num_warps": config.recurrence_warps}
    if config.recurrence_registers is not None:
        options["maxnreg"] = config.recurrence_registers
    launches.append(Launch(recurrence, N * HV * math.ceil(p.V / config.BV), values, options))
    return scratch, launches


@lru_cache
def device_facts(index: int) -> Device:
    p = torch.cuda.get_device_properties(index)
    shared = int(getattr(p, "shared_memory_per_block_optin", p.shared_memory_per_block))
    return Device(p.major * 10 + p.minor, p.multi_processor_count, shared, int(p.shared_memory_per_multiprocessor))


@lru_cache(maxsize=1024)
def plan(call: Call) -> Plan:
    """The plan of every such call."""
    device = call.signature.device
    return Plan(device, TENSORS, *describe(call, configure(call.signature.problem, device_facts(device.index))))


def launch(inputs: Inputs, out: Tensor, final: Tensor | None) -> None:
    """Write the output and, if given, the final state. T and N are at least 1."""
    q, k, v, g, beta, gate, S0, cu = *inputs[:6], inputs.initial_state, inputs.cu_seqlens
    A_log, dt_bias = gate_parameters(gate)
    call = Call(
        inputs.signature,
        inputs.scale or 0.0,  # 0.0 and -0.0 are equal: one of them for both
        float(gate.lower_bound) if isinstance(gate, LowerBoundGate) else 0.0,
        inputs.qk_l2norm,
        inputs.beta_is_logit,
        inputs.allow_neg_eigval,
        (out.dtype, out.stride()),
        None if final is None else (final.dtype, final.stride()),
    )
    A_log = None if A_log is None else A_log.float().contiguous()
    dt_bias = None if dt_bias is None else dt_bias.float().contiguous()
    cu = None if cu is None else cu.contiguous()
    plan(call)((q, k, v, g, beta, A_log, dt_bias, cu, S0, final, out))


def forward(inputs: Inputs, out: Tensor | None, final: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Output ``[B, T, HV, V]`` in v's dtype and final state (None unless asked for), into the tensors given."""
    signature, S0 = inputs.signature, inputs.initial_state
    problem, device = signature.problem, signature.device
    if out is None:
        out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    if final is None and inputs.output_final_state:
        if S0 is None:
            final = torch.empty(inputs.state_shape, dtype=problem.state_dtype, device=device)
        else:
            final = torch.empty_like(S0, memory_format=torch.contiguous_format)
    if problem.N == 0 or problem.T == 0:
        out.zero_()
        if final is not None:
            final.zero_() if S0 is None else final.copy_(S0)
    elif device.index == torch.cuda.current_device():
        launch(inputs, out, final)
    else:
        with torch.cuda.device(device):
            launch(inputs, out, final)
    return out, final
