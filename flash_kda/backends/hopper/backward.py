"""One backward call on Hopper: that of the Triton backend, with the gradients of whole chunks by a kernel of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from flash_kda.backends.hopper.forward import rows_of
from flash_kda.backends.hopper.gradient import WARPS, gradient
from flash_kda.backends.triton import backward as portable
from flash_kda.backends.triton.backward import CHUNKS, WALKS, Found, Half
from flash_kda.backends.triton.chunk_gradient import chunk_gradient
from flash_kda.backends.triton.common import HARD
from flash_kda.backends.triton.config import Config, Device, configure
from flash_kda.backends.triton.forward import Written, device_facts, slots
from flash_kda.backends.triton.launch import Launch, Matrix, Plan
from flash_kda.types import Inputs, Signature


def supports(call: Signature, config: Config) -> bool:
    """Whether the kernel takes a call that the backend takes: no grouped heads, V = 64 or 128, rows in 32 bits."""
    p = call.problem
    return (p.HV or p.H) == p.H and p.V in (64, 128) and slots(p, config.C) * p.H * p.V < 2**31


def describe(call: Signature, config: Config, device: Device, of_dS: Written | None) -> tuple[Half, Half]:
    """See ``portable.describe_backward``; of the chunks' gradients those that one anchor serves are made here."""
    p, C = call.problem, config.C
    first, (scratch, launches) = portable.describe_backward(call, config, of_dS)
    chunks = slots(p, C) * p.H
    rows = (p.B * p.T, p.H * p.V, p.H * p.V, (C, p.V))
    states = (chunks * p.V, p.K, p.K, (p.V, p.K))
    matrices = {name: rows_of(call, name, (C, p.K)) for name in "qkg"} | {
        "do": Matrix("do", *rows),
        "dR": Matrix("dR", *rows),
        "U": Matrix("U", chunks * C, p.V, p.V, (C, p.V)),
        "states": Matrix("states", *states),
        "dstates": Matrix("dstates", *states),
    }

    def own(launch: Launch) -> Launch:
        if launch.kernel is not chunk_gradient or launch.values["CHUNKS"] == HARD.value:
            return launch
        programs = min(chunks, device.multiprocessors)
        given = {**launch.values, "CHUNKS_END": chunks}
        return replace(
            launch, kernel=gradient, programs=programs, values=given, options={"num_warps": WARPS.value}, matrices=matrices
        )

    return first, (scratch, [own(x) for x in launches])


@lru_cache(maxsize=1024)
def plan(call: Signature, of_dS: Written | None) -> tuple[Plan, Plan]:
    """See ``portable.plan``."""
    device = device_facts(call.device.index)
    config = configure(call.problem, device)
    if not supports(call, config):
        return portable.plan(call, of_dS)
    first, second = describe(call, config, device, of_dS)
    walks = Plan(call.device, WALKS, *first)
    return walks, Plan(call.device, CHUNKS, *second, otherwise=lambda: portable.plan(call, of_dS)[1])


def backward(inputs: Inputs, do: Tensor | None, dS: Tensor | None) -> Found:
    """See ``portable.backward``."""
    return portable.backward(inputs, do, dS, plan)
