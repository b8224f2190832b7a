"""One forward call on Hopper: the scratch memory and the launches that follow from its signature."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import cast

import torch
import triton
from torch import Tensor

from flash_kda.backends.hopper.config import BV, LEAST_SEGMENT, MAPS, HopperConfig, configure, later_segments
from flash_kda.backends.hopper.prepare import BC, HALF, prepare_warp
from flash_kda.backends.hopper.recurrence import APPLY, MAP, WHOLE, walk
from flash_kda.backends.triton import common
from flash_kda.backends.triton import config as triton_config
from flash_kda.backends.triton import forward as triton_forward
from flash_kda.backends.triton.forward import TENSORS, Written
from flash_kda.backends.triton.launch import Launch, Matrix, Plan, Scratch
from flash_kda.backends.triton.prepare import prepare
from flash_kda.backends.triton.segments import cut_sequences, scan_segments
from flash_kda.types import Inputs, Layout, Maybe, Runner, Signature

# Value columns of a program of the scan over segments.
SCAN_BV = 16
# Sequences whose segments are counted, and numbered, at a time, and warps for it.
COUNTED, NUMBERED, CUT_WARPS = 1024, 64, 8


def rows_of(call: Signature, name: str, block: tuple[int, int]) -> Matrix:
    """``[B, T, heads, size]`` as a matrix of a row per token."""
    layout = cast(Layout, call.layouts[name])
    B, T, heads, size = layout.shape
    return Matrix(name, B * T, heads * size, layout.strides[1], block)


def preparation(
    call: Signature, portable: triton_config.Config, values: Mapping[str, object], programs: int
) -> list[Launch]:
    """The launches that prepare all chunks, as so many programs at most."""
    C, chunks = portable.C, _chunks(call, portable)
    bounded = call.problem.gate == "lower_bound"
    given = {**values, "SEGMENTS": 1, "CHUNKS_END": chunks}  # rows of tiles are in the order of time
    which = common.ALL.value if bounded else common.EASY.value
    matrices = {name: rows_of(call, name, (C, BC.value)) for name in "qkg"} | {
        "tiles": tiles_of(call, portable, C, BC.value),
        "squares": squares_of(call, portable, HALF.value),
    }
    launches = [Launch(prepare_warp, min(chunks, programs), given | {"CHUNKS": which}, {"num_warps": 1}, matrices)]
    if not bounded:
        own = {"CHUNKS": common.HARD.value, "BC": portable.hard_BC}
        count = portable.hard_programs(chunks)
        launches.append(Launch(prepare, count, given | own, {"num_warps": portable.prepare_warps}))
    return launches


def prepared(call: Signature, portable: triton_config.Config) -> dict[str, Matrix]:
    """What a walk copies of what was prepared, and of v."""
    C, K = portable.C, call.problem.K
    return {
        "tile": tiles_of(call, portable, C, K),
        "square": squares_of(call, portable, C),
        "decay": decays_of(call, portable),
        "v": rows_of(call, "v", (C, BV)),
    }


def _chunks(call: Signature, portable: triton_config.Config) -> int:
    p = call.problem
    return triton_config.slots(p, portable.C) * (p.HV or p.H)


def decays_of(call: Signature, portable: triton_config.Config) -> Matrix:
    K = call.problem.K
    return Matrix("decay", _chunks(call, portable), K, K, (1, K))


def tiles_of(call: Signature, portable: triton_config.Config, rows: int, columns: int) -> Matrix:
    K = call.problem.K
    return Matrix("tiles", _chunks(call, portable) * 3 * portable.C, K, K, (rows, columns))


def squares_of(call: Signature, portable: triton_config.Config, rows: int) -> Matrix:
    width = 2 * portable.C
    return Matrix("squares", _chunks(call, portable) * width, width, width, (rows, width))


def describe(
    call: Signature,
    config: HopperConfig,
    portable: triton_config.Config,
    out: Written,
    final: Written | None,
    keeps: bool = False,
) -> tuple[Scratch, list[Launch]]:
    """Scratch memory, and launches in their order; see the same of the Triton backend, whose configuration is
    ``portable``. T and N are at least 1.
    """
    p = call.problem
    K, HV, N = p.K, p.HV or p.H, p.N or p.B
    later = 0 if config.segment is None else later_segments(p, config.segment)
    maps = later * HV * MAPS * K * K
    cuts = 1 + 2 * later if p.packed and later else 0
    scratch = {**triton_config.workspace(p), "maps": (maps, torch.float32), "cuts": (cuts, torch.int32)}
    values = triton_forward.values(call, portable, out, final) | {
        "STAGES": config.stages,
        "PARTS": config.parts,
        "SEGMENT": config.segment or 0,
        "LATER": later,
        "LEAST_SEGMENT": LEAST_SEGMENT,
        "COUNTED": COUNTED,
        "NUMBERED": NUMBERED,
        "NUMBERS": triton.next_power_of_2(max(later, 1)),
        "MODE": WHOLE.value if config.segment is None else APPLY.value,
        "SCAN_BV": SCAN_BV,
        "MAPS": MAPS,
    }
    if keeps:
        values["LEAST_BETA"] = triton_config.LEAST_BETA
    launches = preparation(call, portable, values, config.prepare_programs)
    walked = prepared(call, portable)
    options = {"num_warps": 4} | ({} if config.walk_registers is None else {"maxnreg": config.walk_registers})
    walks = N
    if config.segment is not None:
        walks = later
        own = {"MODE": MAP.value, "PARTS": K // BV}
        if p.packed:
            launches.append(Launch(cut_sequences, 1, values, {"num_warps": CUT_WARPS}))
        # See ``recurrence.place``.
        programs = 3 * later + N if p.packed else 2 * later - N
        launches.append(Launch(walk, programs * HV, values | own, {"num_warps": 4}, walked))
        scans = (later if p.packed else N) * HV * K // SCAN_BV
        launches.append(Launch(scan_segments, scans, values, {"num_warps": 8}))
    launches.append(Launch(walk, walks * HV * p.V // (BV * config.parts), values, options, walked))
    return scratch, launches


@lru_cache(maxsize=1024)
def plan(call: Signature, out: Written, final: Written | None, keeps: bool = False) -> Plan:
    """The plan of all calls with this signature and such results; see ``triton_forward.Planner``."""
    device = triton_forward.device_facts(call.device.index)
    portable = triton_config.configure(call.problem, device)
    described = describe(call, configure(call.problem, device), portable, out, final, keeps)
    if keeps:
        return triton_forward.plan_that_keeps(call, *described)
    return Plan(call.device, TENSORS, *described, otherwise=lambda: triton_forward.plan(call, out, final))


def forward(inputs: Inputs, out: Tensor | None, final: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Output ``[B, T, HV, V]`` in v's dtype and final state (None unless asked for), into the tensors given."""
    return triton_forward.forward(inputs, out, final, plan)


def forward_of_gradients(inputs: Inputs) -> tuple[Tensor, Maybe, Maybe]:
    """See the same of the Triton backend."""
    return triton_forward.forward_of_gradients(inputs, plan)


def runner(inputs: Inputs) -> Runner | None:
    """Calls of this call's form as a function of their tensors; None where a call is no single plan."""
    return triton_forward.runner(inputs, plan)
