"""One backward call on Hopper: the launches of the Triton backend's, by kernels of its own where it has them."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from flash_kda.backends.hopper.config import BV, PREPARE_PROGRAMS, configure_walks
from flash_kda.backends.hopper.forward import decays_of, preparation, rows_of, squares_of, tiles_of
from flash_kda.backends.hopper.gradient import WARPS, gradient
from flash_kda.backends.hopper.walks import walks
from flash_kda.backends.triton import backward as portable
from flash_kda.backends.triton.backward import CHUNKS, WALKS, Found, Half, Plans
from flash_kda.backends.triton.config import Config, Device, configure, slots
from flash_kda.backends.triton.forward import Written, device_facts, scale_of
from flash_kda.backends.triton.launch import Launch, Matrix, Plan
from flash_kda.types import Inputs, Signature

# The gradients of chunks divide by it.
LEAST_SCALE = 2.0**-100


def describe(call: Signature, config: Config, device: Device, of_dS: Written | None) -> tuple[Half, Half]:
    """See ``portable.describe_backward``. Chunks that no anchor serves, and whose heads share q and k, are its own."""
    p, C = call.problem, config.C
    HV, N = p.HV or p.H, p.N or p.B
    (tiles, first), (parts, second) = portable.describe_backward(call, config, of_dS)
    chunks = slots(p, C) * HV
    rows = (p.B * p.T, HV * p.V, HV * p.V)
    of_states = (chunks * p.V, p.K, p.K)
    of_U = (chunks * C, p.V, p.V)
    of_bits = (chunks * p.V, 4, 4)

    walking = configure_walks(p, device)
    # The launches of a half are given the same values.
    given = {**first[-1].values, "STAGES": walking.stages, "BUFFERS": walking.buffers, "PARTS": walking.parts}
    matrices = {
        "tile": tiles_of(call, config, C, p.K),
        "square": squares_of(call, config, C),
        "decay": decays_of(call, config),
        "v": rows_of(call, "v", (C, BV)),
        "do": Matrix("do", *rows, (C, BV)),
        "dv": Matrix("dv", *rows, (C, BV)),
        "states": Matrix("states", *of_states, (BV, p.K)),
        "dstates": Matrix("dstates", *of_states, (BV, p.K)),
        "U": Matrix("U", *of_U, (C, BV)),
    }
    prepare_all = preparation(call, config, given, PREPARE_PROGRAMS * device.multiprocessors)
    programs = 2 * N * HV * p.V // (BV * walking.parts)
    walk_all = Launch(walks, programs, given, walking.options, matrices)
    if p.H != HV or p.V not in (64, 128):
        return (tiles, [*prepare_all, walk_all]), (parts, second)

    matrices = {name: rows_of(call, name, (C, p.K)) for name in "qkg"} | {
        "do": Matrix("do", *rows, (C, p.V)),
        "dR": Matrix("dR", *rows, (C, p.V)),
        "states": Matrix("states", *of_states, (p.V, p.K)),
        "dstates": Matrix("dstates", *of_states, (p.V, p.K)),
        "U": Matrix("U", *of_U, (C, p.V)),
        "dR_bits": Matrix("dR_bits", *of_bits, (p.V, 4)),
        "U_bits": Matrix("U_bits", *of_bits, (p.V, 4)),
    }
    given = {**second[0].values, "CHUNKS_END": chunks}
    options = {"num_warps": WARPS.value}
    most = Launch(gradient, min(chunks, device.multiprocessors), given, options, matrices)
    return (tiles, [*prepare_all, walk_all]), (parts, [most, *second[1:]])


@lru_cache(maxsize=1024)
def plan(call: Signature, of_dS: Written | None) -> Plans:
    """See ``portable.plan``."""
    if abs(scale_of(call)) < LEAST_SCALE:
        # What this backend's forward prepared has its rows in another order.
        return portable.plan(call, of_dS)._replace(walk_kept=None)
    device = device_facts(call.device.index)
    first, second = describe(call, configure(call.problem, device), device, of_dS)
    return Plans(
        Plan(call.device, WALKS, *first, otherwise=lambda: portable.plan(call, of_dS).walk),
        portable.plan_of_kept(call, *first),
        Plan(call.device, CHUNKS, *second, otherwise=lambda: portable.plan(call, of_dS).finish),
    )


def backward(inputs: Inputs, do: Tensor | None, dS: Tensor | None, kept: Tensor | None = None) -> Found:
    """See ``portable.backward``."""
    return portable.backward(inputs, do, dS, kept, plan)
