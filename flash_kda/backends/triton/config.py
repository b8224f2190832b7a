"""Launch configurations: a pure function of the problem and of facts about the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from flash_kda.types import Problem, StateLayout

CHUNK = 32
# Sequences whose first slots one vector load compares, when a chunk looks for its sequence.
SEARCH = 256
MOST_STAGES = 4
# Programs per multiprocessor of a launch over HARD chunks, and blocks that each looks at, at most: a bit for each.
HARD_PROGRAMS = 4
MOST_LOOKED_AT = 32
# What stands for a smaller beta where gradients are to follow: far below what any of them notices, and its square is a
# normal number.
LEAST_BETA = 2.0**-30
# Tokens x value heads whose states and tiles a backward has in memory at a time: 1.8 GB of them at K = V = 128.
MOST_GRADIENT_ROWS = 2**19


@dataclass(frozen=True)
class Device:
    """Compute capability (90 for 9.0), multiprocessors, shared memory in bytes per block and per multiprocessor."""

    capability: int
    multiprocessors: int
    shared_memory: int
    shared_memory_per_multiprocessor: int


@dataclass(frozen=True)
class Config:
    """How the kernels are launched.

    Attributes:
        C: tokens per chunk. BK: channels per tile, a power of two. BV: value columns per program of the recurrence.
        BC, hard_BC: channels that the preparation takes at a time, for most chunks and for those that one anchor does
            not serve.
        split: whether tiles are bfloat16 and squares pairs of them, otherwise everything is float32.
        prepare_warps, recurrence_warps: warps per program.
        stages: chunks in flight in the recurrence.
        recurrence_registers: limit per thread, where more programs per multiprocessor are worth it; None for no limit.
        most_hard_programs: of a launch over HARD chunks, while none of them looks at more than MOST_LOOKED_AT blocks.
    """

    C: int
    BK: int
    BC: int
    hard_BC: int
    BV: int
    split: bool
    prepare_warps: int
    recurrence_warps: int
    stages: int
    recurrence_registers: int | None
    most_hard_programs: int

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of a tile or square."""
        return 2 if self.split else 4

    @property
    def segments(self) -> int:
        """Rows of a tile that one pass of the preparation's threads covers, 16 bytes each; see ``token_of_row``."""
        rows = self.prepare_warps * 32 * 16 // (self.BC * self.element_bytes)
        return max(2, min(self.C, rows))

    def hard_programs(self, blocks: int) -> int:
        """Programs of a launch over those of so many blocks whose chunks are HARD: usually few or none, if not all.

        Block i is that of program ``i % programs``. Heads are the fastest dimension of blocks: an odd number spreads
        both all heads of one chunk and all chunks of one head, since heads are mostly a power of two.
        """
        return max(min(blocks, self.most_hard_programs), math.ceil(blocks / MOST_LOOKED_AT)) | 1


def power_of_two(n: int) -> int:
    """The least one that is not less."""
    return 1 << (n - 1).bit_length()


def channels(problem: Problem) -> int:
    """Of a tile."""
    return max(16, power_of_two(int(problem.K)))


def slots(p: Problem, C: int) -> int:
    """Chunks in the workspace: an upper bound that needs no lengths when sequences are packed."""
    return p.T // C + 1 + (p.N or 0) if p.packed else p.B * -(-p.T // C)


def workspace(p: Problem) -> dict[str, tuple[int, torch.dtype]]:
    """What the preparation leaves for the walks, elements and dtype by name; ``hard`` where a gate may need it.

    It follows from the problem alone: sizes may be torch's symbols.
    """
    BK, split = channels(p), p.dtype != torch.float32
    tile = torch.bfloat16 if split else torch.float32
    chunks = slots(p, CHUNK) * (p.HV or p.H)
    return {
        "tiles": (chunks * 3 * CHUNK * BK, tile),
        # A square is a pair of them with bfloat16 tiles.
        "squares": (chunks * 2 * CHUNK * CHUNK * (2 if split else 1), tile),
        "decay": (chunks * BK, torch.float32),
        "hard": (0 if p.gate == "lower_bound" else chunks, torch.int8),
    }


def kept_bytes(p: Problem) -> int:
    """Of the workspace, where it is kept for the backward unless that is to recompute it; 0 where it never is.

    The backward of more rows takes turns by heads, whose workspaces are no parts of that of all heads.
    """
    if p.N == 0 or p.T == 0 or p.T * (p.HV or p.H) > MOST_GRADIENT_ROWS:
        return 0
    return sum(elements * dtype.itemsize for elements, dtype in workspace(p).values())


