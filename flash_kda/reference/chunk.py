"""The chunk form, written as in docs/derivation.md: each matrix has its name, nothing is optimised."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_kda.reference.gate import activate
from flash_kda.reference.recurrent import final_states, initial_states, spans, used_rows
from flash_kda.types import Inputs


@dataclass(frozen=True, eq=False)
class Chunk:
    """The matrices of one chunk of C tokens of one sequence, for all HV value heads.

    Attributes:
        sequence, start: which sequence, and its token index (along T) of the chunk's first row.
        G: ``[HV, C, K]`` inclusive cumulative sum of the log decay inside the chunk.
        K_plus, Q_plus, K_end: ``[HV, C, K]``: ``k_i e^{G_i}``, ``scale q_i e^{G_i}``, ``k_j e^{G_C - G_j}``.
        L: ``[HV, C, C]``, ``beta_i k_i (k_j e^{G_i - G_j})`` below the diagonal, zero elsewhere.
        Mqk: ``[HV, C, C]``, ``scale q_i (k_j e^{G_i - G_j})`` on and below the diagonal.
        T: ``[HV, C, C]``, ``(I + L)^{-1}``, unit lower triangular.
        U: ``[HV, C, V]``, ``T Diag(beta) (V - K_plus S)``: the deltas that are written.
        S: ``[HV, K, V]`` state before the chunk.
    """

    sequence: int
    start: int
    G: Tensor
    K_plus: Tensor
    Q_plus: Tensor
    K_end: Tensor
    L: Tensor
    Mqk: Tensor
    T: Tensor
    U: Tensor
    S: Tensor


def chunk_matrices(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, *, sequence: int = 0, start: int = 0
) -> Chunk:
    """The matrices of one chunk from activated (scaled) q, k, g ``[HV, C, K]``, v ``[HV, C, V]``, beta ``[HV, C]``.

    The pairwise decays ``e^{G_i - G_j}`` are spelled out as ``[HV, C, C, K]``, each as the sum of the log decays
    between j and i: no difference of large sums, so any g <= 0 is right, minus infinity included.
    """
    C = q.shape[1]
    i, j, m = (torch.arange(C, device=q.device).view(shape) for shape in ((C, 1, 1), (1, C, 1), (1, 1, C)))
    between = (m > j) & (m <= i)
    exponent = torch.where(between[None, ..., None], g[:, None, None], 0.0).sum(3)
    pair = torch.where((i >= j)[None], exponent.exp(), 0.0)
    eye = torch.eye(C, dtype=q.dtype, device=q.device)
    L = torch.einsum("hik,hjk,hijk->hij", k, k, pair).tril(-1) * beta[..., None]
    T = torch.linalg.solve_triangular(eye + L, eye.expand_as(L), upper=False, unitriangular=True)
    G = g.cumsum(1)
    K_plus, Q_plus = k * G.exp(), q * G.exp()
    U = T @ (beta[..., None] * (v - K_plus @ S))
    return Chunk(
        sequence=sequence,
        start=start,
        G=G,
        K_plus=K_plus,
        Q_plus=Q_plus,
        K_end=k * pair[:, -1],
        L=L,
        Mqk=torch.einsum("hik,hjk,hijk->hij", q, k, pair),
        T=T,
        U=U,
        S=S,
    )


def kda_chunk(
    inputs: Inputs, chunk_size: int = 16, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor | None, list[Chunk]]:
    """KDA in chunks of ``chunk_size`` tokens (the last of a sequence may be shorter), keeping every matrix.

    Returns:
        Output and final state as :func:`kda_recurrent`, and the chunks in order of sequence and time. Memory is
        quadratic in the chunk size: this is for reading and checking, not for running models.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size: got {chunk_size}, expected 1 or more")
    q, k, v, g, beta = activate(used_rows(inputs), dtype)
    S0 = initial_states(inputs, dtype)
    B, T = inputs.v.shape[:2]
    outputs = [[v.new_zeros(v.shape[2:])[None]] * T for _ in range(B)]
    chunks, states = [], []
    for n, (b, first, end) in enumerate(spans(inputs)):
        S = S0[n]
        for start in range(first, end, chunk_size):
            rows = slice(start, min(start + chunk_size, end))
            q_, k_, v_, g_, beta_ = (x[b, rows].transpose(0, 1) for x in (q, k, v, g, beta))
            c = chunk_matrices(q_, k_, v_, g_, beta_, S, sequence=n, start=start)
            o = (c.Q_plus @ S + c.Mqk @ c.U).transpose(0, 1)
            S = c.G[:, -1].exp()[..., None] * S + c.K_end.transpose(-1, -2) @ c.U
            outputs[b][rows] = list(o.split(1))
            chunks.append(c)
        states.append(S)
    o = torch.stack([torch.cat(rows) for rows in outputs]) if B * T else torch.zeros_like(v)
    return o.to(inputs.v.dtype), final_states(inputs, states), chunks
