"""Gradients of whole chunks on Hopper: see ``flash_kda.backends.triton.chunk_gradient``, whose equations these are.

One warp copies ahead all that a chunk is made of; two warpgroups take its channels. Every tile of theirs is ``[K, C]``,
tokens along the rows of accumulators: that is where products leave it, where their left operands are read from, and
sums over tokens stay in a warp.
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

from flash_kda.backends.hopper.common import layout_of_bits, lost_bits_of_words, pair, sequence_of_slot
from flash_kda.backends.hopper.prepare import PLAIN, locate, to_float
from flash_kda.backends.triton.chunk_gradient import beta_gradient, gate_gradient
from flash_kda.backends.triton.common import (
    EASY,
    L2NORM_EPS,
    exp2,
    log2_decay,
    reciprocal,
    with_lost_bits,
)
from flash_kda.backends.triton.config import CHUNK

C = gl.constexpr(CHUNK)
ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# Warps that compute, and copies of q, k, g, do, dR and U in flight.
WARPS, STAGES = gl.constexpr(8), gl.constexpr(2)
# Tiles [K, C], as results and as left operands: the same registers.
TOKENS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CHUNK, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, TOKENS, 2))
OF_CHANNEL = gl.constexpr(gl.SliceLayout(1, TOKENS))
OF_TOKEN = gl.constexpr(gl.SliceLayout(0, TOKENS))
BITS_64, BITS_128 = layout_of_bits(64, WARPS.value), layout_of_bits(128, WARPS.value)
# [2 C, C]: dM above -dP.
PAIRS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, CHUNK // 2, 16]))
OUT = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0]))
# Four values in every thread that computes; and in the warp that copies.
EVERYWHERE = gl.constexpr(gl.BlockedLayout([4], [32], [WARPS], [0]))
LANES = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))
# 64 values in every warp.
PER_WARP = gl.constexpr(gl.BlockedLayout([2], [32], [WARPS], [0]))
# Tokens along the lanes of every warp, and what is summed in each.
LANE_SUMS = gl.constexpr(gl.BlockedLayout([8, 1], [1, 32], [1, WARPS], [0, 1]))
OF_LANE = gl.constexpr(gl.SliceLayout(0, LANE_SUMS))
# Rows get 2^6 of what columns have too much: gradients of rows, which columns multiply, need the room.
ROOM = gl.constexpr(6.0)


@gluon.jit
def _add_both(a1, a2, b1, b2):
    return a1 + b1, a2 + b2


@gluon.jit
def _add_and_max(a1, a2, b1, b2):
    return a1 + b1, gl.maximum(a2, b2)


@gluon.jit
def _announce(s_words, row, last, chunk, i_h):
    """Tell the warps that compute which chunk a stage holds."""
    o = gl.arange(0, 4, LANES)
    s_words.store(gl.where(o < 2, gl.where(o == 0, row, last), gl.where(o == 2, chunk, i_h)))  # handed over
    gl.thread_barrier()


@gluon.jit
def _announced(s_words):
    """What :func:`_announce` was told."""
    o = gl.arange(0, 4, EVERYWHERE)
    x = s_words.load(EVERYWHERE)
    row = gl.sum(gl.where(o == 0, x, 0), 0)
    last = gl.sum(gl.where(o == 1, x, 0), 0)
    chunk = gl.sum(gl.where(o == 2, x, 0), 0)
    i_h = gl.sum(gl.where(o == 3, x, 0), 0)
    return row, last, chunk, i_h


@gluon.jit
def _load_parameters(
    p_beta, p_A_log, p_dt_bias, beta_t, beta_h, row, last, i_h, s_beta, s_a, s_bias,
    K: gl.constexpr, HAS_A_LOG: gl.constexpr, HAS_DT_BIAS: gl.constexpr,
):  # fmt: skip
    """Beta, exp(A_log) and dt_bias, for which nobody who computes then waits."""
    o_t = gl.arange(0, C, gl.BlockedLayout([1], [32], [1], [0]))
    i_beta = (row + gl.minimum(o_t, last)).to(gl.int64)
    s_beta.store(gl.load(p_beta + i_beta * beta_t + i_h * beta_h).to(gl.float32))  # handed over
    if HAS_A_LOG:
        s_a.store(gl.exp(gl.load(p_A_log + i_h + gl.zeros([4], gl.int32, LANES))))  # handed over
    if HAS_DT_BIAS:
        s_bias.store(gl.load(p_dt_bias + i_h * K + gl.arange(0, K, LANES)))  # handed over


@gluon.jit
def _scale_rows(x, s_r, last):
    """``[K, C]`` times a factor per token; zero past the last, where rows are another sequence's."""
    x *= gl.expand_dims(s_r.load(OF_TOKEN), 0)
    if last < C - 1:
        x = gl.where(gl.expand_dims(gl.arange(0, C, OF_TOKEN), 0) <= last, x, 0.0)
    return x


