"""Second kernel on Hopper: see ``flash_kda.backends.triton.recurrence``, whose equations these are.

One warp copies the chunks into shared memory ahead of use; a warpgroup for every 64 columns of V walks along them,
with its part of the state in registers. Products run while the registers are busy with something else.
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
from flash_kda.backends.hopper.common import pair
from flash_kda.backends.triton.common import L2NORM_EPS, activated_beta, exp2, first_slot, log2_decay
from flash_kda.backends.triton.config import CHUNK

C, BV = gl.constexpr(CHUNK), gl.constexpr(config.BV)
# Of the output's rows, on their way out.
OUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# What a launch is for: whole sequences; first segments, and what the later ones do to a state; these from the states
# before them.
WHOLE, MAP, APPLY = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
# What there is for each later segment: the state before it, B and A.
MAPS = gl.constexpr(config.MAPS)
OF_FIRST, OF_LATER = gl.constexpr(config.OF_FIRST), gl.constexpr(config.OF_LATER)


@gluon.jit
def load_chunks(
    d_tile, d_square, d_decay, d_v, slot, row, length, HV, i_h, column, is_first, is_map,
    s_kq, s_end, s_square, s_decay, s_v, bar_ready, bar_free,
    MODE: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Copy every chunk of a walk as soon as its stage is free.

    What a segment does to a state needs nothing that makes outputs, and A no v.
    """
    stage = 0
    phase = 0
    chunk = slot * HV + i_h
    has_output = is_first if MODE == MAP else True
    ALWAYS: gl.constexpr = 2 * d_tile.block_type.nbytes + d_square.block_type.nbytes + d_decay.block_type.nbytes
    OF_OUTPUT: gl.constexpr = d_tile.block_type.nbytes + d_square.block_type.nbytes
    OF_V: gl.constexpr = PARTS * d_v.block_type.nbytes
    for first in range(0, length, C):
        mbarrier.wait(bar_free.index(stage), phase ^ 1)
        bar = bar_ready.index(stage)
        kq = s_kq.index(stage)
        square = s_square.index(stage)
        tile = chunk * (3 * C)
        if has_output:
            mbarrier.expect(bar, ALWAYS + OF_V + OF_OUTPUT)
        elif is_map:
            mbarrier.expect(bar, ALWAYS)
        else:
            mbarrier.expect(bar, ALWAYS + OF_V)
        tma.async_copy_global_to_shared(d_tile, [tile, 0], bar, kq.slice(0, C))
        if has_output:
            tma.async_copy_global_to_shared(d_tile, [tile + C, 0], bar, kq.slice(C, C))
        if is_map == 0:
            for part in gl.static_range(PARTS):
                at = stage * PARTS + part
                tma.async_copy_global_to_shared(d_v, [row + first, column + part * BV], bar, s_v.index(at))
        tma.async_copy_global_to_shared(d_square, [chunk * (2 * C), 0], bar, square.slice(0, C))
        if has_output:
            tma.async_copy_global_to_shared(d_square, [chunk * (2 * C) + C, 0], bar, square.slice(C, C))
        tma.async_copy_global_to_shared(d_tile, [tile + 2 * C, 0], bar, s_end.index(stage))
        tma.async_copy_global_to_shared(d_decay, [chunk, 0], bar, s_decay.index(stage))
        chunk += HV
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def state_before(
    p_S0, S0_strides, p_map, n, i_h, is_first, is_map, o_v, o_k, is_known, STATE: gl.constexpr, HAS_S0: gl.constexpr,
    MODE: gl.constexpr,
):  # fmt: skip
    """The state that a walk starts from, ``[BV, K]``; zeros before a sequence whose state is not ``is_known``."""
    K: gl.constexpr = o_k.shape[1]
    S = gl.zeros([o_v.shape[0], K], gl.float32, STATE)
    if MODE == APPLY:
        S = gl.load(p_map + o_v * K + o_k)
    elif is_first:
        if HAS_S0 and is_known:
            S0_n, S0_h, S0_v, S0_k = S0_strides
            S = gl.load(p_S0 + n * S0_n + i_h * S0_h + o_v * S0_v + o_k * S0_k).to(gl.float32)
    elif is_map:
        S = gl.where(o_v == o_k, 1.0, 0.0)
    return S


