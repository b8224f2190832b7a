"""Gradients of every (chunk, value head, block of channels) in parallel, then of the normalisation of q and k.

Notation of docs/derivation.md, section 5. Tokens are in the order of time here. ``g2`` and sums of it are in log2
units; gradients are those of natural logarithms.

Products have the 32 tokens of a chunk as their rows on purpose: with channels as rows Triton 3.6 takes Hopper's
asynchronous products, and makes wrong ones of some (see CONTRIBUTING.md).
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_kda.backends.triton.common import (
    EASY,
    HARD,
    L2NORM_EPS,
    LOG,
    LOG2E,
    LOWER_BOUND,
    MOST_LOOKED_AT,
    activated_beta,
    at_least,
    exp2,
    locate,
    log2_decay,
    marks_of_program,
    prefetch,
    slots,
    with_lost_bits,
)


@triton.jit
def _row_counts_token(bit, C: tl.constexpr, TRANSPOSED: tl.constexpr):
    """``[C, C]``, 1 where the decay of the column's token is part of the row's factor; the transpose if TRANSPOSED.

    The factors are those of the join of blocks of 2^bit tokens: a late row decays from the boundary to itself, an early
    row from itself to the boundary.
    """
    o = tl.arange(0, C)
    if TRANSPOSED:
        token, row = o[:, None], o[None, :]
    else:
        token, row = o[None, :], o[:, None]
    is_late = ((row >> bit) & 1) == 1
    counts = (is_late & (token <= row)) | ((is_late == 0) & (token > row))
    return tl.where(counts & ((token >> bit) == (row >> bit)), 1.0, 0.0)


@triton.jit
def _sum_over_time(x, counts):
    """``counts @ x`` of ``[C, C]`` that holds -1, 0 and 1 and float32 ``[C, BC]``, to 2^-21 of each term."""
    high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return tl.dot(counts, high, tl.dot(counts, x - high, input_precision="tf32"), input_precision="tf32")


@triton.jit
def _join_gradient(
    q, k, g2, dM, dP, dq, dk, dg,
    bit, C: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the pairs across the boundaries of one join give to the gradients of q, k and g ``[C, BC]``.

    Every factor is at most 1, and its log gradient is gradient x value: nothing is divided, and a decay of zero is no
    special case.
    """
    o = tl.arange(0, C)
    across = (o[:, None] > o[None, :]) & (((o[:, None] ^ o[None, :]) >> bit) == 1)
    e = exp2(_sum_over_time(g2, _row_counts_token(bit, C, False)))
    k_e = (k * e).to(TILE)
    q_e = (q * e).to(TILE)
    M = tl.where(across, dM, 0.0)
    P = tl.where(across, dP, 0.0)
    # Late rows of k meet early ones and the reverse, each row being one or the other.
    dk_e = tl.dot((P + tl.trans(P)).to(TILE), k_e, input_precision=PRECISION)
    dk_e = tl.dot(tl.trans(M).to(TILE), q_e, dk_e, input_precision=PRECISION) * e
    dq_e = tl.dot(M.to(TILE), k_e, input_precision=PRECISION) * e
    dg += _sum_over_time(dk_e * k + dq_e * q, _row_counts_token(bit, C, True))
    return dq + dq_e, dk + dk_e, dg


@triton.jit
def _joined_gradient(q, k, g2, dM, dP, C: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """What the pairs of different tokens give to q, k and g ``[C, BC]``, for any gate: by the joins of ``prepare``."""
    dq = tl.zeros_like(q)
    dk = tl.zeros_like(q)
    dg = tl.zeros_like(q)
    # A loop at run time: unrolled, the decays of all joins would be in registers at once.
    for bit in tl.range(0, tl.constexpr(C.bit_length() - 1), num_stages=1):
        dq, dk, dg = _join_gradient(q, k, g2, dM, dP, dq, dk, dg, bit, C, TILE, PRECISION)
    return dq, dk, dg


@triton.jit
def _to_unit(x):
    """``x`` over the power of two that makes its largest magnitude at least 1 and less than 2; and that power."""
    largest = tl.minimum(tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), 2.0**-100), 2.0**126)
    exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
    return x * (0x7F000000 - exponent).to(tl.float32, bitcast=True), exponent.to(tl.float32, bitcast=True)


