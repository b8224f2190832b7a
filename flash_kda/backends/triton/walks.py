"""The two walks of the backward: the state of each (sequence, value head, V part) forwards, its gradient backwards.

Both are held transposed, ``[BV, BK]`` float32, as in the forward's recurrence, and both read what ``prepare`` stored.
A walk leaves what the gradient of a chunk needs of it, so that all chunks then go on in parallel. V columns never mix.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_kda.backends.triton.common import first_slot, lost_bits, token_of_row


@triton.jit
def _span(p_cu, n, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Batch row, first token, tokens and first slot of sequence ``n``."""
    if PACKED:
        start = tl.load(p_cu + n).to(tl.int64)
        length = (tl.load(p_cu + n + 1) - start).to(tl.int32)
        return tl.zeros((), tl.int64), start, length, first_slot(start, n, C)
    return n, tl.zeros((), tl.int64), T, n * ((T + C - 1) // C)


@triton.jit
def _load_square(p, first_row, C: tl.constexpr, SPLIT: tl.constexpr):
    """``[C, C]`` from a row of the chunk's square on, and what its rounding lost if SPLIT (otherwise itself)."""
    WIDTH: tl.constexpr = 2 * C if SPLIT else C
    o = (first_row + tl.arange(0, C))[:, None] * WIDTH + tl.arange(0, C)[None, :]
    high = tl.load(p + o)
    if SPLIT:
        return high, tl.load(p + o + C)
    return high, high


@triton.jit
def _store_lost_bits(p_bits, x, rounded, o_v, V: tl.constexpr, C: tl.constexpr, SEGMENTS: tl.constexpr):
    """What rounding ``[BV, C]`` lost, as words of eight tokens ``[BV, 4]``; see ``walks``."""
    BV: tl.constexpr = x.shape[0]
    lost = tl.reshape(lost_bits(x, rounded) & 15, (BV, C // SEGMENTS, SEGMENTS))
    # In the order of time, and then by words.
    lost = tl.reshape(tl.permute(lost, (0, 2, 1)), (BV, 4, 4, 2))
    lost = tl.reshape(tl.permute(lost, (0, 2, 1, 3)), (BV, 4, 8))
    words = tl.sum(lost << (4 * tl.arange(0, 8))[None, None, :], 2)
    tl.store(p_bits + o_v[:, None] * 4 + tl.arange(0, 4)[None, :], words, mask=(o_v < V)[:, None])


@triton.jit
def _walk_states(
    p_v, p_tiles, p_squares, p_decay, p_S0, p_states, p_U, p_U_bits, v_t, S0_v, S0_k, length, chunk, HV, o_v,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, SEGMENTS: tl.constexpr,
    HAS_S0: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, WALK_STAGES: tl.constexpr,
):  # fmt: skip
    """From the first chunk to the last: the state before each, and what each token writes."""
    o_r = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    m_v = o_v < V
    if HAS_S0:
        p_first = p_S0 + o_v[:, None] * S0_v + o_k[None, :] * S0_k
        S = tl.load(p_first, mask=m_v[:, None] & (o_k < K)[None, :], other=0.0).to(tl.float32)
    else:
        S = tl.zeros((o_v.shape[0], BK), tl.float32)

    o_time = token_of_row(C, SEGMENTS)
    SQUARE_SIZE: tl.constexpr = 2 * C * C * (2 if SPLIT else 1)
    p_v_row = p_v + o_time.to(tl.int64)[:, None] * v_t + o_v[None, :]
    for first in tl.range(0, length, C, num_stages=WALK_STAGES):
        p_tile = p_tiles + chunk * (3 * C * BK) + o_r[:, None] * BK + o_k[None, :]
        b_v = tl.load(p_v_row, mask=(o_time < length - first)[:, None] & m_v[None, :], other=0.0)
        minus_K_plus = tl.load(p_tile)
        K_end = tl.load(p_tile + 2 * C * BK)
        T_beta, lost = _load_square(p_squares + chunk * SQUARE_SIZE, 0, C, SPLIT)
        decay = tl.load(p_decay + chunk * BK + o_k)
        b_S = S.to(TILE)
        tl.store(p_states + chunk * (V * BK) + o_v[:, None] * BK + o_k[None, :], b_S, mask=m_v[:, None])
        R = tl.dot(b_S, tl.trans(minus_K_plus), input_precision=PRECISION) + tl.trans(b_v).to(tl.float32)
        b_R = R.to(TILE)
        U = tl.dot(b_R, tl.trans(T_beta), input_precision=PRECISION)
        if SPLIT:
            U = tl.dot(b_R, tl.trans(lost), U)
        b_U = U.to(TILE)
        S = tl.dot(b_U, K_end, S * decay[None, :], input_precision=PRECISION)
        if SPLIT:
            # As in the forward: the state keeps what the rounding of U lost for as long as the gate is slow.
            S = tl.dot((U - b_U.to(tl.float32)).to(TILE), K_end, S)
        p_U_row = p_U + chunk * (C * V) + o_time[:, None] * V + o_v[None, :]
        tl.store(p_U_row, tl.trans(b_U), mask=m_v[None, :] & (o_time >= 0)[:, None])
        if SPLIT:
            _store_lost_bits(p_U_bits + chunk * (4 * V), U, b_U, o_v, V, C, SEGMENTS)
        p_v_row += C * v_t
        chunk += HV


@triton.jit
def _walk_gradient(
    p_tiles, p_squares, p_decay, p_do, p_dS, p_dstates, p_dR, p_dR_bits, p_dv, p_dS0, o_t, S_v, S_k,
    length, chunk, HV, o_v,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, SEGMENTS: tl.constexpr,
    HAS_DS: tl.constexpr, STORE_DS0: tl.constexpr, STORE_DR: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, WALK_STAGES: tl.constexpr,
):  # fmt: skip
    """From the last chunk to the first: the gradient D of the state after each, and of R.

    ``dR = (T Diag(beta))^T (K_end D) + (Mqk T Diag(beta))^T dO``.
    """
    o_r = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    m_v = o_v < V
    m_S = m_v[:, None] & (o_k < K)[None, :]
    o_S = o_v[:, None] * S_v + o_k[None, :] * S_k
    if HAS_DS:
        D = tl.load(p_dS + o_S, mask=m_S, other=0.0).to(tl.float32)
    else:
        D = tl.zeros((o_v.shape[0], BK), tl.float32)

    o_time = token_of_row(C, SEGMENTS)
    SQUARE_SIZE: tl.constexpr = 2 * C * C * (2 if SPLIT else 1)
    count = (length + C - 1) // C
    chunk += (count - 1).to(tl.int64) * HV
    for i in tl.range(0, count, num_stages=WALK_STAGES):
        first = (count - 1 - i) * C
        m = (o_time < length - first)[:, None] & m_v[None, :]
        o_row = (first + o_time).to(tl.int64)[:, None] * o_t + o_v[None, :]
        p_tile = p_tiles + chunk * (3 * C * BK) + o_r[:, None] * BK + o_k[None, :]
        p_square = p_squares + chunk * SQUARE_SIZE
        b_do = tl.trans(tl.load(p_do + o_row, mask=m, other=0.0)).to(TILE)
        minus_K_plus = tl.load(p_tile)
        Q_plus = tl.load(p_tile + C * BK)
        K_end = tl.load(p_tile + 2 * C * BK)
        T_beta, T_lost = _load_square(p_square, 0, C, SPLIT)
        M_T, M_lost = _load_square(p_square, C, C, SPLIT)
        decay = tl.load(p_decay + chunk * BK + o_k)
        b_D = D.to(TILE)
        if SPLIT:
            # Where few tokens have most of dbeta, what the rounding of D lost would be most of its error.
            X = tl.dot((D - b_D.to(tl.float32)).to(TILE), tl.trans(K_end))
            X = tl.dot(b_D, tl.trans(K_end), X)
        else:
            X = tl.dot(b_D, tl.trans(K_end), input_precision=PRECISION)
        # Before the products it would make more spill, and so would they in the other order.
        tl.store(p_dstates + chunk * (V * BK) + o_v[:, None] * BK + o_k[None, :], b_D, mask=m_v[:, None])
        b_X = X.to(TILE)
        dR = tl.dot(b_do, M_T, input_precision=PRECISION)
        if SPLIT:
            dR = tl.dot(b_do, M_lost, dR)
            dR = tl.dot(b_X, T_lost, dR)
        dR = tl.dot(b_X, T_beta, dR, input_precision=PRECISION)
        b_dR = dR.to(TILE)
        D = tl.dot(b_do, Q_plus, D * decay[None, :], input_precision=PRECISION)
        D = tl.dot(b_dR, minus_K_plus, D, input_precision=PRECISION)
        if SPLIT:
            D = tl.dot((dR - b_dR.to(tl.float32)).to(TILE), minus_K_plus, D)
        dR_rows = tl.trans(dR)
        tl.store(p_dv + o_row, dR_rows.to(p_dv.dtype.element_ty), mask=m)
        if STORE_DR:
            tl.store(p_dR + o_row, dR_rows.to(TILE), mask=m)
        if SPLIT:
            _store_lost_bits(p_dR_bits + chunk * (4 * V), dR, b_dR, o_v, V, C, SEGMENTS)
        chunk -= HV
    if STORE_DS0:
        tl.store(p_dS0 + o_S, D.to(p_dS0.dtype.element_ty), mask=m_S)


@triton.jit(do_not_specialize=["T", "N", "HV"])
def walks(
    p_v, p_cu, p_tiles, p_squares, p_decay, p_S0, p_states, p_U, p_U_bits,
    p_do, p_dS, p_dstates, p_dR, p_dR_bits, p_dv, p_dS0,
    v_b, v_t, v_h, o_b, o_t, o_h, S0_n, S0_h, S0_v, S0_k, S_n, S_h, S_v, S_k,
    T, N, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, SEGMENTS: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, HAS_S0: tl.constexpr, HAS_DS: tl.constexpr, STORE_DS0: tl.constexpr, STORE_DR: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, WALK_STAGES: tl.constexpr,
):  # fmt: skip
    """One (sequence, value head, V part), by even programs the states and by odd ones their gradients.

    Neither needs the other, and one alone leaves most of a GPU idle where heads are few.

    Args:
        p_states: ``[slots, HV, V, BK]`` in TILE, the state before each chunk, transposed.
        p_U: ``[slots, HV, C, V]`` in TILE, what each token writes; tokens in the order of time.
        p_do, p_dv: ``[B, T, HV, V]`` with the strides of o; dv is dR in its own dtype.
        p_dS, p_dS0: gradients of the final and of the initial states, with the strides of S.
        p_dstates: ``[slots, HV, V, BK]`` in TILE, D transposed.
        p_dR: as dv in TILE, stored if STORE_DR: otherwise it is dv.
        p_U_bits, p_dR_bits: ``[slots, HV, V, 4]`` int32, stored if SPLIT: of each token and column four bits of what
            rounding to bfloat16 lost. Bits ``4 (2 j + b)`` and up of word a are those of the chunk's token
            ``8 j + 2 a + b`` in the order of time, as a thread has them in a row of an accumulator.
        The others: see ``prepare`` and ``recurrence``.
    """
    PARTS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0) // 2
    i_v = pid % PARTS
    i_h = (pid // PARTS) % HV
    n = (pid // (PARTS * HV)).to(tl.int64)
    batch, start, length, slot = _span(p_cu, n, T, C, PACKED)
    o_v = i_v * BV + tl.arange(0, BV)
    chunk = slot * HV + i_h
    if tl.program_id(0) % 2 == 0:
        p_v += batch * v_b + start * v_t + i_h * v_h
        p_S0 += n * S0_n + i_h * S0_h
        _walk_states(
            p_v, p_tiles, p_squares, p_decay, p_S0, p_states, p_U, p_U_bits, v_t, S0_v, S0_k, length, chunk, HV, o_v,
            K, V, C, BK, SEGMENTS, HAS_S0, TILE, SPLIT, PRECISION, WALK_STAGES,
        )  # fmt: skip
    else:
        o_row = batch * o_b + start * o_t + i_h * o_h
        o_S = n * S_n + i_h * S_h
        _walk_gradient(
            p_tiles, p_squares, p_decay, p_do + o_row, p_dS + o_S, p_dstates, p_dR + o_row, p_dR_bits, p_dv + o_row,
            p_dS0 + o_S, o_t, S_v, S_k, length, chunk, HV, o_v,
            K, V, C, BK, SEGMENTS, HAS_DS, STORE_DS0, STORE_DR, TILE, SPLIT, PRECISION, WALK_STAGES,
        )  # fmt: skip
