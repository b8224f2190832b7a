"""Second kernel on Hopper for states in the slots of a pool, and states at checkpoints: see ``recurrence``.

The chunks between two checkpoints are walked along without a test. Where the next one lies, and where its state goes,
is read before them. A state goes to memory from the registers that hold it, and nothing waits for that.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_kda.backends.hopper.common import SEARCH
from flash_kda.backends.hopper.recurrence import (
    BV,
    MAP,
    OUT,
    WHOLE,
    C,
    allocate,
    load_chunks,
    place,
    state_before,
    step_chunks,
    walk_by_token,
)
from flash_kda.backends.triton.common import exists

# After how many tokens a checkpoint comes that is not there.
NEVER = gl.constexpr(2**31 - 1)


@gluon.jit
def _clear(p_out, step, length, COLUMNS: gl.constexpr):
    """Zeros in the rows of padding."""
    o_row = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, OUT)), 1)
    p_row = p_out + gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, OUT)), 0)
    zeros = gl.zeros([C, COLUMNS], p_out.dtype.element_ty, OUT)
    for first in range(0, length, C):
        gl.store(p_row + (first + o_row) * step, zeros, mask=first + o_row < length)


@gluon.jit
def _first_checkpoint(p_ends, ends_n, p_offset, offset_n, entries, n, offset, whole):
    """The first entry of sequence n with an offset in ``offset + 1 .. whole``, and how many tokens after ``offset``.

    Entries before it lie before, so that it is a checkpoint whatever they are. Also one past the sequence's last entry.
    """
    first = gl.maximum(gl.load(p_ends + n * ends_n).to(gl.int64), 0)
    end = gl.minimum(gl.load(p_ends + (n + 1) * ends_n).to(gl.int64), entries)
    o = gl.arange(0, SEARCH, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    i_c = first
    found = SEARCH
    while (i_c < end) & (found == SEARCH):
        at = i_c + o
        x = gl.load(p_offset + at * offset_n, mask=at < end, other=0).to(gl.int64)
        found = gl.min(gl.where((x > offset) & (x <= whole), o, SEARCH), 0)
        i_c += found
    x = gl.load(p_offset + i_c * offset_n, mask=i_c < end, other=0).to(gl.int64)
    return i_c, end, gl.where(i_c < end, x - offset, NEVER).to(gl.int32)


@gluon.jit
def _next_checkpoint(x, p_offset, offset_n, i_c, end, offset, done, whole):
    """The next entry after ``i_c`` with an offset in ``offset + done + 1 .. whole``; ``x`` is that of the next one."""
    i_c += 1
    x = x.to(gl.int64)
    while (i_c < end) & ((x <= offset + done) | (x > whole)):
        i_c += 1
        x = gl.load(p_offset + i_c * offset_n, mask=i_c < end, other=0).to(gl.int64)
    return i_c, gl.where(i_c < end, x - offset, NEVER).to(gl.int32)


@gluon.jit
def _entry(p_x, x_n, i_c, end):
    """Entry ``i_c`` of offsets or places, if it is one of the sequence's."""
    return gl.load(p_x + i_c * x_n, mask=i_c < end, other=0)


@gluon.jit
def _store_checkpoint(S, p_kept, at, places, pad, kept_n, kept_v, kept_k, o_v, o_k, HAS_TARGET: gl.constexpr):
    """Store a state at place ``at``; ``p_kept`` is at the head."""
    is_kept = True
    at = at.to(gl.int64)
    if HAS_TARGET:
        is_kept = exists(at, places, pad)
    if is_kept:
        gl.store(p_kept + at * kept_n + o_v * kept_v + o_k * kept_k, S.to(p_kept.dtype.element_ty))


