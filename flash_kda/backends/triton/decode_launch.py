"""Decode calls on the GPU: what a launch takes besides tensors, worked out once, and the launch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_kda.backends.triton import decode as kernels
from flash_kda.backends.triton.config import DecodeConfig, StepConfig, configure_decode
from flash_kda.backends.triton.forward import GATES, dense, device_facts, is_dense, scale_of, stride, strides
from flash_kda.backends.triton.launch import Launch, Plan, on_device
from flash_kda.types import DecodeInputs, Decoder, Maybe, gate_parameters

# What is passed to the kernel, by the names of its parameters without ``p_``: the tensors of a call in their order, and
# the gate's parameters.
TENSORS = ("q", "k", "v", "g", "beta", "S", "index", "accepted", "known", "cu", "o", "A_log", "dt_bias")


def index_kind(indices: Tensor | None) -> int:
    """How the kernel finds a row's slots."""
    if indices is None:
        return int(kernels.OWN.value)
    return int(kernels.ONE.value if indices.ndim == 1 else kernels.EACH.value)


def values(call: DecodeInputs, config: DecodeConfig | StepConfig, out: Tensor) -> dict[str, object]:
    """What the kernel takes besides tensors, by the names of its parameters."""
    signature, p, pool, indices = call.inputs.signature, call.problem, call.pool, call.indices
    HV = p.HV or p.H
    return strides(signature, (out.dtype, out.stride()), (pool.dtype, pool.stride())) | {
        "cu_n": stride(call.inputs.cu_seqlens),
        "index_n": stride(indices),
        "index_t": stride(indices, 1),
        "accepted_n": stride(call.num_accepted),
        "known_n": stride(call.has_initial_state),
        "T": p.T,
        "N": p.N,
        "slots": pool.shape[0],
        "width": 1 if indices is None or indices.ndim == 1 else indices.shape[1],
        "pad": call.pad_index,
        "scale": scale_of(signature),
        "lower_bound": float(signature.lower_bound or 0.0),
        "HV": HV,
        "GROUP": HV // p.H,
        "K": p.K,
        "V": p.V,
        "BK": config.BK,
        "BV": config.BV,
        "GATE": GATES[p.gate],
        "HAS_A_LOG": signature.layout("A_log") is not None,
        "HAS_DT_BIAS": signature.layout("dt_bias") is not None,
        "QK_L2NORM": signature.qk_l2norm,
        "BETA_IS_LOGIT": signature.beta_is_logit,
        "NEG_EIGVAL": signature.allow_neg_eigval,
        "PACKED": p.packed,
        "SINGLE": p.T == 1 and not p.packed,
        "INDEX": index_kind(indices),
        "HAS_ACCEPTED": call.num_accepted is not None,
        "HAS_KNOWN": call.has_initial_state is not None,
        "STORE": call.write_states,
    }


def plan(call: DecodeInputs, config: DecodeConfig, out: Tensor) -> Plan:
    """The launch of all calls of this call's form. There are rows and tokens."""
    p = call.problem
    programs = call.inputs.num_sequences * (p.HV or p.H) * math.ceil(p.V / config.BV)
    launch = Launch(kernels.decode, programs, values(call, config, out), {"num_warps": config.warps})
    return Plan(call.inputs.signature.device, TENSORS, {}, [launch])


def launcher(call: DecodeInputs, planner: Callable[[Tensor], Plan]) -> Callable[[Any, Maybe, Maybe], Tensor]:
    """All calls of this call's form, as a function of their tensors, of which the last is the output.

    Args:
        planner: the launch for an output that looks like its argument.
    """
    v = call.inputs.v
    like = torch.empty(v.shape, dtype=v.dtype, device="meta") if call.out is None else call.out
    empty = call.problem.N == 0 or call.problem.T == 0
    convert = not all(map(is_dense, gate_parameters(call.inputs.gate)))
    # Without an argument torch takes a fifth less.
    layout: dict[str, Any] = {} if v.is_contiguous() else {"memory_format": torch.contiguous_format}
    launch = on_device(v.device, planner(like))

    def run(tensors: Any, A_log: Maybe, dt_bias: Maybe) -> Tensor:
        out: Maybe = tensors[-1]
        if out is None:
            # Like v; torch reads these arguments in half the time of a shape, dtype and device.
            out = torch.empty_like(tensors[2], **layout)
        if empty:
            return out.zero_()
        if convert:
            A_log, dt_bias = dense(A_log), dense(dt_bias)
        given = [*tensors, A_log, dt_bias]
        given[-3] = out  # which may be new
        launch(given)
        return out

    return run


def decoder(call: DecodeInputs) -> Decoder:
    """All calls of this call's form, as a function of their tensors."""
    device = device_facts(call.inputs.v.device.index)
    config = configure_decode(call.problem, device, call.inputs.state_layout)
    return launcher(call, lambda out: plan(call, config, out))


def run_decode(call: DecodeInputs) -> tuple[Tensor, Decoder]:
    """Output ``[B, T, HV, V]``, into the call's tensor if it has one, and all calls of its form."""
    decode = decoder(call)
    return decode(call.tensors, *gate_parameters(call.inputs.gate)), decode
