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
        window: a program walks along all sequences that begin within so many tokens; a multiple of T if not packed.
        segment: tokens at most that longer sequences are cut into, a multiple of 32; None where nothing is cut.
    """

    prepare_programs: int
    parts: int
    stages: int
    walk_registers: int | None
    window: int
    segment: int | None = None


# A first segment has so many tokens for each so many of a later one: its walk stores outputs beside others that do not.
FIRST, LATER = 4, 5
# Matrices [K, K] for each later segment: the state before it, and two of what it does to a state.
MAPS = 3
# Cutting makes two walks of one and a scan between them: it takes two later segments and long sequences to pay.
LEAST_SEGMENTS, LEAST_TOKENS = 2, 4096
# Where sequences are packed their lengths are not known here: many short ones are taken for all short.
LEAST_AVERAGE = 512


def segment(problem: Problem, device: Device) -> int | None:
    """Most tokens of a segment where walks of whole sequences would leave most multiprocessors idle, otherwise None.

    The later segments, all but each sequence's first, are one round of walks. Of packed sequences one may hold all
    tokens, and is to be cut as if it did.
    """
    p = problem
    walks = (1 if p.packed else p.B) * (p.HV or p.H) * (p.V // BV)
    later = device.multiprocessors // walks
    is_short = p.packed and LEAST_AVERAGE * (p.N or 1) > p.T
    if p.V != p.K or later < LEAST_SEGMENTS or p.T < LEAST_TOKENS or is_short:
        return None
    return math.ceil(LATER * p.T / (LATER * later + FIRST) / CHUNK) * CHUNK


def later_segments(problem: Problem, tokens: int) -> int:
    """Segments of at most so many tokens, but each sequence's first: an upper bound that needs no lengths if packed."""
    p = problem
    return (1 if p.packed else p.B) * (math.ceil(p.T / tokens) - 1)


# Copies of a program's next sequence are under way before the last one's end, which is worth it for short sequences.
# Among those of unknown lengths programs are more than fit at a time, since some take longer than others.
MOST_WINDOW = 1024


def window(problem: Problem, parts: int, places: int) -> int:
    """Tokens within which sequences are one program's, where so many programs run at a time; see ``HopperConfig``."""
    p = problem
    of_row = (p.HV or p.H) * math.ceil(p.V / (BV * parts))
    if p.packed:
        return max(1, min(math.ceil(p.T * of_row / places), MOST_WINDOW))
    return p.T * max(1, min(math.ceil(p.B * of_row / places), MOST_WINDOW // p.T))


def windows(problem: Problem, tokens: int) -> int:
    """Windows of so many tokens: of packed sequences the last, if they are empty, may begin behind all tokens."""
    p = problem
    return p.T // tokens + 1 if p.packed else math.ceil(p.B * p.T / tokens)


@lru_cache(maxsize=1024)
def configure(problem: Problem, device: Device) -> HopperConfig:
    """The configuration for a problem that the backend supports."""
    p = problem
    programs = max(1, p.N or p.B) * (p.HV or p.H) * (p.V // BV)
    cut = segment(p, device)
    parts, stages, registers, places = 1, 4, None, device.multiprocessors
    if cut is None and programs > device.multiprocessors:
        if p.V % (2 * BV) == 0:
            # Two warpgroups share the tiles that they both read.
            parts = 2
        else:
            stages, registers, places = 2, 128, 2 * places
    # Whole sequences and first segments; these by programs of all columns.
    within = window(p, parts if cut is None else p.V // BV, places)
    return HopperConfig(PREPARE_PROGRAMS * device.multiprocessors, parts, stages, registers, within, cut)


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