@gluon.jit
def _walk(
    p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_S0, p_S, p_map, p_o, p_offset, p_ends, p_target, p_kept,
    raw_strides, S0_strides, S_strides, o_t, offset_n, ends_n, target_n, kept_n, kept_v, kept_k,
    batch, start, length, n, slot_S, i_h, i_qk, offset, whole, is_known, is_first, is_map, is_mapped, is_stored, column,
    scale, lower_bound, entries, places, pad, s_kq, s_end, s_square, s_decay, s_v, s_o, bar_ready, bar_free,
    K: gl.constexpr, GATE: gl.constexpr, HAS_A_LOG: gl.constexpr, HAS_DT_BIAS: gl.constexpr,
    NEG_EIGVAL: gl.constexpr, STORE_S: gl.constexpr, CHECKPOINTS: gl.constexpr, HAS_TARGET: gl.constexpr,
    MODE: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """The state of 64 columns of V from the first token to the last; ``p_kept`` is at the head."""
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    TOKENS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    # A pool may be a view of anything.
    h_S = i_h.to(gl.int64)
    o_v = (column + PART * BV + gl.expand_dims(gl.arange(0, BV, gl.SliceLayout(1, STATE)), 1)).to(gl.int64)
    o_k = gl.expand_dims(gl.arange(0, K, gl.SliceLayout(0, STATE)), 0).to(gl.int64)
    S = state_before(p_S0, S0_strides, p_map, slot_S, h_S, is_first, is_map, o_v, o_k, is_known, STATE, True, MODE)
    zero = gl.zeros([BV, C], gl.float32, TOKENS)
    o_token = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, TOKENS)), 0)
    o_row = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, OUT)), 1)
    p_out = p_o + column + PART * BV + gl.expand_dims(gl.arange(0, BV, gl.SliceLayout(0, OUT)), 0) + o_row * o_t
    step = o_t.to(gl.int64)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    if MODE == MAP:
        # What a later segment does to any state meets no checkpoint.
        entries = gl.where(is_first, entries, 0)
    if CHECKPOINTS:
        i_c, end_c, checkpoint = _first_checkpoint(p_ends, ends_n, p_offset, offset_n, entries, n, offset, whole)
        done = length * 0
        while done < length:
            # To the checkpoint, or to before the chunk that it lies in.
            stop = gl.where(checkpoint < length, checkpoint // C * C, length)
            x = _entry(p_offset, offset_n, i_c + 1, end_c)
            at = i_c
            if HAS_TARGET:
                at = _entry(p_target, target_n, i_c, end_c)
            S, stage, phase = step_chunks(
                S, done, stop, length, stage, phase, p_out, step, is_first, is_map, zero, o_token, o_row,
                s_kq, s_end, s_square, s_decay, s_v, s_o, bar_ready, bar_free, K, MODE, STAGES, PARTS, PART,
            )  # fmt: skip
            done = stop
            if checkpoint == stop:
                _store_checkpoint(S, p_kept, at, places, pad, kept_n, kept_v, kept_k, o_v, o_k, HAS_TARGET)
                i_c, checkpoint = _next_checkpoint(x, p_offset, offset_n, i_c, end_c, offset, done, whole)
            elif checkpoint < length:
                # Token by token from the state before the chunk: nothing that the chunk has ready is of use, and
                # dividing decays would not be exact.
                S_t = S
                t = done
                while checkpoint < gl.minimum(stop + C, length):
                    S_t = walk_by_token(
                        S_t, p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_o, raw_strides, o_t, batch, start + t,
                        checkpoint - t, i_h, i_qk, False, False, column + PART * BV, scale, lower_bound, K, GATE,
                        HAS_A_LOG, HAS_DT_BIAS, NEG_EIGVAL, WHOLE,
                    )  # fmt: skip
                    t = checkpoint
                    _store_checkpoint(S_t, p_kept, at, places, pad, kept_n, kept_v, kept_k, o_v, o_k, HAS_TARGET)
                    i_c, checkpoint = _next_checkpoint(x, p_offset, offset_n, i_c, end_c, offset, t, whole)
                    x = _entry(p_offset, offset_n, i_c + 1, end_c)
                    at = i_c
                    if HAS_TARGET:
                        at = _entry(p_target, target_n, i_c, end_c)
    else:
        S, stage, phase = step_chunks(
            S, 0, length, length, stage, phase, p_out, step, is_first, is_map, zero, o_token, o_row,
            s_kq, s_end, s_square, s_decay, s_v, s_o, bar_ready, bar_free, K, MODE, STAGES, PARTS, PART,
        )  # fmt: skip
    # 0 * x is not 0 for a NaN or inf, which a product of matrices has then also carried to earlier rows.
    broken = gl.where(S * 0.0 == 0.0, 0, 1)
    if gl.max(gl.max(broken, 1), 0) > 0:
        S = state_before(p_S0, S0_strides, p_map, slot_S, h_S, is_first, is_map, o_v, o_k, is_known, STATE, True, MODE)
        i_c = start * 0
        end_c = i_c
        checkpoint = length * 0 + NEVER
        if CHECKPOINTS:
            i_c, end_c, checkpoint = _first_checkpoint(p_ends, ends_n, p_offset, offset_n, entries, n, offset, whole)
        t = length * 0
        while t < length:
            stop = gl.minimum(checkpoint, length)
            S = walk_by_token(
                S, p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_o + t * step, raw_strides, o_t, batch, start + t,
                stop - t, i_h, i_qk, is_map, is_first if MODE == MAP else True, column + PART * BV, scale, lower_bound,
                K, GATE, HAS_A_LOG, HAS_DT_BIAS, NEG_EIGVAL, MODE,
            )  # fmt: skip
            t = stop
            if CHECKPOINTS and checkpoint == stop:
                at = i_c
                if HAS_TARGET:
                    at = _entry(p_target, target_n, i_c, end_c)
                _store_checkpoint(S, p_kept, at, places, pad, kept_n, kept_v, kept_k, o_v, o_k, HAS_TARGET)
                x = _entry(p_offset, offset_n, i_c + 1, end_c)
                i_c, checkpoint = _next_checkpoint(x, p_offset, offset_n, i_c, end_c, offset, t, whole)
    if MODE == MAP and is_mapped:
        gl.store(p_map + o_v * K + o_k, S)
    if STORE_S and is_stored:
        S_n, S_h, S_v, S_k = S_strides
        gl.store(p_S + slot_S * S_n + h_S * S_h + o_v * S_v + o_k * S_k, S.to(p_S.dtype.element_ty))


@gluon.jit(do_not_specialize=[
    "T", "N", "HV", "GROUP", "scale", "lower_bound", "SEGMENT", "LATER", "states", "pad", "entries", "places",
])  # fmt: skip
def pooled_walk(
    d_tile, d_square, d_decay, d_v, p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_cu, p_cuts, p_S0, p_S, p_maps,
    p_o, p_index, p_known, p_offset, p_ends, p_target, p_kept,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    S0_n, S0_h, S0_v, S0_k, S_n, S_h, S_v, S_k, o_b, o_t, o_h,
    index_n, known_n, offset_n, ends_n, target_n, kept_n, kept_h, kept_v, kept_k,
    T, N, HV, GROUP, scale, lower_bound, SEGMENT, LATER, states, pad, entries, places,
    K: gl.constexpr, V: gl.constexpr, GATE: gl.constexpr, HAS_A_LOG: gl.constexpr, HAS_DT_BIAS: gl.constexpr,
    NEG_EIGVAL: gl.constexpr, PACKED: gl.constexpr, STORE_S: gl.constexpr, HAS_INDEX: gl.constexpr,
    HAS_KNOWN: gl.constexpr, CHECKPOINTS: gl.constexpr, HAS_TARGET: gl.constexpr,
    MODE: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """As ``walk``, with the states in a pool, and those at checkpoints stored.

    Args:
        The tensors of pool and checkpoints: see ``flash_kda.backends.triton.recurrence.pooled_recurrence``.
        The raw inputs are read only for checkpoints inside of a chunk, and if the state is not finite at the end.
    """
    i_h, i_v, n, at, batch, slot, start, length, offset, whole, is_first, is_map, is_mapped, is_stored = place(
        p_cu, p_cuts, T, N, HV, SEGMENT, LATER, V, PACKED, MODE, PARTS
    )
    column = i_v * (PARTS * BV)
    p_out = p_o + batch * o_b + start * o_t + i_h * o_h
    # The slot of an empty sequence may be another's: the last entries of boundaries are repeated for padding.
    is_stored = is_stored & (length > 0)
    slot_S = n
    is_known = True
    if HAS_KNOWN:
        is_known = gl.load(p_known + n * known_n).to(gl.int1)
    if HAS_INDEX:
        slot_S = gl.load(p_index + n * index_n).to(gl.int64)
        valid = exists(slot_S, states, pad)
        cleared = gl.where(valid, 0, length)
        if MODE == MAP:
            cleared = gl.where(is_first, cleared, 0)
        _clear(p_out + column, o_t.to(gl.int64), cleared, PARTS * BV)
        length = gl.where(valid, length, 0)
        is_known = is_known & valid
        is_stored = is_stored & valid
    s_kq, s_end, s_square, s_decay, s_v, s_o, bar_ready, bar_free = allocate(
        d_tile, d_square, d_decay, d_v, K, STAGES, PARTS
    )
    row = (batch * T + start).to(gl.int32)
    slot = slot.to(gl.int32)
    i_qk = i_h // GROUP
    p_map = p_maps + at * (K * K)
    p_places = p_kept + i_h.to(gl.int64) * kept_h
    raw = (q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h)
    S0_strides = (S0_n, S0_h, S0_v, S0_k)
    S_strides = (S_n, S_h, S_v, S_k)
    # Compile-time values keep their nature only in a tuple written out in the call.
    if PARTS == 1:
        gl.warp_specialize([
            (_walk, (
                p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_S0, p_S, p_map, p_out, p_offset, p_ends, p_target,
                p_places, raw, S0_strides, S_strides, o_t, offset_n, ends_n, target_n, kept_n, kept_v, kept_k,
                batch, start, length, n, slot_S, i_h, i_qk, offset, whole, is_known, is_first, is_map, is_mapped,
                is_stored, column, scale, lower_bound, entries, places, pad,
                s_kq, s_end, s_square, s_decay, s_v, s_o.index(0), bar_ready, bar_free, K, GATE, HAS_A_LOG,
                HAS_DT_BIAS, NEG_EIGVAL, STORE_S, CHECKPOINTS, HAS_TARGET, MODE, STAGES, PARTS, 0,
            )),
            (load_chunks, (
                d_tile, d_square, d_decay, d_v, slot, row, length, HV, i_h, i_h * V + column, is_first, is_map,
                s_kq, s_end, s_square, s_decay, s_v, bar_ready, bar_free, MODE, STAGES, PARTS,
            )),
        ], [1], [24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_walk, (
                p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_S0, p_S, p_map, p_out, p_offset, p_ends, p_target,
                p_places, raw, S0_strides, S_strides, o_t, offset_n, ends_n, target_n, kept_n, kept_v, kept_k,
                batch, start, length, n, slot_S, i_h, i_qk, offset, whole, is_known, is_first, is_map, is_mapped,
                is_stored, column, scale, lower_bound, entries, places, pad,
                s_kq, s_end, s_square, s_decay, s_v, s_o.index(0), bar_ready, bar_free, K, GATE, HAS_A_LOG,
                HAS_DT_BIAS, NEG_EIGVAL, STORE_S, CHECKPOINTS, HAS_TARGET, MODE, STAGES, PARTS, 0,
            )),
            (_walk, (
                p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_S0, p_S, p_map, p_out, p_offset, p_ends, p_target,
                p_places, raw, S0_strides, S_strides, o_t, offset_n, ends_n, target_n, kept_n, kept_v, kept_k,
                batch, start, length, n, slot_S, i_h, i_qk, offset, whole, is_known, is_first, is_map, is_mapped,
                is_stored, column, scale, lower_bound, entries, places, pad,
                s_kq, s_end, s_square, s_decay, s_v, s_o.index(1), bar_ready, bar_free, K, GATE, HAS_A_LOG,
                HAS_DT_BIAS, NEG_EIGVAL, STORE_S, CHECKPOINTS, HAS_TARGET, MODE, STAGES, PARTS, 1,
            )),
            (load_chunks, (
                d_tile, d_square, d_decay, d_v, slot, row, length, HV, i_h, i_h * V + column, is_first, is_map,
                s_kq, s_end, s_square, s_decay, s_v, bar_ready, bar_free, MODE, STAGES, PARTS,
            )),
        ], [4, 1], [240, 24])  # fmt: skip