@gluon.jit
def _load_chunks(
    d_q, d_k, d_g, d_do, d_dR, d_dR_bits, d_U, d_U_bits, d_states, d_dstates,
    p_beta, p_A_log, p_dt_bias, p_cu, p_hard,
    p_dA_part, p_dbias_part, beta_t, beta_h, T, N, HV, CHUNKS_END, words, tiles, states, bars,
    K: gl.constexpr, V: gl.constexpr, HAS_A_LOG: gl.constexpr, HAS_DT_BIAS: gl.constexpr, PACKED: gl.constexpr,
    CHUNKS: gl.constexpr,
):  # fmt: skip
    """Copy every chunk of this program that one anchor serves as soon as there is room.

    The others are another launch's. Parts of sums over chunks are zero where a chunk holds no token.
    """
    s_words, s_beta, s_a, s_bias = words
    s_qk, s_g, s_rows, s_U, s_bits = tiles
    s_S, s_dS = states
    bar_ready, bar_free, bar_S_ready, bar_S_free = bars
    zeros = gl.zeros([K], gl.float32, LANES)
    o_c = gl.arange(0, K, LANES)
    chunk = gl.program_id(0)
    n = 0
    if PACKED:
        n = sequence_of_slot(p_cu, chunk // HV, N, C, 1)
    stage = 0
    phase = 0
    phase_S = 0
    while chunk < CHUNKS_END:
        n, is_taken, row, last = locate(chunk, n, p_cu, T, N, HV, CHUNKS_END, PACKED)
        if is_taken == 0:
            i_part = chunk.to(gl.int64) * K + o_c
            if HAS_A_LOG:
                gl.store(p_dA_part + i_part, zeros)
            if HAS_DT_BIAS:
                gl.store(p_dbias_part + i_part, zeros)
        if CHUNKS == EASY:
            is_taken = is_taken & (gl.load(p_hard + chunk.to(gl.int64)) == 0)
        if is_taken:
            i_h = chunk % HV
            mbarrier.wait(bar_free.index(stage), phase ^ 1)
            _load_parameters(
                p_beta, p_A_log, p_dt_bias, beta_t, beta_h, row, last, i_h,
                s_beta.index(stage), s_a.index(stage), s_bias.index(stage), K, HAS_A_LOG, HAS_DT_BIAS,
            )  # fmt: skip
            _announce(s_words.index(stage), row, last, chunk, i_h)
            bar = bar_ready.index(stage)
            BYTES: gl.constexpr = 3 * d_q.block_type.nbytes + 3 * d_U.block_type.nbytes
            mbarrier.expect(bar, BYTES + 2 * d_U_bits.block_type.nbytes)
            tma.async_copy_global_to_shared(d_do, [row, i_h * V], bar, s_rows.index(stage).slice(0, C))
            tma.async_copy_global_to_shared(d_dR, [row, i_h * V], bar, s_rows.index(stage).slice(C, C))
            tma.async_copy_global_to_shared(d_U, [chunk * C, 0], bar, s_U.index(stage))
            tma.async_copy_global_to_shared(d_dR_bits, [chunk * V, 0], bar, s_bits.index(2 * stage))
            tma.async_copy_global_to_shared(d_U_bits, [chunk * V, 0], bar, s_bits.index(2 * stage + 1))
            tma.async_copy_global_to_shared(d_k, [row, i_h * K], bar, s_qk.index(stage).slice(C, C))
            tma.async_copy_global_to_shared(d_q, [row, i_h * K], bar, s_qk.index(stage).slice(0, C))
            tma.async_copy_global_to_shared(d_g, [row, i_h * K], bar, s_g.index(stage))
            mbarrier.wait(bar_S_free.index(0), phase_S ^ 1)
            bar = bar_S_ready.index(0)
            mbarrier.expect(bar, 2 * d_states.block_type.nbytes)
            tma.async_copy_global_to_shared(d_states, [chunk * V, 0], bar, s_S)
            tma.async_copy_global_to_shared(d_dstates, [chunk * V, 0], bar, s_dS)
            phase_S ^= 1
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        chunk += gl.num_programs(0)
    mbarrier.wait(bar_free.index(stage), phase ^ 1)
    _announce(s_words.index(stage), 0, -1, 0, 0)
    mbarrier.arrive(bar_ready.index(stage), count=1)


@gluon.jit
def _tile(s_x):
    """``[C, K]`` in shared memory as ``[K, C]`` in TOKENS."""
    return gl.convert_layout(s_x.permute((1, 0)).load(LEFT), TOKENS, assert_trivial=True).to(gl.float32)


@gluon.jit
def _wide_tile(s_x, s_bits, V: gl.constexpr):
    """``[C, V]`` the same way, with the bits that the walks kept of what rounding lost."""
    BITS: gl.constexpr = BITS_64 if V == 64 else BITS_128
    x = gl.convert_layout(s_x.permute((1, 0)).load(LEFT), TOKENS, assert_trivial=True)
    return with_lost_bits(x, lost_bits_of_words(s_bits.load(gl.SliceLayout(2, BITS)), BITS, TOKENS))


@gluon.jit
def _left(x):
    return gl.convert_layout(x.to(gl.bfloat16), LEFT, assert_trivial=True)


@gluon.jit
def _halves(x):
    """Sums over the early and the late tokens of ``[K, C]``, in OF_CHANNEL."""
    sums = gl.sum(gl.reshape(x, (x.shape[0], 2, C // 2)), 2)
    early, late = gl.split(sums)
    return gl.convert_layout(early, OF_CHANNEL), gl.convert_layout(late, OF_CHANNEL)


@gluon.jit
def _unit(largest):
    """The power of two that leaves the largest magnitude at least 1 and less than 2, and one over it."""
    largest = gl.minimum(gl.maximum(largest, 2.0**-100), 2.0**126)
    exponent = largest.to(gl.int32, bitcast=True) & 0x7F800000
    return exponent.to(gl.float32, bitcast=True), (0x7F000000 - exponent).to(gl.float32, bitcast=True)


@gluon.jit
def _chunk(
    p_dq, p_dk, p_dg, p_dbeta, p_dA_part, p_dbias_part, row, last, chunk, i_h, HV, scale, lower_bound,
    words, tiles, states, scratch, bars, stage, phase_S,
    K: gl.constexpr, V: gl.constexpr, GATE: gl.constexpr, HAS_A_LOG: gl.constexpr, HAS_DT_BIAS: gl.constexpr,
    NEG_EIGVAL: gl.constexpr, LEAST_BETA: gl.constexpr,
):  # fmt: skip
    """All gradients of one chunk whose tiles are, or soon will be, in the given stage of shared memory."""
    o_c = gl.arange(0, K, OF_CHANNEL)
    o_t = gl.expand_dims(gl.arange(0, C, OF_TOKEN), 0)
    valid = o_t <= last
    zero = gl.zeros([K, C], gl.float32, TOKENS)
    o_pair = gl.arange(0, 2 * C, gl.SliceLayout(1, PAIRS))
    _, s_beta, s_a, s_bias = words
    s_qk, s_g, s_rows, s_U, s_bits = tiles
    s_S, s_dS = states
    s_squares, s_sums, s_norms, s_largest, s_dR_U, s_out = scratch
    _, bar_free, bar_S_ready, bar_S_free = bars
    s_qk, s_g, s_rows, s_U = s_qk.index(stage), s_g.index(stage), s_rows.index(stage), s_U.index(stage)
    s_dR_bits, s_U_bits = s_bits.index(2 * stage), s_bits.index(2 * stage + 1)
    s_q, s_k = s_qk.slice(0, C), s_qk.slice(C, C)
    s_do, s_dR = s_rows.slice(0, C), s_rows.slice(C, C)
    empty = gl.zeros([2 * C, C], gl.float32, PAIRS)
    D = warpgroup_mma(s_rows, s_U.permute((1, 0)), empty, use_acc=False, is_async=True)
    # Their diagonals are the squares of q's and of k's rows.
    by_q = warpgroup_mma(s_qk, s_q.permute((1, 0)), empty, use_acc=False, is_async=True)
    by_k = warpgroup_mma(s_qk, s_k.permute((1, 0)), empty, use_acc=False, is_async=True)
    # Decays from the chunk's middle to each token; later from its start and to its end.
    a = 1.0
    if HAS_A_LOG:
        a = gl.max(s_a.index(stage).load(EVERYWHERE), 0)
    bias = gl.zeros([K], gl.float32, OF_CHANNEL)
    if HAS_DT_BIAS:
        bias = s_bias.index(stage).load(OF_CHANNEL)
    bias = gl.expand_dims(bias, 1)
    raw = _tile(s_g)
    if last < C - 1:
        # A NaN in another sequence's rows would reach all tokens through the sums.
        raw = gl.where(valid, raw, 0.0)
    g2 = log2_decay(raw, a, bias, lower_bound, valid, GATE)
    early, late = _halves(g2)
    high, low = pair(g2)
    from_mid = warpgroup_mma(_left(high), s_sums.index(0), zero, use_acc=False, is_async=True)
    from_mid = warpgroup_mma(_left(low), s_sums.index(0), from_mid, is_async=True)
    # Parts of the state before and of the gradient of that after: nothing waits for them soon.
    mbarrier.wait(bar_S_ready.index(0), phase_S)
    dQ_plus = warpgroup_mma(s_S.permute((1, 0)), s_do.permute((1, 0)), zero, use_acc=False, is_async=True)
    minus_dK_plus = warpgroup_mma(s_S.permute((1, 0)), s_dR.permute((1, 0)), zero, use_acc=False, is_async=True)
    dK_end = warpgroup_mma(s_dS.permute((1, 0)), s_U.permute((1, 0)), zero, use_acc=False, is_async=True)

    # dM and dP as operands. The diagonal of dM, a token's own pair, has no decay.
    D, by_q, by_k = warpgroup_mma_wait(5, deps=(D, by_q, by_k))
    row_of = gl.expand_dims(o_pair % C, 1)
    column = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, PAIRS)), 0)
    is_P = gl.expand_dims(o_pair, 1) >= C
    own = column == row_of
    squares = gl.where(own, gl.where(is_P, by_k, by_q), 0.0)
    is_pair = (column < row_of) | (own & (is_P == 0))
    D = gl.where(is_pair & (row_of <= last), gl.where(is_P, -D, D), 0.0)
    squares, largest = gl.reduce((squares, gl.abs(D)), 1, _add_and_max)
    s_norms.store(gl.rsqrt(squares + L2NORM_EPS))
    s_largest.store(largest)
    unit, over_unit = _unit(gl.max(s_largest.load(PER_WARP), 0))
    s_squares.store((D * over_unit).to(gl.bfloat16))
    q = _scale_rows(_tile(s_q), s_norms.slice(0, C), last) * scale
    k = _scale_rows(_tile(s_k), s_norms.slice(C, C), last)
    from_mid = warpgroup_mma_wait(3, deps=(from_mid,))
    e_row = exp2(from_mid + ROOM)
    e_column = reciprocal(e_row)
    q_row = (q * e_row).to(gl.bfloat16)
    k_row = (k * e_row).to(gl.bfloat16)
    k_column = (k * e_column).to(gl.bfloat16)
    fence_async_shared()
    gl.thread_barrier()
    s_M = s_squares.slice(0, C)
    s_P = s_squares.slice(C, C)
    dq_row = warpgroup_mma(_left(k_column), s_M.permute((1, 0)), zero, use_acc=False, is_async=True)
    dk_row = warpgroup_mma(_left(k_column), s_P.permute((1, 0)), zero, use_acc=False, is_async=True)
    dk_column = warpgroup_mma(_left(q_row), s_M, zero, use_acc=False, is_async=True)
    dk_column = warpgroup_mma(_left(k_row), s_P, dk_column, is_async=True)
    S_dS = zero
    for v in gl.static_range(0, V, C):
        S_dS += _tile(s_S.slice(v, C)) * _tile(s_dS.slice(v, C))
    S_dS = gl.sum(S_dS, 1)
    dQ_plus, minus_dK_plus, dK_end = warpgroup_mma_wait(4, deps=(dQ_plus, minus_dK_plus, dK_end))
    gl.thread_barrier()
    mbarrier.arrive(bar_S_free.index(0), count=1)
    if last < C - 1:
        dQ_plus = gl.where(valid, dQ_plus, 0.0)
        minus_dK_plus = gl.where(valid, minus_dK_plus, 0.0)
    from_start = e_row * gl.expand_dims(exp2(early - ROOM), 1)
    # Read again, since registers are short meanwhile.
    q = _scale_rows(_tile(s_q), s_norms.slice(0, C), last) * scale
    k = _scale_rows(_tile(s_k), s_norms.slice(C, C), last)
    to_end = e_column * gl.expand_dims(exp2(late + ROOM), 1)
    dQ_plus *= from_start
    minus_dK_plus *= from_start
    dK_end *= to_end
    dG = dQ_plus * q - minus_dK_plus * k
    of_end = dK_end * k
    # Columns count to the end of the chunk, so in the sums of the tokens after them: in all, but for those until them.
    after = gl.sum(of_end, 1) + S_dS * exp2(early + late)
    dG -= of_end
    dk = dK_end - minus_dK_plus
    dq_row, dk_row, dk_column = warpgroup_mma_wait(0, deps=(dq_row, dk_row, dk_column))
    # A pair gives to the log decay of its row what it takes from that of its column. Both are made from the same
    # rounded operands, so that in sums over time they cancel but for the sums' own rounding.
    pairs = dq_row * to_float(q_row) + dk_row * to_float(k_row) - dk_column * to_float(k_column)
    dG += pairs * unit
    high, low = pair(dG)
    # What the pair loses of a column is none of the tokens until it.
    after += gl.sum(dG - to_float(high) - to_float(low), 1)
    dg = warpgroup_mma(_left(high), s_sums.index(1), zero, use_acc=False, is_async=True)
    dg = warpgroup_mma(_left(low), s_sums.index(1), dg, is_async=True)
    # The unit last: beside it, a strong decay of a small gradient would be zero.
    dq = (dQ_plus + dq_row * e_row * unit) * scale
    dk += (dk_row * e_row + dk_column * e_column) * unit
    q *= 1.0 / scale
    q_dq, k_dk = gl.reduce((q * dq, k * dk), 0, _add_both)
    dq = gl.expand_dims(s_norms.slice(0, C).load(OF_TOKEN), 0) * (dq - q * gl.expand_dims(q_dq, 0))
    dk = gl.expand_dims(s_norms.slice(C, C).load(OF_TOKEN), 0) * (dk - k * gl.expand_dims(k_dk, 0))
    # Sums over the 16 columns of V that a warp has, which need no barrier; the rest after the last one.
    dR_U = _wide_tile(s_dR, s_dR_bits, V) * _wide_tile(s_U, s_U_bits, V)
    s_dR_U.store(gl.sum(gl.reshape(dR_U, (V // 16, 16, C)), 1))
    dg = warpgroup_mma_wait(0, deps=(dg,))
    dg += gl.expand_dims(after, 1)
    draw, dA = gate_gradient(dg, g2, _tile(s_g), a, bias, lower_bound, GATE)
    draw = gl.where(valid, draw, 0.0)
    dA = gl.sum(gl.where(valid, dA, 0.0), 1)
    dbias = gl.sum(draw, 1)

    s_out.index(0).permute((1, 0)).store(dq.to(gl.bfloat16))
    s_out.index(1).permute((1, 0)).store(dk.to(gl.bfloat16))
    s_out.index(2).permute((1, 0)).store(draw.to(gl.bfloat16))
    raw_beta = s_beta.index(stage).load(OF_LANE)
    gl.thread_barrier()
    mbarrier.arrive(bar_free.index(stage), count=1)
    dbeta = beta_gradient(gl.sum(s_dR_U.load(LANE_SUMS), 0), raw_beta, True, NEG_EIGVAL, LEAST_BETA)
    o_lane = gl.arange(0, C, OF_LANE)
    p_to = p_dbeta + (row + o_lane).to(gl.int64) * HV + i_h
    gl.store(p_to, dbeta.to(p_dbeta.dtype.element_ty), mask=o_lane <= last)
    i_part = chunk.to(gl.int64) * K + o_c
    if HAS_A_LOG:
        gl.store(p_dA_part + i_part, dA)
    if HAS_DT_BIAS:
        gl.store(p_dbias_part + i_part, dbias)
    o_row = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, OUT)), 1)
    o_k = gl.expand_dims(gl.arange(0, K, gl.SliceLayout(0, OUT)), 0)
    o_out = ((row + o_row).to(gl.int64) * HV + i_h) * K + o_k
    m_out = (o_row <= last) & (o_k < K)
    gl.store(p_dq + o_out, s_out.index(0).load(OUT), mask=m_out)
    gl.store(p_dk + o_out, s_out.index(1).load(OUT), mask=m_out)
    gl.store(p_dg + o_out, s_out.index(2).load(OUT), mask=m_out)


@gluon.jit
def _take_chunks(
    p_dq, p_dk, p_dg, p_dbeta, p_dA_part, p_dbias_part, HV, scale, lower_bound, words, tiles, states, scratch, bars,
    K: gl.constexpr, V: gl.constexpr, GATE: gl.constexpr, HAS_A_LOG: gl.constexpr, HAS_DT_BIAS: gl.constexpr,
    NEG_EIGVAL: gl.constexpr, LEAST_BETA: gl.constexpr,
):  # fmt: skip
    """The gradients of every chunk of this program that is announced."""
    s_sums = scratch[1]
    o_i = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, OUT)), 1)
    o_j = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, OUT)), 0)
    # The sum over tokens i of x_i times what stands at (i, j): from the middle to j, and from j to the end.
    since = gl.where((o_i <= o_j) & (o_i >= C // 2), 1.0, 0.0)
    until = gl.where((o_i > o_j) & (o_i < C // 2), 1.0, 0.0)
    s_sums.index(0).store((since - until).to(gl.bfloat16))
    s_sums.index(1).store(gl.where(o_i >= o_j, 1.0, 0.0).to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    stage = 0
    phase = 0
    phase_S = 0
    mbarrier.wait(bars[0].index(0), 0)
    row, last, chunk, i_h = _announced(words[0].index(0))
    while last >= 0:
        _chunk(
            p_dq, p_dk, p_dg, p_dbeta, p_dA_part, p_dbias_part, row, last, chunk, i_h, HV, scale, lower_bound,
            words, tiles, states, scratch, bars, stage, phase_S,
            K, V, GATE, HAS_A_LOG, HAS_DT_BIAS, NEG_EIGVAL, LEAST_BETA,
        )  # fmt: skip
        phase_S ^= 1
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
        mbarrier.wait(bars[0].index(stage), phase)
        row, last, chunk, i_h = _announced(words[0].index(stage))


@gluon.jit(do_not_specialize=["T", "N", "HV", "lower_bound", "scale", "CHUNKS_END"])
def gradient(
    d_q, d_k, d_g, d_do, d_dR, d_dR_bits, d_U, d_U_bits, d_states, d_dstates,
    p_beta, p_A_log, p_dt_bias, p_cu, p_hard,
    p_dq, p_dk, p_dg, p_dbeta, p_dA_part, p_dbias_part, beta_t, beta_h,
    T, N, HV, scale, lower_bound, CHUNKS_END,
    K: gl.constexpr, V: gl.constexpr, GATE: gl.constexpr, HAS_A_LOG: gl.constexpr, HAS_DT_BIAS: gl.constexpr,
    NEG_EIGVAL: gl.constexpr, PACKED: gl.constexpr, CHUNKS: gl.constexpr, LEAST_BETA: gl.constexpr,
):  # fmt: skip
    """Every chunk whose number is this program's modulo the number of programs, if one anchor serves it.

    Keys are normalised, beta is given as logits, and every value head has its own head of q and k.

    Args:
        d_q, d_k, d_g: descriptors of ``[B * T, HV * K]`` with blocks ``[C, K]``; d_do, d_dR: of ``[B * T, HV * V]``
            with blocks ``[C, V]``; d_U: of ``[slots * HV * C, V]`` with blocks ``[C, V]``; d_states, d_dstates: of
            ``[slots * HV * V, K]`` with blocks ``[V, K]``; d_dR_bits, d_U_bits: of ``[slots * HV * V, 4]`` with blocks
            ``[V, 4]``.
        CHUNKS_END: number of chunks, slots x HV.
        The others: see ``flash_kda.backends.triton.chunk_gradient.chunk_gradient``.
    """
    s_qk = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * C, K], d_q.layout)
    s_g = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], d_g.layout)
    s_rows = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * C, V], d_do.layout)
    s_U = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, V], d_U.layout)
    # Of dR and then U.
    s_bits = gl.allocate_shared_memory(gl.int32, [2 * STAGES, V, 4], d_U_bits.layout)
    s_S = gl.allocate_shared_memory(gl.bfloat16, [V, K], d_states.layout)
    s_dS = gl.allocate_shared_memory(gl.bfloat16, [V, K], d_dstates.layout)
    SQUARES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    s_squares = gl.allocate_shared_memory(gl.bfloat16, [2 * C, C], SQUARES)
    s_sums = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], SQUARES)
    s_words = gl.allocate_shared_memory(gl.int32, [STAGES, 4], PLAIN)
    s_beta = gl.allocate_shared_memory(gl.float32, [STAGES, C], PLAIN)
    s_a = gl.allocate_shared_memory(gl.float32, [STAGES, 4], PLAIN)
    s_bias = gl.allocate_shared_memory(gl.float32, [STAGES, K], PLAIN)
    # Of the rows of q and then k: one over their norms. Of the rows of dM and then dP: largest magnitudes.
    s_norms = gl.allocate_shared_memory(gl.float32, [2 * C], PLAIN)
    s_largest = gl.allocate_shared_memory(gl.float32, [2 * C], PLAIN)
    s_dR_U = gl.allocate_shared_memory(gl.float32, [V // 16, C], ROWS)
    s_out = gl.allocate_shared_memory(gl.bfloat16, [4, C, K], d_q.layout)
    bar_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    bar_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    bar_S_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    bar_S_free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bar_ready.index(s), count=1)
        mbarrier.init(bar_free.index(s), count=1)
    mbarrier.init(bar_S_ready.index(0), count=1)
    mbarrier.init(bar_S_free.index(0), count=1)
    fence_async_shared()
    words = (s_words, s_beta, s_a, s_bias)
    tiles = (s_qk, s_g, s_rows, s_U, s_bits)
    states = (s_S, s_dS)
    scratch = (s_squares, s_sums, s_norms, s_largest, s_dR_U, s_out)
    bars = (bar_ready, bar_free, bar_S_ready, bar_S_free)
    gl.warp_specialize([
        (_take_chunks, (
            p_dq, p_dk, p_dg, p_dbeta, p_dA_part, p_dbias_part, HV, scale, lower_bound,
            words, tiles, states, scratch, bars, K, V, GATE, HAS_A_LOG, HAS_DT_BIAS, NEG_EIGVAL, LEAST_BETA,
        )),
        (_load_chunks, (
            d_q, d_k, d_g, d_do, d_dR, d_dR_bits, d_U, d_U_bits, d_states, d_dstates,
            p_beta, p_A_log, p_dt_bias, p_cu, p_hard,
            p_dA_part, p_dbias_part, beta_t, beta_h, T, N, HV, CHUNKS_END, words, tiles, states, bars,
            K, V, HAS_A_LOG, HAS_DT_BIAS, PACKED, CHUNKS,
        )),
    ], [1], [24])  # fmt: skip
