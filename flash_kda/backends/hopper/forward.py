"""One forward call on Hopper: the scratch memory and the launches that follow from its signature."""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from flash_kda.backends.hopper.config import BV, HopperConfig, configure, segments
from flash_kda.backends.hopper.prepare import BC, HALF, prepare_warp
from flash_kda.backends.hopper.recurrence import APPLY, MAP, WHOLE, walk
from flash_kda.backends.triton import common
from flash_kda.backends.triton import config as triton_config
from flash_kda.backends.triton import forward as triton_forward
from flash_kda.backends.triton.forward import TENSORS, Written
from flash_kda.backends.triton.launch import Launch, Matrix, Plan, Scratch
from flash_kda.backends.triton.prepare import prepare
from flash_kda.backends.triton.segments import scan_segments
from flash_kda.types import Inputs, Layout, Runner, Signature

# Value columns of a program of the scan over segments.
SCAN_BV = 16


def rows_of(call: Signature, name: str, block: tuple[int, int]) -> Matrix:
    """``[B, T, heads, size]`` as a matrix of a row per token."""
    layout = cast(Layout, call.layouts[name])
    B, T, heads, size = layout.shape
    return Matrix(name, B * T, heads * size, layout.strides[1], block)


def describe(
    call: Signature, config: HopperConfig, portable: triton_config.Config, out: Written, final: Written | None
) -> tuple[Scratch, list[Launch]]:
    """Scratch memory, and launches in their order; see the same of the Triton backend, whose configuration is
    ``portable``. T and N are at least 1.
    """
    p = call.problem
    K, C = p.K, portable.C
    HV, N = p.HV or p.H, p.N or p.B
    chunks = triton_forward.slots(p, C) * HV
    bounded = p.gate == "lower_bound"
    scratch = {
        "tiles": (chunks * 3 * C * K, torch.bfloat16),
        "squares": (chunks * 2 * portable.square_elements, torch.bfloat16),
        "decay": (chunks * K, torch.float32),
        "hard": (0 if bounded else chunks, torch.int8),
        "maps": (0 if config.segment is None else segments(p, config.segment) * HV * 2 * K * K, torch.float32),
    }
    values = triton_forward.values(call, portable, out, final) | {
        # Rows of tiles are in the order of time.
        "SEGMENTS": 1,
        "CHUNKS_END": chunks,
        "STAGES": config.stages,
        "PARTS": config.parts,
        "SEGMENT": config.segment or 0,
        "MODE": WHOLE.value if config.segment is None else APPLY.value,
        "SCAN_BV": SCAN_BV,
    }

    def tiles(rows: int, columns: int) -> Matrix:
        return Matrix("tiles", chunks * 3 * C, K, K, (rows, columns))

    def squares(rows: int) -> Matrix:
        return Matrix("squares", chunks * 2 * C, 2 * C, 2 * C, (rows, 2 * C))

    which = common.ALL.value if bounded else common.EASY.value
    prepared = {name: rows_of(call, name, (C, BC.value)) for name in "qkg"} | {
        "tiles": tiles(C, BC.value),
        "squares": squares(HALF.value),
    }
    programs = min(chunks, config.prepare_programs)
    launches = [Launch(prepare_warp, programs, values | {"CHUNKS": which}, {"num_warps": 1}, prepared)]
    if not bounded:
        own = {"CHUNKS": common.HARD.value, "BC": portable.hard_BC}
        launches.append(Launch(prepare, chunks, values | own, {"num_warps": portable.prepare_warps}))
    walked = {
        "kq": tiles(2 * C, K),
        "end": tiles(C, K),
        "square": squares(2 * C),
        "decay": Matrix("decay", chunks, K, K, (1, K)),
        "v": rows_of(call, "v", (C, BV)),
    }
    options = {"num_warps": 4} | ({} if config.walk_registers is None else {"maxnreg": config.walk_registers})
    walks = N
    if config.segment is not None:
        walks = segments(p, config.segment)
        own = {"MODE": MAP.value, "PARTS": K // BV}
        launches.append(Launch(walk, walks * HV * 2, values | own, {"num_warps": 4}, walked))
        launches.append(Launch(scan_segments, N * HV * K // SCAN_BV, values, {"num_warps": 8}))
    launches.append(Launch(walk, walks * HV * p.V // (BV * config.parts), values, options, walked))
    return scratch, launches


@lru_cache(maxsize=1024)
def plan(call: Signature, out: Written, final: Written | None) -> Plan:
    """The plan of all calls with this signature and such results."""
    device = triton_forward.device_facts(call.device.index)
    portable = triton_config.configure(call.problem, device)
    described = describe(call, configure(call.problem, device), portable, out, final)
    return Plan(call.device, TENSORS, *described, otherwise=lambda: triton_forward.plan(call, out, final))


def forward(inputs: Inputs, out: Tensor | None, final: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Output ``[B, T, HV, V]`` in v's dtype and final state (None unless asked for), into the tensors given."""
    return triton_forward.forward(inputs, out, final, plan)


def runner(inputs: Inputs) -> Runner | None:
    """Calls of this call's form as a function of their tensors; None where a call is no single plan."""
    return triton_forward.runner(inputs, plan)
