"""First kernel on Hopper: one warp prepares one chunk, start to end, so that no warp waits for another.

What it stores is what ``flash_kda.backends.triton.prepare`` stores, with the rows of tiles in the order of time.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flash_kda.backends.hopper.common import pair, sequence_of_slot
from flash_kda.backends.triton.common import (
    EASY,
    L2NORM_EPS,
    activated_beta,
    at_least,
    exp2,
    first_slot,
    log2_decay,
    reciprocal,
)
from flash_kda.backends.triton.config import CHUNK

# Tokens of a chunk and of the blocks that it is inverted by; channels at a time.
C, HALF, BC = gl.constexpr(CHUNK), gl.constexpr(CHUNK // 2), gl.constexpr(32)
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
# Left and right operands of a product. A tile [C, BC] in LEFT is, transposed, a right operand in the same registers.
LEFT = gl.constexpr(gl.DotOperandLayout(0, SQUARE, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, SQUARE, 2))
ROW = gl.constexpr(gl.SliceLayout(1, SQUARE))
COLUMN = gl.constexpr(gl.SliceLayout(0, SQUARE))
LANE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
TILE = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0]))
SMALL = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _clear(p_o, o_t, row0, end, T, V: gl.constexpr):
    """Set the rows ``row0`` to ``row0 + C`` to zero that lie past ``end``."""
    o_r = row0 + gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, TILE)), 1)
    o_c = gl.expand_dims(gl.arange(0, BC, gl.SliceLayout(0, TILE)), 0)
    for v in range(0, V, BC):
        zero = gl.zeros([C, BC], p_o.dtype.element_ty, TILE)
        gl.store(p_o + o_r * o_t + v + o_c, zero, mask=(o_r >= end) & (o_r < T) & (v + o_c < V))


@gluon.jit
def _clear_rows(s_x, last):
    x = s_x.load(TILE)
    valid = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, TILE)), 1) <= last
    s_x.store(gl.where(valid, x, gl.zeros_like(x)))


@gluon.jit
def _scaled(x, factor):
    """``[C, BC]`` in LEFT times a factor per channel, given as 8 equal rows, in bfloat16."""
    x = gl.reshape(x, (4, 8, BC))
    factor = gl.convert_layout(factor, gl.SliceLayout(0, x.type.layout), assert_trivial=True)
    x = gl.reshape((x * gl.expand_dims(factor, 0)).to(gl.bfloat16), (C, BC))
    return gl.convert_layout(x, LEFT, assert_trivial=True)


@gluon.jit
def _halves(x):
    """Early and late half of ``[C, n]``, which lie in different registers."""
    x = gl.permute(gl.reshape(x, (2, HALF, x.shape[1])), (1, 2, 0))
    return gl.split(x)


@gluon.jit
def _sums(g2):
    """Sums along time of ``[C, BC]`` in RIGHT, as products with matrices of 0, 1 and -1.

    Returns the sums from the middle of the chunk to each row, and those over its early and its late half, the latter
    as 8 equal rows. Pairs of bfloat16 keep 16 bits of ``g2``.
    """
    high, low = pair(g2)
    o_i = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(1, LEFT)), 1)
    o_j = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, LEFT)), 0)
    until = gl.where(o_j > o_i, -1.0, 0.0).to(gl.bfloat16)
    since = gl.where(o_j <= o_i, 1.0, 0.0).to(gl.bfloat16)
    first_rows = gl.where(o_i + 0 * o_j < 8, 1.0, 0.0).to(gl.bfloat16)
    last_rows = gl.where(o_i + 0 * o_j < 8, 0.0, 1.0).to(gl.bfloat16)
    zero = gl.zeros([HALF, BC], gl.float32, SQUARE)
    high1, high2 = _halves(high)
    low1, low2 = _halves(low)
    high1 = gl.convert_layout(high1, RIGHT, assert_trivial=True)
    high2 = gl.convert_layout(high2, RIGHT, assert_trivial=True)
    low1 = gl.convert_layout(low1, RIGHT, assert_trivial=True)
    low2 = gl.convert_layout(low2, RIGHT, assert_trivial=True)
    from_mid1 = mma_v2(until, high1, mma_v2(until, low1, zero))
    from_mid2 = mma_v2(since, high2, mma_v2(since, low2, zero))
    ends = mma_v2(first_rows, high1, mma_v2(first_rows, low1, zero))
    ends = mma_v2(last_rows, high2, mma_v2(last_rows, low2, ends))
    early, late = gl.split(gl.permute(gl.reshape(ends, (2, 8, BC)), (1, 2, 0)))
    from_mid = gl.reshape(gl.permute(gl.join(from_mid1, from_mid2), (2, 0, 1)), (C, BC))
    return gl.convert_layout(from_mid, LEFT, assert_trivial=True), early, late


@gluon.jit
def _square_norms(s_x, BLOCKS: gl.constexpr):
    """``1 / |x_i|`` of every row of ``[BLOCKS, C, BC]``, as its two halves in ROW: the diagonal of x x^T, exact."""
    early = gl.zeros([HALF, HALF], gl.float32, SQUARE)
    late = early
    for s in gl.static_range(BLOCKS):
        x1 = s_x.index(s).slice(0, HALF)
        x2 = s_x.index(s).slice(HALF, HALF)
        early = mma_v2(x1.load(LEFT), x1.permute((1, 0)).load(RIGHT), early)
        late = mma_v2(x2.load(LEFT), x2.permute((1, 0)).load(RIGHT), late)
    o_i = gl.expand_dims(gl.arange(0, HALF, ROW), 1)
    o_j = gl.expand_dims(gl.arange(0, HALF, COLUMN), 0)
    n1 = gl.sum(gl.where(o_i == o_j, early, 0.0), 1)
    n2 = gl.sum(gl.where(o_i == o_j, late, 0.0), 1)
    return gl.rsqrt(n1 + L2NORM_EPS), gl.rsqrt(n2 + L2NORM_EPS)


@gluon.jit
def _fetch(d_q, d_k, d_g, row, column_qk, column, c, s_q, s_k, s_g, bar, stage):
    """Start the copy of ``[C, BC]`` of q, k and g into stage ``stage``."""
    mbarrier.expect(bar.index(stage), d_q.block_type.nbytes + d_k.block_type.nbytes + d_g.block_type.nbytes)
    tma.async_copy_global_to_shared(d_g, [row, column + c], bar.index(stage), s_g.index(stage))
    tma.async_copy_global_to_shared(d_k, [row, column_qk + c], bar.index(stage), s_k.index(stage))
    tma.async_copy_global_to_shared(d_q, [row, column_qk + c], bar.index(stage), s_q.index(stage))


@gluon.jit
def to_float(x):
    """bfloat16 to float32, two in two instructions."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def _half(x):
    """float32 to float16, two at a time."""
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.float16, is_pure=True, pack=2)


