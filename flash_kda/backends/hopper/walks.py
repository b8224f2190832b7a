"""The two walks of the backward on Hopper: see ``flash_kda.backends.triton.walks``, whose equations these are.

As in the forward, one warp copies the chunks ahead of use and a warpgroup walks along 64 columns of V, its part of the
state, or of the state's gradient, in registers. What a walk leaves goes out by hardware copies while it goes on.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_kda.backends.hopper import config
from flash_kda.backends.hopper.common import layout_of_bits, pair, words_of_lost_bits
from flash_kda.backends.hopper.prepare import to_float
from flash_kda.backends.triton.common import first_slot
from flash_kda.backends.triton.config import CHUNK

C, BV = gl.constexpr(CHUNK), gl.constexpr(config.BV)
TOKENS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16]))
PAIR = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * CHUNK, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, TOKENS, 2))
LEFT_OF_PAIR = gl.constexpr(gl.DotOperandLayout(0, PAIR, 2))
OF_TOKEN = gl.constexpr(gl.SliceLayout(0, TOKENS))
OUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
BITS = layout_of_bits(config.BV, 4)


@gluon.jit
def _load_chunks(
    d_tile, d_square, d_decay, d_v, d_do, chunk, row, length, HV, column, is_gradient, tiles, bars,
    STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Copy every chunk as soon as its stage is free: of the gradient's walk from the last one on."""
    s_K, s_Q, s_end, s_T, s_M, s_decay, s_rows = tiles
    bar_ready, bar_free = bars
    count = (length + C - 1) // C
    step = 1
    if is_gradient:
        step = -1
        chunk += (count - 1) * HV
        row += (count - 1) * C
    stage = 0
    phase = 0
    for _ in range(0, count):
        mbarrier.wait(bar_free.index(stage), phase ^ 1)
        bar = bar_ready.index(stage)
        ALWAYS: gl.constexpr = (
            2 * d_tile.block_type.nbytes + d_square.block_type.nbytes + d_decay.block_type.nbytes
            + PARTS * d_v.block_type.nbytes
        )  # fmt: skip
        if is_gradient:
            mbarrier.expect(bar, ALWAYS + d_tile.block_type.nbytes + d_square.block_type.nbytes)
            for part in gl.static_range(PARTS):
                at = stage * PARTS + part
                tma.async_copy_global_to_shared(d_do, [row, column + part * BV], bar, s_rows.index(at))
            tma.async_copy_global_to_shared(d_tile, [chunk * (3 * C) + C, 0], bar, s_Q.index(stage))
            tma.async_copy_global_to_shared(d_square, [chunk * (2 * C) + C, 0], bar, s_M.index(stage))
        else:
            mbarrier.expect(bar, ALWAYS)
            for part in gl.static_range(PARTS):
                at = stage * PARTS + part
                tma.async_copy_global_to_shared(d_v, [row, column + part * BV], bar, s_rows.index(at))
        tma.async_copy_global_to_shared(d_tile, [chunk * (3 * C), 0], bar, s_K.index(stage))
        tma.async_copy_global_to_shared(d_tile, [chunk * (3 * C) + 2 * C, 0], bar, s_end.index(stage))
        tma.async_copy_global_to_shared(d_square, [chunk * (2 * C), 0], bar, s_T.index(stage))
        tma.async_copy_global_to_shared(d_decay, [chunk, 0], bar, s_decay.index(stage))
        chunk += step * HV
        row += step * C
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _twice(x):
    """``[BV, C]`` beside itself, as the left operand of a product with values and what their rounding lost."""
    x = gl.reshape(gl.permute(gl.join(x, x), (0, 2, 1)), (BV, 2 * C))
    return gl.convert_layout(x, LEFT)


