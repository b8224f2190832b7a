"""Prefill calls on Hopper: the launches of a forward call, with walks that keep states in a pool."""

from __future__ import annotations

from torch import Tensor

from flash_kda.backends.hopper import forward
from flash_kda.backends.hopper.config import HopperConfig, configure
from flash_kda.backends.hopper.pooled import pooled_walk
from flash_kda.backends.triton import config as triton_config
from flash_kda.backends.triton import forward as triton_forward
from flash_kda.backends.triton import prefill_launch as triton_prefill
from flash_kda.backends.triton.launch import Launch, Plan, Scratch
from flash_kda.types import Prefiller, PrefillInputs


def describe(
    call: PrefillInputs, config: HopperConfig, portable: triton_config.Config, out: Tensor
) -> tuple[Scratch, list[Launch]]:
    """Scratch memory, and launches in their order; see the same of a forward call. T and N are at least 1."""
    scratch, launches = forward.describe(
        call.inputs.signature, config, portable, (out.dtype, out.stride()), triton_prefill.final_state(call)
    )
    own = triton_prefill.pool_values(call)

    def pooled(x: Launch) -> Launch:
        if "decay" not in x.matrices:
            # No walk.
            return x
        return Launch(pooled_walk, x.programs, {**x.values, **own}, x.options, x.matrices)

    return scratch, [pooled(x) for x in launches]


def plan(call: PrefillInputs, out: Tensor) -> Plan:
    """The launches of all calls of this call's form."""
    device = triton_forward.device_facts(call.inputs.q.device.index)
    portable = triton_config.configure(call.problem, device)
    described = describe(call, configure(call.problem, device), portable, out)
    # Made now: made later, it would keep this call's tensors until then.
    otherwise = triton_prefill.plan(call, portable, out)
    return Plan(call.inputs.signature.device, triton_prefill.TENSORS, *described, otherwise=lambda: otherwise)


def run_prefill(call: PrefillInputs) -> tuple[Tensor, Prefiller]:
    """Output ``[B, T, HV, V]``, into the call's tensor if it has one, and all calls of its form."""
    return triton_prefill.run_prefill(call, plan)
