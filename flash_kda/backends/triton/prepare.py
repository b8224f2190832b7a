"""First kernel: what each chunk needs of its own tokens, for every (chunk, value head) in parallel.

Notation of docs/derivation.md. ``g2``, ``G`` are in log2 units. Tiles are ``[C, BK]`` with channels past K zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_kda.backends.triton.common import activated_beta, first_slot, log2_decay, rstd, sequence_of_slot


@triton.jit
def _of_halves(x, h: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """Sums of ``[C, BK]`` over the early and the late half of each block of 2h rows, repeated on every row."""
    blocks: tl.constexpr = C // (2 * h)
    b_x = tl.reshape(x, (blocks, 2 * h, BK))
    is_early = (tl.arange(0, 2 * h) < h)[None, :, None]
    early = tl.sum(tl.where(is_early, b_x, 0.0), 1)[:, None, :]
    late = tl.sum(tl.where(is_early, 0.0, b_x), 1)[:, None, :]
    early = tl.reshape(tl.broadcast_to(early, (blocks, 2 * h, BK)), (C, BK))
    late = tl.reshape(tl.broadcast_to(late, (blocks, 2 * h, BK)), (C, BK))
    return early, late


@triton.jit
def _join(
    q, k, g2, qk, kk, to_row, to_end, h: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr
):
    """Join blocks of h rows: make the pairs across each boundary, then move the decays to the new ends."""
    o_r = tl.arange(0, C)
    distance = o_r[:, None] ^ o_r[None, :]
    across = (o_r[:, None] > o_r[None, :]) & (distance >= h) & (distance < 2 * h)
    is_late = ((o_r & h) != 0)[:, None]
    e = tl.exp2(tl.where(is_late, to_row, to_end))
    ke = (k * e).to(TILE)
    qk = tl.where(across, tl.dot((q * e).to(TILE), tl.trans(ke), input_precision=PRECISION), qk)
    kk = tl.where(across, tl.dot(ke, tl.trans(ke), input_precision=PRECISION), kk)
    early, late = _of_halves(g2, h, C, k.shape[1])
    return qk, kk, to_row + tl.where(is_late, early, 0.0), to_end + tl.where(is_late, 0.0, late)


@triton.jit
def _joined(q, k, g2, p_tile, C: tl.constexpr, BK: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """Store K_plus, Q_plus and K_end; return ``q_i (k_j 2^(G_i - G_j))`` and the same of k and k, for any gate.

    Blocks of 1, 2, 4, ... rows are joined pairwise. Across the boundary of a join every factor is at most 1: a late
    row decays from the boundary to itself, an early row from itself to the boundary. One tile holds both.
    """
    o_r = tl.arange(0, C)
    qk = tl.where(o_r[:, None] == o_r[None, :], tl.sum(q * k, 1)[:, None], 0.0)
    kk = tl.zeros((C, C), tl.float32)
    to_row = g2
    to_end = tl.zeros_like(g2)
    for level in tl.static_range(tl.constexpr(C.bit_length() - 1)):
        qk, kk, to_row, to_end = _join(q, k, g2, qk, kk, to_row, to_end, 1 << level, C, TILE, PRECISION)
    e = tl.exp2(to_row)
    tl.store(p_tile, (k * e).to(TILE))
    tl.store(p_tile + C * BK, (q * e).to(TILE))
    tl.store(p_tile + 2 * C * BK, (k * tl.exp2(to_end)).to(TILE))
    return qk, kk


@triton.jit
def _anchored(q, k, g2, p_tile, C: tl.constexpr, BK: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """As _joined where no half of the chunk decays by 2^-120 or more: one anchor in the middle serves every pair."""
    G = tl.cumsum(g2, 0)
    G_mid = tl.sum(tl.where((tl.arange(0, C) < C // 2)[:, None], g2, 0.0), 0)
    G_late = tl.sum(tl.where((tl.arange(0, C) < C // 2)[:, None], 0.0, g2), 0)
    from_mid = G - G_mid[None, :]
    e = tl.exp2(from_mid)
    k_row = k * e
    q_row = q * e
    k_column = k * tl.exp2(-from_mid)
    e_mid = tl.exp2(G_mid)[None, :]
    tl.store(p_tile, (k_row * e_mid).to(TILE))
    tl.store(p_tile + C * BK, (q_row * e_mid).to(TILE))
    tl.store(p_tile + 2 * C * BK, (k_column * tl.exp2(G_late)[None, :]).to(TILE))
    columns = tl.trans(k_column.to(TILE))
    kk = tl.dot(k_row.to(TILE), columns, input_precision=PRECISION)
    qk = tl.dot(q_row.to(TILE), columns, input_precision=PRECISION)
    return qk, kk


@triton.jit
def _unit_inverse(L, C: tl.constexpr, PRECISION: tl.constexpr):
    """``(I + L)^{-1}`` of strictly lower triangular L: forward substitution by blocks of 1, 2, 4, ... rows.

    With D the inverse of the diagonal blocks, joining two of them gives ``D - D L_across D``.
    """
    o_r = tl.arange(0, C)
    distance = o_r[:, None] ^ o_r[None, :]
    D = tl.where(distance == 0, 1.0, 0.0) - tl.where(distance == 1, L, 0.0)
    for level in tl.static_range(1, tl.constexpr(C.bit_length() - 1)):
        across = tl.where((distance >> level) == 1, L, 0.0)
        D -= tl.dot(tl.dot(D, across, input_precision=PRECISION), D, input_precision=PRECISION)
    return D


@triton.jit
def _store_square(p, b_x, C: tl.constexpr, SPLIT: tl.constexpr):
    """Store ``[C, C]``: as a pair of low-precision matrices whose sum keeps twice the bits, or as float32."""
    o = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    if SPLIT:
        high = b_x.to(p.dtype.element_ty)
        tl.store(p + o, high)
        tl.store(p + C * C + o, (b_x - high.to(tl.float32)).to(p.dtype.element_ty))
    else:
        tl.store(p + o, b_x)


@triton.jit(do_not_specialize=["T", "N", "slots", "lower_bound", "scale"])
def prepare(
    p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_cu, p_tiles, p_squares, p_decay, p_o,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    T, N, slots, scale, lower_bound,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    GATE: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr, QK_L2NORM: tl.constexpr,
    BETA_IS_LOGIT: tl.constexpr, NEG_EIGVAL: tl.constexpr, PACKED: tl.constexpr, SEARCH: tl.constexpr,
    ANCHORED: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One (chunk, value head).

    Args:
        p_q, p_k: ``[B, T, H, K]``. p_g: ``[B, T, HV, K]``. p_beta: ``[B, T, HV]``. Strides in elements by dimension.
        p_cu: ``[N + 1]`` boundaries if PACKED. slots: chunks in the workspace.
        p_tiles: ``[slots, HV, 3, C, BK]`` in TILE: K_plus, Q_plus, K_end.
        p_squares: ``[slots, HV, 2, (2,) C, C]``: ``T Diag(beta)`` and ``Mqk T Diag(beta)``, see _store_square.
        p_decay: ``[slots, HV, BK]`` float32, the decay of the whole chunk.
        p_o: ``[B, T, HV, V]`` dense; if PACKED, rows past the last sequence are set to zero here.
        ANCHORED: every 16 tokens decay by less than 2^-120 in all, so one anchor serves the chunk.
    """
    pid = tl.program_id(0)
    i_s = (pid // HV).to(tl.int64)
    i_h = pid % HV
    if PACKED:
        end = tl.load(p_cu + N).to(tl.int64)
        row0 = (i_s - N) * C
        if row0 + C > end:
            # No sequence uses this slot: it clears the rows that belong to none.
            o_t = row0 + tl.arange(0, C)
            o_v = tl.arange(0, 64)
            for v in range(0, V, 64):
                m_o = ((o_t >= end) & (o_t < T))[:, None] & (v + o_v < V)[None, :]
                p_row = p_o + (o_t[:, None] * HV + i_h) * V + v + o_v[None, :]
                tl.store(p_row, tl.zeros((C, 64), p_o.dtype.element_ty), mask=m_o)
            return
        n = sequence_of_slot(p_cu, i_s, N, C, SEARCH)
        start = tl.load(p_cu + n).to(tl.int64)
        length = tl.load(p_cu + n + 1).to(tl.int64) - start
        first = (i_s - first_slot(start, n, C)) * C
        batch = tl.zeros((), tl.int64)
    else:
        per_row = (T + C - 1) // C
        batch = i_s // per_row
        first = (i_s % per_row) * C
        start = tl.zeros((), tl.int64)
        length = T.to(tl.int64)
    if first >= length:
        return

    o_r = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    m_r = first + o_r < length
    m_k = o_k < K
    m = m_r[:, None] & m_k[None, :]
    t = (start + first + o_r).to(tl.int64)
    i_qk = i_h // (HV // H)
    b_g = tl.load(p_g + batch * g_b + t[:, None] * g_t + i_h * g_h + o_k[None, :], mask=m, other=0.0).to(tl.float32)
    b_k = tl.load(p_k + batch * k_b + t[:, None] * k_t + i_qk * k_h + o_k[None, :], mask=m, other=0.0).to(tl.float32)
    b_q = tl.load(p_q + batch * q_b + t[:, None] * q_t + i_qk * q_h + o_k[None, :], mask=m, other=0.0).to(tl.float32)
    beta = tl.load(p_beta + batch * beta_b + t * beta_t + i_h * beta_h, mask=m_r, other=0.0).to(tl.float32)
    a = 1.0
    if HAS_A_LOG:
        a = tl.exp(tl.load(p_A_log + i_h))
    bias = tl.zeros((BK,), tl.float32)
    if HAS_DT_BIAS:
        bias = tl.load(p_dt_bias + i_h * K + o_k, mask=m_k, other=0.0)
    # A row past the end must not decay or write: masked after the activation, since gate(0) and sigmoid(0) are not 0.
    g2 = tl.where(m, log2_decay(b_g, a, bias[None, :], lower_bound, GATE), 0.0)
    beta = tl.where(m_r, activated_beta(beta, BETA_IS_LOGIT, NEG_EIGVAL), 0.0)
    b_k *= rstd(b_k, QK_L2NORM)[:, None]
    b_q *= rstd(b_q, QK_L2NORM)[:, None] * scale

    chunk = i_s * HV + i_h
    p_tile = p_tiles + chunk * (3 * C * BK) + o_r[:, None] * BK + o_k[None, :]
    tl.store(p_decay + chunk * BK + o_k, tl.exp2(tl.sum(g2, 0)))
    if ANCHORED:
        b_qk, b_kk = _anchored(b_q, b_k, g2, p_tile, C, BK, TILE, PRECISION)
    else:
        early, late = _of_halves(g2, C // 2, C, BK)
        if tl.min(tl.minimum(early, late)) > -120.0:
            b_qk, b_kk = _anchored(b_q, b_k, g2, p_tile, C, BK, TILE, PRECISION)
        else:
            b_qk, b_kk = _joined(b_q, b_k, g2, p_tile, C, BK, TILE, PRECISION)
    L = tl.where(o_r[:, None] > o_r[None, :], b_kk, 0.0) * beta[:, None]
    Mqk = tl.where(o_r[:, None] >= o_r[None, :], b_qk, 0.0)
    SQUARE: tl.constexpr = "tf32" if SPLIT else PRECISION
    T_beta = _unit_inverse(L, C, SQUARE) * beta[None, :]
    p_square = p_squares + chunk * (2 * C * C * (2 if SPLIT else 1))
    _store_square(p_square, T_beta, C, SPLIT)
    _store_square(p_square + C * C * (2 if SPLIT else 1), tl.dot(Mqk, T_beta, input_precision=SQUARE), C, SPLIT)
