"""Second kernel: the state of each (sequence, value head, V part) from the first token to the last, in registers.

The state is held transposed, ``[BV, BK]`` float32, so that it is the register operand of every product; the tiles of
the chunks are the shared-memory operands. V columns never mix.

There are two kernels: one for states that lie sequence by sequence, and one for states in the slots of a pool, which
also stores the states at checkpoints.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_kda.backends.triton.common import (
    activated_beta,
    exists,
    exp2,
    first_slot,
    log2_decay,
    rstd,
    token_of_row,
)


@triton.jit
def _halves(x, BV: tl.constexpr, C: tl.constexpr):
    """Left and right half of ``[BV, 2 C]``; both halves of a thread's registers, so nothing moves."""
    return tl.split(tl.permute(tl.reshape(x, (BV, 2, C)), (0, 2, 1)))


@triton.jit
def _twice(x, BV: tl.constexpr, C: tl.constexpr):
    """``[BV, C]`` beside itself, ``[BV, 2 C]``."""
    return tl.reshape(tl.permute(tl.join(x, x), (0, 2, 1)), (BV, 2 * C))


@triton.jit
def _gate_of_head(p_A_log, p_dt_bias, i_h, o_k, K: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr):
    """``exp(A_log)`` and the bias ``[BK]`` of a head."""
    a = tl.full((), 1.0, tl.float32)
    if HAS_A_LOG:
        a = tl.exp(tl.load(p_A_log + i_h))
    bias = tl.zeros(o_k.shape, tl.float32)
    if HAS_DT_BIAS:
        bias = tl.load(p_dt_bias + i_h * K + o_k, mask=o_k < K, other=0.0)
    return a, bias


@triton.jit
def _after_token(
    S, p_q, p_k, p_v, p_g, p_beta, a, bias, m_k, m_v, scale, lower_bound,
    GATE: tl.constexpr, QK_L2NORM: tl.constexpr, BETA_IS_LOGIT: tl.constexpr, NEG_EIGVAL: tl.constexpr,
):  # fmt: skip
    """State and output row ``[BV]`` after the token that the pointers ``[BK]``, ``[BV]`` and ``[]`` name."""
    g = tl.load(p_g, mask=m_k, other=0.0).to(tl.float32)
    k = tl.load(p_k, mask=m_k, other=0.0).to(tl.float32)
    q = tl.load(p_q, mask=m_k, other=0.0).to(tl.float32)
    beta = tl.load(p_beta).to(tl.float32)
    v = tl.load(p_v, mask=m_v, other=0.0).to(tl.float32)
    k *= rstd(k, QK_L2NORM)
    q *= rstd(q, QK_L2NORM) * scale
    S *= exp2(log2_decay(g, a, bias, lower_bound, m_k, GATE))[None, :]
    u = activated_beta(beta, BETA_IS_LOGIT, NEG_EIGVAL) * (v - tl.sum(S * k[None, :], 1))
    S += u[:, None] * k[None, :]
    return S, tl.sum(S * q[None, :], 1)


@triton.jit
def _next_checkpoint(p_offset, offset_n, i_c, end, done, length):
    """The next entry after ``i_c`` whose offset lies in ``done + 1 .. length``, and that offset.

    If there is none before ``end``: an offset that no token reaches.
    """
    i_c += 1
    offset = tl.load(p_offset + i_c * offset_n, mask=i_c < end, other=0).to(tl.int64)
    while (i_c < end) & ((offset <= done) | (offset > length)):
        i_c += 1
        offset = tl.load(p_offset + i_c * offset_n, mask=i_c < end, other=0).to(tl.int64)
    return i_c, tl.where(i_c < end, offset, 2**62)