@lru_cache(maxsize=1024)
def configure(problem: Problem, device: Device) -> Config:
    """The configuration for a problem with K and V of at most 256.

    Args:
        problem: its ``T`` and ``N`` serve as a guess of the sequences' length when they are packed: an even one, or
            for prefill into a pool, which is for serving, that of one long sequence.
    """
    HV, N = problem.HV or problem.H, max(1, problem.N or problem.B)
    BK = channels(problem)
    split = problem.dtype != torch.float32
    # Three-term TF32 products of larger tiles exhaust registers on sm_80 and sm_120, and tensor memory on sm_100.
    most_BV = (64 if BK <= 128 else 32) if split else (32 if BK <= 128 else 16)
    BV = min(most_BV, max(16, power_of_two(problem.V)))
    programs = N * HV * math.ceil(problem.V / BV)
    tokens = problem.B * problem.T / N
    if problem.op == "prefill" and problem.packed:
        # One prompt beside rows of a single token: it takes longest, and must not be slowed down by their number.
        tokens = problem.T - N + 1
    chunks = max(1, math.ceil(tokens / CHUNK))
    element = 2 if split else 4
    stage = element * (3 * CHUNK * BK + 2 * CHUNK * CHUNK * (2 if split else 1) + CHUNK * BV) + 4 * BK
    # One program has a multiprocessor to itself while there are enough; then two share it, each with less in flight.
    # On sm_100 a program takes all of the tensor memory, so two never share.
    alone = programs <= device.multiprocessors or device.capability // 10 == 10
    room = device.shared_memory if alone else device.shared_memory_per_multiprocessor // 2 - 1024
    if problem.checkpoints:
        # A state on its way to memory passes through shared memory beside the chunks in flight.
        room -= 4 * BV * BK
    # Besides the chunks in flight there is the output; the newest chunk's decay is not there yet.
    most = min(MOST_STAGES, (min(room, device.shared_memory) + 4 * BK - element * CHUNK * BV) // stage)
    stages = max(1, min(most, chunks))
    return Config(
        C=CHUNK,
        BK=BK,
        BC=BK if split else min(BK, 64),
        hard_BC=min(BK, 32),
        BV=BV,
        split=split,
        prepare_warps=(2 if BK <= 128 else 4) if split else (4 if BK <= 128 else 8),
        recurrence_warps=4 if split or BK < 128 else 8,
        stages=stages,
        # A sequence of one chunk waits for memory alone: what counts is how many are under way. Without wgmma the limit
        # would spill.
        recurrence_registers=168
        if chunks == 1 and split and BK <= 128 and device.capability // 10 in (9, 10) and not problem.checkpoints
        else None,
        # One fewer, so that it is odd; see hard_programs.
        most_hard_programs=HARD_PROGRAMS * device.multiprocessors - 1,
    )


@dataclass(frozen=True)
class DecodeConfig:
    """How decoding is launched: BK channels (a power of two) and BV value columns per program, and its warps."""

    BK: int
    BV: int
    warps: int


# Elements of the state that a warp holds, two registers for each of a thread's 32: more would cost occupancy.
DECODE_TILE = 2048
# Bytes of the state that a warp holds for a row of one token, when it has little to do but to wait for them.
DECODE_BYTES = 4096
# Warps of a program of a decode step, at most.
STEP_WARPS = 8
# Channels that a thread of a decode step holds of each of its value columns: of fewer, sums over K would take more
# exchanges between threads, and of more the vectors along K more registers.
STEP_CHANNELS = 8
# Programs per multiprocessor below which they are made smaller.
DECODE_PROGRAMS = 4


@lru_cache(maxsize=1024)
def configure_decode(problem: Problem, device: Device, state_layout: StateLayout) -> DecodeConfig:
    """The configuration of a decode problem with K and V of at most 256."""
    BK = max(16, power_of_two(problem.K))
    element = problem.state_dtype.itemsize
    if state_layout == "kv":
        # What lies together is 32 bytes of columns, the least that memory moves.
        return DecodeConfig(BK, max(1, 32 // element), warps=1)
    tile = DECODE_BYTES // element if problem.T == 1 and not problem.packed else DECODE_TILE
    BV = min(64, max(1, tile // BK), power_of_two(problem.V))
    # Each thread has 16 bytes of a row whatever BV is, so that the order of sums, and with it the bits of a row, do not
    # depend on how many rows there are.
    least = max(4, 32 * 16 // (element * BK))
    states = max(1, problem.N or problem.B) * (problem.HV or problem.H)
    enough = DECODE_PROGRAMS * device.multiprocessors
    while states * math.ceil(problem.V / BV) < enough and least < BV:
        BV //= 2
    return DecodeConfig(BK, BV, warps=1)


@dataclass(frozen=True)
class StepConfig:
    """How a decode step is launched.

    Attributes:
        BK: channels, a power of two. BV: value columns that a program holds at a time. warps: of a program.
        rows, piece: how a state lies over threads: all of them together have ``rows`` value columns in steps of BV /
            rows, and ``piece`` channels that follow each other; a thread has the columns in between and one channel (or
            16 bytes of them) of every piece. In the "kv" layout it has ``piece`` channels, 16 bytes of columns of each.
        registers: limit per thread, where a second program per multiprocessor is worth it; None for no limit.
    """

    BK: int
    BV: int
    warps: int
    rows: int
    piece: int
    registers: int | None


@lru_cache(maxsize=1024)
def configure_step(problem: Problem, state_layout: StateLayout) -> StepConfig:
    """The configuration of a decode step with K and V of at most 256, the same for any number of rows.

    A program has whole heads, since the norm is over all of V; what it does not hold at once it takes in turn.
    """
    BK = max(16, power_of_two(problem.K))
    BV, most = power_of_two(problem.V), STEP_WARPS * DECODE_TILE // BK
    warps = max(1, min(BV, most) * BK // DECODE_TILE)
    parts = BV // min(BV, most)
    if parts > 1:
        # What is the same for all parts stays in registers beside them.
        BV = most // 2
    # Without the limit one program would have a multiprocessor to itself, which is idle while this one computes.
    alone = warps == STEP_WARPS and parts == 1 and problem.HV in (None, problem.H)
    element, threads = problem.state_dtype.itemsize, 32 * warps
    if state_layout == "vk":
        rows, piece = min(BV, threads * STEP_CHANNELS // BK), BK * 16 // (element * STEP_CHANNELS)
    else:
        rows, piece = 1, max(1, BK * BV * element // (16 * threads))
    return StepConfig(BK, BV, warps, rows, piece, registers=128 if alone else None)
