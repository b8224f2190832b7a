"""Device helpers of the Hopper kernels, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_kda.backends.triton.common import first_slot, lost_bits
from flash_kda.backends.triton.config import CHUNK

C = gl.constexpr(CHUNK)
SEARCH = gl.constexpr(256)


def layout_of_bits(rows: int, warps: int) -> gl.constexpr:
    """``[rows, 4, 8]``: tokens ``[rows, C]`` of an accumulator, 16 rows a warp, as words and what they hold.

    A thread has all of a word. Warps that have no rows of their own have those of the first.
    """
    of_warp, step = [], 16
    while warps > 1:
        of_warp.append([step if step < rows else 0, 0, 0])
        step, warps = 2 * step, warps // 2
    in_thread = [[0, 0, 1], [8, 0, 0], [0, 0, 2], [0, 0, 4]]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.constexpr(gl.DistributedLinearLayout(in_thread, lanes, of_warp, [], [rows, 4, 8]))


@gluon.jit
def pair(x):
    """float32 as two bfloat16 whose sum keeps 16 bits. The first is cut off: a mask costs less than rounding twice."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)


@gluon.jit
def _places(BITS: gl.constexpr):
    """By how much the eight tokens of a word are shifted."""
    o = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, BITS)))
    return 4 * gl.expand_dims(gl.expand_dims(o, 0), 0)


@gluon.jit
def words_of_lost_bits(x, rounded, BITS: gl.constexpr):
    """What rounding ``[rows, C]`` lost as words ``[rows, 4]``; see ``flash_kda.backends.triton.walks.walks``."""
    lost = gl.reshape(lost_bits(x, rounded), (x.shape[0], 4, 4, 2))
    lost = gl.reshape(gl.permute(lost, (0, 2, 1, 3)), (x.shape[0], 4, 8))
    lost = gl.convert_layout(lost, BITS, assert_trivial=True)
    return gl.sum((lost & 15) << _places(BITS), 2)


@gluon.jit
def lost_bits_of_words(words, BITS: gl.constexpr, TOKENS: gl.constexpr):
    """The other way."""
    lost = gl.expand_dims(words, 2) << (28 - _places(BITS)) >> 28
    lost = gl.permute(gl.reshape(lost, (words.shape[0], 4, 4, 2)), (0, 2, 1, 3))
    return gl.convert_layout(gl.reshape(lost, (words.shape[0], C)), TOKENS, assert_trivial=True)


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
