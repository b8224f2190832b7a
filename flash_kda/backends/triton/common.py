"""Device helpers that every Triton kernel calls: the one definition of gate, normalisation, beta and indexing."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_kda.backends.triton import config

# Gates, as constexpr values of the kernels.
LOG, LOWER_BOUND, SOFTPLUS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Which chunks a launch of the preparation takes: all, by one anchor, since the gate is bounded; all that one anchor can
# serve, marking the others; the marked ones, by joins.
ALL, EASY, HARD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LOG2E = tl.constexpr(1.4426950408889634)
# A decay of 2^-200 is zero in float32, and sums of 64 such terms stay finite: minus infinity becomes a plain number.
LOWEST_G2 = tl.constexpr(-200.0)
L2NORM_EPS = tl.constexpr(1e-6)
# The interpreter knows no inline assembly.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
MOST_LOOKED_AT = tl.constexpr(config.MOST_LOOKED_AT)


@triton.jit
def exp2(x):
    """``2^x`` in one instruction: results below 2^-126 are zero, which spares tl.exp2 its rescaling."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def prefetch(p):
    """Bring the 128 bytes around each address into the L2 cache."""
    if not INTERPRETED:
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r,l", [p.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def reciprocal(x):
    """``1 / x`` within one unit in the last place."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def product(x, y):
    """``x y``, rounded before anything is added to it: for sums over lanes of which each may have one product.

    The compiler would have a lane add its own product, not rounded, to another lane's rounded one. Lanes that hold the
    same sum would then differ in its last bit, and each write its own where the sum passes through shared memory.
    """
    return tl.fma(x, y, 0.0)


@triton.jit
def log2_decay(raw, a, bias, lower_bound, valid, GATE: tl.constexpr):
    """Log2 of the decay per token from the raw gate (float32); 0 where not ``valid``.

    ``a`` is exp(A_log). A NaN stays a NaN. The mask comes after the activation, since gate(0) is not 0.
    """
    if GATE == LOWER_BOUND:
        # lb sigmoid(a x) as 1 / (e / lb + 1 / lb), e = 2^(-a x log2 e); past the end 1 / lb is too large for that.
        slope = -a * LOG2E
        inverse = tl.where(valid, 1.0 / (lower_bound * LOG2E), -3e38)
        return reciprocal(exp2(raw * slope + bias * slope) * inverse + inverse)
    x = raw + bias
    if GATE == SOFTPLUS:
        # softplus(x) = max(x, 0) + log1p(e^-|x|); the series where log2(1 + z) would lose z.
        z = exp2(-tl.abs(x) * LOG2E)
        series = z * LOG2E * (1.0 - z * (0.5 - z * (0.33333334 - z * 0.25)))
        log1p_2 = tl.where(z > 0.05, tl.log2(1.0 + z), series)
        g2 = -a * (tl.where(x < 0.0, 0.0, x) * LOG2E + log1p_2)
    else:
        g2 = x * LOG2E
    return tl.where(valid, tl.where(g2 < LOWEST_G2, LOWEST_G2, g2), 0.0)


@triton.jit
def rstd(b_x, QK_L2NORM: tl.constexpr):
    """``rsqrt(sum(x^2) + 1e-6)`` over the last dimension, or ones."""
    n = tl.sum(product(b_x, b_x), axis=-1)
    if QK_L2NORM:
        return tl.rsqrt(n + L2NORM_EPS)
    return tl.full(n.shape, 1.0, tl.float32)


@triton.jit
def sigmoid(x):
    return reciprocal(1.0 + exp2(-x * LOG2E))


@triton.jit
def activated_beta(b, BETA_IS_LOGIT: tl.constexpr, NEG_EIGVAL: tl.constexpr):
    if BETA_IS_LOGIT:
        b = sigmoid(b)
    if NEG_EIGVAL:
        b = 2.0 * b
    return b


@triton.jit
def at_least(beta, LEAST_BETA: tl.constexpr):
    """``beta`` away from zero, if LEAST_BETA is not: gradients divide what beta multiplied by beta. A NaN stays."""
    if LEAST_BETA > 0.0:
        return tl.where(tl.abs(beta) < LEAST_BETA, LEAST_BETA, beta)
    return beta


@triton.jit
def lost_bits(x, rounded):
    """What float32 ``x`` lost when it was rounded to bfloat16: -8 to 7, in 15ths of a unit in the last place.

    But for the sign, which both share, the bits of a float count its magnitude in units of the last place.
    """
    lost = x.to(tl.int32, bitcast=True) - rounded.to(tl.float32).to(tl.int32, bitcast=True)
    # To the nearest. From -32768 to 32768, this is the largest that does not make 8 of the latter.
    return (lost * 15 + 32767) >> 16


@triton.jit
def with_lost_bits(rounded, lost):
    """float32 from a bfloat16 and what :func:`lost_bits` found. Zero and infinity stay, and a NaN is one still."""
    bits = rounded.to(tl.float32).to(tl.int32, bitcast=True) + lost * 4369
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def token_of_row(C: tl.constexpr, SEGMENTS: tl.constexpr):
    """The token of a chunk that each row of its tiles holds, ``[C]``.

    Rows are not in the order of time: SEGMENTS runs of C / SEGMENTS tokens are interleaved. Where the lanes and warps
    of a program spread over SEGMENTS rows at a time, a thread then holds consecutive tokens, and sums along time stay
    in its registers. Every tile of a chunk keeps this order; only loads and stores of tokens know of it.
    """
    o = tl.arange(0, C)
    return (o % SEGMENTS) * (C // SEGMENTS) + o // SEGMENTS


@triton.jit
def first_slot(start, n, C: tl.constexpr):
    """Workspace slot of a packed sequence's first chunk.

    ``start // C + n`` leaves room for the partial chunk of every sequence before, so slots never collide and need no
    prefix sum over the lengths.
    """
    return start // C + n


@triton.jit
def sequence_of_slot(p_cu, slot, N, C: tl.constexpr, BLOCK: tl.constexpr):
    """The last sequence whose first slot is at most ``slot``: two rounds of vector loads for any number of them."""
    o = tl.arange(0, BLOCK)
    step = (N + BLOCK - 1) // BLOCK
    at = o * step
    start = tl.load(p_cu + at, mask=at < N, other=0)
    low = (tl.sum(((at < N) & (first_slot(start, at, C) <= slot)).to(tl.int32), 0) - 1) * step
    found = 0
    for block in range(0, step, BLOCK):
        at = low + block + o
        inside = (at < N) & (block + o < step)
        start = tl.load(p_cu + at, mask=inside, other=0)
        found += tl.sum((inside & (first_slot(start, at, C) <= slot)).to(tl.int32), 0)
    return low + found - 1


@triton.jit
def locate(p_cu, slot, T, N, C: tl.constexpr, PACKED: tl.constexpr, SEARCH: tl.constexpr):
    """Batch row, first token of the sequence, first token of the chunk in it, and tokens; no more of these: unused."""
    if PACKED:
        n = sequence_of_slot(p_cu, slot, N, C, SEARCH)
        start = tl.load(p_cu + n).to(tl.int64)
        length = tl.load(p_cu + n + 1).to(tl.int64) - start
        return tl.zeros((), tl.int64), start, (slot - first_slot(start, n, C)) * C, length
    per_row = (T + C - 1) // C
    return slot // per_row, tl.zeros((), tl.int64), (slot % per_row) * C, T.to(tl.int64)


@triton.jit
def slots(T, N, C: tl.constexpr, PACKED: tl.constexpr):
    """Chunks in the workspace, as ``forward.slots`` counts them."""
    return T // C + 1 + N if PACKED else N * ((T + C - 1) // C)


@triton.jit
def marks_of_program(p_hard, end, BLOCKS: tl.constexpr):
    """Bit i says whether the chunk of block ``i_p + i programs`` is marked: one load of all that a program looks at.

    Each of the chunks has BLOCKS of the ``end`` blocks.
    """
    o = tl.arange(0, MOST_LOOKED_AT)
    block = tl.program_id(0) + o * tl.num_programs(0)
    is_marked = tl.load(p_hard + block // BLOCKS, mask=block < end, other=0) != 0
    return tl.sum(is_marked.to(tl.uint32) << o.to(tl.uint32), 0)


@triton.jit
def exists(slot, slots, pad):
    """Whether an index names one of ``slots`` slots and is not that of padding."""
    return (slot >= 0) & (slot < slots) & (slot != pad)
