"""Device helpers of the Hopper kernels, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_kda.backends.triton.common import first_slot

SEARCH = gl.constexpr(256)


@gluon.jit
def pair(x):
    """float32 as two bfloat16 whose sum keeps 16 bits. The first is cut off: a mask costs less than rounding twice."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)


@gluon.jit
def sequence_of_slot(p_cu, slot, N, TOKENS, WARPS: gl.constexpr):
    """The last sequence whose first slot of TOKENS tokens is at most ``slot``; see the Triton kernels' own."""
    o = gl.arange(0, SEARCH, gl.BlockedLayout([1], [32], [WARPS], [0]))
    step = (N + SEARCH - 1) // SEARCH
    at = o * step
    start = gl.load(p_cu + at, mask=at < N, other=0)
    low = (gl.sum(((at < N) & (first_slot(start, at, TOKENS) <= slot)).to(gl.int32), 0) - 1) * step
    found = 0
    for block in range(0, step, SEARCH):
        at = low + block + o
        inside = (at < N) & (block + o < step)
        start = gl.load(p_cu + at, mask=inside, other=0)
        found += gl.sum((inside & (first_slot(start, at, TOKENS) <= slot)).to(gl.int32), 0)
    return low + found - 1
