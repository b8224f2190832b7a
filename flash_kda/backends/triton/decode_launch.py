"""One decode call on the GPU: its arguments and its launch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flash_kda.backends.triton import decode as kernels
from flash_kda.backends.triton.config import DecodeConfig, configure_decode
from flash_kda.backends.triton.forward import GATES, device_facts, state_strides
from flash_kda.backends.triton.launch import run
from flash_kda.types import DecodeInputs, LowerBoundGate, gate_parameters


def index_kind(indices: Tensor | None) -> int:
    """How the kernel finds a row's slots."""
    if indices is None:
        return int(kernels.OWN.value)
    return int(kernels.ONE.value if indices.ndim == 1 else kernels.EACH.value)


def _optional(x: Tensor | None, instead: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """A tensor and its strides; an argument that the kernel does not read still needs a pointer."""
    return (instead, (0,)) if x is None else (x, x.stride())


def _row_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides by batch row, token and head. That of a lone batch row, which may be any number, is left out."""
    b, t, h = x.stride()[:3]
    return (0 if x.shape[0] == 1 else b, t, h)


def launch(call: DecodeInputs, config: DecodeConfig, out: Tensor) -> None:
    """Write the output and update the pool. There are rows and tokens."""
    inputs, pool, indices = call.inputs, call.pool, call.indices
    q, k, v, g, beta, gate = inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.gate
    T, HV, V = q.shape[1], v.shape[2], v.shape[3]
    N, packed = inputs.num_sequences, inputs.cu_seqlens is not None
    A_log, dt_bias = gate_parameters(gate)
    cu, cu_strides = _optional(inputs.cu_seqlens, q)
    index, index_strides = _optional(indices, q)
    accepted, accepted_strides = _optional(call.num_accepted, q)
    known, known_strides = _optional(call.has_initial_state, q)
    width = 1 if indices is None or indices.ndim == 1 else indices.shape[1]
    tensors = (
        *(q, k, v, g, beta),
        q if A_log is None else A_log.float().contiguous(),
        q if dt_bias is None else dt_bias.float().contiguous(),
        *(cu, pool, index, accepted, known, out),
    )
    S_n, S_h, S_v, S_k = state_strides(pool, inputs.state_layout)
    strides = (
        *(*_row_strides(q), *_row_strides(k), *_row_strides(v), *_row_strides(g), *_row_strides(beta), *cu_strides),
        *(S_n, S_h, *(*index_strides, 0)[:2], *accepted_strides, *known_strides),
        *_row_strides(out),
    )
    lower_bound = float(gate.lower_bound) if isinstance(gate, LowerBoundGate) else 0.0
    numbers = (T, N, pool.shape[0], width, call.pad_index, inputs.scale, lower_bound)
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
    run(kernels.decode, N * HV * math.ceil(V / config.BV), tensors, strides, numbers, constants, config.warps)


def decode(call: DecodeInputs) -> Tensor:
    """Output ``[B, T, HV, V]``, into the call's tensor if it has one."""
    v = call.inputs.v
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if call.out is None else call.out
    if call.inputs.num_sequences == 0 or v.shape[1] == 0:
        return out.zero_()
    device = v.device
    with torch.cuda.device(device):
        launch(call, configure_decode(call.problem, device_facts(device.index), call.inputs.state_layout), out)
    return out