@triton.jit
def _store_checkpoint(
    S, p_kept, p_target, target_n, kept_n, kept_v, kept_k, i_c, places, pad, v_S, k_S, m_S, HAS_TARGET: tl.constexpr
):
    """Store the state of entry ``i_c``; ``p_kept`` is at the head."""
    place = i_c
    if HAS_TARGET:
        place = tl.load(p_target + i_c * target_n).to(tl.int64)
        m_S = m_S & exists(place, places, pad)
    p_S = p_kept + place * kept_n + v_S[:, None] * kept_v + k_S[None, :] * kept_k
    tl.store(p_S, S.to(p_kept.dtype.element_ty), mask=m_S)


@triton.jit
def _first_checkpoint(p_ends, ends_n, p_offset, offset_n, entries, n, length):
    """The first entry of sequence n with an offset in it, one past its last entry, and the offset."""
    first = tl.maximum(tl.load(p_ends + n * ends_n).to(tl.int64), 0)
    end = tl.minimum(tl.load(p_ends + (n + 1) * ends_n).to(tl.int64), entries)
    i_c, offset = _next_checkpoint(p_offset, offset_n, first - 1, end, tl.zeros((), tl.int64), length)
    return i_c, end, offset


@triton.jit
def _walk(
    p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_cu, p_tiles, p_squares, p_decay, p_S0, p_S, p_o,
    p_index, p_known, p_offset, p_ends, p_target, p_kept,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    S0_n, S0_h, S0_v, S0_k, S_n, S_h, S_v, S_k, o_b, o_t, o_h,
    index_n, known_n, offset_n, ends_n, target_n, kept_n, kept_h, kept_v, kept_k,
    T, N, HV, GROUP, scale, lower_bound, states, pad, entries, places,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    SEGMENTS: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr,
    QK_L2NORM: tl.constexpr, BETA_IS_LOGIT: tl.constexpr, NEG_EIGVAL: tl.constexpr, PACKED: tl.constexpr,
    HAS_S0: tl.constexpr, STORE_S: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_INDEX: tl.constexpr, HAS_KNOWN: tl.constexpr, POOLED: tl.constexpr, CHECKPOINTS: tl.constexpr,
    HAS_TARGET: tl.constexpr,
):  # fmt: skip
    """One (sequence, value head, V part): the body of both kernels, whose docstrings describe the arguments."""
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
    h_S, v_S, k_S = i_h, o_v, o_k
    if POOLED:
        # A pool may be a view of anything.
        h_S, v_S, k_S = i_h.to(tl.int64), o_v.to(tl.int64), o_k.to(tl.int64)
    slot_S = n
    valid = True
    if HAS_INDEX:
        slot_S = tl.load(p_index + n * index_n).to(tl.int64)
        valid = exists(slot_S, states, pad)
    if not valid:
        zeros = tl.zeros((C, BV), p_o.dtype.element_ty)
        for first in tl.range(0, length, C, num_stages=1):
            o_t_row = first + tl.arange(0, C)
            p_row = p_o + batch * o_b + (start + o_t_row)[:, None] * o_t + i_h * o_h + o_v[None, :]
            tl.store(p_row, zeros, mask=(o_t_row < length)[:, None] & m_v[None, :])
        return
    m_first = m_S
    if HAS_KNOWN:
        m_first = m_S & tl.load(p_known + n * known_n).to(tl.int1)
    if HAS_S0:
        p_first = p_S0 + slot_S * S0_n + h_S * S0_h + v_S[:, None] * S0_v + k_S[None, :] * S0_k
        S = tl.load(p_first, mask=m_first, other=0.0).to(tl.float32)
    else:
        S = tl.zeros((BV, BK), tl.float32)
    if CHECKPOINTS:
        i_c, end_c, checkpoint = _first_checkpoint(p_ends, ends_n, p_offset, offset_n, entries, n, length)
        p_kept += h_S * kept_h

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
        if CHECKPOINTS:
            stop = tl.minimum(first + C, length)
            if checkpoint < stop:
                # Inside of this chunk. Token by token from the state before it: nothing that the chunk has ready is of
                # use, and dividing decays would not be exact.
                a, bias = _gate_of_head(p_A_log, p_dt_bias, i_h, o_k, K, HAS_A_LOG, HAS_DT_BIAS)
                S_t = S
                t = first
                while checkpoint < stop:
                    for i_t in tl.range(t, checkpoint.to(tl.int32), num_stages=1):
                        at = start + i_t
                        S_t, _ = _after_token(
                            S_t,
                            p_q + batch * q_b + at * q_t + (i_h // GROUP) * q_h + o_k,
                            p_k + batch * k_b + at * k_t + (i_h // GROUP) * k_h + o_k,
                            p_v + (at - start) * v_t + o_v,
                            p_g + batch * g_b + at * g_t + i_h * g_h + o_k,
                            p_beta + batch * beta_b + at * beta_t + i_h * beta_h,
                            a, bias, o_k < K, m_v, scale, lower_bound, GATE, QK_L2NORM, BETA_IS_LOGIT, NEG_EIGVAL,
                        )  # fmt: skip
                    t = checkpoint.to(tl.int32)
                    _store_checkpoint(
                        S_t, p_kept, p_target, target_n, kept_n, kept_v, kept_k, i_c, places, pad, v_S, k_S, m_S,
                        HAS_TARGET,
                    )  # fmt: skip
                    i_c, checkpoint = _next_checkpoint(p_offset, offset_n, i_c, end_c, checkpoint, length)
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
        if CHECKPOINTS and checkpoint == stop:
            _store_checkpoint(
                S, p_kept, p_target, target_n, kept_n, kept_v, kept_k, i_c, places, pad, v_S, k_S, m_S, HAS_TARGET
            )  # fmt: skip
            i_c, checkpoint = _next_checkpoint(p_offset, offset_n, i_c, end_c, checkpoint, length)

    # 0 * x is not 0 for a NaN or inf, which a product of matrices has then also carried to earlier rows.
    if tl.max(tl.where(S * 0.0 == 0.0, 0, 1)) > 0:
        if HAS_S0:
            S = tl.load(p_first, mask=m_first, other=0.0).to(tl.float32)
        else:
            S = tl.zeros((BV, BK), tl.float32)
        i_qk = i_h // GROUP
        a, bias = _gate_of_head(p_A_log, p_dt_bias, i_h, o_k, K, HAS_A_LOG, HAS_DT_BIAS)
        if CHECKPOINTS:
            i_c, end_c, checkpoint = _first_checkpoint(p_ends, ends_n, p_offset, offset_n, entries, n, length)
        i_t = start
        for _ in tl.range(0, length):
            S, row = _after_token(
                S,
                p_q + batch * q_b + i_t * q_t + i_qk * q_h + o_k,
                p_k + batch * k_b + i_t * k_t + i_qk * k_h + o_k,
                p_v + (i_t - start) * v_t + o_v,
                p_g + batch * g_b + i_t * g_t + i_h * g_h + o_k,
                p_beta + batch * beta_b + i_t * beta_t + i_h * beta_h,
                a, bias, o_k < K, m_v, scale, lower_bound, GATE, QK_L2NORM, BETA_IS_LOGIT, NEG_EIGVAL,
            )  # fmt: skip
            tl.store(p_o + (i_t - start) * o_t + o_v, row.to(p_o.dtype.element_ty), mask=m_v)
            i_t += 1
            if CHECKPOINTS and i_t - start == checkpoint:
                _store_checkpoint(
                    S, p_kept, p_target, target_n, kept_n, kept_v, kept_k, i_c, places, pad, v_S, k_S, m_S,
                    HAS_TARGET,
                )  # fmt: skip
                i_c, checkpoint = _next_checkpoint(p_offset, offset_n, i_c, end_c, checkpoint, length)
    if STORE_S:
        if POOLED:
            # The slot of an empty sequence may be another's: the last entries of boundaries are repeated for padding.
            m_S = m_S & (length > 0)
        p_last = p_S + slot_S * S_n + h_S * S_h + v_S[:, None] * S_v + k_S[None, :] * S_k
        tl.store(p_last, S.to(p_S.dtype.element_ty), mask=m_S)


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
    _walk(
        p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_cu, p_tiles, p_squares, p_decay, p_S0, p_S, p_o,
        None, None, None, None, None, None,
        q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
        S0_n, S0_h, S0_v, S0_k, S_n, S_h, S_v, S_k, o_b, o_t, o_h,
        0, 0, 0, 0, 0, 0, 0, 0, 0,
        T, N, HV, GROUP, scale, lower_bound, 0, 0, 0, 0,
        K, V, C, BK, SEGMENTS, BV, GATE, HAS_A_LOG, HAS_DT_BIAS, QK_L2NORM, BETA_IS_LOGIT, NEG_EIGVAL, PACKED,
        HAS_S0, STORE_S, TILE, SPLIT, PRECISION, STAGES,
        False, False, False, False, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "N", "HV", "GROUP", "scale", "lower_bound", "states", "pad", "entries", "places"])
def pooled_recurrence(
    p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_cu, p_tiles, p_squares, p_decay, p_S0, p_S, p_o,
    p_index, p_known, p_offset, p_ends, p_target, p_kept,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    S0_n, S0_h, S0_v, S0_k, S_n, S_h, S_v, S_k, o_b, o_t, o_h,
    index_n, known_n, offset_n, ends_n, target_n, kept_n, kept_h, kept_v, kept_k,
    T, N, HV, GROUP, scale, lower_bound, states, pad, entries, places,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    SEGMENTS: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr, HAS_A_LOG: tl.constexpr, HAS_DT_BIAS: tl.constexpr,
    QK_L2NORM: tl.constexpr, BETA_IS_LOGIT: tl.constexpr, NEG_EIGVAL: tl.constexpr, PACKED: tl.constexpr,
    STORE_S: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_INDEX: tl.constexpr, HAS_KNOWN: tl.constexpr, CHECKPOINTS: tl.constexpr, HAS_TARGET: tl.constexpr,
):  # fmt: skip
    """As ``recurrence``, with the states in a pool.

    Args:
        p_S0, p_S: both the pool, of ``states`` slots; sequence n has slot ``p_index[n]`` if HAS_INDEX, otherwise n. As
            one, addresses would be held in registers from the first load to the last store.
        p_index, p_known: ``[N]``; ``p_known`` tells, if HAS_KNOWN, which sequences have a state already.
        p_offset: ``[entries]``, after how many tokens of their sequence states are kept, if CHECKPOINTS.
        p_ends: ``[N + 1]`` boundaries of the sequences' entries in it.
        p_kept: where those states go, ``places`` of them; that of entry i to ``p_target[i]`` if HAS_TARGET, otherwise
            to i.
        pad: the index of no slot. STORE_S: whether the last states go back to the pool.
        The raw inputs are read only for checkpoints inside of a chunk, and if the state is not finite at the end.
    """
    _walk(
        p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_cu, p_tiles, p_squares, p_decay, p_S0, p_S, p_o,
        p_index, p_known, p_offset, p_ends, p_target, p_kept,
        q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
        S0_n, S0_h, S0_v, S0_k, S_n, S_h, S_v, S_k, o_b, o_t, o_h,
        index_n, known_n, offset_n, ends_n, target_n, kept_n, kept_h, kept_v, kept_k,
        T, N, HV, GROUP, scale, lower_bound, states, pad, entries, places,
        K, V, C, BK, SEGMENTS, BV, GATE, HAS_A_LOG, HAS_DT_BIAS, QK_L2NORM, BETA_IS_LOGIT, NEG_EIGVAL, PACKED,
        True, STORE_S, TILE, SPLIT, PRECISION, STAGES,
        HAS_INDEX, HAS_KNOWN, True, CHECKPOINTS, HAS_TARGET,
    )  # fmt: skip
