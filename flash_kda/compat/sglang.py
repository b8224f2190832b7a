"""SGLang's interface: the methods of its KDA kernels, as functions with SGLang's arguments.

They work in place on SGLang's pool of states ``[slots, HV, V, K]``. A row whose index is -1 (any negative one, or one
that is not in the pool) is padding: it gives zeros and writes nothing. Slot 0 is a slot like any other.

In all of them q and k are normalised and the gate comes raw. ``lower_bound=None`` means the softplus gate. ``A_log``
and ``dt_bias`` hold HV and HV * K float32 values in any shape, such as ``[1, 1, HV, 1]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_kda.compat.engines import first_rows, gate_of, heads_apart, naming, refuse, rows_of, split_packed, tensor
from flash_kda.decode import kda_decode
from flash_kda.prefill import kda_prefill
from flash_kda.types import Checkpoints, LogGate

PAD_SLOT = -1
# SGLang counts the places of snapshots in chunks of so many tokens.
CHUNK = 64


@naming(
    pool="ssm_states",
    indices="cache_indices",
    cu_seqlens="query_start_loc",
    **{"checkpoints.states": "track_state", "checkpoints.offsets": "track_chunk_idx"},
)
def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_is_raw: bool = False,
    extend_seq_lens_cpu: Sequence[int] | Tensor | None = None,
    is_spec_decode: bool = False,
    return_intermediate_states: bool = False,
    track_state: Tensor | None = None,
    track_chunk_idx: Tensor | None = None,
) -> Tensor | tuple[Tensor, None]:
    """Whole sequences, long and short ones in one call, from the pool into the pool.

    Args:
        q, k, v, ssm_states, cache_indices, query_start_loc: as for :func:`decode`, of any lengths.
        g: raw gate, ``[1, T, HV, K]`` or flattened. Without ``A_log``, ``dt_bias`` and ``lower_bound`` it is the log
            decay itself.
        beta: ``[1, T, HV]`` or ``[T, HV]``: logits if ``beta_is_raw``, otherwise the values.
        extend_seq_lens_cpu: without effect: lengths are read where they are.
        is_spec_decode: refused if True: states are committed in place.
        return_intermediate_states: with ``track_state`` alone: return ``(output, None)``.
        track_state: ``[N, HV, V, K]``, written for row n with the state after ``64 * track_chunk_idx[n]`` of its
            tokens; rows where that is not between 1 and the row's length stay as they are.

    Returns:
        The output ``[1, T, HV, V]``. Tokens past the last boundary give zeros.
    """
    refuse(
        is_spec_decode=is_spec_decode,
        return_intermediate_states=return_intermediate_states and track_state is None,
    )
    boundaries, N = rows_of(query_start_loc, "query_start_loc")
    is_log = A_log is None and dt_bias is None and lower_bound is None
    checkpoints = None
    if track_state is not None:
        index = first_rows("track_chunk_idx", track_chunk_idx, N)
        ends = torch.arange(N + 1, dtype=torch.int32, device=index.device)
        checkpoints = Checkpoints(index * CHUNK, ends, track_state)
    gate, b = _gate_and_beta(q, v, ("g", g), ("beta", beta))
    o = kda_prefill(
        q,
        k,
        v,
        gate,
        b,
        gate=LogGate() if is_log else gate_of(A_log, dt_bias, lower_bound),
        pool=ssm_states,
        indices=first_rows("cache_indices", cache_indices, N),
        checkpoints=checkpoints,
        cu_seqlens=boundaries,
        beta_is_logit=beta_is_raw,
        pad_index=PAD_SLOT,
    )
    return (o, None) if return_intermediate_states else o


@naming(q="mixed_qkv", pool="ssm_states", indices="cache_indices", g="a", beta="b")
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


@naming(pool="ssm_states", indices="cache_indices", cu_seqlens="query_start_loc", g="a", beta="b")
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
        *_gate_and_beta(q, v, ("a", a), ("b", b)),
        gate=gate_of(A_log, dt_bias, lower_bound),
        pool=ssm_states,
        indices=first_rows("cache_indices", cache_indices, N),
        cu_seqlens=boundaries,
        pad_index=PAD_SLOT,
    )


@naming(
    pool="ssm_states",
    indices="cache_indices",
    cu_seqlens="query_start_loc",
    g="a",
    beta="b",
    **{"checkpoints.states": "intermediate_states_buffer"},
)
def target_verify(
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    intermediate_states_buffer: Tensor | None,
    intermediate_state_indices: Tensor | None,
    cache_steps: int | None,
    retrieve_parent_token: Tensor | None = None,
    lower_bound: float | None = None,
    cache_ring: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
) -> Tensor:
    """Compute chains of drafts from the pool's states, and leave the pool as it is.

    Args:
        q, k, v, a, b, ssm_states, cache_indices, query_start_loc: as for :func:`decode`; the pool is only read.
        intermediate_states_buffer: ``[rows, steps, HV, V, K]``, rows dense; the state after token t of row n goes to
            ``[intermediate_state_indices[n], t]``. None: states are not kept, and what follows is not read.
        intermediate_state_indices: a row of the buffer for each row, or more; one that the buffer does not have keeps
            no states.
        cache_steps: for how many tokens of a row states are kept, at most ``steps``; None means ``steps``.
        retrieve_parent_token: refused: drafts are chains, not trees.
        cache_ring, replayssm_...: refused: states are kept, not recomputed.

    Returns:
        The output ``[1, T, HV, V]``. Padding rows and tokens past the last boundary give zeros.
    """
    refuse(
        retrieve_parent_token=retrieve_parent_token,
        cache_ring=cache_ring,
        replayssm_rawv=replayssm_rawv,
        replayssm_rawk=replayssm_rawk,
        replayssm_g=replayssm_g,
        replayssm_beta=replayssm_beta,
    )
    boundaries, N = rows_of(query_start_loc, "query_start_loc")
    g, beta = _gate_and_beta(q, v, ("a", a), ("b", b))
    indices = first_rows("cache_indices", cache_indices, N)
    gate = gate_of(A_log, dt_bias, lower_bound)
    if intermediate_states_buffer is None:
        return kda_decode(
            q,
            k,
            v,
            g,
            beta,
            gate=gate,
            pool=ssm_states,
            indices=indices,
            cu_seqlens=boundaries,
            pad_index=PAD_SLOT,
            write_states=False,
        )
    rows = first_rows("intermediate_state_indices", intermediate_state_indices, N)
    return kda_prefill(
        q,
        k,
        v,
        g,
        beta,
        gate=gate,
        pool=ssm_states,
        indices=indices,
        checkpoints=_every_token(intermediate_states_buffer, rows, cache_steps),
        cu_seqlens=boundaries,
        pad_index=PAD_SLOT,
        write_states=False,
    )


def _every_token(buffer: object, rows: Tensor, steps: int | None) -> Checkpoints:
    """The states after each of the first ``steps`` tokens of every row, in that row of a buffer."""
    states = tensor("intermediate_states_buffer", buffer)
    if states.ndim != 5:
        raise ValueError(
            f"intermediate_states_buffer: got shape {tuple(states.shape)}, expected [rows, steps, HV, V, K]"
        )
    most = states.shape[1]
    steps = most if steps is None else steps
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"cache_steps: got {steps!r}, expected an int")
    if not 0 <= steps <= most:
        raise ValueError(f"cache_steps: got {steps}, expected at most {most}, the steps of intermediate_states_buffer")
    try:
        flat = states.view(-1, *states.shape[2:])
    except RuntimeError:
        raise ValueError(
            f"intermediate_states_buffer: got strides {states.stride()}, expected its rows and steps evenly spaced"
        ) from None
    N, step = rows.shape[0], torch.arange(steps, dtype=torch.int64, device=rows.device)
    # A row that is not in the buffer has no place there, whatever the step: nothing wraps.
    places = (rows.view(-1, 1) * most + step).view(-1)
    ends = torch.arange(N + 1, dtype=torch.int64, device=rows.device) * steps
    return Checkpoints((step + 1).repeat(N), ends, flat, places)


def _gate_and_beta(q: object, v: object, a: tuple[str, object], b: tuple[str, object]) -> tuple[Tensor, Tensor]:
    """The raw gate and beta of packed tokens, with their heads apart."""
    q, v = tensor("q", q), tensor("v", v)
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"q, v: got shapes {tuple(q.shape)} and {tuple(v.shape)}, expected [1, T, H, K] and [1, T, HV, V]"
        )
    leading, HV = (v.shape[0], v.shape[1]), v.shape[2]
    return heads_apart(*a, leading, HV, q.shape[3]), heads_apart(*b, leading, HV, 0)