@gluon.jit
def walk_by_token(
    S, p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_o, raw_strides, o_t, batch, start, length, i_h, i_qk, is_map,
    has_output, column, scale, lower_bound, K: gl.constexpr, GATE: gl.constexpr, HAS_A_LOG: gl.constexpr,
    HAS_DT_BIAS: gl.constexpr, NEG_EIGVAL: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """The recurrence itself, from the raw inputs: a NaN or inf goes where it must, and no further."""
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h = raw_strides
    STATE: gl.constexpr = S.type.layout
    o_k = gl.arange(0, K, gl.SliceLayout(0, STATE))
    o_v = column + gl.arange(0, BV, gl.SliceLayout(1, STATE))
    a = 1.0
    if HAS_A_LOG:
        a = gl.exp(gl.load(p_A_log + i_h))
    bias = gl.zeros([K], gl.float32, gl.SliceLayout(0, STATE))
    if HAS_DT_BIAS:
        bias = gl.load(p_dt_bias + i_h * K + o_k)
    valid = o_k < K
    p_q += batch * q_b + start * q_t + i_qk * q_h
    p_k += batch * k_b + start * k_t + i_qk * k_h
    p_v += batch * v_b + start * v_t + i_h * v_h
    p_g += batch * g_b + start * g_t + i_h * g_h
    p_beta += batch * beta_b + start * beta_t + i_h * beta_h
    step = o_t.to(gl.int64)
    for t in range(0, length):
        k = gl.load(p_k + o_k).to(gl.float32)
        q = gl.load(p_q + o_k).to(gl.float32)
        k *= gl.rsqrt(gl.sum(k * k, 0) + L2NORM_EPS)
        q *= gl.rsqrt(gl.sum(q * q, 0) + L2NORM_EPS) * scale
        g2 = log2_decay(gl.load(p_g + o_k).to(gl.float32), a, bias, lower_bound, valid, GATE)
        S *= gl.expand_dims(exp2(g2), 0)
        v = gl.load(p_v + o_v).to(gl.float32)
        if MODE == MAP:
            v = gl.where(is_map, 0.0, v)
        beta = activated_beta(gl.load(p_beta).to(gl.float32), True, NEG_EIGVAL)
        u = beta * (v - gl.sum(S * gl.expand_dims(k, 0), 1))
        S += gl.expand_dims(u, 1) * gl.expand_dims(k, 0)
        if has_output:
            o = gl.sum(S * gl.expand_dims(q, 0), 1)
            gl.store(p_o + t * step + o_v, o.to(p_o.dtype.element_ty))
        p_q += q_t
        p_k += k_t
        p_v += v_t
        p_g += g_t
        p_beta += beta_t
    return S


@gluon.jit
def step_chunk(
    S, first, length, stage, phase, p_out, step, zero, o_token, o_row,
    s_kq, s_end, s_square, s_decay, s_v, s_o, bar_ready, bar_free,
    K: gl.constexpr, MODE: gl.constexpr, IS_A: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """The state after the chunk that begins with token ``first``, whose output is stored; the next stage and phase."""
    STATE: gl.constexpr = S.type.layout
    TOKENS: gl.constexpr = zero.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    LEFT_OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    b_S = gl.convert_layout(S.to(gl.bfloat16), LEFT)
    mbarrier.wait(bar_ready.index(stage), phase)
    kq = s_kq.index(stage)
    K_S = warpgroup_mma(b_S, kq.slice(0, C).permute((1, 0)), zero, use_acc=False, is_async=True)
    if MODE != MAP:
        Q_S = warpgroup_mma(b_S, kq.slice(C, C).permute((1, 0)), zero, use_acc=False, is_async=True)
    v = zero
    if not IS_A:
        v = s_v.index(stage * PARTS + PART).permute((1, 0)).load(TOKENS).to(gl.float32)
        if first + C > length:
            # The rows past the end are another sequence's.
            v = gl.where(first + o_token < length, v, 0.0)
    decay = gl.expand_dims(s_decay.index(stage).reshape((K,)).load(gl.SliceLayout(0, STATE)), 0)
    K_S = warpgroup_mma_wait(0 if MODE == MAP else 1, deps=(K_S,))
    # The tile holds minus K_plus.
    R = (K_S + v).to(gl.bfloat16)
    R = gl.reshape(gl.permute(gl.join(R, R), (0, 2, 1)), (BV, 2 * C))
    R = gl.convert_layout(R, LEFT)
    square = s_square.index(stage)
    U = warpgroup_mma(R, square.slice(0, C).permute((1, 0)), zero, use_acc=False, is_async=True)
    if MODE != MAP:
        o = warpgroup_mma(R, square.slice(C, C).permute((1, 0)), Q_S, is_async=True)
    S *= decay
    U = warpgroup_mma_wait(0 if MODE == MAP else 1, deps=(U,))
    # What one bfloat16 loses of U the state would keep for as long as the gate is slow.
    high, low = pair(U)
    S = warpgroup_mma(gl.convert_layout(high, LEFT_OF_STATE), s_end.index(stage), S, is_async=True)
    S = warpgroup_mma(gl.convert_layout(low, LEFT_OF_STATE), s_end.index(stage), S, is_async=True)
    if MODE != MAP:
        o = warpgroup_mma_wait(2, deps=(o,))
        s_o.permute((1, 0)).store(o.to(gl.bfloat16))
        gl.thread_barrier()
        rows = s_o.load(OUT).to(p_out.dtype.element_ty)
        gl.store(p_out + first * step, rows, mask=first + o_row < length)
    S = warpgroup_mma_wait(0, deps=(S,))
    mbarrier.arrive(bar_free.index(stage), count=1)
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return S, stage, phase


@gluon.jit
def step_chunks(
    S, begin, end, length, stage, phase, p_out, step, is_first, is_map, zero, o_token, o_row,
    s_kq, s_end, s_square, s_decay, s_v, s_o, bar_ready, bar_free,
    K: gl.constexpr, MODE: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """:func:`step_chunk` for the chunks that begin with tokens from ``begin`` to before ``end``.

    What a walk is, is known to the compiler in its loop: a branch in there would have the products wait.
    """
    if MODE == MAP and is_first:
        for first in range(begin, end, C):
            S, stage, phase = step_chunk(
                S, first, length, stage, phase, p_out, step, zero, o_token, o_row,
                s_kq, s_end, s_square, s_decay, s_v, s_o, bar_ready, bar_free, K, WHOLE, False, STAGES, PARTS, PART,
            )  # fmt: skip
    elif MODE == MAP and is_map:
        for first in range(begin, end, C):
            S, stage, phase = step_chunk(
                S, first, length, stage, phase, p_out, step, zero, o_token, o_row,
                s_kq, s_end, s_square, s_decay, s_v, s_o, bar_ready, bar_free, K, MODE, True, STAGES, PARTS, PART,
            )  # fmt: skip
    else:
        for first in range(begin, end, C):
            S, stage, phase = step_chunk(
                S, first, length, stage, phase, p_out, step, zero, o_token, o_row,
                s_kq, s_end, s_square, s_decay, s_v, s_o, bar_ready, bar_free, K, MODE, False, STAGES, PARTS, PART,
            )  # fmt: skip
    return S, stage, phase


@gluon.jit
def _walk(
    p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_S0, p_S, p_map, p_o, raw_strides, S0_strides, S_strides, o_t,
    batch, start, length, n, i_h, i_qk, is_first, is_map, is_mapped, is_stored, column, scale, lower_bound,
    s_kq, s_end, s_square, s_decay, s_v, s_o, bar_ready, bar_free,
    K: gl.constexpr, GATE: gl.constexpr, HAS_A_LOG: gl.constexpr, HAS_DT_BIAS: gl.constexpr,
    NEG_EIGVAL: gl.constexpr, HAS_S0: gl.constexpr, STORE_S: gl.constexpr, MODE: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """The state of 64 columns of V from the first token to the last."""
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    TOKENS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    o_v = column + PART * BV + gl.expand_dims(gl.arange(0, BV, gl.SliceLayout(1, STATE)), 1)
    o_k = gl.expand_dims(gl.arange(0, K, gl.SliceLayout(0, STATE)), 0)
    S = state_before(p_S0, S0_strides, p_map, n, i_h, is_first, is_map, o_v, o_k, True, STATE, HAS_S0, MODE)
    zero = gl.zeros([BV, C], gl.float32, TOKENS)
    o_token = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, TOKENS)), 0)
    o_row = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, OUT)), 1)
    p_out = p_o + column + PART * BV + gl.expand_dims(gl.arange(0, BV, gl.SliceLayout(0, OUT)), 0) + o_row * o_t
    step = o_t.to(gl.int64)
    start_of_ring = gl.to_tensor(0)
    S, _, _ = step_chunks(
        S, 0, length, length, start_of_ring, start_of_ring, p_out, step, is_first, is_map, zero, o_token, o_row,
        s_kq, s_end, s_square, s_decay, s_v, s_o, bar_ready, bar_free, K, MODE, STAGES, PARTS, PART,
    )  # fmt: skip
    # 0 * x is not 0 for a NaN or inf, which a product of matrices has then also carried to earlier rows.
    broken = gl.where(S * 0.0 == 0.0, 0, 1)
    if gl.max(gl.max(broken, 1), 0) > 0:
        S = state_before(p_S0, S0_strides, p_map, n, i_h, is_first, is_map, o_v, o_k, True, STATE, HAS_S0, MODE)
        S = walk_by_token(
            S, p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_o, raw_strides, o_t, batch, start, length, i_h, i_qk,
            is_map, is_first if MODE == MAP else True, column + PART * BV, scale, lower_bound, K, GATE, HAS_A_LOG,
            HAS_DT_BIAS, NEG_EIGVAL, MODE,
        )  # fmt: skip
    if MODE == MAP and is_mapped:
        gl.store(p_map + o_v * K + o_k, S)
    if STORE_S:
        S_n, S_h, S_v, S_k = S_strides
        p_last = p_S + n * S_n + i_h * S_h + o_v * S_v + o_k * S_k
        gl.store(p_last, S.to(p_S.dtype.element_ty), mask=is_stored & (o_v >= 0))


