"""Second kernel: the state of each (sequence, value head, V part) from the first token to the last, in registers.

The state is held transposed, ``[BV, BK]`` float32, so that it is the register operand of every product; the tiles of
the chunks are the shared-memory operands. V columns never mix.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_kda.backends.triton.common import activated_beta, first_slot, log2_decay, rstd


@triton.jit
def _fine_dot(a, p_square, acc, C: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """``acc + a X^T`` with X ``[C, C]`` from the workspace: a bfloat16 pair, or float32."""
    o = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    if SPLIT:
        acc = tl.dot(a, tl.trans(tl.load(p_square + o)), acc)
        return tl.dot(a, tl.trans(tl.load(p_square + C * C + o)), acc)
    return tl.dot(a, tl.trans(tl.load(p_square + o)), acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "N", "scale", "lower_bound"])
def recurrence(
    p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_cu, p_tiles, p_squares, p_decay, p_S0, p_S, p_o,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    S0_n, S0_h, S0_v, S0_k, S_n, S_h, S_v, S_k, o_b, o_t, o_h,
    T, N, scale, lower_bound,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, GATE: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr,
    QK_L2NORM: tl.constexpr, BETA_IS_LOGIT: tl.constexpr, NEG_EIGVAL: tl.constexpr, PACKED: tl.constexpr,
    HAS_S0: tl.constexpr, STORE_S: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One (sequence, value head, V part); see ``prepare`` for the workspace.

    Args:
        p_v, p_o: ``[B, T, HV, V]``. p_S0, p_S: states, addressed by their strides, so in either layout.
        The raw inputs are read only if the state is not finite at the end.
    """
    PARTS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % PARTS
    i_h = (pid // PARTS) % HV
    n = (pid // (PARTS * HV)).to(tl.int64)
    if PACKED:
        start = tl.load(p_cu + n).to(tl.int64)
        length = (tl.load(p_cu + n + 1) - start).to(tl.int32)
        slot = first_slot(start, n, C)
        batch = tl.zeros((), tl.int64)
    else:
        start = tl.zeros((), tl.int64)
        length = T
        slot = n * ((T + C - 1) // C)
        batch = n
    o_r = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V
    m_S = m_v[:, None] & (o_k < K)[None, :]
    if HAS_S0:
        p_first = p_S0 + n * S0_n + i_h * S0_h + o_v[:, None] * S0_v + o_k[None, :] * S0_k
        S = tl.load(p_first, mask=m_S, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((BV, BK), tl.float32)

    chunk = slot * HV + i_h
    SQUARE: tl.constexpr = C * C * (2 if SPLIT else 1)
    p_v += batch * v_b + start * v_t + i_h * v_h
    p_o += batch * o_b + start * o_t + i_h * o_h
    p_tiles += chunk * (3 * C * BK)
    p_squares += chunk * (2 * SQUARE)
    p_decay += chunk * BK
    o_tile = o_r[:, None] * BK + o_k[None, :]
    i = tl.zeros((), tl.int64)
    for first in tl.range(0, length, C, num_stages=STAGES):
        p_tile = p_tiles + i * (3 * C * BK)
        p_square = p_squares + i * (2 * SQUARE)
        m = (first + o_r < length)[:, None] & m_v[None, :]
        o_rows = (first + o_r).to(tl.int64)[:, None]
        K_plus = tl.load(p_tile + o_tile)
        Q_plus = tl.load(p_tile + C * BK + o_tile)
        K_end = tl.load(p_tile + 2 * C * BK + o_tile)
        decay = tl.load(p_decay + i * BK + o_k)
        b_v = tl.load(p_v + o_rows * v_t + o_v[None, :], mask=m, other=0.0)
        b_S = S.to(TILE)
        b_o = tl.dot(b_S, tl.trans(Q_plus), input_precision=PRECISION)
        R = tl.trans(b_v).to(tl.float32) - tl.dot(b_S, tl.trans(K_plus), input_precision=PRECISION)
        R = R.to(TILE)
        U = _fine_dot(R, p_square, tl.zeros((BV, C), tl.float32), C, SPLIT, PRECISION)
        b_o = _fine_dot(R, p_square + SQUARE, b_o, C, SPLIT, PRECISION)
        S = tl.dot(U.to(TILE), K_end, S * decay[None, :], input_precision=PRECISION)
        tl.store(p_o + o_rows * o_t + o_v[None, :], tl.trans(b_o).to(p_o.dtype.element_ty), mask=m)
        i += HV

    # 0 * x is not 0 for a NaN or inf, which a product of matrices has then also carried to earlier rows.
    if tl.max(tl.where(S * 0.0 == 0.0, 0, 1)) > 0:
        if HAS_S0:
            S = tl.load(p_first, mask=m_S, other=0.0).to(tl.float32)
        else:
            S = tl.zeros((BV, BK), tl.float32)
        m_k = o_k < K
        i_qk = i_h // (HV // H)
        a = 1.0
        if HAS_A_LOG:
            a = tl.exp(tl.load(p_A_log + i_h))
        bias = tl.zeros((BK,), tl.float32)
        if HAS_DT_BIAS:
            bias = tl.load(p_dt_bias + i_h * K + o_k, mask=m_k, other=0.0)
        i_t = start
        for _ in tl.range(0, length):
            g = tl.load(p_g + batch * g_b + i_t * g_t + i_h * g_h + o_k, mask=m_k, other=0.0).to(tl.float32)
            k = tl.load(p_k + batch * k_b + i_t * k_t + i_qk * k_h + o_k, mask=m_k, other=0.0).to(tl.float32)
            q = tl.load(p_q + batch * q_b + i_t * q_t + i_qk * q_h + o_k, mask=m_k, other=0.0).to(tl.float32)
            beta = tl.load(p_beta + batch * beta_b + i_t * beta_t + i_h * beta_h).to(tl.float32)
            v = tl.load(p_v + (i_t - start) * v_t + o_v, mask=m_v, other=0.0).to(tl.float32)
            k *= rstd(k, QK_L2NORM)
            q *= rstd(q, QK_L2NORM) * scale
            S *= tl.exp2(tl.where(m_k, log2_decay(g, a, bias, lower_bound, GATE), 0.0))[None, :]
            u = activated_beta(beta, BETA_IS_LOGIT, NEG_EIGVAL) * (v - tl.sum(S * k[None, :], 1))
            S += u[:, None] * k[None, :]
            row = tl.sum(S * q[None, :], 1)
            tl.store(p_o + (i_t - start) * o_t + o_v, row.to(p_o.dtype.element_ty), mask=m_v)
            i_t += 1
    if STORE_S:
        p_last = p_S + n * S_n + i_h * S_h + o_v[:, None] * S_v + o_k[None, :] * S_k
        tl.store(p_last, S.to(p_S.dtype.element_ty), mask=m_S)
