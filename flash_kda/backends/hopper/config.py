"""Launch configurations on Hopper: a pure function of the problem and of facts about the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from flash_kda.backends.triton.config import CHUNK, Device
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
        segment: tokens at most that longer sequences are cut into, a multiple of 32; None where nothing is cut.
    """

    prepare_programs: int
    parts: int
    stages: int
    walk_registers: int | None
    segment: int | None = None


# A first segment has so many tokens for each so many of a later one: its walk stores outputs beside others that do not.
OF_FIRST, OF_LATER = 4, 5
# Matrices [K, K] for each later segment: the state before it, and two of what it does to a state.
MAPS = 3
# Packed sequences may be cut into segments as short as this.
LEAST_SEGMENT = 512
# In tokens of one walk: what the two walks of a segment take for each of its tokens, and the scan for each segment.
TWO_WALKS, SCAN_STEP = 2.1, 108
# The tokens that cutting must save, since launches and short walks take longer than that, and where sequences are
# packed: if all are short, nothing is saved, and the launches for longer ones take as long as 800.
LEAST_SAVED, LEAST_SAVED_OF_PACKED = 1000, 2600


def segment(problem: Problem, device: Device) -> int | None:
    """Most tokens of a segment where walks of whole sequences would leave most multiprocessors idle, otherwise None.

    The later segments, all but each sequence's first, are one round of walks at most. Of packed sequences one may hold
    all tokens, and this is for that; the device, which knows their lengths, may cut them shorter.
    """
    p = problem
    walks = (1 if p.packed else p.B) * (p.HV or p.H) * (p.V // BV)
    # With n segments the walks take T / n and the scan n: the sum is least where both are equal.
    later = min(device.multiprocessors // walks, math.isqrt(int(TWO_WALKS * p.T / SCAN_STEP)))
    if p.V != p.K or later < 2:
        return None
    # A first segment has fewer tokens than the later ones.
    tokens = p.T / (later + OF_FIRST / OF_LATER)
    saved = p.T - TWO_WALKS * tokens - SCAN_STEP * later
    if saved < (LEAST_SAVED_OF_PACKED if p.packed else LEAST_SAVED):
        return None
    return math.ceil(tokens / CHUNK) * CHUNK


def later_segments(problem: Problem, tokens: int) -> int:
    """Segments of at most so many tokens, but each sequence's first: an upper bound that needs no lengths if packed."""
    p = problem
    return (1 if p.packed else p.B) * (math.ceil(p.T / tokens) - 1)


@lru_cache(maxsize=1024)
def configure(problem: Problem, device: Device) -> HopperConfig:
    """The configuration for a problem that the backend supports."""
    p = problem
    programs = max(1, p.N or p.B) * (p.HV or p.H) * (p.V // BV)
    prepare_programs = PREPARE_PROGRAMS * device.multiprocessors
    if (cut := segment(p, device)) is not None:
        return HopperConfig(prepare_programs, parts=1, stages=4, walk_registers=None, segment=cut)
    if programs <= device.multiprocessors:
        return HopperConfig(prepare_programs, parts=1, stages=4, walk_registers=None)
    if p.V % (2 * BV) == 0:
        # Two warpgroups share the tiles that they both read.
        return HopperConfig(prepare_programs, parts=2, stages=4, walk_registers=None)
    return HopperConfig(prepare_programs, parts=1, stages=2, walk_registers=128)


@dataclass(frozen=True)
class WalksConfig:
    """How the walks of the backward are launched.

    Attributes:
        parts: warpgroups per program, BV columns each. stages: chunks in flight. buffers: for what goes out.
        registers: as ``walk_registers`` of the forward.
    """

    parts: int
    stages: int
    buffers: int
    registers: int | None

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 4} | ({} if self.registers is None else {"maxnreg": self.registers})


def configure_walks(problem: Problem, device: Device) -> WalksConfig:
    """As in the forward, with two walks for each (sequence, value head, BV columns)."""
    p = problem
    walks = 2 * (p.N or p.B) * (p.HV or p.H) * (p.V // BV)
    if walks <= device.multiprocessors:
        return WalksConfig(parts=1, stages=4, buffers=2, registers=None)
    if p.V % (2 * BV) == 0:
        # Two warpgroups share the tiles that they both read.
        return WalksConfig(parts=2, stages=3, buffers=2, registers=None)
    return WalksConfig(parts=1, stages=2, buffers=1, registers=128)
