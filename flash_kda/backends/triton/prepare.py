"""First kernel: what each chunk needs of its own tokens, for every (chunk, value head) in parallel.

Notation of docs/derivation.md. ``g2`` and sums of it are in log2 units. Tiles are ``[C, BK]`` with channels past K
zero; their rows hold the tokens in the order of ``token_of_row``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_kda.backends.triton.common import (
    EASY,
    HARD,
    L2NORM_EPS,
    MOST_LOOKED_AT,
    activated_beta,
    at_least,
    exp2,
    locate,
    log2_decay,
    marks_of_program,
    slots,
    token_of_row,
)


@triton.jit
def _to_segments(x, C: tl.constexpr, SEGMENTS: tl.constexpr):
    """``[C, B]`` as ``[C / SEGMENTS, SEGMENTS, B]``: consecutive tokens along the first axis."""
    return tl.reshape(x, (C // SEGMENTS, SEGMENTS, x.shape[1]))


@triton.jit
def _sum_from_mid(g2, totals, to_mid, C: tl.constexpr, SEGMENTS: tl.constexpr):
    """Sum along time of ``[C, B]`` from the chunk's middle to each row, from the totals ``[SEGMENTS, B]``."""
    before = tl.cumsum(totals, 0) - totals - to_mid[None, :]
    return tl.reshape(tl.cumsum(_to_segments(g2, C, SEGMENTS), 0) + before[None, :, :], g2.shape)


