"""The states before the later segments of cut sequences, from what each segment does to a state."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_kda.backends.triton.common import sequence_of_slot


@triton.jit
def _halves(x):
    """float32 as two values with the bits of TF32: the second loses the last two."""
    high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit(do_not_specialize=["T", "N", "HV", "SEGMENT"])
def scan_segments(
    p_maps, p_cu, T, N, HV, SEGMENT,
    K: tl.constexpr, SCAN_BV: tl.constexpr, MAPS: tl.constexpr, PACKED: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """One (sequence, value head, SCAN_BV columns of V): ``S_{s+1} = S_s A_s + B_s``, states transposed, V = K.

    There is a program for each later segment if PACKED: those of second segments have the sequences.

    Args:
        p_maps: ``[later segments, HV, MAPS, K, K]`` float32: for each segment but a sequence's first, the state before
            it, B and A. The state before a second segment is given, those before all after it are made. B and A of a
            last segment are not read.
        p_cu: ``[N + 1]`` boundaries if PACKED. SEGMENT: tokens of a segment at most. The later segments of a packed
            sequence that begins with token s are numbered from ``s // SEGMENT`` on, where those of the sequences before
            it have ended.
    """
    PARTS: tl.constexpr = K // SCAN_BV
    pid = tl.program_id(0)
    i_v = pid % PARTS
    i_h = (pid // PARTS) % HV
    number = (pid // (PARTS * HV)).to(tl.int64)
    if PACKED:
        n = sequence_of_slot(p_cu, number, N, SEGMENT, SEARCH, False)
        start = tl.load(p_cu + n).to(tl.int64)
        length = tl.load(p_cu + n + 1).to(tl.int64) - start
        later = ((length + SEGMENT - 1) // SEGMENT).to(tl.int32) - 1
        later = tl.where(number == start // SEGMENT, later, 0)
    else:
        later = (T + SEGMENT - 1) // SEGMENT - 1
        number *= later
    o_S = (i_v * SCAN_BV + tl.arange(0, SCAN_BV))[:, None] * K + tl.arange(0, K)[None, :]
    o_A = tl.arange(0, K)[:, None] * K + tl.arange(0, K)[None, :]
    p_map = p_maps + (number * HV + i_h) * (MAPS * K * K)
    S = tl.load(p_map + o_S, mask=later + 0 * o_S > 1, other=0.0)
    for _ in tl.range(1, later, num_stages=3):
        B = tl.load(p_map + K * K + o_S)
        # Three products of which none waits for another.
        A_high, A_low = _halves(tl.load(p_map + 2 * K * K + o_A))
        S_high, S_low = _halves(S)
        # Infinity is itself and nothing else.
        S_low = tl.where(S_low == S_low, S_low, 0.0)
        S = tl.dot(S_high, A_high, B, input_precision="tf32")
        S += tl.dot(S_high, A_low, input_precision="tf32") + tl.dot(S_low, A_high, input_precision="tf32")
        p_map += HV.to(tl.int64) * (MAPS * K * K)
        tl.store(p_map + o_S, S)
