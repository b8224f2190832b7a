"""Prefill calls on the GPU: the launches of a forward call, with the kernel that keeps states in a pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from flash_kda.backends.triton import forward
from flash_kda.backends.triton.config import Config, configure
from flash_kda.backends.triton.forward import Written, dense, stride
from flash_kda.backends.triton.launch import Launch, Plan, Scratch, on_device
from flash_kda.backends.triton.recurrence import pooled_recurrence
from flash_kda.types import Prefiller, PrefillInputs, PrefillTensors, gate_parameters

# What is passed to the kernels, by the names of their parameters without ``p_``: the tensors of a call in their order,
# the gate's parameters, and the pool again.
TENSORS = (
    *("q", "k", "v", "g", "beta", "S0", "index", "known", "cu"),
    *("offset", "ends", "kept", "target", "o", "A_log", "dt_bias", "S"),
)


# A call, and what its output goes to, to the plan of all calls of this call's form.
Planner: TypeAlias = Callable[[PrefillInputs, Tensor], Plan]


def final_state(call: PrefillInputs) -> Written | None:
    """What the last states go to."""
    return (call.pool.dtype, call.pool.stride()) if call.write_states else None


def pool_values(call: PrefillInputs) -> dict[str, object]:
    """What the kernels with a pool take beside the values of a forward call."""
    pool, c, kept = call.pool, call.checkpoints, call.kept
    layout = call.inputs.state_layout
    strides = dict.fromkeys(("S0", "S"), forward.state_strides(pool.stride(), layout))
    strides["kept"] = forward.state_strides(None if kept is None else kept.stride(), layout)
    return {
        **{f"{name}_{d}": step for name, x in strides.items() for d, step in zip("nhvk", x, strict=True)},
        "index_n": stride(call.indices),
        "known_n": stride(call.has_initial_state),
        "offset_n": 0 if c is None else stride(c.offsets),
        "ends_n": 0 if c is None else stride(c.cu_offsets),
        "target_n": 0 if c is None else stride(c.indices),
        "states": pool.shape[0],
        "pad": call.pad_index,
        "entries": 0 if c is None else c.offsets.shape[0],
        "places": 0 if kept is None else kept.shape[0],
        "HAS_INDEX": call.indices is not None,
        "HAS_KNOWN": call.has_initial_state is not None,
        "CHECKPOINTS": c is not None,
        "HAS_TARGET": c is not None and c.indices is not None,
    }


def describe(call: PrefillInputs, config: Config, out: Tensor) -> tuple[Scratch, list[Launch]]:
    """Scratch memory, and launches in their order. T and N are at least 1."""
    scratch, (*prepared, walk) = forward.describe(
        call.inputs.signature, config, (out.dtype, out.stride()), final_state(call)
    )
    values = {**walk.values, **pool_values(call)}
    return scratch, [*prepared, Launch(pooled_recurrence, walk.programs, values, walk.options)]


def plan(call: PrefillInputs, config: Config, out: Tensor) -> Plan:
    """The launches of all calls of this call's form."""
    return Plan(call.inputs.signature.device, TENSORS, *describe(call, config, out))


def configured_plan(call: PrefillInputs, out: Tensor) -> Plan:
    """:func:`plan` with the configuration for the call's device."""
    return plan(call, configure(call.problem, forward.device_facts(call.inputs.q.device.index)), out)


def prefiller(call: PrefillInputs, planner: Planner) -> Prefiller:
    """All calls of this call's form, as a function of their tensors."""
    v = call.inputs.v
    like = torch.empty(v.shape, dtype=v.dtype, device="meta") if call.out is None else call.out
    empty = call.problem.N == 0 or call.problem.T == 0
    in_pool = call.checkpoints is not None and call.checkpoints.states is None
    launch = None if empty else on_device(v.device, planner(call, like))

    def prefill(tensors: PrefillTensors, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
        *others, offsets, cu_offsets, kept, target, out = tensors
        if out is None:
            out = torch.empty_like(tensors[2], memory_format=torch.contiguous_format)
        if launch is None:
            return out.zero_()
        *others, pool, indices, known, cu = others
        given = (
            *(*others, pool, indices, known, None if cu is None else cu.contiguous()),
            *(offsets, cu_offsets, pool if in_pool else kept, target, out, dense(A_log), dense(dt_bias), pool),
        )
        launch(given)
        return out

    return prefill


def run_prefill(call: PrefillInputs, planner: Planner = configured_plan) -> tuple[Tensor, Prefiller]:
    """Output ``[B, T, HV, V]``, into the call's tensor if it has one, and all calls of its form."""
    prefill = prefiller(call, planner)
    return prefill(call.tensors, *gate_parameters(call.inputs.gate)), prefill
