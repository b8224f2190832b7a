"""Decode calls on the GPU: what a launch takes besides tensors, worked out once, and the launch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_kda.backends.triton import decode as kernels
from flash_kda.backends.triton.config import DecodeConfig, configure_decode
from flash_kda.backends.triton.forward import GATES, device_facts, state_strides
from flash_kda.backends.triton.launch import run
from flash_kda.types import DecodeInputs, Decoder, DecodeTensors, LowerBoundGate, gate_parameters


@dataclass(frozen=True)
class Plan:
    """What a launch takes besides tensors, for all calls of one form; in the order of the kernel's parameters."""

    programs: int
    strides: tuple[int, ...]
    numbers: tuple[int | float, ...]
    constants: dict[str, object]
    warps: int


def _row_strides(**tensors: Tensor) -> dict[str, int]:
    """Strides by batch row, token and head. That of a lone batch row, which may be any number, is left out."""
    found: dict[str, int] = {}
    for name, x in tensors.items():
        b, t, h = x.stride()[:3]
        found |= {f"{name}_b": 0 if x.shape[0] == 1 else b, f"{name}_t": t, f"{name}_h": h}
    return found


def _stride(x: Tensor | None, dim: int = 0) -> int:
    """A stride, 0 of what is not there."""
    return 0 if x is None or dim >= x.ndim else x.stride(dim)


def index_kind(indices: Tensor | None) -> int:
    """How the kernel finds a row's slots."""
    if indices is None:
        return int(kernels.OWN.value)
    return int(kernels.ONE.value if indices.ndim == 1 else kernels.EACH.value)


def plan(call: DecodeInputs, config: DecodeConfig, out: Tensor) -> Plan:
    """What the launch of a call takes besides its tensors. There are rows and tokens."""
    inputs, pool, indices = call.inputs, call.pool, call.indices
    q, k, v, g, beta, gate = inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.gate
    T, HV, V = q.shape[1], v.shape[2], v.shape[3]
    A_log, dt_bias = gate_parameters(gate)
    packed = inputs.cu_seqlens is not None
    S_n, S_h, S_v, S_k = state_strides(pool, inputs.state_layout)
    strides = {
        **_row_strides(q=q, k=k, v=v, g=g, beta=beta),
        "cu_n": _stride(inputs.cu_seqlens),
        "S_n": S_n,
        "S_h": S_h,
        "index_n": _stride(indices),
        "index_t": _stride(indices, 1),
        "accepted_n": _stride(call.num_accepted),
        "known_n": _stride(call.has_initial_state),
        **_row_strides(o=out),
    }
    numbers: dict[str, int | float] = {
        "T": T,
        "N": inputs.num_sequences,
        "slots": pool.shape[0],
        "width": 1 if indices is None or indices.ndim == 1 else indices.shape[1],
        "pad": call.pad_index,
        "scale": inputs.scale,
        "lower_bound": float(gate.lower_bound) if isinstance(gate, LowerBoundGate) else 0.0,
    }
    constants: dict[str, object] = {
        "HV": HV,
        "GROUP": HV // q.shape[2],
        "K": q.shape[3],
        "V": V,
        "BK": config.BK,
        "BV": config.BV,
        "S_v": S_v,
        "S_k": S_k,
        "GATE": GATES[gate.kind],
        "HAS_A_LOG": A_log is not None,
        "HAS_DT_BIAS": dt_bias is not None,
        "QK_L2NORM": inputs.qk_l2norm,
        "BETA_IS_LOGIT": inputs.beta_is_logit,
        "NEG_EIGVAL": inputs.allow_neg_eigval,
        "PACKED": packed,
        "SINGLE": T == 1 and not packed,
        "INDEX": index_kind(indices),
        "HAS_ACCEPTED": call.num_accepted is not None,
        "HAS_KNOWN": call.has_initial_state is not None,
        "STORE": call.write_states,
    }
    programs = inputs.num_sequences * HV * math.ceil(V / config.BV)
    return Plan(programs, tuple(strides.values()), tuple(numbers.values()), constants, config.warps)


def launch(plan: Plan, tensors: DecodeTensors, A_log: Tensor | None, dt_bias: Tensor | None, out: Tensor) -> None:
    """Write the output and update the pool."""
    q, k, v, g, beta, pool, indices, accepted, known, cu, _ = tensors
    run(
        kernels.decode,
        plan.programs,
        (
            *(q, k, v, g, beta),
            # An argument that the kernel does not read still needs a pointer: q stands in for those that are absent.
            q if A_log is None else A_log.float().contiguous(),
            q if dt_bias is None else dt_bias.float().contiguous(),
            q if cu is None else cu,
            pool,
            q if indices is None else indices,
            q if accepted is None else accepted,
            q if known is None else known,
            out,
        ),
        plan.strides,
        plan.numbers,
        plan.constants,
        plan.warps,
    )


def tensors_of(call: DecodeInputs) -> DecodeTensors:
    """The call's tensors."""
    x = call.inputs
    rows = (x.q, x.k, x.v, x.g, x.beta, call.pool)
    return (*rows, call.indices, call.num_accepted, call.has_initial_state, x.cu_seqlens, call.out)


def decoder(call: DecodeInputs) -> Decoder:
    """All calls of this call's form, as a function of their tensors."""
    v = call.inputs.v
    shape, dtype, device = v.shape, v.dtype, v.device
    empty = call.inputs.num_sequences == 0 or shape[1] == 0
    like = torch.empty(shape, dtype=dtype, device="meta") if call.out is None else call.out
    config = configure_decode(call.problem, device_facts(device.index), call.inputs.state_layout)
    ready = plan(call, config, like)

    def decode(tensors: DecodeTensors, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
        out = tensors[-1]
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=device)
        if empty:
            return out.zero_()
        if torch.cuda.current_device() == device.index:
            launch(ready, tensors, A_log, dt_bias, out)
        else:
            with torch.cuda.device(device):
                launch(ready, tensors, A_log, dt_bias, out)
        return out

    return decode


def run_decode(call: DecodeInputs) -> Tensor:
    """Output ``[B, T, HV, V]``, into the call's tensor if it has one."""
    return decoder(call)(tensors_of(call), *gate_parameters(call.inputs.gate))