@gluon.jit
def _store_lost_bits(p_bits, x, s_out):
    """What ``[BV, C]`` lost when it was rounded to what ``s_out`` holds.

    Which is read back: from registers, the compiler would make this before it starts the products of the state.
    """
    rounded = gl.convert_layout(s_out.permute((1, 0)).load(LEFT), TOKENS, assert_trivial=True)
    WORDS: gl.constexpr = gl.SliceLayout(2, BITS)
    o_v = gl.expand_dims(gl.arange(0, BV, gl.SliceLayout(1, WORDS)), 1)
    o_word = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, WORDS)), 0)
    gl.store(p_bits + o_v * 4 + o_word, words_of_lost_bits(x, rounded, BITS))


@gluon.jit
def _walk_states(
    d_states, d_U, p_S0, p_U_bits, chunk, length, HV, column, tiles, s_state, s_out, bars, S0_v, S0_k,
    V: gl.constexpr, K: gl.constexpr, HAS_S0: gl.constexpr, STAGES: gl.constexpr,
    BUFFERS: gl.constexpr, PARTS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """From the first chunk to the last: the state before each, and what each token writes."""
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    LEFT_OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    s_K, _, s_end, s_T, _, s_decay, s_rows = tiles
    bar_ready, bar_free = bars
    S = gl.zeros([BV, K], gl.float32, STATE)
    if HAS_S0:
        o_v = column + gl.expand_dims(gl.arange(0, BV, gl.SliceLayout(1, STATE)), 1)
        o_k = gl.expand_dims(gl.arange(0, K, gl.SliceLayout(0, STATE)), 0)
        S = gl.load(p_S0 + o_v * S0_v + o_k * S0_k).to(gl.float32)
    zero = gl.zeros([BV, C], gl.float32, TOKENS)
    o_token = gl.expand_dims(gl.arange(0, C, OF_TOKEN), 0)
    stage = 0
    phase = 0
    for first in range(0, length, C):
        b_S = S.to(gl.bfloat16)
        left_S = gl.convert_layout(b_S, LEFT_OF_STATE)
        mbarrier.wait(bar_ready.index(stage), phase)
        K_S = warpgroup_mma(left_S, s_K.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        buffer = (first // C) % BUFFERS + BUFFERS * PART
        if BUFFERS == 1:
            # What the chunk before left has gone out.
            tma.store_wait(0)
            gl.thread_barrier()
        s_state.index(buffer).store(b_S)
        v = s_rows.index(stage * PARTS + PART).permute((1, 0)).load(TOKENS).to(gl.float32)
        if first + C > length:
            # The rows past the end are another sequence's.
            v = gl.where(first + o_token < length, v, 0.0)
        decay = gl.expand_dims(s_decay.index(stage).reshape((K,)).load(gl.SliceLayout(0, STATE)), 0)
        K_S = warpgroup_mma_wait(0, deps=(K_S,))
        # The tile holds minus K_plus.
        R = _twice((K_S + v).to(gl.bfloat16))
        U = warpgroup_mma(R, s_T.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        S *= decay
        U = warpgroup_mma_wait(0, deps=(U,))
        # As in the forward: the state keeps what the rounding of U lost for as long as the gate is slow.
        high, low = pair(U)
        S = warpgroup_mma(gl.convert_layout(high, LEFT_OF_STATE), s_end.index(stage), S, is_async=True)
        S = warpgroup_mma(gl.convert_layout(low, LEFT_OF_STATE), s_end.index(stage), S, is_async=True)
        s_out.index(buffer).permute((1, 0)).store(U.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(d_states, [chunk * V + column, 0], s_state.index(buffer))
        _store_lost_bits(p_U_bits + (chunk.to(gl.int64) * V + column) * 4, U, s_out.index(buffer))
        tma.async_copy_shared_to_global(d_U, [chunk * C, column], s_out.index(buffer))
        S = warpgroup_mma_wait(0, deps=(S,))
        if BUFFERS == 2:
            # What the chunk before left has gone out.
            tma.store_wait(2)
        gl.thread_barrier()
        mbarrier.arrive(bar_free.index(stage), count=1)
        chunk += HV
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    tma.store_wait(0)


@gluon.jit
def _walk_gradient(
    d_dstates, d_dv, p_dS, p_dv, p_dS0, p_dR_bits, chunk, row, length, HV, column, out_column, o_t,
    tiles, s_state, s_out, bars, S_v, S_k,
    V: gl.constexpr, K: gl.constexpr, HAS_DS: gl.constexpr, STORE_DS0: gl.constexpr, STAGES: gl.constexpr,
    BUFFERS: gl.constexpr, PARTS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """From the last chunk to the first: the gradient D of the state after each, and of R, which is that of v."""
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    LEFT_OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    s_K, s_Q, s_end, s_T, s_M, s_decay, s_rows = tiles
    bar_ready, bar_free = bars
    o_v = column + gl.expand_dims(gl.arange(0, BV, gl.SliceLayout(1, STATE)), 1)
    o_k = gl.expand_dims(gl.arange(0, K, gl.SliceLayout(0, STATE)), 0)
    D = gl.zeros([BV, K], gl.float32, STATE)
    if HAS_DS:
        D = gl.load(p_dS + o_v * S_v + o_k * S_k).to(gl.float32)
    zero = gl.zeros([BV, C], gl.float32, TOKENS)
    zeros = gl.zeros([BV, 2 * C], gl.float32, PAIR)
    o_row = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, OUT)), 1)
    p_out = p_dv + column + gl.expand_dims(gl.arange(0, BV, gl.SliceLayout(0, OUT)), 0) + o_row * o_t
    count = (length + C - 1) // C
    chunk += (count - 1) * HV
    stage = 0
    phase = 0
    for i in range(0, count):
        first = (count - 1 - i) * C
        b_D = D.to(gl.bfloat16)
        left_D = gl.convert_layout(b_D, LEFT_OF_STATE)
        # Where few tokens have most of dbeta, what the rounding of D lost would be most of its error. It is made from
        # b_D two by two: values that are used one by one the compiler also rounds one by one, several times as slowly.
        lost_D = gl.convert_layout((D - to_float(b_D)).to(gl.bfloat16), LEFT_OF_STATE)
        mbarrier.wait(bar_ready.index(stage), phase)
        do = s_rows.index(stage * PARTS + PART).permute((1, 0)).load(LEFT)
        if first + C > length:
            # The rows past the end are another sequence's.
            o_left = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, LEFT)), 0)
            do = gl.where(first + o_left < length, do, gl.zeros_like(do))
        do_of_state = gl.convert_layout(do, LEFT_OF_STATE)
        # Products with values and with what their rounding lost, side by side.
        left_do = gl.convert_layout(do, LEFT_OF_PAIR)
        # Three products without a pause: all operands are there, since between one product and the next the compiler
        # waits for the first before it makes an operand of the second.
        X = warpgroup_mma(left_D, s_end.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        X = warpgroup_mma(lost_D, s_end.index(stage).permute((1, 0)), X, is_async=True)
        both = warpgroup_mma(left_do, s_M.index(stage), zeros, use_acc=False, is_async=True)
        buffer = i % BUFFERS + BUFFERS * PART
        if BUFFERS == 1:
            # What the chunk before left has gone out.
            tma.store_wait(0)
            gl.thread_barrier()
        s_state.index(buffer).store(b_D)
        decay = gl.expand_dims(s_decay.index(stage).reshape((K,)).load(gl.SliceLayout(0, STATE)), 0)
        D *= decay
        X = warpgroup_mma_wait(1, deps=(X,))
        left_X = gl.convert_layout(X.to(gl.bfloat16), LEFT_OF_PAIR)
        both = warpgroup_mma(left_X, s_T.index(stage), both, is_async=True)
        D = warpgroup_mma(do_of_state, s_Q.index(stage), D, is_async=True)
        both = warpgroup_mma_wait(1, deps=(both,))
        high, low = gl.split(gl.permute(gl.reshape(both, (BV, 2, C)), (0, 2, 1)))
        dR = gl.convert_layout(high + low, TOKENS)
        high, low = pair(dR)
        D = warpgroup_mma(gl.convert_layout(high, LEFT_OF_STATE), s_K.index(stage), D, is_async=True)
        D = warpgroup_mma(gl.convert_layout(low, LEFT_OF_STATE), s_K.index(stage), D, is_async=True)
        s_out.index(buffer).permute((1, 0)).store(dR.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(d_dstates, [chunk * V + column, 0], s_state.index(buffer))
        _store_lost_bits(p_dR_bits + (chunk.to(gl.int64) * V + column) * 4, dR, s_out.index(buffer))
        if first + C > length:
            gl.store(p_out + first.to(gl.int64) * o_t, s_out.index(buffer).load(OUT), mask=first + o_row < length)
        else:
            tma.async_copy_shared_to_global(d_dv, [row + first, out_column], s_out.index(buffer))
        D = warpgroup_mma_wait(0, deps=(D,))
        if BUFFERS == 2:
            # What the chunk before left has gone out.
            tma.store_wait(2)
        gl.thread_barrier()
        mbarrier.arrive(bar_free.index(stage), count=1)
        chunk -= HV
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if STORE_DS0:
        gl.store(p_dS0 + o_v * S_v + o_k * S_k, D.to(p_dS0.dtype.element_ty))
    tma.store_wait(0)


@gluon.jit
def _walk(
    d_states, d_U, d_dstates, d_dv, p_S0, p_dS, p_dv, p_dS0, p_U_bits, p_dR_bits,
    chunk, row, length, HV, column, out_column, o_t,
    is_gradient, tiles, s_state, s_out, bars, S0_v, S0_k, S_v, S_k,
    V: gl.constexpr, K: gl.constexpr, HAS_S0: gl.constexpr, HAS_DS: gl.constexpr, STORE_DS0: gl.constexpr,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr, PARTS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    column += PART * BV
    out_column += PART * BV
    if is_gradient:
        _walk_gradient(
            d_dstates, d_dv, p_dS, p_dv, p_dS0, p_dR_bits, chunk, row, length, HV, column, out_column, o_t,
            tiles, s_state, s_out, bars, S_v, S_k, V, K, HAS_DS, STORE_DS0, STAGES, BUFFERS, PARTS, PART,
        )  # fmt: skip
    else:
        _walk_states(
            d_states, d_U, p_S0, p_U_bits, chunk, length, HV, column, tiles, s_state, s_out, bars, S0_v, S0_k,
            V, K, HAS_S0, STAGES, BUFFERS, PARTS, PART,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["T", "N", "HV"])
def walks(
    d_tile, d_square, d_decay, d_v, d_do, d_states, d_U, d_dstates, d_dv, p_cu, p_S0, p_dS, p_dv, p_dS0,
    p_U_bits, p_dR_bits,
    o_b, o_t, o_h, S0_n, S0_h, S0_v, S0_k, S_n, S_h, S_v, S_k,
    T, N, HV,
    K: gl.constexpr, V: gl.constexpr, PACKED: gl.constexpr, HAS_S0: gl.constexpr, HAS_DS: gl.constexpr,
    STORE_DS0: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """One (sequence, value head, PARTS x 64 columns of V), by even programs the states and by odd ones their gradients.

    Args:
        d_tile: descriptor of the tiles, blocks ``[C, K]``; d_square: of the squares, blocks ``[C, 2 C]``.
        d_decay, d_v: see ``flash_kda.backends.hopper.recurrence.walk``; d_do, d_dv: as d_v.
        d_states, d_dstates: descriptors of ``[slots * HV * V, K]`` with blocks ``[BV, K]``; d_U: of
            ``[slots * HV * C, V]`` with blocks ``[C, BV]``.
        p_dv: ``[B, T, HV, V]`` with the strides of o. p_dS, p_dS0: with the strides of S.
        BUFFERS: for what goes out, 1 or 2. The others: see ``flash_kda.backends.triton.walks.walks``.
    """
    is_gradient = gl.program_id(0) % 2 == 1
    pid = gl.program_id(0) // 2
    SPLITS: gl.constexpr = V // (PARTS * BV)
    i_v = pid % SPLITS
    rest = pid // SPLITS
    i_h = rest % HV
    n = (rest // HV).to(gl.int64)
    if PACKED:
        start = gl.load(p_cu + n).to(gl.int64)
        length = (gl.load(p_cu + n + 1) - start).to(gl.int32)
        slot = first_slot(start, n, C)
        batch = n * 0
    else:
        start = n * 0
        length = T
        slot = n * ((T + C - 1) // C)
        batch = n
    s_K = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], d_tile.layout)
    s_Q = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], d_tile.layout)
    s_end = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], d_tile.layout)
    s_T = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, 2 * C], d_square.layout)
    s_M = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, 2 * C], d_square.layout)
    s_decay = gl.allocate_shared_memory(gl.float32, [STAGES, 1, K], d_decay.layout)
    s_rows = gl.allocate_shared_memory(gl.bfloat16, [STAGES * PARTS, C, BV], d_v.layout)
    s_state = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS * PARTS, BV, K], d_states.layout)
    s_out = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS * PARTS, C, BV], d_v.layout)
    bar_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    bar_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bar_ready.index(s), count=1)
        mbarrier.init(bar_free.index(s), count=PARTS)
    fence_async_shared()
    row = (batch * T + start).to(gl.int32)
    chunk = slot.to(gl.int32) * HV + i_h
    column = i_v * (PARTS * BV)
    p_S0 += n * S0_n + i_h * S0_h
    p_dS += n * S_n + i_h * S_h
    p_dS0 += n * S_n + i_h * S_h
    p_dv += batch * o_b + start * o_t + i_h * o_h
    tiles = (s_K, s_Q, s_end, s_T, s_M, s_decay, s_rows)
    bars = (bar_ready, bar_free)
    # Compile-time values keep their nature only in a tuple written out in the call.
    if PARTS == 1:
        gl.warp_specialize([
            (_walk, (
                d_states, d_U, d_dstates, d_dv, p_S0, p_dS, p_dv, p_dS0, p_U_bits, p_dR_bits,
                chunk, row, length, HV, column, i_h * V + column, o_t, is_gradient,
                tiles, s_state, s_out, bars, S0_v, S0_k, S_v, S_k,
                V, K, HAS_S0, HAS_DS, STORE_DS0, STAGES, BUFFERS, PARTS, 0,
            )),
            (_load_chunks, (
                d_tile, d_square, d_decay, d_v, d_do, chunk, row, length, HV, i_h * V + column, is_gradient,
                tiles, bars, STAGES, PARTS,
            )),
        ], [1], [24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_walk, (
                d_states, d_U, d_dstates, d_dv, p_S0, p_dS, p_dv, p_dS0, p_U_bits, p_dR_bits,
                chunk, row, length, HV, column, i_h * V + column, o_t, is_gradient,
                tiles, s_state, s_out, bars, S0_v, S0_k, S_v, S_k,
                V, K, HAS_S0, HAS_DS, STORE_DS0, STAGES, BUFFERS, PARTS, 0,
            )),
            (_walk, (
                d_states, d_U, d_dstates, d_dv, p_S0, p_dS, p_dv, p_dS0, p_U_bits, p_dR_bits,
                chunk, row, length, HV, column, i_h * V + column, o_t, is_gradient,
                tiles, s_state, s_out, bars, S0_v, S0_k, S_v, S_k,
                V, K, HAS_S0, HAS_DS, STORE_DS0, STAGES, BUFFERS, PARTS, 1,
            )),
            (_load_chunks, (
                d_tile, d_square, d_decay, d_v, d_do, chunk, row, length, HV, i_h * V + column, is_gradient,
                tiles, bars, STAGES, PARTS,
            )),
        ], [4, 1], [240, 24])  # fmt: skip
