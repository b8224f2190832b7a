"""The decode step: convolutions, gate, recurrence and norm of one token of each row, in one launch.

A program has a query/key head of a row and all value heads that use it. So nobody else reads what it writes: no states,
and no last inputs of the convolutions either, of which those of q and k serve all of these value heads.

What it waits for is memory, and in a launch of few rows its own chain of operations. So everything is under way before
anything is computed; and a channel is convolved by one thread, of a vector that has one for every thread, and handed on
through shared memory to all threads that need it. Of shorter vectors the compiler would load and convolve anew in every
thread what that thread needs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_kda.backends.triton.common import activated_beta, exists, exp2, log2_decay, product, rstd, sigmoid
from flash_kda.backends.triton.decode import updated


@triton.jit
def _either(p_q, p_k, is_k, m):
    """What lies at k's addresses where ``is_k``, and at q's elsewhere."""
    if p_q.dtype == p_k.dtype:
        found = tl.load(tl.where(is_k, p_k, p_q), mask=m, other=0.0)
    else:
        of_q = tl.load(p_q, mask=m & (is_k == 0), other=0.0).to(tl.float32)
        found = tl.where(is_k, tl.load(p_k, mask=m & is_k, other=0.0).to(tl.float32), of_q)
    return found


@triton.jit
def _vectors(p, step, o, m, COUNT: tl.constexpr):
    """COUNT vectors at offsets ``o``, each ``step`` elements on from the last."""
    found: tl.tuple = ()
    for _ in tl.static_range(COUNT):
        found += (tl.load(p + o, mask=m, other=0.0),)
        p += step
    return found


@triton.jit
def _convolved(b_x, before, weights, bias, W: tl.constexpr):
    """SiLU of the convolution of some channels."""
    y = bias.to(tl.float32)
    for i in tl.static_range(W - 1):
        y = tl.fma(before[i].to(tl.float32), weights[i].to(tl.float32), y)
    y = tl.fma(b_x.to(tl.float32), weights[W - 1].to(tl.float32), y)
    return y * sigmoid(y)


@triton.jit
def _keep(b_x, before, p_conv, conv_w, o, m, W: tl.constexpr):
    """All inputs but the oldest go to the pool, each one place further up than it was."""
    for i in tl.static_range(W - 1):
        tl.store(p_conv + o, before[i + 1] if i < W - 2 else b_x.to(p_conv.dtype.element_ty), mask=m)
        p_conv += conv_w


# What differs from row to row must not decide how sums are made, or a row's bits would depend on its company. So
# nothing is compiled for where rows lie; a thread has single elements of them anyway.
_OF_ROWS = ("q", "k", "v", "g", "beta", "z", "o", "index", "known")
_STRIDES = ("q_b", "q_h", "k_b", "k_h", "v_b", "v_h", "g_b", "g_h", "beta_b", "beta_h", "z_b", "z_h", "o_b", "o_h")


@triton.jit(
    do_not_specialize=[*_STRIDES, "index_n", "known_n", "slots", "pad", "scale", "lower_bound", "eps"],
    do_not_specialize_on_alignment=[f"p_{name}" for name in _OF_ROWS],
)
def step(
    p_q, p_k, p_v, p_g, p_beta, p_z, p_A_log, p_dt_bias, p_S, p_conv, p_index, p_known,
    p_q_weight, p_k_weight, p_v_weight, p_q_bias, p_k_bias, p_v_bias, p_norm, p_o,
    q_b, q_h, k_b, k_h, v_b, v_h, g_b, g_h, beta_b, beta_h, z_b, z_h,
    S_n, S_h, conv_n, conv_w, conv_c, index_n, known_n,
    q_weight_c, q_weight_w, k_weight_c, k_weight_w, v_weight_c, v_weight_w, o_b, o_h,
    slots, pad, scale, lower_bound, eps,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr, S_v: tl.constexpr, S_k: tl.constexpr,
    ROWS: tl.constexpr, PIECE: tl.constexpr, THREADS: tl.constexpr,
    GATE: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
    QK_L2NORM: tl.constexpr, BETA_IS_LOGIT: tl.constexpr, NEG_EIGVAL: tl.constexpr,
    HAS_INDEX: tl.constexpr, HAS_KNOWN: tl.constexpr,
):  # fmt: skip
    """One (row, query/key head).

    Args:
        p_q, p_k: ``[N, 1, H, K]``. p_v, p_z, p_o: ``[N, 1, HV, V]``. p_g: ``[N, 1, HV, K]``. p_beta: ``[N, 1, HV]``.
            Strides in elements by dimension.
        p_S: the pool of states, addressed by its strides, so in either layout. p_conv: ``[slots, W - 1, channels]``,
            those of q, k and v beside each other.
        p_index: ``[N]`` if HAS_INDEX. p_known: ``[N]`` if HAS_KNOWN.
        p_q_weight, p_k_weight, p_v_weight: ``[channels, W]``. p_q_bias, p_k_bias, p_v_bias: ``[channels]`` if HAS_BIAS.
        p_norm: ``[V]``.
        GROUP: value heads per query/key head. PARTS: of BV value columns each, one after the other; a power of two.
        ROWS, PIECE: a state's tile is [ROWS, BV / ROWS, BK / PIECE, PIECE], of which each thread has all of the two
            dimensions in the middle ("vk"). THREADS: of the program.
    """
    pid = tl.program_id(0)
    i_h = (pid % H).to(tl.int64)
    n = (pid // H).to(tl.int64)
    slot = n
    if HAS_INDEX:
        slot = tl.load(p_index + n * index_n).to(tl.int64)
    known = True
    if HAS_KNOWN:
        known = tl.load(p_known + n * known_n).to(tl.int1)

    o_k = tl.arange(0, BK)
    m_k = o_k < K
    # q's channels and k's, over and over where there are more threads.
    MOST_QK: tl.constexpr = 2 * BK if 2 * BK > THREADS else THREADS
    o_qk = tl.arange(0, MOST_QK)
    is_k = o_qk // BK % 2 == 1
    o_c = o_qk % BK
    m_qk = o_c < K
    b_qk = _either(p_q + n * q_b + i_h * q_h + o_c, p_k + n * k_b + i_h * k_h + o_c, is_k, m_qk)
    o_c += i_h * K
    p_q_weight += o_c * q_weight_c
    p_k_weight += o_c * k_weight_c
    qk_weights: tl.tuple = ()
    for _ in tl.static_range(W):
        qk_weights += (_either(p_q_weight, p_k_weight, is_k, m_qk),)
        p_q_weight += q_weight_w
        p_k_weight += k_weight_w
    qk_bias = tl.zeros((MOST_QK,), tl.float32)
    if HAS_BIAS:
        qk_bias = _either(p_q_bias + o_c, p_k_bias + o_c, is_k, m_qk)
    valid = exists(slot, slots, pad) if HAS_INDEX else slot < slots
    known &= valid
    p_conv += slot * conv_n
    o_qk_conv = (is_k.to(tl.int64) * H * K + o_c) * conv_c
    qk_before = _vectors(p_conv, conv_w, o_qk_conv, m_qk & known, W - 1)

    # All of V at once, as the norm takes it: parts that follow each other.
    o_o = (tl.arange(0, PARTS) * BV)[:, None] + tl.arange(0, BV)[None, :]
    m_o = o_o < V
    p_o += n * o_b + i_h * GROUP * o_h
    for j in tl.range(0, GROUP, num_stages=1):
        i_hv = i_h * GROUP + j
        b_g = tl.load(p_g + n * g_b + i_hv * g_h + o_k, mask=m_k, other=0.0)
        beta = tl.load(p_beta + n * beta_b + i_hv * beta_h)
        A_log = 0.0
        if HAS_A_LOG:
            A_log = tl.load(p_A_log + i_hv)
        bias = tl.zeros((BK,), tl.float32)
        if HAS_DT_BIAS:
            bias = tl.load(p_dt_bias + i_hv * K + o_k, mask=m_k, other=0.0)
        b_z = tl.load(p_z + n * z_b + i_hv * z_h + o_o, mask=m_o, other=0.0)
        b_norm = tl.load(p_norm + o_o, mask=m_o, other=0.0)
        b_o = tl.zeros((PARTS, BV), tl.float32)
        squares = 0.0
        for i_v in tl.range(0, PARTS, num_stages=1):
            # As of q and k.
            MOST_V: tl.constexpr = BV if BV > THREADS else THREADS
            o_v = i_v * BV + tl.arange(0, MOST_V) % BV
            m_v = o_v < V
            b_v = tl.load(p_v + n * v_b + i_hv * v_h + o_v, mask=m_v, other=0.0)
            o_v += i_hv * V
            v_weights = _vectors(p_v_weight, v_weight_w, o_v * v_weight_c, m_v, W)
            v_bias = tl.zeros((MOST_V,), tl.float32)
            if HAS_BIAS:
                v_bias = tl.load(p_v_bias + o_v, mask=m_v, other=0.0)
            o_v_conv = (2 * H * K + o_v) * conv_c
            v_before = _vectors(p_conv, conv_w, o_v_conv, m_v & known, W - 1)
            # The last inputs are needed first, so they are asked for before the state.
            tl.debug_barrier()
            o_row = (i_v * BV + tl.arange(0, ROWS) * (BV // ROWS))[:, None] + tl.arange(0, BV // ROWS)[None, :]
            o_piece = (tl.arange(0, BK // PIECE) * PIECE)[:, None] + tl.arange(0, PIECE)[None, :]
            m_S = (o_row < V)[:, :, None, None] & (o_piece < K)[None, None, :, :]
            p_state = p_S + slot * S_n + i_hv * S_h
            p_state += (o_row.to(tl.int64) * S_v)[:, :, None, None] + (o_piece.to(tl.int64) * S_k)[None, None, :, :]
            S = tl.load(p_state, mask=m_S & known, other=0.0)
            # Within one block the compiler puts loads off until others have been used: none gets past a barrier, and no
            # use before a branch. And behind the barrier everybody has read the last inputs, which are overwritten now.
            tl.debug_barrier()
            if valid:
                _keep(b_v, v_before, p_conv, conv_w, o_v_conv, m_v & (tl.arange(0, MOST_V) < BV), W)
                is_first = (j == 0) & (i_v == 0)
                _keep(b_qk, qk_before, p_conv, conv_w, o_qk_conv, m_qk & (o_qk < 2 * BK) & is_first, W)
                # What is gathered passes through shared memory, and is then where the state needs it. The decay comes
                # last, so that nothing waits for the state before all else is there.
                y_v = tl.gather(_convolved(b_v, v_before, v_weights, v_bias, W), tl.arange(0, BV), 0)
                y_qk = tl.reshape(_convolved(b_qk, qk_before, qk_weights, qk_bias, W), (MOST_QK // BK, BK))
                unit = rstd(y_qk, QK_L2NORM) * tl.where(tl.arange(0, MOST_QK // BK) % 2 == 0, scale, 1.0)
                y_qk = tl.reshape(y_qk * unit[:, None], (MOST_QK,))
                y_q = tl.gather(y_qk, o_k, 0)
                y_k = tl.gather(y_qk, BK + o_k, 0)
                decay = exp2(log2_decay(b_g.to(tl.float32), tl.exp(A_log), bias, lower_bound, m_k, GATE))
                decay = tl.gather(decay, o_k, 0)
                y_beta = activated_beta(beta.to(tl.float32), BETA_IS_LOGIT, NEG_EIGVAL)
                T = tl.reshape(S.to(tl.float32), (BV, BK))
                T, b_part = updated(T, y_q, y_k, y_v, decay, y_beta, S_k == 1 and BK > 16)
                T = tl.reshape(T, (ROWS, BV // ROWS, BK // PIECE, PIECE))
                tl.store(p_state, T.to(p_S.dtype.element_ty), mask=m_S)
                squares += tl.sum(product(b_part, b_part), 0)
                b_o = tl.where((tl.arange(0, PARTS) == i_v)[:, None], b_part[None, :], b_o)
        b_o *= tl.rsqrt(squares / V + eps) * b_norm.to(tl.float32) * sigmoid(b_z.to(tl.float32))
        tl.store(p_o + o_o, tl.where(valid, b_o, 0.0).to(p_o.dtype.element_ty), mask=m_o)
        p_o += o_h