@gluon.jit
def _to_right(x, s_x):
    """The accumulator ``x`` ``[16, 16]`` as the right operand of a product, by way of shared memory."""
    s_x.store(_half(x))
    return s_x.load(RIGHT)


@gluon.jit
def _to_left(x):
    return gl.convert_layout(_half(x), LEFT, assert_trivial=True)


@gluon.jit
def _product(a, b):
    return mma_v2(a, b, gl.zeros([HALF, HALF], gl.float32, SQUARE))


@gluon.jit
def _unit_inverse(L, s_x):
    """``(I + L)^{-1}`` of strictly lower triangular ``[16, 16]``: blocks of 1, 2, 4, 8 joined pairwise."""
    o_i = gl.expand_dims(gl.arange(0, HALF, ROW), 1)
    o_j = gl.expand_dims(gl.arange(0, HALF, COLUMN), 0)
    distance = o_i ^ o_j
    r_i = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(1, RIGHT)), 1)
    r_j = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, RIGHT)), 0)
    L_right = _to_right(L, s_x)
    D = gl.where(distance == 0, 1.0, 0.0) - gl.where(distance == 1, L, 0.0)
    for bit in gl.static_range(1, 4):
        across = gl.where(((r_i ^ r_j) >> bit) == 1, L_right, gl.zeros_like(L_right))
        D -= _product(_to_left(_product(_to_left(D), across)), _to_right(D, s_x))
    return D


@gluon.jit
def _beta(raw, NEG_EIGVAL: gl.constexpr, LEAST_BETA: gl.constexpr):
    return at_least(activated_beta(raw.to(gl.float32), True, NEG_EIGVAL), LEAST_BETA)


@gluon.jit
def _columns(s_x):
    """``[C]`` as rows ``[1, 16]`` of its two halves."""
    return gl.expand_dims(s_x.slice(0, HALF).load(COLUMN), 0), gl.expand_dims(s_x.slice(HALF, HALF).load(COLUMN), 0)


