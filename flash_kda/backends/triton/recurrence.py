"""Second kernel: the state of each (sequence, value head, V part) from the first token to the last, in registers.

The state is held transposed, ``[BV, BK]`` float32, so that it is the register operand of every product; the tiles of
the chunks are the shared-memory operands. V columns never mix.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_kda.backends.triton.common import activated_beta, exp2, first_slot, log2_decay, rstd, token_of_row


@triton.jit
def _halves(x, BV: tl.constexpr, C: tl.constexpr):
    """Left and right half of ``[BV, 2 C]``; both halves of a thread's registers, so nothing moves."""
    return tl.split(tl.permute(tl.reshape(x, (BV, 2, C)), (0, 2, 1)))


@triton.jit
def _twice(x, BV: tl.constexpr, C: tl.constexpr):
    """``[BV, C]`` beside itself, ``[BV, 2 C]``."""
    return tl.reshape(tl.permute(tl.join(x, x), (0, 2, 1)), (BV, 2 * C))


@triton.jit(do_not_specialize=["T", "N", "HV", "GROUP", "scale", "lower_bound"])
def recurrence(
    p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_cu, p_tiles, p_squares, p_decay, p_S0, p_S, p_o,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    S0_n, S0_h, S0_v, S0_k, S_n, S_h, S_v, S_k, o_b, o_t, o_h,
    T, N, HV, GROUP, scale, lower_bound,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    SEGMENTS: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr,
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
    o_r = tl.arange(0, 2 * C)
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
    WIDTH: tl.constexpr = 2 * C if SPLIT else C
    p_v += batch * v_b + start * v_t + i_h * v_h
    p_o += batch * o_b + start * o_t + i_h * o_h
    p_tiles += chunk * (3 * C * BK)
    p_squares += chunk * (2 * C * WIDTH)
    p_decay += chunk * BK
    o_time = token_of_row(C, SEGMENTS)
    # A product with -I turns v into the layout of the other products. It is exact, and makes v an operand that is
    # fetched ahead into shared memory like the others. The sign keeps the sum that follows from being folded into this
    # product, which must not wait for the state.
    minus_unit = tl.where(tl.arange(0, C)[:, None] == tl.arange(0, C)[None, :], -1.0, 0.0).to(p_v.dtype.element_ty)
    p_v_row = p_v + o_time.to(tl.int64)[:, None] * v_t + o_v[None, :]
    p_o_row = p_o + o_time.to(tl.int64)[:, None] * o_t + o_v[None, :]
    i = tl.zeros((), tl.int64)
    for first in tl.range(0, length, C, num_stages=STAGES):
        p_tile = p_tiles + i * (3 * C * BK)
        p_square = p_squares + i * (2 * C * WIDTH)
        m = (o_time < length - first)[:, None] & m_v[None, :]
        b_v = tl.load(p_v_row, mask=m, other=0.0)
        KQ = tl.load(p_tile + o_r[:, None] * BK + o_k[None, :])
        square = tl.load(p_square + o_r[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
        K_end = tl.load(p_tile + 2 * C * BK + tl.arange(0, C)[:, None] * BK + o_k[None, :])
        decay = tl.load(p_decay + i * BK + o_k)
        minus_v = tl.dot(tl.trans(b_v), minus_unit, input_precision=PRECISION)
        # S^T [-K_plus; Q_plus]^T = [R - V | state's part of O]^T
        R, o_of_S = _halves(tl.dot(S.to(TILE), tl.trans(KQ), input_precision=PRECISION), BV, C)
        R = (R - minus_v).to(TILE)
        if SPLIT:
            R = _twice(R, BV, C)
        U, o_of_U = _halves(tl.dot(R, tl.trans(square), input_precision=PRECISION), BV, C)
        b_U = U.to(TILE)
        S = tl.dot(b_U, K_end, S * decay[None, :], input_precision=PRECISION)
        if SPLIT:
            # What the rounding of U lost: the state keeps it for as long as the gate is slow.
            S = tl.dot((U - b_U.to(tl.float32)).to(TILE), K_end, S)
        tl.store(p_o_row, tl.trans(o_of_S + o_of_U).to(p_o.dtype.element_ty), mask=m)
        p_v_row += C * v_t
        p_o_row += C * o_t
        i += HV

    # 0 * x is not 0 for a NaN or inf, which a product of matrices has then also carried to earlier rows.
    if tl.max(tl.where(S * 0.0 == 0.0, 0, 1)) > 0:
        if HAS_S0:
            S = tl.load(p_first, mask=m_S, other=0.0).to(tl.float32)
        else:
            S = tl.zeros((BV, BK), tl.float32)
        m_k = o_k < K
        i_qk = i_h // GROUP
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
            S *= exp2(log2_decay(g, a, bias, lower_bound, m_k, GATE))[None, :]
            u = activated_beta(beta, BETA_IS_LOGIT, NEG_EIGVAL) * (v - tl.sum(S * k[None, :], 1))
            S += u[:, None] * k[None, :]
            row = tl.sum(S * q[None, :], 1)
            tl.store(p_o + (i_t - start) * o_t + o_v, row.to(p_o.dtype.element_ty), mask=m_v)
            i_t += 1
    if STORE_S:
        p_last = p_S + n * S_n + i_h * S_h + o_v[:, None] * S_v + o_k[None, :] * S_k
        tl.store(p_last, S.to(p_S.dtype.element_ty), mask=m_S)
