"""Launch configurations on Hopper: a pure function of the problem and of facts about the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from flash_kda.backends.triton.config import Device
from flash_kda.types import Problem

# Value columns of a warpgroup.
BV = 64
# Programs of the preparation per multiprocessor: 255 registers a thread and 28 KiB of shared memory each.
PREPARE_PROGRAMS = 8


@dataclass(frozen=True)
class HopperConfig:
    """How the kernels are launched.

    Attributes:
        prepare_programs: of the preparation, one warp each.
        parts: warpgroups per program of the walk, BV columns each.
        stages: chunks in flight in the walk.
        walk_registers: limit per thread where two programs are to share a multiprocessor; None for no limit.
    """

    prepare_programs: int
    parts: int
    stages: int
    walk_registers: int | None


@lru_cache(maxsize=1024)
def configure(problem: Problem, device: Device) -> HopperConfig:
    """The configuration for a problem that the backend supports."""
    p = problem
    programs = max(1, p.N or p.B) * (p.HV or p.H) * (p.V // BV)
    prepare_programs = PREPARE_PROGRAMS * device.multiprocessors
    if programs <= device.multiprocessors:
        return HopperConfig(prepare_programs, parts=1, stages=4, walk_registers=None)
    if p.V % (2 * BV) == 0:
        # Two warpgroups share the tiles that they both read.
        return HopperConfig(prepare_programs, parts=2, stages=4, walk_registers=None)
    return HopperConfig(prepare_programs, parts=1, stages=2, walk_registers=128)