@gluon.jit
def _segments_of(length, SEGMENT):
    """How many segments there are of at most SEGMENT tokens, and how many the first and each later one have.

    A first one walks with outputs beside others without, and has fewer for that. All begin with a chunk, and only the
    last may end inside of one.
    """
    chunks = (length + C - 1) // C
    count = gl.maximum((length + SEGMENT - 1) // SEGMENT, 1)
    parts = OF_LATER * count - (OF_LATER - OF_FIRST)
    later = gl.minimum((OF_LATER * chunks + parts - 1) // parts, SEGMENT // C)
    return count, (chunks - (count - 1) * later) * C, later * C


@gluon.jit
def place(
    p_cu, p_cuts, T, N, HV, SEGMENT, LATER, V: gl.constexpr, PACKED: gl.constexpr, MODE: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """What a program walks along.

    Programs of MAP are first segments, then B of the later ones that another follows, then A of these. If PACKED they
    are B of all later segments, A of all, first ones at the numbers of their second ones, and then the sequences that
    are not cut: these may be many, and the others take long.

    Returns:
        Its head, part of V and sequence; where among the maps its own is; batch row, first slot, first token and count
        of tokens; the token of its sequence that it begins with and the sequence's length; whether it begins the
        sequence, whether it is a segment's A, and whether it stores a map, and a final state.
    """
    pid = gl.program_id(0)
    SPLITS: gl.constexpr = V // (PARTS * BV)
    i_v = pid % SPLITS
    rest = pid // SPLITS
    is_first = MODE != APPLY
    is_map = False
    is_whole = False
    i_later = 0
    if MODE == MAP and PACKED:
        role = gl.minimum(rest // (LATER * HV), 3)
        rest -= role * (LATER * HV)
        is_map = role == 1
        is_first = role >= 2
        is_whole = role == 3
    elif MODE != WHOLE and not PACKED:
        per_row = LATER // N
        i_later = rest // (N * HV)
        rest %= N * HV
        if MODE == MAP:
            is_first = i_later == 0
            is_map = i_later >= per_row
            i_later = gl.maximum(i_later - gl.where(is_map, per_row, 1), 0)
    i_h = rest % HV
    n = (rest // HV).to(gl.int64)
    number = n
    if MODE != WHOLE:
        if PACKED:
            SEGMENT = gl.load(p_cuts)
            number = gl.where(is_whole, 0, number)
            n = gl.where(is_whole, n, gl.load(p_cuts + 1 + number))
            i_later = gl.load(p_cuts + 1 + LATER + number)
        else:
            number = n * per_row + i_later
    if PACKED:
        start = gl.load(p_cu + n).to(gl.int64)
        whole = (gl.load(p_cu + n + 1) - start).to(gl.int32)
        batch = n * 0
        slot = first_slot(start, n, C)
    else:
        start = gl.to_tensor(0).to(gl.int64)
        whole = T
        batch = n
        slot = n * ((T + C - 1) // C)
    length = whole
    offset = 0
    at = number
    is_mapped = False
    is_stored = True
    if MODE != WHOLE:
        count, first, later = _segments_of(whole, SEGMENT)
        is_there = (i_later >= 0) & ((i_later == 0) | (is_first == 0))
        is_there = gl.where(is_whole, count == 1, is_there)
        offset = gl.where(is_first, 0, first + i_later * later)
        size = gl.where(is_first, first, later)
        is_last = offset + size >= whole
        length = gl.where(is_there, gl.minimum(whole - offset, size), 0)
        is_stored = is_there & is_last
        at = number * (HV * MAPS) + i_h * MAPS
        if MODE == MAP:
            # Nothing follows a last segment.
            length = gl.where(is_whole | (is_last == 0), length, 0)
            is_mapped = is_there & (is_last == 0)
            is_stored = is_stored & is_first
            at += gl.where(is_first, 0, gl.where(is_map, 2, 1))
        slot += offset // C
        start += offset
    return i_h, i_v, n, at, batch, slot, start, length, offset, whole, is_first, is_map, is_mapped, is_stored


@gluon.jit
def allocate(d_tile, d_square, d_decay, d_v, K: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr):
    """The ring of tiles, squares, decays and v, the output of a chunk, and the ring's barriers."""
    s_kq = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * C, K], d_tile.layout)
    s_end = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], d_tile.layout)
    s_square = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * C, 2 * C], d_square.layout)
    s_decay = gl.allocate_shared_memory(gl.float32, [STAGES, 1, K], d_decay.layout)
    s_v = gl.allocate_shared_memory(gl.bfloat16, [STAGES * PARTS, C, BV], d_v.layout)
    s_o = gl.allocate_shared_memory(gl.bfloat16, [PARTS, C, BV], d_v.layout)
    bar_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    bar_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bar_ready.index(s), count=1)
        mbarrier.init(bar_free.index(s), count=PARTS)
    fence_async_shared()
    return s_kq, s_end, s_square, s_decay, s_v, s_o, bar_ready, bar_free


