"""A Gluon kernel that is right by its making and that racecheck takes for wrong.

    python tests/control.py        # on a Hopper GPU; leaves with 1 if the kernel's result is wrong

A warp writes words, the warps of another partition read them, and each side waits for the other's arrival at a barrier
in shared memory. One thread arrives for all of its side, after a barrier of theirs; of such a chain the tool follows no
more than the thread that arrives. Nor does it follow how Triton sends partitions their work.
"""

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

WORDS = gl.constexpr(128)
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
LANES = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))
EVERY = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _take(p_sums, count, s_words, bar_ready, bar_free):
    total = gl.zeros([WORDS], gl.int32, EVERY)
    for i in range(0, count):
        mbarrier.wait(bar_ready.index(0), i & 1)
        total += s_words.load(EVERY)
        gl.thread_barrier()
        mbarrier.arrive(bar_free.index(0), count=1)
    gl.store(p_sums + gl.arange(0, WORDS, EVERY), total)


@gluon.jit
def _give(count, s_words, bar_ready, bar_free):
    for i in range(0, count):
        mbarrier.wait(bar_free.index(0), (i & 1) ^ 1)
        s_words.store(gl.arange(0, WORDS, LANES) + i)  # handed over
        gl.thread_barrier()
        mbarrier.arrive(bar_ready.index(0), count=1)


@gluon.jit
def hand_over(p_sums, count):
    """Sums of ``count`` times 128 words that one partition hands to another."""
    s_words = gl.allocate_shared_memory(gl.int32, [WORDS], PLAIN)
    bar_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    bar_free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bar_ready.index(0), count=1)
    mbarrier.init(bar_free.index(0), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_take, (p_sums, count, s_words, bar_ready, bar_free)),
        (_give, (count, s_words, bar_ready, bar_free)),
    ], [1], [24])  # fmt: skip


def expected(count: int) -> torch.Tensor:
    """What :func:`hand_over` sums up to."""
    return torch.arange(WORDS.value, dtype=torch.int32) * count + count * (count - 1) // 2


def main(count: int = 6) -> int:
    sums = torch.zeros(WORDS.value, dtype=torch.int32, device="cuda")
    hand_over[(1,)](sums, count, num_warps=4)
    return 0 if torch.equal(sums.cpu(), expected(count)) else 1


if __name__ == "__main__":
    sys.exit(main())
