"""The chunk matrices of one head of one chunk, from the arguments of a call."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_kda.checks import check
from flash_kda.reference import kda_chunk
from flash_kda.types import Gate, LogGate


@dataclass(frozen=True, eq=False)
class ChunkMatrices:
    """``L``, ``Mqk`` and ``T`` ``[C, C]`` float64 of tokens start..start + C - 1, and their decays ``G [C, K]``."""

    start: int
    L: Tensor
    Mqk: Tensor
    T: Tensor
    G: Tensor


def chunk_matrices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    gate: Gate,
    head: int = 0,
    chunk: int = 0,
    chunk_size: int = 32,
    beta_is_logit: bool = True,
    allow_neg_eigval: bool = False,
) -> ChunkMatrices:
    """The matrices of value head ``head`` in chunk ``chunk`` of the first batch row.

    Args:
        q, k, v, g, beta, gate, beta_is_logit, allow_neg_eigval: as for :func:`flash_kda.kda`.
        head: of the HV value heads.
        chunk: counted in chunks of ``chunk_size`` tokens; the last one may be shorter.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.
    """
    inputs = check(
        q,
        k,
        v,
        g,
        beta,
        gate=gate,
        scale=None,
        initial_state=None,
        output_final_state=False,
        cu_seqlens=None,
        qk_l2norm=True,
        beta_is_logit=beta_is_logit,
        allow_neg_eigval=allow_neg_eigval,
        state_layout="vk",
    )
    B, T, H = q.shape[:3]
    HV = v.shape[2]
    if B < 1 or T < 1:
        raise ValueError(f"q: got shape {tuple(q.shape)}, expected at least one sequence and one token")
    if not 0 <= head < HV:
        raise ValueError(f"head: got {head}, expected 0 to {HV - 1}")
    # The pairwise decays of a chunk are spelled out: C^3 K numbers.
    if not 1 <= chunk_size <= 64:
        raise ValueError(f"chunk_size: got {chunk_size}, expected 1 to 64")
    chunks = -(-T // chunk_size)
    if not 0 <= chunk < chunks:
        raise ValueError(f"chunk: got {chunk}, expected 0 to {chunks - 1} ({T} tokens in chunks of {chunk_size})")
    rows = slice(chunk * chunk_size, (chunk + 1) * chunk_size)
    one, shared = slice(head, head + 1), slice(head // (HV // H), head // (HV // H) + 1)
    checked = inputs.gate
    if not isinstance(checked, LogGate):
        A_log, dt_bias = checked.A_log, checked.dt_bias
        checked = replace(
            checked,
            A_log=None if A_log is None else A_log[one],
            dt_bias=None if dt_bias is None else dt_bias[one],
        )
    # L, Mqk and T need no state, so the chunk can stand alone.
    part = inputs.replace(
        q=q[:1, rows, shared],
        k=k[:1, rows, shared],
        v=v[:1, rows, one],
        g=g[:1, rows, one],
        beta=beta[:1, rows, one],
        gate=checked,
    )
    with torch.no_grad():
        _, _, (c,) = kda_chunk(part, chunk_size)
    return ChunkMatrices(rows.start, c.L[0], c.Mqk[0], c.T[0], c.G[0])