@gluon.jit(do_not_specialize=["T", "N", "HV", "GROUP", "scale", "lower_bound", "SEGMENT", "LATER"])
def walk(
    d_tile, d_square, d_decay, d_v, p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_cu, p_cuts, p_S0, p_S, p_maps,
    p_o,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    S0_n, S0_h, S0_v, S0_k, S_n, S_h, S_v, S_k, o_b, o_t, o_h,
    T, N, HV, GROUP, scale, lower_bound, SEGMENT, LATER,
    K: gl.constexpr, V: gl.constexpr, GATE: gl.constexpr, HAS_A_LOG: gl.constexpr, HAS_DT_BIAS: gl.constexpr,
    NEG_EIGVAL: gl.constexpr, PACKED: gl.constexpr, HAS_S0: gl.constexpr, STORE_S: gl.constexpr,
    MODE: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """One (sequence or segment, value head, PARTS x 64 columns of V).

    A segment takes a state S before it to ``S A + B``, states transposed as here. Where sequences are cut, a launch
    with MODE = MAP walks along first segments, and finds A and B of every later one: B by a walk from zeros, A by a
    walk from the unit matrix with v = 0. A scan makes the state before every later segment of them, and a launch with
    MODE = APPLY goes on from these.

    Args:
        d_tile: descriptor of the tiles, blocks ``[C, K]``; d_square: of the squares, blocks ``[C, 2 C]``; d_decay:
            ``[slots * HV, K]``, blocks ``[1, K]``; d_v: ``[B * T, HV * V]``, blocks ``[C, BV]``.
        p_cuts: how PACKED sequences are cut; see ``cut_sequences``.
        p_maps: ``[LATER, HV, 3, K, K]`` float32: the state before each later segment, B and A; V = K.
        SEGMENT: tokens of a segment at most, a multiple of C, if not PACKED. LATER: how many segments are not the first
            of a sequence, at most.
        The raw inputs are read only if the state is not finite at the end.
        The others: see ``flash_kda.backends.triton.recurrence.recurrence``.
    """
    i_h, i_v, n, at, batch, slot, start, length, _, _, is_first, is_map, is_mapped, is_stored = place(
        p_cu, p_cuts, T, N, HV, SEGMENT, LATER, V, PACKED, MODE, PARTS
    )
    s_kq, s_end, s_square, s_decay, s_v, s_o, bar_ready, bar_free = allocate(
        d_tile, d_square, d_decay, d_v, K, STAGES, PARTS
    )
    row = (batch * T + start).to(gl.int32)
    slot = slot.to(gl.int32)
    column = i_v * (PARTS * BV)
    i_qk = i_h // GROUP
    p_out = p_o + batch * o_b + start * o_t + i_h * o_h
    p_map = p_maps + at * (K * K)
    raw = (q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h)
    S0_strides = (S0_n, S0_h, S0_v, S0_k)
    S_strides = (S_n, S_h, S_v, S_k)
    # Compile-time values keep their nature only in a tuple written out in the call.
    if PARTS == 1:
        gl.warp_specialize([
            (_walk, (
                p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_S0, p_S, p_map, p_out, raw, S0_strides, S_strides,
                o_t, batch, start, length, n, i_h, i_qk, is_first, is_map, is_mapped, is_stored, column, scale,
                lower_bound, s_kq, s_end, s_square, s_decay, s_v, s_o.index(0), bar_ready, bar_free,
                K, GATE, HAS_A_LOG, HAS_DT_BIAS, NEG_EIGVAL, HAS_S0, STORE_S, MODE, STAGES, PARTS, 0,
            )),
            (load_chunks, (
                d_tile, d_square, d_decay, d_v, slot, row, length, HV, i_h, i_h * V + column, is_first, is_map,
                s_kq, s_end, s_square, s_decay, s_v, bar_ready, bar_free, MODE, STAGES, PARTS,
            )),
        ], [1], [24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_walk, (
                p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_S0, p_S, p_map, p_out, raw, S0_strides, S_strides,
                o_t, batch, start, length, n, i_h, i_qk, is_first, is_map, is_mapped, is_stored, column, scale,
                lower_bound, s_kq, s_end, s_square, s_decay, s_v, s_o.index(0), bar_ready, bar_free,
                K, GATE, HAS_A_LOG, HAS_DT_BIAS, NEG_EIGVAL, HAS_S0, STORE_S, MODE, STAGES, PARTS, 0,
            )),
            (_walk, (
                p_q, p_k, p_v, p_g, p_beta, p_A_log, p_dt_bias, p_S0, p_S, p_map, p_out, raw, S0_strides, S_strides,
                o_t, batch, start, length, n, i_h, i_qk, is_first, is_map, is_mapped, is_stored, column, scale,
                lower_bound, s_kq, s_end, s_square, s_decay, s_v, s_o.index(1), bar_ready, bar_free,
                K, GATE, HAS_A_LOG, HAS_DT_BIAS, NEG_EIGVAL, HAS_S0, STORE_S, MODE, STAGES, PARTS, 1,
            )),
            (load_chunks, (
                d_tile, d_square, d_decay, d_v, slot, row, length, HV, i_h, i_h * V + column, is_first, is_map,
                s_kq, s_end, s_square, s_decay, s_v, bar_ready, bar_free, MODE, STAGES, PARTS,
            )),
        ], [4, 1], [240, 24])  # fmt: skip
