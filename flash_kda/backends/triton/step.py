"""The decode step: convolutions, gate, recurrence and norm of one token of each row, in one launch.

A program has a query/key head of a row and all value heads that use it. So nobody else reads what it writes: no states,
and no last inputs of the convolutions either, of which those of q and k serve all of these value heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_kda.backends.triton.common import exists, product, sigmoid
from flash_kda.backends.triton.decode import after_token


@triton.jit
def _along(o_w, o_c, AXIS: tl.constexpr):
    """Offsets of taps along ``AXIS`` of a tile, and what belongs to channels along its other dimension."""
    return tl.expand_dims(o_w, 1 - AXIS), tl.expand_dims(o_c, AXIS)


@triton.jit
def _window(p_x, p_conv, conv_w, o_w, m, known, W: tl.constexpr, AXIS: tl.constexpr):
    """The last W inputs of some channels, oldest first, float32: from the pool those before this token, and its own.

    It is a tile with its taps along ``AXIS``. What is summed over them lies along the other dimension. The state lies
    along both, so for a vector that it is multiplied with in that dimension the compiler would take the tile's layout,
    and would move the state into it. So the taps of q and k lie along V's dimension, and those of v along K's.
    """
    o_w, p_conv = _along(o_w, p_conv, AXIS)
    b_x = tl.expand_dims(tl.load(p_x, mask=m, other=0.0).to(tl.float32), AXIS)
    m_before = tl.expand_dims(m, AXIS) & (o_w < W - 1) & known
    b_before = tl.load(p_conv + o_w * conv_w, mask=m_before, other=0.0).to(tl.float32)
    return tl.where(o_w == W - 1, b_x, b_before)


@triton.jit
def _convolved(
    b_window, p_weight, weight_w, p_bias, o_w, m, W: tl.constexpr, AXIS: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """SiLU of the convolution of some channels."""
    o_w, p_weight = _along(o_w, p_weight, AXIS)
    m_weight = tl.expand_dims(m, AXIS) & (o_w < W)
    weight = tl.load(p_weight + o_w * weight_w, mask=m_weight, other=0.0).to(tl.float32)
    y = tl.sum(product(b_window, weight), AXIS)
    if HAS_BIAS:
        y += tl.load(p_bias, mask=m, other=0.0).to(tl.float32)
    return y * sigmoid(y)


@triton.jit
def _keep(b_window, p_conv, conv_w, o_w, m, W: tl.constexpr, AXIS: tl.constexpr):
    """All inputs of the window but the oldest go to the pool, each one place further up than it was."""
    o_w, p_conv = _along(o_w, p_conv, AXIS)
    m_kept = tl.expand_dims(m, AXIS) & (o_w > 0) & (o_w < W)
    tl.store(p_conv + (o_w - 1) * conv_w, b_window.to(p_conv.dtype.element_ty), mask=m_kept)


@triton.jit(do_not_specialize=["slots", "pad", "scale", "lower_bound", "eps"])
def step(
    p_q, p_k, p_v, p_g, p_beta, p_z, p_A_log, p_dt_bias, p_S, p_conv, p_index, p_known,
    p_q_weight, p_k_weight, p_v_weight, p_q_bias, p_k_bias, p_v_bias, p_norm, p_o,
    q_b, q_h, k_b, k_h, v_b, v_h, g_b, g_h, beta_b, beta_h, z_b, z_h,
    S_n, S_h, conv_n, conv_w, conv_c, index_n, known_n,
    q_weight_c, q_weight_w, k_weight_c, k_weight_w, v_weight_c, v_weight_w, o_b, o_h,
    slots, pad, scale, lower_bound, eps,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr, BW: tl.constexpr, S_v: tl.constexpr, S_k: tl.constexpr,
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
    """
    pid = tl.program_id(0)
    i_h = (pid % H).to(tl.int64)
    n = (pid // H).to(tl.int64)
    slot = n
    valid = True
    if HAS_INDEX:
        slot = tl.load(p_index + n * index_n).to(tl.int64)
        valid = exists(slot, slots, pad)
    known = True
    if HAS_KNOWN:
        known = tl.load(p_known + n * known_n).to(tl.int1)

    # All of V at once, as the norm takes it: parts that follow each other.
    o_o = (tl.arange(0, PARTS) * BV)[:, None] + tl.arange(0, BV)[None, :]
    m_o = o_o < V
    p_o += n * o_b + i_h * GROUP * o_h
    if not valid:
        for _ in tl.range(0, GROUP, num_stages=1):
            tl.store(p_o + o_o, tl.zeros((PARTS, BV), p_o.dtype.element_ty), mask=m_o)
            p_o += o_h
        return

    o_w = tl.arange(0, BW).to(tl.int64)
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    o_qk = i_h * K + o_k
    p_conv += slot * conv_n
    p_q_conv = p_conv + o_qk * conv_c
    p_k_conv = p_conv + (H * K + o_qk) * conv_c
    q_window = _window(p_q + n * q_b + i_h * q_h + o_k, p_q_conv, conv_w, o_w, m_k, known, W, 1)
    k_window = _window(p_k + n * k_b + i_h * k_h + o_k, p_k_conv, conv_w, o_w, m_k, known, W, 1)

    for j in tl.range(0, GROUP, num_stages=1):
        i_hv = i_h * GROUP + j
        b_g = tl.load(p_g + n * g_b + i_hv * g_h + o_k, mask=m_k, other=0.0)
        beta = tl.load(p_beta + n * beta_b + i_hv * beta_h)
        a = 1.0
        if HAS_A_LOG:
            a = tl.exp(tl.load(p_A_log + i_hv))
        bias = tl.zeros((BK,), tl.float32)
        if HAS_DT_BIAS:
            bias = tl.load(p_dt_bias + i_hv * K + o_k, mask=m_k, other=0.0)
        b_z = tl.load(p_z + n * z_b + i_hv * z_h + o_o, mask=m_o, other=0.0).to(tl.float32)
        b_norm = tl.load(p_norm + o_o, mask=m_o, other=0.0).to(tl.float32)
        b_o = tl.zeros((PARTS, BV), tl.float32)
        for i_v in tl.range(0, PARTS, num_stages=1):
            o_v = i_v * BV + tl.arange(0, BV)
            m_v = o_v < V
            m_S = m_v[:, None] & m_k[None, :]
            o_S = slot * S_n + i_hv * S_h + (o_v.to(tl.int64)[:, None] * S_v + o_k.to(tl.int64)[None, :] * S_k)
            S = tl.load(p_S + o_S, mask=m_S & known, other=0.0).to(tl.float32)
            o_vc = i_hv * V + o_v
            p_v_conv = p_conv + (2 * H * K + o_vc) * conv_c
            v_window = _window(p_v + n * v_b + i_hv * v_h + o_v, p_v_conv, conv_w, o_w, m_v, known, W, 0)
            b_v = _convolved(
                v_window, p_v_weight + o_vc * v_weight_c, v_weight_w, p_v_bias + o_vc, o_w, m_v, W, 0, HAS_BIAS
            )
            # Of every value head and part the same; the states are under way before it is computed for the first.
            b_q = _convolved(
                q_window, p_q_weight + o_qk * q_weight_c, q_weight_w, p_q_bias + o_qk, o_w, m_k, W, 1, HAS_BIAS
            )
            b_k = _convolved(
                k_window, p_k_weight + o_qk * k_weight_c, k_weight_w, p_k_bias + o_qk, o_w, m_k, W, 1, HAS_BIAS
            )
            S, b_part = after_token(
                S, b_q, b_k, b_v, b_g, beta, a, bias, m_k, scale, lower_bound,
                GATE, QK_L2NORM, BETA_IS_LOGIT, NEG_EIGVAL,
            )  # fmt: skip
            tl.store(p_S + o_S, S.to(p_S.dtype.element_ty), mask=m_S)
            b_o = tl.where((tl.arange(0, PARTS) == i_v)[:, None], b_part[None, :], b_o)
            # Another warp may be yet to read what is overwritten here.
            tl.debug_barrier()
            _keep(v_window, p_v_conv, conv_w, o_w, m_v, W, 0)
        b_o *= tl.rsqrt(tl.sum(tl.sum(product(b_o, b_o), 1), 0) / V + eps) * b_norm * sigmoid(b_z)
        tl.store(p_o + o_o, b_o.to(p_o.dtype.element_ty), mask=m_o)
        p_o += o_h
    # As above: the barrier of the last value head has been passed.
    _keep(q_window, p_q_conv, conv_w, o_w, m_k, W, 1)
    _keep(k_window, p_k_conv, conv_w, o_w, m_k, W, 1)
