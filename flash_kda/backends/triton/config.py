"""Launch configurations: a pure function of the problem and of facts about the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flash_kda.types import Problem

CHUNK = 32
# Sequences whose first slots one vector load compares, when a chunk looks for its sequence.
SEARCH = 256


@dataclass(frozen=True)
class Device:
    """Compute capability (90 for 9.0), multiprocessors, and shared memory per block in bytes."""

    capability: int
    multiprocessors: int
    shared_memory: int


@dataclass(frozen=True)
class Config:
    """How both kernels are launched.

    Attributes:
        C: tokens per chunk. BK: channels per tile, a power of two. BV: value columns per program of the recurrence.
        BC: channels that the preparation takes at a time.
        split: whether squares are kept as bfloat16 pairs (bfloat16 tiles), otherwise everything is float32.
        prepare_warps, recurrence_warps: warps per program. stages: chunks in flight in the recurrence.
    """

    C: int
    BK: int
    BC: int
    BV: int
    split: bool
    prepare_warps: int
    recurrence_warps: int
    stages: int

    @property
    def segments(self) -> int:
        """Rows of ``[C, BC]`` that one pass of the preparation's threads covers, 16 bytes each."""
        rows = self.prepare_warps * 32 * 16 // (self.BC * self.tile_bytes)
        return max(1, min(self.C, rows))

    @property
    def square_elements(self) -> int:
        """Elements of one ``[C, C]`` matrix in the workspace."""
        return self.C * self.C * (2 if self.split else 1)

    @property
    def tile_bytes(self) -> int:
        return 2 if self.split else 4

    def stage_bytes(self) -> int:
        """Shared memory of one chunk in flight in the recurrence."""
        tiles = 3 * self.C * self.BK + 2 * self.square_elements
        return self.tile_bytes * (tiles + 2 * self.C * self.BV) + 4 * self.BK


def configure(problem: Problem, device: Device) -> Config:
    """The configuration for a problem with K and V of at most 256."""
    BK = max(16, 1 << (problem.K - 1).bit_length())
    split = problem.dtype != torch.float32
    BV = min(64 if BK <= 128 else 32, max(16, 1 << (problem.V - 1).bit_length()))
    warps = (2 if BK <= 128 else 4) if split else (4 if BK <= 128 else 8)
    config = Config(CHUNK, BK, min(BK, 128 if split else 64), BV, split, warps, 4, 1)
    stages = max(1, min(3, (device.shared_memory - 16384) // config.stage_bytes()))
    return replace(config, stages=stages)