@triton.jit
def _partner(x, BIT: tl.constexpr, C: tl.constexpr, SEGMENTS: tl.constexpr):
    """``[C, B]`` with the rows exchanged whose tokens differ in bit BIT alone."""
    TOKEN_BITS: tl.constexpr = (C // SEGMENTS).bit_length() - 1
    ROW_BIT: tl.constexpr = BIT + SEGMENTS.bit_length() - 1 if BIT < TOKEN_BITS else BIT - TOKEN_BITS
    b_x = tl.reshape(x, (C >> (ROW_BIT + 1), 2, 1 << ROW_BIT, x.shape[1]))
    is_early = (tl.arange(0, 2) == 0)[None, :, None, None]
    early = tl.sum(tl.where(is_early, b_x, 0.0), 1)[:, None, :, :]
    late = tl.sum(tl.where(is_early, 0.0, b_x), 1)[:, None, :, :]
    return tl.reshape(tl.where(is_early, late, early), x.shape)


@triton.jit
def _join(
    q, k, qk, kk, sums, to_row, to_end,
    BIT: tl.constexpr, C: tl.constexpr, SEGMENTS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Join blocks of 2^BIT tokens: add the pairs across each boundary, then move the decays to the new ends.

    ``sums`` are the sums over the block of each row's token.
    """
    o_t = token_of_row(C, SEGMENTS)
    across = (o_t[:, None] > o_t[None, :]) & (((o_t[:, None] ^ o_t[None, :]) >> BIT) == 1)
    is_late = (((o_t >> BIT) & 1) == 1)[:, None]
    e = exp2(tl.where(is_late, to_row, to_end))
    ke = (k * e).to(TILE)
    qk += tl.where(across, tl.dot((q * e).to(TILE), tl.trans(ke), input_precision=PRECISION), 0.0)
    kk += tl.where(across, tl.dot(ke, tl.trans(ke), input_precision=PRECISION), 0.0)
    other = _partner(sums, BIT, C, SEGMENTS)
    return qk, kk, sums + other, to_row + tl.where(is_late, other, 0.0), to_end + tl.where(is_late, 0.0, other)


@triton.jit
def _joined(
    q, k, g2, qk, kk, p_tile, tile_size,
    C: tl.constexpr, SEGMENTS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the tiles; add ``q_i (k_j 2^(G_i - G_j))`` and the same of k and k over some channels, for any gate.

    Blocks of 1, 2, 4, ... tokens are joined pairwise. Across the boundary of a join every factor is at most 1: a late
    row decays from the boundary to itself, an early row from itself to the boundary. One tile holds both.
    """
    o = tl.arange(0, C)
    qk += tl.where(o[:, None] == o[None, :], tl.sum(q * k, 1)[:, None], 0.0)
    sums = g2
    to_row = g2
    to_end = tl.zeros_like(g2)
    for bit in tl.static_range(tl.constexpr(C.bit_length() - 1)):
        qk, kk, sums, to_row, to_end = _join(q, k, qk, kk, sums, to_row, to_end, bit, C, SEGMENTS, TILE, PRECISION)
    e = exp2(to_row)
    tl.store(p_tile, (-k * e).to(TILE))
    tl.store(p_tile + tile_size, (q * e).to(TILE))
    tl.store(p_tile + 2 * tile_size, (k * exp2(to_end)).to(TILE))
    return qk, kk


@triton.jit
def _anchored(
    q, k, g2, totals, to_mid, from_mid_to_end, qk, kk, p_tile, tile_size,
    C: tl.constexpr, SEGMENTS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As _joined where neither half of the chunk decays by 2^-120: one anchor in the middle serves every pair.

    Entries above the diagonal are of no use and may be infinite.
    """
    from_mid = _sum_from_mid(g2, totals, to_mid, C, SEGMENTS)
    e = exp2(from_mid)
    k_row = k * e
    q_row = q * e
    k_column = k * exp2(-from_mid)
    e_mid = exp2(to_mid)[None, :]
    tl.store(p_tile, (k_row * -e_mid).to(TILE))
    tl.store(p_tile + tile_size, (q_row * e_mid).to(TILE))
    tl.store(p_tile + 2 * tile_size, (k_column * exp2(from_mid_to_end)[None, :]).to(TILE))
    columns = tl.trans(k_column.to(TILE))
    kk = tl.dot(k_row.to(TILE), columns, kk, input_precision=PRECISION)
    qk = tl.dot(q_row.to(TILE), columns, qk, input_precision=PRECISION)
    return qk, kk


@triton.jit
def _unit_inverse(L, C: tl.constexpr, SEGMENTS: tl.constexpr, SQUARE: tl.constexpr, PRECISION: tl.constexpr):
    """``(I + L)^{-1}`` of strictly lower triangular L: forward substitution by blocks of 1, 2, 4, ... tokens.

    With D the inverse of the diagonal blocks, joining two of them gives ``D - D L_across D``.
    """
    o_t = token_of_row(C, SEGMENTS)
    distance = o_t[:, None] ^ o_t[None, :]
    D = tl.where(distance == 0, 1.0, 0.0) - tl.where(distance == 1, L, 0.0)
    for bit in tl.static_range(1, tl.constexpr(C.bit_length() - 1)):
        across = tl.where((distance >> bit) == 1, L, 0.0).to(SQUARE)
        d = D.to(SQUARE)
        D -= tl.dot(tl.dot(d, across, input_precision=PRECISION).to(SQUARE), d, input_precision=PRECISION)
    return D


@triton.jit
def _store_square(p, b_x, first_row, C: tl.constexpr, SPLIT: tl.constexpr):
    """Store ``[C, C]`` as rows of the chunk's square: as a pair whose sum keeps twice the bits, or as float32."""
    width: tl.constexpr = 2 * C if SPLIT else C
    o = (first_row + tl.arange(0, C))[:, None] * width + tl.arange(0, C)[None, :]
    high = b_x.to(p.dtype.element_ty)
    tl.store(p + o, high)
    if SPLIT:
        tl.store(p + o + C, (b_x - high.to(tl.float32)).to(p.dtype.element_ty))


@triton.jit
def _chunk(
    i_s, i_h, batch, start, first, length,
    p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_tiles, p_squares, p_decay, p_hard,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    HV, GROUP, scale, lower_bound,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    GATE: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr, QK_L2NORM: tl.constexpr,
    BETA_IS_LOGIT: tl.constexpr, NEG_EIGVAL: tl.constexpr,
    BC: tl.constexpr, SEGMENTS: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, SQUARE: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, LEAST_BETA: tl.constexpr,
):  # fmt: skip
    """What ``prepare`` stores of a chunk with tokens."""
    o_r = tl.arange(0, C)
    o_time = token_of_row(C, SEGMENTS)
    m_t = first + o_time < length
    t = start + first + o_time
    i_qk = i_h // GROUP
    beta = tl.load(p_beta + batch * beta_b + t * beta_t + i_h * beta_h, mask=m_t, other=0.0).to(tl.float32)
    t = t[:, None]
    p_q += batch * q_b + t * q_t + i_qk * q_h
    p_k += batch * k_b + t * k_t + i_qk * k_h
    p_g += batch * g_b + t * g_t + i_h * g_h
    o_c = tl.arange(0, BC)
    rk = tl.full((C,), 1.0, tl.float32)
    rq = tl.full((C,), 1.0, tl.float32)
    if QK_L2NORM and BC < BK:
        k_squares = tl.zeros((C, BC), tl.float32)
        q_squares = tl.zeros((C, BC), tl.float32)
        for c in tl.range(0, BK, BC, num_stages=1):
            m = m_t[:, None] & (c + o_c < K)[None, :]
            b_k = tl.load(p_k + c + o_c[None, :], mask=m, other=0.0).to(tl.float32)
            b_q = tl.load(p_q + c + o_c[None, :], mask=m, other=0.0).to(tl.float32)
            k_squares += b_k * b_k
            q_squares += b_q * b_q
        rk = tl.rsqrt(tl.sum(k_squares, 1) + L2NORM_EPS)
        rq = tl.rsqrt(tl.sum(q_squares, 1) + L2NORM_EPS)
    a = 1.0
    if HAS_A_LOG:
        a = tl.exp(tl.load(p_A_log + i_h))

    chunk = i_s * HV + i_h
    kk = tl.zeros((C, C), tl.float32)
    qk = tl.zeros((C, C), tl.float32)
    hard = tl.zeros((), tl.int32)
    is_early = (tl.arange(0, SEGMENTS) < SEGMENTS // 2)[:, None]
    for c in tl.range(0, BK, BC, num_stages=1):
        o_k = c + o_c
        m = m_t[:, None] & (o_k < K)[None, :]
        b_g = tl.load(p_g + o_k[None, :], mask=m, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + o_k[None, :], mask=m, other=0.0).to(tl.float32)
        b_q = tl.load(p_q + o_k[None, :], mask=m, other=0.0).to(tl.float32)
        if QK_L2NORM and BC == BK:
            rk = tl.rsqrt(tl.sum(b_k * b_k, 1) + L2NORM_EPS)
            rq = tl.rsqrt(tl.sum(b_q * b_q, 1) + L2NORM_EPS)
        b_k *= rk[:, None]
        b_q *= (rq * scale)[:, None]
        bias = tl.zeros((BC,), tl.float32)
        if HAS_DT_BIAS:
            bias = tl.load(p_dt_bias + i_h * K + o_k, mask=o_k < K, other=0.0)
        g2 = log2_decay(b_g, a, bias[None, :], lower_bound, m_t[:, None], GATE)
        totals = tl.sum(_to_segments(g2, C, SEGMENTS), 0)
        early = tl.sum(tl.where(is_early, totals, 0.0), 0)
        late = tl.sum(tl.where(is_early, 0.0, totals), 0)
        if CHUNKS == EASY:
            hard |= (tl.min(tl.minimum(early, late)) <= -120.0).to(tl.int32)
        tl.store(p_decay + chunk * BK + o_k, exp2(early + late))
        p_tile = p_tiles + chunk * (3 * C * BK) + o_r[:, None] * BK + o_k[None, :]
        if CHUNKS == HARD:
            qk, kk = _joined(b_q, b_k, g2, qk, kk, p_tile, C * BK, C, SEGMENTS, TILE, PRECISION)
        else:
            qk, kk = _anchored(b_q, b_k, g2, totals, early, late, qk, kk, p_tile, C * BK, C, SEGMENTS, TILE, PRECISION)

    if CHUNKS == EASY:
        # What this launch stores for a hard chunk is of no use, and is overwritten.
        tl.store(p_hard + chunk, hard.to(tl.int8))
    beta = tl.where(m_t, at_least(activated_beta(beta, BETA_IS_LOGIT, NEG_EIGVAL), LEAST_BETA), 0.0)
    L = tl.where(o_time[:, None] > o_time[None, :], kk, 0.0) * beta[:, None]
    Mqk = tl.where(o_time[:, None] >= o_time[None, :], qk, 0.0)
    T_beta = _unit_inverse(L, C, SEGMENTS, SQUARE, PRECISION) * beta[None, :]
    p_square = p_squares + chunk * (2 * C * C * (2 if SPLIT else 1))
    _store_square(p_square, T_beta, 0, C, SPLIT)
    M_T = tl.dot(Mqk.to(SQUARE), T_beta.to(SQUARE), input_precision=PRECISION)
    _store_square(p_square, M_T, C, C, SPLIT)


@triton.jit(do_not_specialize=["T", "N", "HV", "GROUP", "lower_bound", "scale"])
def prepare(
    p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_cu, p_tiles, p_squares, p_decay, p_hard, p_o,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h, o_b, o_t, o_h,
    T, N, HV, GROUP, scale, lower_bound,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    GATE: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr, QK_L2NORM: tl.constexpr,
    BETA_IS_LOGIT: tl.constexpr, NEG_EIGVAL: tl.constexpr, PACKED: tl.constexpr, SEARCH: tl.constexpr,
    BC: tl.constexpr, SEGMENTS: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, SQUARE: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, LEAST_BETA: tl.constexpr,
):  # fmt: skip
    """One (chunk, value head); of HARD chunks all that are marked among those that the program looks at.

    Args:
        p_q, p_k: ``[B, T, H, K]``. p_g: ``[B, T, HV, K]``. p_beta: ``[B, T, HV]``. Strides in elements by dimension.
        p_cu: ``[N + 1]`` boundaries if PACKED.
        p_tiles: ``[slots, HV, 3, C, BK]`` in TILE: minus K_plus, Q_plus, K_end.
        p_squares: ``[slots, HV, 2 C, C or 2 C]``: ``T Diag(beta)`` over ``Mqk T Diag(beta)``; with SPLIT the second
            half of a row is what the rounding of the first lost.
        p_decay: ``[slots, HV, BK]`` float32, the decay of the whole chunk.
        p_o: ``[B, T, HV, V]``; if PACKED, rows past the last sequence are set to zero here.
        BC: channels at a time. SEGMENTS: see token_of_row.
        p_hard: ``[slots, HV]`` int8, set by a launch over EASY chunks: one anchor does not serve the chunk, since a
            half of it decays by 2^-120 or more.
        GROUP: value heads per query/key head. CHUNKS: ALL, EASY or HARD.
        SQUARE: dtype of the operands that make the squares.
        LEAST_BETA: what stands for a smaller beta; see ``at_least``.
    """
    given = (
        p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_tiles, p_squares, p_decay, p_hard,
        q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
        HV, GROUP, scale, lower_bound,
    )  # fmt: skip
    if CHUNKS == HARD:
        marks = marks_of_program(p_hard, slots(T, N, C, PACKED) * HV, 1)
        if marks == 0:
            return
        # What does not depend on the chunk is made anew for each: kept, it would spill.
        for i in tl.range(0, MOST_LOOKED_AT, num_stages=1, disable_licm=True):
            if (marks >> i) & 1:
                chunk = tl.program_id(0) + i * tl.num_programs(0)
                i_s = (chunk // HV).to(tl.int64)
                i_h = chunk % HV
                batch, start, first, length = locate(p_cu, i_s, T, N, C, PACKED, SEARCH)
                _chunk(
                    i_s, i_h, batch, start, first, length, *given,
                    K, C, BK, GATE, HAS_A_LOG, HAS_DT_BIAS, QK_L2NORM, BETA_IS_LOGIT, NEG_EIGVAL, BC,
                    SEGMENTS, CHUNKS, TILE, SQUARE, SPLIT, PRECISION, LEAST_BETA,
                )  # fmt: skip
    else:
        chunk = tl.program_id(0)
        i_s = (chunk // HV).to(tl.int64)
        i_h = chunk % HV
        if PACKED:
            end = tl.load(p_cu + N).to(tl.int64)
            row0 = (i_s - N) * C
            if row0 + C > end:
                # No sequence uses this slot: it clears the rows that belong to none.
                if CHUNKS == EASY:
                    tl.store(p_hard + i_s * HV + i_h, 0)
                o_row = row0 + tl.arange(0, C)
                o_v = tl.arange(0, 64)
                for v in range(0, V, 64):
                    m_o = ((o_row >= end) & (o_row < T))[:, None] & (v + o_v < V)[None, :]
                    p_row = p_o + o_row[:, None] * o_t + i_h * o_h + v + o_v[None, :]
                    tl.store(p_row, tl.zeros((C, 64), p_o.dtype.element_ty), mask=m_o)
                return
        batch, start, first, length = locate(p_cu, i_s, T, N, C, PACKED, SEARCH)
        if first >= length:
            if CHUNKS == EASY:
                tl.store(p_hard + i_s * HV + i_h, 0)
            return
        _chunk(
            i_s, i_h, batch, start, first, length, *given,
            K, C, BK, GATE, HAS_A_LOG, HAS_DT_BIAS, QK_L2NORM, BETA_IS_LOGIT, NEG_EIGVAL, BC,
            SEGMENTS, CHUNKS, TILE, SQUARE, SPLIT, PRECISION, LEAST_BETA,
        )  # fmt: skip