@triton.jit
def _anchored_gradient(q, k, g2, dM, dP, C: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """As _joined_gradient where neither half of the chunk decays by 2^-120: one anchor in the middle serves every pair.
    The third result is still to be summed over each token and those after it.

    A pair gives to the log decay of its row what it takes from that of its column. Both are made from the same rounded
    operands, so that in sums over time they cancel but for float32's rounding.
    """
    o = tl.arange(0, C)
    row, column = o[:, None], o[None, :]
    late = tl.where((column <= row) & (column >= C // 2), 1.0, 0.0)
    early = tl.where((column > row) & (column < C // 2), 1.0, 0.0)
    # Rows get 2^8 of what columns have too much: gradients of rows, which columns multiply, need the room.
    from_mid = _sum_over_time(g2, late - early) + 8.0
    e_row = exp2(from_mid)
    e_column = exp2(-from_mid)
    q_row = (q * e_row).to(TILE)
    k_row = (k * e_row).to(TILE)
    k_column = (k * e_column).to(TILE)
    M, M_unit = _to_unit(tl.where(row > column, dM, 0.0))
    P, P_unit = _to_unit(tl.where(row > column, dP, 0.0))
    M = M.to(TILE)
    P = P.to(TILE)
    dq_row = tl.dot(M, k_column, input_precision=PRECISION)
    dq = dq_row * e_row * M_unit
    dG = dq_row * q_row.to(tl.float32)
    dk_column = tl.dot(tl.trans(M), q_row, input_precision=PRECISION)
    dk = dk_column * e_column * M_unit
    dG = (dG - dk_column * k_column.to(tl.float32)) * M_unit
    dk_row = tl.dot(P, k_column, input_precision=PRECISION)
    dk_column = tl.dot(tl.trans(P), k_row, input_precision=PRECISION)
    dk += (dk_row * e_row + dk_column * e_column) * P_unit
    dG += (dk_row * k_row.to(tl.float32) - dk_column * k_column.to(tl.float32)) * P_unit
    return dq, dk, dG


@triton.jit
def _load_rows(p_q, p_k, p_g, q_factor, k_factor, a, bias, lower_bound, m, m_t, GATE: tl.constexpr):
    """q and k times a factor per token, log2 decays and raw gates ``[C, BC]``."""
    b_k = tl.load(p_k, mask=m, other=0.0).to(tl.float32) * k_factor[:, None]
    b_q = tl.load(p_q, mask=m, other=0.0).to(tl.float32) * q_factor[:, None]
    raw = tl.load(p_g, mask=m, other=0.0).to(tl.float32)
    return b_q, b_k, log2_decay(raw, a, bias[None, :], lower_bound, m_t[:, None], GATE), raw


@triton.jit
def _through_norm(y, dy, r):
    """Gradient of x from that of ``y = x r``, ``r = rsqrt(sum(x^2) + 1e-6)`` per row."""
    return r[:, None] * (dy - y * tl.sum(y * dy, 1)[:, None])


@triton.jit
def gate_gradient(dg, g2, raw, a, bias, lower_bound, GATE: tl.constexpr):
    """Gradients of the raw gate, and of A_log by element, from that of the natural log decay."""
    if GATE == LOG:
        return dg, dg
    x = raw + bias
    if GATE == LOWER_BOUND:
        x = a * x
        # The derivative of a sigmoid from e^-|x|, which loses nothing on either side.
        z = exp2(-tl.abs(x) * LOG2E)
        dx = dg * (lower_bound * z / ((1.0 + z) * (1.0 + z)))
        return dx * a, dx * x
    z = exp2(-tl.abs(x) * LOG2E)
    sigmoid = tl.where(x >= 0.0, 1.0, z) / (1.0 + z)
    return -a * sigmoid * dg, dg * (g2 / LOG2E)


@triton.jit
def _load_wide(p, p_bits, o_v, m_t, V: tl.constexpr, C: tl.constexpr):
    """bfloat16 rows ``[C, BV]`` in float32 with the bits that the walks kept of what rounding lost."""
    m = m_t[:, None] & (o_v < V)
    token = tl.arange(0, C)[:, None]
    words = tl.load(p_bits + o_v * 4 + token // 2 % 4, mask=m, other=0)
    return with_lost_bits(tl.load(p + o_v, mask=m, other=0.0), words << (28 - token // 8 * 8 - token % 2 * 4) >> 28)


@triton.jit
def beta_gradient(
    dR_U, raw, BETA_IS_LOGIT: tl.constexpr, NEG_EIGVAL: tl.constexpr, LEAST_BETA: tl.constexpr
):  # fmt: skip
    """Gradient of what beta is made from, ``raw``, from ``dR . U`` of each token.

    dR = beta W and U = beta (R - P U) row by row: the gradient of beta is W (R - P U), their product over beta^2.
    """
    beta = at_least(activated_beta(raw, BETA_IS_LOGIT, NEG_EIGVAL), LEAST_BETA)
    dbeta = dR_U / beta / beta
    if NEG_EIGVAL:
        dbeta *= 2.0
    if BETA_IS_LOGIT:
        z = exp2(-tl.abs(raw) * LOG2E)
        dbeta *= z / ((1.0 + z) * (1.0 + z))
    return dbeta


@triton.jit
def _store_beta_gradient(
    dR_U, p_beta, p_dbeta, m_t,
    BETA_IS_LOGIT: tl.constexpr, NEG_EIGVAL: tl.constexpr, LEAST_BETA: tl.constexpr,
):  # fmt: skip
    raw = tl.load(p_beta, mask=m_t, other=0.0).to(tl.float32)
    dbeta = beta_gradient(dR_U, raw, BETA_IS_LOGIT, NEG_EIGVAL, LEAST_BETA)
    tl.store(p_dbeta, dbeta.to(p_dbeta.dtype.element_ty), mask=m_t)


@triton.jit
def _chunk(
    chunk, i_c, o_c, m_c, i_h, batch, start, first, length,
    p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_do, p_states, p_U, p_U_bits, p_dstates, p_dR, p_dR_bits,
    p_dq, p_dk, p_dq_part, p_dk_part, p_dg, p_dbeta, p_dA_part, p_dbias_part,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h, o_b, o_t, o_h,
    T, HV, GROUP, scale, lower_bound,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    GATE: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr, QK_L2NORM: tl.constexpr,
    BETA_IS_LOGIT: tl.constexpr, NEG_EIGVAL: tl.constexpr,
    GRADIENT_BC: tl.constexpr, GRADIENT_BV: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, LEAST_BETA: tl.constexpr, CHUNKS: tl.constexpr, WHOLE_ROWS: tl.constexpr,
):  # fmt: skip
    """What ``chunk_gradient`` stores of a chunk with tokens."""
    BC: tl.constexpr = GRADIENT_BC
    # The states are needed last, and lie where only memory has them.
    LINE: tl.constexpr = 128 * 8 // p_states.dtype.element_ty.primitive_bitwidth
    o_line = tl.arange(0, triton.next_power_of_2(V * BK // LINE))
    if V * BK % LINE == 0 and i_c == 0:
        o_state = chunk * (V * BK) + tl.minimum(o_line, V * BK // LINE - 1) * LINE
        prefetch(p_states + o_state)
        prefetch(p_dstates + o_state)
    o_r = tl.arange(0, C)
    row, column = o_r[:, None], o_r[None, :]
    m_t = first + o_r < length
    t = start + first + o_r
    p_do += batch * o_b + i_h * o_h + t[:, None] * o_t
    p_dR += batch * o_b + i_h * o_h + t[:, None] * o_t
    p_U += chunk * (C * V) + o_r[:, None] * V
    p_beta += batch * beta_b + t * beta_t + i_h * beta_h
    p_dbeta += (batch * T + t) * HV + i_h
    if i_c == 0 and SPLIT:
        # In a loop of its own and first, while registers are many.
        dR_U = tl.zeros((C,), tl.float32)
        for v in tl.range(0, V, GRADIENT_BV, num_stages=1):
            o_v = v + tl.arange(0, GRADIENT_BV)[None, :]
            wide_U = _load_wide(p_U, p_U_bits + chunk * (4 * V), o_v, m_t, V, C)
            dR_U += tl.sum(_load_wide(p_dR, p_dR_bits + chunk * (4 * V), o_v, m_t, V, C) * wide_U, 1)
        _store_beta_gradient(dR_U, p_beta, p_dbeta, m_t, BETA_IS_LOGIT, NEG_EIGVAL, LEAST_BETA)
    dM = tl.zeros((C, C), tl.float32)
    minus_dP = tl.zeros((C, C), tl.float32)
    for v in tl.range(0, V, GRADIENT_BV, num_stages=1):
        o_v = v + tl.arange(0, GRADIENT_BV)[None, :]
        m_row = m_t[:, None] & (o_v < V)
        b_do = tl.load(p_do + o_v, mask=m_row, other=0.0).to(TILE)
        b_dR = tl.load(p_dR + o_v, mask=m_row, other=0.0)
        b_U = tl.trans(tl.load(p_U + o_v, mask=m_row, other=0.0))
        dM = tl.dot(b_do, b_U, dM, input_precision=PRECISION)
        minus_dP = tl.dot(b_dR, b_U, minus_dP, input_precision=PRECISION)

    if i_c == 0 and not SPLIT:
        dR_U = tl.sum(tl.where(row == column, minus_dP, 0.0), 1)
        _store_beta_gradient(dR_U, p_beta, p_dbeta, m_t, BETA_IS_LOGIT, NEG_EIGVAL, LEAST_BETA)

    i_qk = i_h // GROUP
    t = t[:, None]
    p_q += batch * q_b + t * q_t + i_qk * q_h
    p_k += batch * k_b + t * k_t + i_qk * k_h
    p_g += batch * g_b + t * g_t + i_h * g_h
    rk = tl.full((C,), 1.0, tl.float32)
    rq = tl.full((C,), 1.0, tl.float32)
    if QK_L2NORM and BC < BK:
        k_squares = tl.zeros((C, BC), tl.float32)
        q_squares = tl.zeros((C, BC), tl.float32)
        for c in tl.range(0, BK, BC, num_stages=1):
            o = (c + tl.arange(0, BC))[None, :]
            m_block = (o < K) & m_t[:, None]
            b_k = tl.load(p_k + o, mask=m_block, other=0.0).to(tl.float32)
            b_q = tl.load(p_q + o, mask=m_block, other=0.0).to(tl.float32)
            k_squares += b_k * b_k
            q_squares += b_q * b_q
        rk = tl.rsqrt(tl.sum(k_squares, 1) + L2NORM_EPS)
        rq = tl.rsqrt(tl.sum(q_squares, 1) + L2NORM_EPS)
    m = m_c[None, :] & m_t[:, None]
    a = 1.0
    if HAS_A_LOG:
        a = tl.exp(tl.load(p_A_log + i_h))
    bias = tl.zeros((BC,), tl.float32)
    if HAS_DT_BIAS:
        bias = tl.load(p_dt_bias + i_h * K + o_c, mask=m_c, other=0.0)
    p_q += o_c[None, :]
    p_k += o_c[None, :]
    p_g += o_c[None, :]
    if QK_L2NORM and BC == BK:
        b_k = tl.load(p_k, mask=m, other=0.0).to(tl.float32)
        b_q = tl.load(p_q, mask=m, other=0.0).to(tl.float32)
        rk = tl.rsqrt(tl.sum(b_k * b_k, 1) + L2NORM_EPS)
        rq = tl.rsqrt(tl.sum(b_q * b_q, 1) + L2NORM_EPS)
    b_q, b_k, g2, raw = _load_rows(p_q, p_k, p_g, rq * scale, rk, a, bias, lower_bound, m, m_t, GATE)
    # A token's own pair has no decay.
    own = tl.sum(tl.where(row == column, dM, 0.0), 1)[:, None]
    if CHUNKS == HARD:
        dq, dk, dg = _joined_gradient(b_q, b_k, g2, dM, -minus_dP, C, TILE, PRECISION)
    else:
        dq, dk, dG = _anchored_gradient(b_q, b_k, g2, dM, -minus_dP, C, TILE, PRECISION)

    # What the chunk has of the state before it and of the gradient of that after it. Registers are short: the barriers
    # keep the compiler from loading this ahead, and from holding on to q, k and g meanwhile.
    tl.debug_barrier()
    dQ_plus = tl.zeros((C, BC), tl.float32)
    minus_dK_plus = tl.zeros((C, BC), tl.float32)
    dK_end = tl.zeros((C, BC), tl.float32)
    S_dS = tl.zeros((BC,), tl.float32)
    for v in tl.range(0, V, GRADIENT_BV, num_stages=1):
        o_v = v + tl.arange(0, GRADIENT_BV)
        m_v = o_v < V
        m_row = m_t[:, None] & m_v[None, :]
        o_state = chunk * (V * BK) + o_v[:, None] * BK + o_c[None, :]
        b_S = tl.load(p_states + o_state, mask=m_v[:, None], other=0.0)
        b_dS = tl.load(p_dstates + o_state, mask=m_v[:, None], other=0.0)
        b_do = tl.load(p_do + o_v[None, :], mask=m_row, other=0.0).to(TILE)
        b_dR = tl.load(p_dR + o_v[None, :], mask=m_row, other=0.0)
        b_U = tl.load(p_U + o_v[None, :], mask=m_row, other=0.0)
        S_dS += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), 0)
        dQ_plus = tl.dot(b_do, b_S, dQ_plus, input_precision=PRECISION)
        minus_dK_plus = tl.dot(b_dR, b_S, minus_dK_plus, input_precision=PRECISION)
        dK_end = tl.dot(b_U, b_dS, dK_end, input_precision=PRECISION)
    tl.debug_barrier()
    b_q, b_k, g2, raw = _load_rows(p_q, p_k, p_g, rq * scale, rk, a, bias, lower_bound, m, m_t, GATE)
    e_row = exp2(_sum_over_time(g2, tl.where(row >= column, 1.0, 0.0)))
    dQ_plus *= e_row
    minus_dK_plus *= e_row
    dK_end *= exp2(_sum_over_time(g2, tl.where(row < column, 1.0, 0.0)))
    dq += dQ_plus + own * b_k
    dk += dK_end - minus_dK_plus + own * b_q
    # Rows count from the start of the chunk, and to its end.
    dG_row = dQ_plus * b_q - minus_dK_plus * b_k
    if CHUNKS == HARD:
        dg += _sum_over_time(dG_row, tl.where(row <= column, 1.0, 0.0))
    else:
        dg = _sum_over_time(dG_row + dG, tl.where(row <= column, 1.0, 0.0))
    dg += _sum_over_time(dK_end * b_k, tl.where(row > column, 1.0, 0.0))
    dg += (S_dS * exp2(tl.sum(g2, 0)))[None, :]

    dq *= scale
    o_part = ((batch * T + t) * HV + i_h) * K + o_c[None, :]
    if WHOLE_ROWS:
        # All channels of the only value head of q and k are here: the rows' gradients are whole.
        if QK_L2NORM:
            dk = _through_norm(b_k, dk, rk)
            dq = _through_norm(tl.load(p_q, mask=m, other=0.0).to(tl.float32) * rq[:, None], dq, rq)
        tl.store(p_dq + o_part, dq.to(p_dq.dtype.element_ty), mask=m)
        tl.store(p_dk + o_part, dk.to(p_dk.dtype.element_ty), mask=m)
    else:
        tl.store(p_dq_part + o_part, dq, mask=m)
        tl.store(p_dk_part + o_part, dk, mask=m)
    draw, dA = gate_gradient(dg, g2, raw, a, bias[None, :], lower_bound, GATE)
    tl.store(p_dg + o_part, draw.to(p_dg.dtype.element_ty), mask=m)
    if HAS_A_LOG:
        tl.store(p_dA_part + chunk * BK + o_c, tl.sum(tl.where(m, dA, 0.0), 0))
    if HAS_DT_BIAS:
        tl.store(p_dbias_part + chunk * BK + o_c, tl.sum(tl.where(m, draw, 0.0), 0))


@triton.jit(do_not_specialize=["T", "N", "HV", "GROUP", "lower_bound", "scale"])
def chunk_gradient(
    p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_cu, p_hard, p_do, p_states, p_U, p_U_bits, p_dstates, p_dR, p_dR_bits,
    p_dq, p_dk, p_dq_part, p_dk_part, p_dg, p_dbeta, p_dA_part, p_dbias_part,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h, o_b, o_t, o_h,
    T, N, HV, GROUP, scale, lower_bound,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    GATE: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr, QK_L2NORM: tl.constexpr,
    BETA_IS_LOGIT: tl.constexpr, NEG_EIGVAL: tl.constexpr, PACKED: tl.constexpr, SEARCH: tl.constexpr,
    GRADIENT_BC: tl.constexpr, GRADIENT_BV: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, LEAST_BETA: tl.constexpr, CHUNKS: tl.constexpr, WHOLE_ROWS: tl.constexpr,
):  # fmt: skip
    """One (chunk, value head, block of GRADIENT_BC channels); of HARD chunks as ``prepare``.

    Args:
        p_hard: chunks that one anchor does not serve; see ``prepare``. CHUNKS: ALL, EASY or HARD.
        p_do, p_dR: ``[B, T, HV, V]`` with the strides of o. p_states, p_U, p_U_bits, p_dstates, p_dR, p_dR_bits: what
            the walks left.
        p_dq, p_dk: ``[B, T, H, K]``, written if WHOLE_ROWS: one program has all channels, and H is HV.
        p_dq_part, p_dk_part: ``[B, T, HV, K]`` float32, otherwise: gradients of q and k after the normalisation.
        p_dg: ``[B, T, HV, K]``, of the raw gate. p_dbeta: ``[B, T, HV]``.
        p_dA_part, p_dbias_part: ``[slots, HV, BK]`` float32, each chunk's part of the gradients of A_log and dt_bias.
    """
    BLOCKS: tl.constexpr = BK // GRADIENT_BC
    given = (
        p_q, p_k, p_g, p_beta, p_A_log, p_dt_bias, p_do, p_states, p_U, p_U_bits, p_dstates, p_dR, p_dR_bits,
        p_dq, p_dk, p_dq_part, p_dk_part, p_dg, p_dbeta, p_dA_part, p_dbias_part,
        q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h, o_b, o_t, o_h,
        T, HV, GROUP, scale, lower_bound,
    )  # fmt: skip
    if CHUNKS == HARD:
        marks = marks_of_program(p_hard, slots(T, N, C, PACKED) * HV * BLOCKS, BLOCKS)
        if marks == 0:
            return
        # What does not depend on the chunk is made anew for each: kept, it would spill.
        for i in tl.range(0, MOST_LOOKED_AT, num_stages=1, disable_licm=True):
            if (marks >> i) & 1:
                pid = tl.program_id(0) + i * tl.num_programs(0)
                i_c = pid % BLOCKS
                chunk = (pid // BLOCKS).to(tl.int64)
                i_s = chunk // HV
                i_h = (chunk % HV).to(tl.int32)
                o_c = i_c * GRADIENT_BC + tl.arange(0, GRADIENT_BC)
                m_c = o_c < K
                batch, start, first, length = locate(p_cu, i_s, T, N, C, PACKED, SEARCH)
                _chunk(
                    chunk, i_c, o_c, m_c, i_h, batch, start, first, length, *given,
                    K, V, C, BK, GATE, HAS_A_LOG, HAS_DT_BIAS, QK_L2NORM, BETA_IS_LOGIT, NEG_EIGVAL,
                    GRADIENT_BC, GRADIENT_BV, TILE, SPLIT, PRECISION, LEAST_BETA, CHUNKS, WHOLE_ROWS,
                )  # fmt: skip
    else:
        pid = tl.program_id(0)
        i_c = pid % BLOCKS
        chunk = (pid // BLOCKS).to(tl.int64)
        if CHUNKS == EASY:
            is_hard = tl.load(p_hard + chunk) != 0
            if is_hard:
                return
        i_s = chunk // HV
        i_h = (chunk % HV).to(tl.int32)
        o_c = i_c * GRADIENT_BC + tl.arange(0, GRADIENT_BC)
        m_c = o_c < K
        batch, start, first, length = locate(p_cu, i_s, T, N, C, PACKED, SEARCH)
        if first >= length:
            if HAS_A_LOG:
                tl.store(p_dA_part + chunk * BK + o_c, tl.zeros((GRADIENT_BC,), tl.float32))
            if HAS_DT_BIAS:
                tl.store(p_dbias_part + chunk * BK + o_c, tl.zeros((GRADIENT_BC,), tl.float32))
            return
        _chunk(
            chunk, i_c, o_c, m_c, i_h, batch, start, first, length, *given,
            K, V, C, BK, GATE, HAS_A_LOG, HAS_DT_BIAS, QK_L2NORM, BETA_IS_LOGIT, NEG_EIGVAL,
            GRADIENT_BC, GRADIENT_BV, TILE, SPLIT, PRECISION, LEAST_BETA, CHUNKS, WHOLE_ROWS,
        )  # fmt: skip


@triton.jit
def _normalisation_gradient(x, dy, QK_L2NORM: tl.constexpr):
    """Gradient of x from that of ``y = x rsqrt(sum(x^2) + 1e-6)``, both ``[ROWS, BK]``; dy itself without the norm."""
    if QK_L2NORM:
        r = tl.rsqrt(tl.sum(x * x, 1) + L2NORM_EPS)
        return _through_norm(x * r[:, None], dy, r)
    return dy


@triton.jit(do_not_specialize=["B", "T", "N", "H", "GROUP"])
def head_gradient(
    p_q, p_k, p_cu, p_dq_part, p_dk_part, p_dq, p_dk,
    q_b, q_t, q_h, k_b, k_t, k_h,
    B, T, N, H, GROUP,
    K: tl.constexpr, BK: tl.constexpr, QK_L2NORM: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of q and k ``[B, T, H, K]`` of one (block of ROWS tokens, head): the sum over its value heads in order.

    Rows past the last sequence get zeros.
    """
    pid = tl.program_id(0)
    i_h = pid % H
    row = (pid // H).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    batch = row // T
    t = row % T
    m_row = batch < B
    used = m_row
    if PACKED:
        used = used & (t < tl.load(p_cu + N))
    o_k = tl.arange(0, BK)
    m_k = (o_k < K)[None, :]
    m = used[:, None] & m_k
    dq = tl.zeros((ROWS, BK), tl.float32)
    dk = tl.zeros((ROWS, BK), tl.float32)
    o_part = (row[:, None] * H + i_h) * (GROUP * K) + o_k[None, :]
    for i in tl.range(0, GROUP, num_stages=1):
        dq += tl.load(p_dq_part + o_part + i * K, mask=m, other=0.0)
        dk += tl.load(p_dk_part + o_part + i * K, mask=m, other=0.0)
    q = tl.load(p_q + (batch * q_b + t * q_t + i_h * q_h)[:, None] + o_k[None, :], mask=m, other=0.0).to(tl.float32)
    k = tl.load(p_k + (batch * k_b + t * k_t + i_h * k_h)[:, None] + o_k[None, :], mask=m, other=0.0).to(tl.float32)
    dq = _normalisation_gradient(q, dq, QK_L2NORM)
    dk = _normalisation_gradient(k, dk, QK_L2NORM)
    o_out = (row[:, None] * H + i_h) * K + o_k[None, :]
    tl.store(p_dq + o_out, dq.to(p_dq.dtype.element_ty), mask=m_row[:, None] & m_k)
    tl.store(p_dk + o_out, dk.to(p_dk.dtype.element_ty), mask=m_row[:, None] & m_k)
