"""How packed sequences are cut into segments, and the states before the later ones, from what each does to a state."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _later_segments(p_cu, n, N, segment):
    """Segments of at most so many tokens, but the first, of each of a block of sequences; 0 past the last."""
    valid = n < N
    length = tl.load(p_cu + n + 1, mask=valid, other=0) - tl.load(p_cu + n, mask=valid, other=0)
    return tl.maximum((length.to(tl.int32) + segment - 1) // segment - 1, 0)


@triton.jit(do_not_specialize=["N", "SEGMENT", "LATER"])
def cut_sequences(
    p_cu, p_cuts, N, SEGMENT, LATER,
    C: tl.constexpr, LEAST_SEGMENT: tl.constexpr, COUNTED: tl.constexpr, NUMBERED: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Cut packed sequences into the shortest segments of which no more than LATER are not a sequence's first.

    Args:
        p_cu: ``[N + 1]`` boundaries.
        p_cuts: ``[1 + 2 LATER]`` int32, the results: tokens of a segment at most, a multiple of C; for each later
            segment, numbered in the order of tokens, its sequence; how many of that sequence's are before it, or -1
            where there are not so many.
        SEGMENT: tokens of a segment that are enough for any lengths. LEAST_SEGMENT: the fewest that it may have.
        COUNTED, NUMBERED: sequences whose segments are counted, and numbered, at a time. NUMBERS: a power of two that
            is at least LATER.
    """
    o = tl.arange(0, COUNTED)
    low = tl.minimum(LEAST_SEGMENT, SEGMENT) // C
    high = SEGMENT // C
    while low < high:
        middle = (low + high) // 2
        count = 0
        for first in range(0, N, COUNTED):
            count += tl.sum(_later_segments(p_cu, first + o, N, middle * C), 0)
        if count <= LATER:
            high = middle
        else:
            low = middle + 1
    tl.store(p_cuts, high * C)
    o = tl.arange(0, NUMBERED)
    number = tl.arange(0, NUMBERS)
    n = tl.zeros((NUMBERS,), tl.int32)
    before = tl.zeros((NUMBERS,), tl.int32)
    end = 0
    for first in range(0, N, NUMBERED):
        later = _later_segments(p_cu, first + o, N, high * C)
        # Of sequences with all of their later segments before a number.
        passed = ((end + tl.cumsum(later, 0))[:, None] <= number[None, :]) & (first + o < N)[:, None]
        n += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, later[:, None], 0), 0)
        end += tl.sum(later, 0)
    tl.store(p_cuts + 1 + number, tl.minimum(n, N - 1), mask=number < LATER)
    tl.store(p_cuts + 1 + LATER + number, tl.where(number < end, number - before, -1), mask=number < LATER)


@triton.jit(do_not_specialize=["T", "N", "HV", "SEGMENT", "LATER"])
def scan_segments(
    p_maps, p_cu, p_cuts, T, N, HV, SEGMENT, LATER,
    K: tl.constexpr, SCAN_BV: tl.constexpr, MAPS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One (sequence, value head, SCAN_BV columns of V): ``S_{s+1} = S_s A_s + B_s``, states transposed, V = K.

    There is a program for each later segment if PACKED: those of second segments have the sequences.

    Args:
        p_maps: ``[later segments, HV, MAPS, K, K]`` float32: for each segment but a sequence's first, the state before
            it, B and A. The state before a second segment is given, those before all after it are made. B and A of a
            last segment are not read.
        p_cu, p_cuts: see :func:`cut_sequences`; read if PACKED. SEGMENT: tokens of a segment at most, otherwise.
    """
    PARTS: tl.constexpr = K // SCAN_BV
    pid = tl.program_id(0)
    i_v = pid % PARTS
    i_h = (pid // PARTS) % HV
    number = (pid // (PARTS * HV)).to(tl.int64)
    if PACKED:
        SEGMENT = tl.load(p_cuts)
        n = tl.load(p_cuts + 1 + number)
        length = (tl.load(p_cu + n + 1) - tl.load(p_cu + n)).to(tl.int32)
        later = (length + SEGMENT - 1) // SEGMENT - 1
        later = tl.where(tl.load(p_cuts + 1 + LATER + number) == 0, later, 0)
    else:
        later = (T + SEGMENT - 1) // SEGMENT - 1
        number *= later
    o_S = (i_v * SCAN_BV + tl.arange(0, SCAN_BV))[:, None] * K + tl.arange(0, K)[None, :]
    o_A = tl.arange(0, K)[:, None] * K + tl.arange(0, K)[None, :]
    p_map = p_maps + (number * HV + i_h) * (MAPS * K * K)
    S = tl.load(p_map + o_S, mask=later + 0 * o_S > 1, other=0.0)
    for _ in tl.range(1, later, num_stages=1):
        B = tl.load(p_map + K * K + o_S)
        A = tl.load(p_map + 2 * K * K + o_A)
        S = tl.dot(S, A, B, input_precision="tf32x3")
        p_map += HV.to(tl.int64) * (MAPS * K * K)
        tl.store(p_map + o_S, S)
