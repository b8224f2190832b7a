"""SGLang's interface: the methods of its KDA kernels, as functions with SGLang's arguments.

They work in place on SGLang's pool of states ``[slots, HV, V, K]``. A row whose index is -1 (any negative one, or one
that is not in the pool) is padding: it gives zeros and writes nothing. Slot 0 is a slot like any other.

In all of them q and k are normalised and the gate comes raw. ``lower_bound=None`` means the softplus gate. ``A_log``
and ``dt_bias`` hold HV and HV * K float32 values in any shape, such as ``[1, 1, HV, 1]``.
"""

from __future__ import annotations

from torch import Tensor

from flash_kda.compat.engines import first_rows, gate_of, heads_apart, refuse, rows_of, split_packed, tensor
from flash_kda.decode import kda_decode

PAD_SLOT = -1


def packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    scale: float | None,
    ssm_states: Tensor,
    cache_indices: Tensor,
    num_v_heads: int,
    head_v_dim: int,
    lower_bound: float | None = None,
    replayssm_d: Tensor | None = None,
    replayssm_k: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_write_pos: Tensor | None = None,
    replayssm_force_flush: Tensor | None = None,
) -> Tensor:
    """Decode one token of each row, q, k and v beside each other as the convolution leaves them.

    Args:
        mixed_qkv: ``[N, 2 * H * K + HV * V]``, rows at any distance.
        a: raw gate, ``[N, HV * K]``, ``[N, HV, K]`` or ``[N, 1, HV * K]``. b: logits of beta, ``[N, HV]`` or
            ``[N, 1, HV]``. Rows at any distance.
        scale: factor on q; None means ``K ** -0.5``.
        ssm_states: the pool, float32 or bfloat16, updated in place.
        cache_indices: ``[N]`` int32 or int64, any stride.
        num_v_heads, head_v_dim: HV and V; the pool's shape must agree.
        replayssm_...: refused: states are kept, not recomputed.

    Returns:
        The output ``[1, N, HV, V]``.
    """
    refuse(
        replayssm_d=replayssm_d,
        replayssm_k=replayssm_k,
        replayssm_g=replayssm_g,
        replayssm_write_pos=replayssm_write_pos,
        replayssm_force_flush=replayssm_force_flush,
    )
    q, k, v = split_packed(mixed_qkv, ssm_states)
    N, _, HV, V = v.shape
    if (num_v_heads, head_v_dim) != (HV, V):
        raise ValueError(
            f"num_v_heads, head_v_dim: got {(num_v_heads, head_v_dim)}, expected {(HV, V)}, those of ssm_states"
        )
    o = kda_decode(
        q,
        k,
        v,
        heads_apart("a", a, (N, 1), HV, q.shape[3]),
        heads_apart("b", b, (N, 1), HV, 0),
        gate=gate_of(A_log, dt_bias, lower_bound),
        pool=ssm_states,
        indices=tensor("cache_indices", cache_indices),
        scale=scale,
        pad_index=PAD_SLOT,
    )
    return o.transpose(0, 1)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    lower_bound: float | None = None,
) -> Tensor:
    """Decode rows of one to 16 tokens; the state after a row's last token replaces the one that it started from.

    Args:
        q, k: ``[1, T, H, K]``. v: ``[1, T, HV, V]``. Any strides with a dense last dimension.
        a: raw gate, ``[1, T, HV, K]`` or flattened to ``[T, HV * K]`` or ``[1, T, HV * K]``. b: logits of beta,
            ``[1, T, HV]`` or ``[T, HV]``.
        ssm_states: the pool, float32 or bfloat16, updated in place.
        cache_indices: a slot per row; may have more rows than N.
        query_start_loc: ``[N + 1]`` int32 or int64, boundaries of the rows.

    Returns:
        The output ``[1, T, HV, V]``. Tokens past the last boundary give zeros.
    """
    boundaries, N = rows_of(query_start_loc, "query_start_loc")
    return kda_decode(
        q,
        k,
        v,
        *_gate_and_beta(q, v, a, b),
        gate=gate_of(A_log, dt_bias, lower_bound),
        pool=ssm_states,
        indices=first_rows("cache_indices", cache_indices, N),
        cu_seqlens=boundaries,
        pad_index=PAD_SLOT,
    )


def _gate_and_beta(q: object, v: object, a: object, b: object) -> tuple[Tensor, Tensor]:
    """The raw gate and beta of packed tokens, with their heads apart."""
    q, v = tensor("q", q), tensor("v", v)
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q, v: got shapes {tuple(q.shape)} and {tuple(v.shape)}, expected [1, T, H, K], [1, T, HV, V]")
    leading, HV = (v.shape[0], v.shape[1]), v.shape[2]
    return heads_apart("a", a, leading, HV, q.shape[3]), heads_apart("b", b, leading, HV, 0)
