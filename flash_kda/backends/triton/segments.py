"""The states before the segments of cut sequences, from what each segment does to a state."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_kda.backends.triton.common import first_slot


@triton.jit(do_not_specialize=["T", "N", "HV", "SEGMENT"])
def scan_segments(p_maps, p_cu, T, N, HV, SEGMENT, K: tl.constexpr, SCAN_BV: tl.constexpr, PACKED: tl.constexpr):
    """One (sequence, value head, SCAN_BV columns of V): ``S_{s+1} = S_s A_s + B_s``, states transposed, V = K.

    Args:
        p_maps: ``[segments, HV, 2, K, K]`` float32, B and A of every segment; of a sequence's first segment B is the
            state after it. B of every later one becomes the state before it. Those of a last segment are not read.
        p_cu: ``[N + 1]`` boundaries if PACKED. SEGMENT: tokens of a segment; segments are numbered by ``first_slot``.
    """
    PARTS: tl.constexpr = K // SCAN_BV
    pid = tl.program_id(0)
    i_v = pid % PARTS
    i_h = (pid // PARTS) % HV
    n = (pid // (PARTS * HV)).to(tl.int64)
    if PACKED:
        start = tl.load(p_cu + n).to(tl.int64)
        length = tl.load(p_cu + n + 1).to(tl.int64) - start
        number = first_slot(start, n, SEGMENT)
    else:
        length = T.to(tl.int64)
        number = n * ((T + SEGMENT - 1) // SEGMENT)
    count = ((length + SEGMENT - 1) // SEGMENT).to(tl.int32)
    o_k = tl.arange(0, K)
    o_B = (i_v * SCAN_BV + tl.arange(0, SCAN_BV))[:, None] * K + o_k[None, :]
    o_A = K * K + o_k[:, None] * K + o_k[None, :]
    p_map = p_maps + (number * HV + i_h) * (2 * K * K)
    S = tl.load(p_map + o_B, mask=count + 0 * o_B > 1, other=0.0)
    for s in tl.range(1, count, num_stages=1):
        p_map += HV.to(tl.int64) * (2 * K * K)
        is_followed = s + 1 < count
        A = tl.load(p_map + o_A, mask=is_followed & (o_A >= 0), other=0.0)
        B = tl.load(p_map + o_B, mask=is_followed & (o_B >= 0), other=0.0)
        tl.store(p_map + o_B, S)
        S = tl.dot(S, A, B, input_precision="tf32x3")