@gluon.jit
def _rows(s_x):
    """``[C]`` as columns ``[16, 1]`` of its two halves."""
    return gl.expand_dims(s_x.slice(0, HALF).load(ROW), 1), gl.expand_dims(s_x.slice(HALF, HALF).load(ROW), 1)


@gluon.jit
def _store_rows(d_squares, row, left, right, s_rows):
    """Store ``[16, C]``, given as two blocks: the rounded values, and beside them what the rounding lost."""
    high1, low1 = pair(left)
    high2, low2 = pair(right)
    tma.store_wait(0)
    s_rows.slice(0, HALF, 1).store(high1)
    s_rows.slice(HALF, HALF, 1).store(high2)
    s_rows.slice(C, HALF, 1).store(low1)
    s_rows.slice(C + HALF, HALF, 1).store(low2)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(d_squares, [row, 0], s_rows)


@gluon.jit
def locate(chunk, n, p_cu, T, N, HV, CHUNKS_END, PACKED: gl.constexpr):
    """Where a chunk lies: its sequence, whether it holds tokens, its first row of B * T, and its last token's index.

    ``n`` is the sequence of an earlier chunk, from which the search goes on.
    """
    slot = (chunk // HV).to(gl.int64)
    if PACKED:
        end = gl.load(p_cu + N).to(gl.int64)
        is_used = (chunk < CHUNKS_END) & ((slot - N + 1) * C <= end)
        following = gl.load(p_cu + gl.minimum(n + 1, N))
        while is_used & (n + 1 < N) & (first_slot(following, n + 1, C) <= slot):
            n += 1
            following = gl.load(p_cu + n + 1)
        start = gl.load(p_cu + n).to(gl.int64)
        first = (slot - first_slot(start, n, C)) * C
        row = start + first
        last = following.to(gl.int64) - row - 1
    else:
        is_used = chunk < CHUNKS_END
        per_row = (T + C - 1) // C
        first = (slot % per_row) * C
        row = slot // per_row * T + first
        last = T - first - 1
    return n, is_used & (last >= 0), row.to(gl.int32), gl.minimum(last, C - 1).to(gl.int32)


@gluon.jit(do_not_specialize=["T", "N", "HV", "GROUP", "lower_bound", "scale", "CHUNKS_END"])
def prepare_warp(
    d_q, d_k, d_g, d_tiles, d_squares, p_beta, p_A_log, p_dt_bias, p_cu, p_decay, p_hard, p_o,
    beta_t, beta_h, o_t, o_h,
    T, N, HV, GROUP, scale, lower_bound, CHUNKS_END,
    K: gl.constexpr, V: gl.constexpr, GATE: gl.constexpr, HAS_A_LOG: gl.constexpr, HAS_DT_BIAS: gl.constexpr,
    NEG_EIGVAL: gl.constexpr, PACKED: gl.constexpr, CHUNKS: gl.constexpr, LEAST_BETA: gl.constexpr,
):  # fmt: skip
    """Every chunk whose number is this program's modulo the number of programs.

    Args:
        d_q, d_k: descriptors of ``[B * T, H * K]`` with blocks ``[C, BC]``; d_g: the same of ``[B * T, HV * K]``.
        d_tiles: descriptor of ``[slots * HV * 3 * C, K]`` with blocks ``[C, BC]``; d_squares: of
            ``[slots * HV * 2 * C, 2 * C]`` with blocks ``[HALF, 2 * C]``.
        p_beta, p_o: ``[B * T, HV]`` and ``[B * T, HV, V]`` by their strides.
        CHUNKS_END: number of chunks, slots x HV.
        The others: see ``flash_kda.backends.triton.prepare.prepare``.
    """
    BLOCKS: gl.constexpr = K // BC
    s_q = gl.allocate_shared_memory(gl.bfloat16, [BLOCKS, C, BC], d_q.layout)
    s_k = gl.allocate_shared_memory(gl.bfloat16, [BLOCKS, C, BC], d_k.layout)
    s_g = gl.allocate_shared_memory(gl.bfloat16, [BLOCKS, C, BC], d_g.layout)
    bar = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(BLOCKS):
        mbarrier.init(bar.index(s), count=1)
    s_rows = gl.allocate_shared_memory(gl.bfloat16, [HALF, 2 * C], d_squares.layout)
    s_x = gl.allocate_shared_memory(gl.float16, [HALF, HALF], SMALL)
    s_rk = gl.allocate_shared_memory(gl.float32, [C], PLAIN)
    s_rq = gl.allocate_shared_memory(gl.float32, [C], PLAIN)
    s_beta = gl.allocate_shared_memory(gl.float32, [C], PLAIN)
    fence_async_shared()
    o_lane = gl.arange(0, C, LANE)
    o_i = gl.expand_dims(gl.arange(0, HALF, ROW), 1)
    o_j = gl.expand_dims(gl.arange(0, HALF, COLUMN), 0)
    o_gate = gl.arange(0, BC, gl.SliceLayout(0, RIGHT))
    o_token = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, RIGHT)), 1)

    chunk = gl.program_id(0)
    n = 0
    if PACKED:
        n = sequence_of_slot(p_cu, chunk // HV, N, C, 1)
    n, is_used, row, last = locate(chunk, n, p_cu, T, N, HV, CHUNKS_END, PACKED)
    phase = 0
    if is_used:
        i_h = chunk % HV
        for s in gl.static_range(BLOCKS):
            _fetch(d_q, d_k, d_g, row, i_h // GROUP * K, i_h * K, s * BC, s_q, s_k, s_g, bar, s)
    while chunk < CHUNKS_END:
        next_chunk = chunk + gl.num_programs(0)
        n, next_is_used, next_row, next_last = locate(next_chunk, n, p_cu, T, N, HV, CHUNKS_END, PACKED)
        i_h = chunk % HV
        next_h = next_chunk % HV
        chunk64 = chunk.to(gl.int64)
        if is_used:
            beta = gl.load(p_beta + (row + gl.minimum(o_lane, last)).to(gl.int64) * beta_t + i_h * beta_h)
            a = 1.0
            if HAS_A_LOG:
                a = gl.exp(gl.load(p_A_log + i_h))
            bias = gl.zeros([BC], gl.float32, gl.SliceLayout(0, RIGHT))
            if HAS_DT_BIAS:
                bias = gl.load(p_dt_bias + i_h * K + o_gate)
            for s in gl.static_range(BLOCKS):
                mbarrier.wait(bar.index(s), phase)
                if last < C - 1:
                    # The rows past the end are another sequence's.
                    _clear_rows(s_q.index(s), last)
                    _clear_rows(s_k.index(s), last)
                    _clear_rows(s_g.index(s), last)
            phase ^= 1
            rk1, rk2 = _square_norms(s_k, BLOCKS)
            rq1, rq2 = _square_norms(s_q, BLOCKS)
            s_rk.slice(0, HALF).store(rk1)
            s_rk.slice(HALF, HALF).store(rk2)
            s_rq.slice(0, HALF).store(rq1)
            s_rq.slice(HALF, HALF).store(rq2)
            s_beta.store(gl.where(o_lane <= last, _beta(beta, NEG_EIGVAL, LEAST_BETA), 0.0))
            rk = gl.expand_dims(s_rk.load(gl.SliceLayout(1, LEFT)), 1)
            rq = gl.expand_dims(s_rq.load(gl.SliceLayout(1, LEFT)), 1)
            hard = i_h * 0
            kk11 = gl.zeros([HALF, HALF], gl.float32, SQUARE)
            kk21 = kk11
            kk22 = kk11
            qk11 = kk11
            qk21 = kk11
            qk22 = kk11
            for block in range(BLOCKS):
                x_q = s_q.index(block)
                x_k = s_k.index(block)
                x_g = s_g.index(block)
                g_raw = to_float(x_g.load(RIGHT))
                g2 = log2_decay(g_raw, a, gl.expand_dims(bias, 0), lower_bound, o_token <= last, GATE)
                if HAS_DT_BIAS:
                    bias = gl.load(p_dt_bias + i_h * K + gl.minimum(block + 1, BLOCKS - 1) * BC + o_gate)
                from_mid, early, late = _sums(g2)
                if CHUNKS == EASY:
                    hard |= (gl.min(gl.min(gl.minimum(early, late), 1), 0) <= -120.0).to(gl.int32)
                o_8 = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, early.type.layout)), 1)
                o_d = gl.expand_dims(gl.arange(0, BC, gl.SliceLayout(0, early.type.layout)), 0)
                gl.store(p_decay + chunk64 * K + block * BC + o_d + o_8 * 0, exp2(early + late), mask=o_8 == 0)
                e = exp2(from_mid)
                k = to_float(x_k.load(LEFT)) * rk
                k_row = k * e
                k_column = k * reciprocal(e)
                q_row = to_float(x_q.load(LEFT)) * rq * e
                x_k.store(_scaled(k_row, -exp2(early)))
                x_q.store(_scaled(q_row, exp2(early) * scale))
                x_g.store(_scaled(k_column, exp2(late)))
                k1, k2 = _halves(k_row.to(gl.bfloat16))
                q1, q2 = _halves(q_row.to(gl.bfloat16))
                m1, m2 = _halves(k_column.to(gl.bfloat16))
                m1 = gl.convert_layout(gl.permute(m1, (1, 0)), RIGHT, assert_trivial=True)
                m2 = gl.convert_layout(gl.permute(m2, (1, 0)), RIGHT, assert_trivial=True)
                k1 = gl.convert_layout(k1, LEFT, assert_trivial=True)
                k2 = gl.convert_layout(k2, LEFT, assert_trivial=True)
                q1 = gl.convert_layout(q1, LEFT, assert_trivial=True)
                q2 = gl.convert_layout(q2, LEFT, assert_trivial=True)
                kk11 = mma_v2(k1, m1, kk11)
                kk21 = mma_v2(k2, m1, kk21)
                kk22 = mma_v2(k2, m2, kk22)
                qk11 = mma_v2(q1, m1, qk11)
                qk21 = mma_v2(q2, m1, qk21)
                qk22 = mma_v2(q2, m2, qk22)
                fence_async_shared()
                gl.thread_barrier()
                to = chunk * (3 * C)
                tma.async_copy_shared_to_global(d_tiles, [to, block * BC], s_k.index(block))
                tma.async_copy_shared_to_global(d_tiles, [to + C, block * BC], s_q.index(block))
                tma.async_copy_shared_to_global(d_tiles, [to + 2 * C, block * BC], s_g.index(block))
                if next_is_used & (block > 0):
                    # The block before has been read on its way out.
                    tma.store_wait(3)
                    _fetch(
                        d_q, d_k, d_g, next_row, next_h // GROUP * K, next_h * K, (block - 1) * BC, s_q, s_k, s_g, bar,
                        block - 1,
                    )  # fmt: skip
            if next_is_used:
                tma.store_wait(0)
                _fetch(d_q, d_k, d_g, next_row, next_h // GROUP * K, next_h * K, K - BC, s_q, s_k, s_g, bar, BLOCKS - 1)

            if CHUNKS == EASY:
                gl.store(p_hard + chunk64, hard.to(gl.int8))
            # By columns and by rows, of the early and the late half.
            b_j1, b_j2 = _columns(s_beta)
            b_i1, b_i2 = _rows(s_beta)
            # Each half is on its way to memory while the next is made.
            to = chunk * (2 * C)
            D11 = _unit_inverse(gl.where(o_i > o_j, kk11 * b_i1, 0.0), s_x)
            T11 = D11 * b_j1
            _store_rows(d_squares, to, T11, gl.zeros_like(T11), s_rows)
            T11_right = _to_right(T11, s_x)
            M_T11 = _product(_to_left(gl.where(o_i >= o_j, qk11, 0.0)), T11_right)
            D22 = _unit_inverse(gl.where(o_i > o_j, kk22 * b_i2, 0.0), s_x)
            _store_rows(d_squares, to + C, M_T11 * scale, gl.zeros_like(T11), s_rows)
            T21 = _product(_to_left(_product(_to_left(D22), _to_right(kk21 * b_i2, s_x))), _to_right(D11, s_x)) * -b_j1
            T22 = D22 * b_j2
            _store_rows(d_squares, to + HALF, T21, T22, s_rows)
            M22 = _to_left(gl.where(o_i >= o_j, qk22, 0.0))
            M_T21 = mma_v2(_to_left(qk21), T11_right, _product(M22, _to_right(T21, s_x)))
            M_T22 = _product(M22, _to_right(T22, s_x))
            _store_rows(d_squares, to + C + HALF, M_T21 * scale, M_T22 * scale, s_rows)
        else:
            if CHUNKS == EASY:
                gl.store(p_hard + chunk64, 0)
            if PACKED:
                _clear(p_o + i_h * o_h, o_t, (chunk64 // HV - N) * C, gl.load(p_cu + N), T, V)
            if next_is_used:
                for s in gl.static_range(BLOCKS):
                    _fetch(d_q, d_k, d_g, next_row, next_h // GROUP * K, next_h * K, s * BC, s_q, s_k, s_g, bar, s)
        chunk = next_chunk
        is_used = next_is_used
        row = next_row
        last = next_last
    tma.store_wait(0)
