"""Decoding: one or a few tokens of each row, its state read from a pool once and written back, in one launch.

A program is one warp and holds a few value columns of one state, ``[BV, BK]`` float32, in its registers. What bounds it
is the memory of the states, so all its loads are under way before anything is computed. Sums over K stay in the warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_kda.backends.triton.common import activated_beta, exists, exp2, log2_decay, product, rstd

# Where a row's states are: in its own slot, in one given slot, or in one given slot per token.
OWN, ONE, EACH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _token(p_q, p_k, p_v, p_g, p_beta, m_k, m_v, inside):
    """The raw values of one token; zeros where it is not ``inside`` its row."""
    b_k = tl.load(p_k, mask=m_k & inside, other=0.0)
    b_g = tl.load(p_g, mask=m_k & inside, other=0.0)
    b_q = tl.load(p_q, mask=m_k & inside, other=0.0)
    b_v = tl.load(p_v, mask=m_v & inside, other=0.0)
    beta = tl.load(p_beta, mask=inside, other=0.0)
    return b_q, b_k, b_v, b_g, beta


@triton.jit
def _quarters(x):
    """The entries of the last dimension that are 0, 1, 2 and 3 modulo 4."""
    shape: tl.constexpr = x.shape[:-1] + [x.shape[-1] // 4, 2, 2]  # noqa: RUF005  Triton unpacks no lists
    even, odd = tl.split(tl.reshape(x, shape))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def read(S, b_x, BESIDE: tl.constexpr):
    """``x S``, the sum over K. BESIDE: whether a thread has channels that lie side by side, four at least.

    Which products are rounded before they are added is said here. The compiler would choose, for one value column
    otherwise than for the next: a column's bits would depend on which of a program's it is, and so on how many rows and
    tokens the call has.
    """
    if not BESIDE:
        return tl.sum(product(S, b_x[None, :]), 1)
    S0, S1, S2, S3 = _quarters(S)
    x0, x1, x2, x3 = _quarters(b_x)
    return tl.sum(tl.fma(S3, x3[None, :], tl.fma(S2, x2[None, :], tl.fma(S1, x1[None, :], S0 * x0[None, :]))), 1)


@triton.jit
def updated(S, b_q, b_k, b_v, decay, beta, BESIDE: tl.constexpr):
    """State and output after one token; see :func:`read`."""
    S *= decay[None, :]
    u = beta * (b_v - read(S, b_k, BESIDE))
    S = tl.fma(u[:, None], b_k[None, :], S)
    return S, read(S, b_q, BESIDE)


@triton.jit
def after_token(
    S, b_q, b_k, b_v, b_g, beta, a, bias, m_k, scale, lower_bound, BESIDE: tl.constexpr,
    GATE: tl.constexpr, QK_L2NORM: tl.constexpr, BETA_IS_LOGIT: tl.constexpr, NEG_EIGVAL: tl.constexpr,
):  # fmt: skip
    """State and output after one token, from its raw values."""
    b_k = b_k.to(tl.float32)
    b_q = b_q.to(tl.float32)
    b_k *= rstd(b_k, QK_L2NORM)
    b_q *= rstd(b_q, QK_L2NORM) * scale
    decay = exp2(log2_decay(b_g.to(tl.float32), a, bias, lower_bound, m_k, GATE))
    beta = activated_beta(beta.to(tl.float32), BETA_IS_LOGIT, NEG_EIGVAL)
    return updated(S, b_q, b_k, b_v.to(tl.float32), decay, beta, BESIDE)


@triton.jit
def clear(p_o, o_t, first, last, step, m_v, BV: tl.constexpr):
    """Zeros into every ``step``-th output row from ``first`` on, before ``last``; ``p_o`` is at row 0."""
    zeros = tl.zeros((BV,), p_o.dtype.element_ty)
    for t in tl.range(first, last, step, num_stages=1):
        tl.store(p_o + t * o_t, zeros, mask=m_v)


@triton.jit(do_not_specialize=["T", "N", "slots", "width", "pad", "scale", "lower_bound"])
def decode(
    p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_cu, p_S, p_index, p_accepted, p_known, p_o,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    cu_n, S_n, S_h, index_n, index_t, accepted_n, known_n, o_b, o_t, o_h,
    T, N, slots, width, pad, scale, lower_bound,
    HV: tl.constexpr, GROUP: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, S_v: tl.constexpr, S_k: tl.constexpr,
    GATE: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr, QK_L2NORM: tl.constexpr,
    BETA_IS_LOGIT: tl.constexpr, NEG_EIGVAL: tl.constexpr, PACKED: tl.constexpr, SINGLE: tl.constexpr,
    INDEX: tl.constexpr, HAS_ACCEPTED: tl.constexpr, HAS_KNOWN: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """One (row, value head, V part).

    Args:
        p_q, p_k: ``[B, T, H, K]``. p_v, p_o: ``[B, T, HV, V]``. p_g: ``[B, T, HV, K]``. p_beta: ``[B, T, HV]``. Strides
            in elements by dimension.
        p_cu: ``[N + 1]`` boundaries if PACKED.
        p_S: the pool, addressed by its strides, so in either layout. Those of one state are constants, so that a thread
            needs one address and not one for each of its rows.
        p_index: ``[N]`` or ``[N, width]`` by INDEX. p_accepted, p_known: ``[N]`` if HAS_ACCEPTED, HAS_KNOWN.
        GROUP: value heads per query/key head. HV and GROUP are constants so that no program divides by them.
        SINGLE: every row has one token. STORE: whether states go to the pool.
    """
    PARTS: tl.constexpr = (V + BV - 1) // BV
    # No thread has less than 16 bytes of a state; but of only 16 channels a lane may have one.
    BESIDE: tl.constexpr = S_k == 1 and BK > 16
    pid = tl.program_id(0)
    i_v = pid % PARTS
    i_h = ((pid // PARTS) % HV).to(tl.int64)
    n = (pid // (PARTS * HV)).to(tl.int64)
    valid = True
    slot = n
    if INDEX == ONE:
        slot = tl.load(p_index + n * index_n).to(tl.int64)
    if INDEX == EACH:
        at = 0
        if HAS_ACCEPTED:
            accepted = tl.load(p_accepted + n * accepted_n)
            valid = (accepted >= 0) & (accepted <= width)
            at = tl.where(valid & (accepted > 0), accepted - 1, 0).to(tl.int64)
        slot = tl.load(p_index + n * index_n + at * index_t).to(tl.int64)
        target = tl.load(p_index + n * index_n).to(tl.int64)
    known = True
    if HAS_KNOWN:
        known = tl.load(p_known + n * known_n).to(tl.int1)
    if INDEX != OWN:
        # What the state waits for is asked for before the other addresses are worked out.
        tl.debug_barrier()
    if PACKED:
        first = tl.load(p_cu + n * cu_n).to(tl.int64)
        length = tl.load(p_cu + (n + 1) * cu_n).to(tl.int64) - first
        batch = tl.zeros((), tl.int64)
        inside = length > 0
    else:
        first = tl.zeros((), tl.int64)
        length = tl.full((), 1, tl.int64) if SINGLE else T.to(tl.int64)
        batch = n
        inside = True

    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    i_qk = i_h // GROUP
    p_q += batch * q_b + first * q_t + i_qk * q_h + o_k
    p_k += batch * k_b + first * k_t + i_qk * k_h + o_k
    p_v += batch * v_b + first * v_t + i_h * v_h + o_v
    p_g += batch * g_b + first * g_t + i_h * g_h + o_k
    p_beta += batch * beta_b + first * beta_t + i_h * beta_h
    p_o += batch * o_b + i_h * o_h + o_v
    b_q, b_k, b_v, b_g, beta = _token(p_q, p_k, p_v, p_g, p_beta, m_k, m_v, inside)
    a = 1.0
    if HAS_A_LOG:
        a = tl.exp(tl.load(p_A_log + i_h))
    bias = tl.zeros((BK,), tl.float32)
    if HAS_DT_BIAS:
        bias = tl.load(p_dt_bias + i_h * K + o_k, mask=m_k, other=0.0)

    if INDEX != OWN:
        valid = valid & exists(slot, slots, pad)
    if PACKED:
        valid = valid & inside
    p_S += i_h * S_h + (o_v.to(tl.int64)[:, None] * S_v + o_k.to(tl.int64)[None, :] * S_k)
    m_S = m_v[:, None] & m_k[None, :]
    # Before the branch below: within one block the compiler puts loads off until what was loaded has been used.
    S = tl.load(p_S + slot * S_n, mask=m_S & known & valid, other=0.0).to(tl.float32)
    if PACKED:
        # Rows that belong to nobody are cleared by all programs together.
        clear(p_o, o_t, tl.load(p_cu + N * cu_n).to(tl.int64) + n, T, N, m_v, BV)
    if not valid:
        clear(p_o, o_t, first, first + length, 1, m_v, BV)
        return

    p_o += first * o_t
    if SINGLE:
        S, b_o = after_token(
            S, b_q, b_k, b_v, b_g, beta, a, bias, m_k, scale, lower_bound, BESIDE,
            GATE, QK_L2NORM, BETA_IS_LOGIT, NEG_EIGVAL,
        )  # fmt: skip
        tl.store(p_o, b_o.to(p_o.dtype.element_ty), mask=m_v)
        if STORE and INDEX == EACH:
            slot = target
            m_S = m_S & exists(target, slots, pad)
    else:
        for t in tl.range(0, length, num_stages=1):
            # What the next token needs is under way while this one is computed.
            p_q += q_t
            p_k += k_t
            p_v += v_t
            p_g += g_t
            p_beta += beta_t
            next_q, next_k, next_v, next_g, next_beta = _token(p_q, p_k, p_v, p_g, p_beta, m_k, m_v, t + 1 < length)
            if STORE and INDEX == EACH:
                p_next = p_index + n * index_n + (t + 1) * index_t
                next_target = tl.load(p_next, mask=t + 1 < tl.minimum(length, width), other=-1).to(tl.int64)
            S, b_o = after_token(
                S, b_q, b_k, b_v, b_g, beta, a, bias, m_k, scale, lower_bound, BESIDE,
                GATE, QK_L2NORM, BETA_IS_LOGIT, NEG_EIGVAL,
            )  # fmt: skip
            tl.store(p_o, b_o.to(p_o.dtype.element_ty), mask=m_v)
            p_o += o_t
            if STORE and INDEX == EACH:
                m_target = m_S & exists(target, slots, pad)
                tl.store(p_S + target * S_n, S.to(p_S.dtype.element_ty), mask=m_target)
                target = next_target
            b_q, b_k, b_v, b_g, beta = next_q, next_k, next_v, next_g, next_beta
    if STORE and (SINGLE or INDEX != EACH):
        tl.store(p_S + slot * S_n, S.to(p_S.dtype.element_ty), mask=m_S)
