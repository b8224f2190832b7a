"""vLLM's interface: the KDA functions that its Kimi models call, with vLLM's arguments.

:func:`fwd` and :func:`get_workspace_size` are those of its fork of FlashKDA.
:func:`fused_recurrent_kda` and :func:`fused_recurrent_kda_packed_decode` decode in place on the cache's states
``[slots, HV, V, K]``; :func:`chunk_kda_with_fused_gate` is the prefill of models whose gate has no lower bound. vLLM's
slot 0 holds nobody: a row whose index is 0, negative or not in the cache is padding. It gives zeros and writes no slot.

In all of them q and k are normalised, and the gate and beta come raw. ``lower_bound=None`` means the softplus gate.
"""

from __future__ import annotations

from torch import Tensor

from flash_kda.api import kda
from flash_kda.compat import flashkda
from flash_kda.compat.engines import first_rows, gate_of, naming, rows_of, split_packed, tensor
from flash_kda.compat.flashkda import get_workspace_size
from flash_kda.decode import kda_decode

__all__ = [
    "chunk_kda_with_fused_gate",
    "fused_recurrent_kda",
    "fused_recurrent_kda_packed_decode",
    "fwd",
    "get_workspace_size",
]

NULL_SLOT = 0


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    out: Tensor,
    workspace: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    checkpoint_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_indptr: Tensor | None = None,
) -> None:
    """:func:`flash_kda.fwd` with the order of arguments of vLLM's operator, the workspace after the output."""
    flashkda.fwd(
        q,
        k,
        v,
        g,
        beta,
        scale,
        out,
        A_log,
        dt_bias,
        lower_bound,
        initial_state=initial_state,
        final_state=final_state,
        cu_seqlens=cu_seqlens,
        workspace=workspace,
        checkpoint_state=checkpoint_state,
        checkpoint_offsets=checkpoint_offsets,
        checkpoint_indptr=checkpoint_indptr,
    )


@naming(
    g="raw_g",
    beta="raw_beta",
    pool="initial_state",
    indices="ssm_state_indices",
    num_accepted="num_accepted_tokens",
)
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    fuse_gate: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode rows of one to 16 tokens, drafts among them, on the states in vLLM's cache.

    Args:
        q, k: ``[1, T, H, K]``. v: ``[1, T, HV, V]``. raw_g: ``[1, T, HV, K]``. raw_beta: ``[1, T, HV]``, logits. Any
            strides with a dense last dimension (of raw_beta any at all).
        A_log: HV float32 values, dt_bias: HV * K or None, of any shape.
        initial_state: the cache, ``[slots, HV, V, K]`` float32 or bfloat16, updated in place.
        cu_seqlens: ``[N + 1]`` int32 or int64, boundaries of the rows.
        ssm_state_indices: a slot per row ``[N]``, or one per token ``[N, 1 + S]``: the state after a row's token t goes
            to its slot t, unless that is 0 or less. May have more rows than N.
        num_accepted_tokens: ``[N]`` or more; a row starts from its slot ``num_accepted_tokens - 1``. None: from slot 0.
        out: where the output goes.
        fuse_gate: accepted and without effect: the gate is always applied inside.

    Returns:
        The output, ``out`` if it was given, and ``initial_state``.
    """
    boundaries, N = rows_of(cu_seqlens, "cu_seqlens")
    indices = first_rows("ssm_state_indices", ssm_state_indices, N)
    accepted = None if num_accepted_tokens is None else first_rows("num_accepted_tokens", num_accepted_tokens, N)
    o = kda_decode(
        q,
        k,
        v,
        raw_g,
        raw_beta,
        gate=gate_of(A_log, dt_bias, lower_bound),
        pool=initial_state,
        indices=indices,
        num_accepted=accepted,
        cu_seqlens=boundaries,
        pad_index=NULL_SLOT,
        out=out,
    )
    return o, initial_state


@naming(q="mixed_qkv", g="raw_g", beta="raw_beta", pool="initial_state", indices="state_indices")
def fused_recurrent_kda_packed_decode(
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode one token of each row, q, k and v beside each other as the convolution leaves them.

    Args:
        mixed_qkv: ``[N, 2 * H * K + HV * V]``, rows at any distance.
        raw_g: ``[1, N, HV, K]``. raw_beta: ``[1, N, HV]``, logits. Strides as for :func:`fused_recurrent_kda`.
        A_log, dt_bias, initial_state: as for :func:`fused_recurrent_kda`.
        state_indices: ``[N]`` int32 or int64, any stride.
        scale: factor on q; None means ``K ** -0.5``.

    Returns:
        The output ``[1, N, HV, V]``, and ``initial_state``.
    """
    q, k, v = split_packed(mixed_qkv, initial_state)
    g, beta = tensor("raw_g", raw_g), tensor("raw_beta", raw_beta)
    for name, x, ndim in (("raw_g", g, 4), ("raw_beta", beta, 3)):
        if x.ndim != ndim:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {ndim} dimensions, the first two [1, N]")
    o = kda_decode(
        q,
        k,
        v,
        g.transpose(0, 1),
        beta.transpose(0, 1),
        gate=gate_of(A_log, dt_bias, lower_bound),
        pool=initial_state,
        indices=tensor("state_indices", state_indices),
        scale=scale,
        pad_index=NULL_SLOT,
    )
    return o.transpose(0, 1), initial_state


@naming(g="raw_g", beta="raw_beta", dt_bias="g_bias")
def chunk_kda_with_fused_gate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor | None,
    g_bias: Tensor | None,
    lower_bound: float | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Whole sequences, with states that the caller gathers and scatters; v keeps its values (vLLM's own overwrites it).

    Args:
        q, k, v, raw_g, raw_beta, scale, initial_state, output_final_state, cu_seqlens: as for :func:`flash_kda.kda`,
            with states ``[N, HV, V, K]``.
        A_log, g_bias: HV and HV * K float32 values of any shape; g_bias may be None.

    Returns:
        The output and the final state (None unless asked for).
    """
    return kda(
        q,
        k,
        v,
        raw_g,
        raw_beta,
        gate=gate_of(A_log, g_bias, lower_bound),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        qk_l2norm=use_qk_l2norm_in_kernel,
    )
