"""The chunk form as batched matrix products, and its gradient.

Notation of docs/derivation.md. A tile holds the chunks of a group: ``[chunks, lanes, C, K]``, a lane being one value
head of one sequence. Everything is in the dtype of the tiles (float32; float64 for float64 inputs).

Decays are only ever multiplied, never divided, and log decays are not subtracted from one another. ``e^{G_i - G_j}``
of a pair on both sides of a boundary is a product of two factors of at most 1: from the boundary to i, and from j to
the boundary. Blocks of 1, 2, 4, ... rows are joined pairwise; the join of two blocks makes the pairs that lie across
it, then moves the factors of its rows to the outer ends of the joined block. So any gate is exact, -inf included,
with one exponential per element. Only the decay of a whole chunk is the exponential of a sum: there the product of
rounded factors, the same at every token of a slow constant gate, would drift over thousands of chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Join:
    """What the gradient needs of one join: operands as they were before their factors moved. ``h`` rows a side."""

    h: int
    K_late: Tensor
    Q_late: Tensor
    K_early: Tensor
    decay_early: Tensor
    decay_late: Tensor


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a chunk gives without the state. ``P`` is L without beta, ``a`` is ``e^g``, ``decay`` ``e^{G_C}``."""

    K_plus: Tensor
    Q_plus: Tensor
    K_end: Tensor
    P: Tensor
    Mqk: Tensor
    T: Tensor
    beta: Tensor
    a: Tensor
    decay: Tensor
    joins: tuple[Join, ...]


def _halves(x: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """Early and late half ``[blocks, h, K]`` of each block of 2h rows of ``[chunks, lanes, C, K]``, as views."""
    early, late = x.view(-1, 2, h, x.shape[-1]).unbind(1)
    return early, late


def _across(x: Tensor, h: int) -> Tensor:
    """The entries of ``[chunks, lanes, C, C]`` with late rows and early columns of each block: ``[blocks, h, h]``."""
    C = x.shape[-1]
    nb = C // (2 * h)
    blocks = x.view(-1, nb, 2, h, nb, 2, h)[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3)
    return blocks.permute(0, 3, 1, 2)


def prepare(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, keep: bool = False) -> Prepared:
    """Everything of the chunks that does not need the state.

    Args:
        q, k: normalised (and scaled) ``[chunks, lanes, C, K]``, of any strides; C a power of two.
        g: log decay, same shape. beta: ``[chunks, lanes, C]``.
        keep: whether to keep the joins for :func:`prepare_backward`.
    """
    C, K = q.shape[-2:]
    a, K_plus, Q_plus = (torch.empty(q.shape, dtype=q.dtype) for _ in range(3))
    # torch.sum orders its terms by the shape of the whole tensor; sums of halves depend on the chunk alone.
    G = g.contiguous()
    torch.exp(G, out=a)
    torch.mul(k, a, out=K_plus)
    torch.mul(q, a, out=Q_plus)
    K_end, decay = k.clone(memory_format=torch.contiguous_format), a
    P, Mqk = k.new_zeros(*q.shape[:-1], C), torch.diag_embed((q * k).sum(-1))
    joins = []
    h = 1
    while h < C:
        decay_early, decay_late = decay.view(-1, 2, K).unbind(1)
        G_early, G_late = G.view(-1, 2, K).unbind(1)
        K_early, _ = _halves(K_end, h)
        (_, K_late), (_, Q_late) = _halves(K_plus, h), _halves(Q_plus, h)
        columns = K_early.transpose(1, 2)
        for out, rows in ((P, K_late), (Mqk, Q_late)):
            view = _across(out, h)
            view.copy_(torch.bmm(rows, columns).view(view.shape))
        if keep:
            joins.append(Join(h, K_late.clone(), Q_late.clone(), K_early.clone(), decay_early, decay_late))
        K_late.mul_(decay_early[:, None])
        Q_late.mul_(decay_early[:, None])
        K_early.mul_(decay_late[:, None])
        decay = decay_early * decay_late
        G = G_early + G_late
        h *= 2
    L = P * beta[..., None]
    eye = torch.eye(C, dtype=L.dtype).expand_as(L)
    T = torch.linalg.solve_triangular(L, eye, upper=False, unitriangular=True)
    return Prepared(K_plus, Q_plus, K_end, P, Mqk, T, beta, a, G.exp().view(*q.shape[:2], K), tuple(joins))


def walk(S: Tensor, v: Tensor, p: Prepared, keep: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Carry the state ``[lanes, K, V]`` through the chunks of v ``[chunks, lanes, C, V]``.

    Args:
        keep: whether to keep the state before each chunk.

    Returns:
        Output ``[chunks, lanes, C, V]``, the state after the last chunk, and the kept states ``[chunks, lanes, K, V]``.
    """
    chunks = v.shape[0]
    T_beta = p.T * p.beta[..., None, :]
    o = torch.empty(v.shape, dtype=v.dtype)
    states = S.new_empty((chunks + 1 if keep else 2, *S.shape))
    states[0] = S
    for c in range(chunks):
        S, S_next = states[c % len(states)], states[(c + 1) % len(states)]
        R = torch.baddbmm(v[c], p.K_plus[c], S, alpha=-1)
        U = torch.bmm(T_beta[c], R)
        torch.bmm(p.Q_plus[c], S, out=o[c])
        o[c].baddbmm_(p.Mqk[c], U)
        torch.mul(p.decay[c, :, :, None], S, out=S_next)
        S_next.baddbmm_(p.K_end[c].transpose(1, 2), U)
    return o, states[chunks % len(states)], states[:chunks]


@dataclass(eq=False)
class PreparedGrad:
    """Gradients of the fields of :class:`Prepared`; ``log_decay`` is that of ``G_C`` (so ``decay`` times its own)."""

    K_plus: Tensor
    Q_plus: Tensor
    K_end: Tensor
    P: Tensor
    Mqk: Tensor
    beta: Tensor
    log_decay: Tensor


def walk_backward(
    states: Tensor, v: Tensor, p: Prepared, do: Tensor, dS: Tensor
) -> tuple[Tensor, Tensor, PreparedGrad]:
    """Gradient of :func:`walk` (docs/derivation.md section 5).

    Args:
        states: the state before each chunk, ``[chunks, lanes, K, V]``.
        do, dS: gradients of the output and of the state after the last chunk.

    Returns:
        Gradients of the first state, of v, and of what the chunks prepared.
    """
    T_beta = p.T * p.beta[..., None, :]
    R = v - p.K_plus @ states
    U = T_beta @ R
    dU = p.Mqk.transpose(-1, -2) @ do
    dR = torch.empty(v.shape, dtype=v.dtype)
    # The gradient of the state before chunk c is at c, so that of the state after it at c + 1.
    dS_at = dS.new_empty(v.shape[0] + 1, *dS.shape)
    dS_at[-1] = dS
    for c in reversed(range(v.shape[0])):
        dU[c].baddbmm_(p.K_end[c], dS_at[c + 1])
        torch.bmm(T_beta[c].transpose(1, 2), dU[c], out=dR[c])
        torch.mul(p.decay[c, :, :, None], dS_at[c + 1], out=dS_at[c])
        dS_at[c].baddbmm_(p.Q_plus[c].transpose(1, 2), do[c])
        dS_at[c].baddbmm_(p.K_plus[c].transpose(1, 2), dR[c], alpha=-1)
    dS_after = dS_at[1:]
    # R before its solve: W = T^T dU gives dR = beta W and dL = -W U^T below the diagonal.
    W = p.T.transpose(-1, -2) @ dU
    dL = (W @ U.transpose(-1, -2)).tril_(-1).neg_()
    S_T = states.transpose(-1, -2)
    grads = PreparedGrad(
        K_plus=(dR @ S_T).neg_(),
        Q_plus=do @ S_T,
        K_end=U @ dS_after.transpose(-1, -2),
        P=dL * p.beta[..., None],
        Mqk=(do @ U.transpose(-1, -2)).tril_(),
        beta=(W * R).sum(-1) + (dL * p.P).sum(-1),
        log_decay=torch.einsum("clkv,clkv->clk", states, dS_after) * p.decay,
    )
    return dS_at[0], dR, grads


def prepare_backward(q: Tensor, k: Tensor, p: Prepared, d: PreparedGrad) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and g of :func:`prepare`; d's tensors are used up.

    The joins are undone from the last to the first. A factor's log gradient is the sum of (gradient x value) over what
    it multiplied, so nothing is divided and a decay of zero is no special case.
    """
    K = q.shape[-1]
    dlog = d.log_decay.reshape(-1, K)
    for j in reversed(p.joins):
        early, late = j.decay_early[:, None], j.decay_late[:, None]
        dK_early, _ = _halves(d.K_end, j.h)
        (_, dK_late), (_, dQ_late) = _halves(d.K_plus, j.h), _halves(d.Q_plus, j.h)
        dK_late.mul_(early)
        dQ_late.mul_(early)
        dK_early.mul_(late)
        dlog_early = dlog + (dK_late * j.K_late).addcmul_(dQ_late, j.Q_late).sum(1)
        dlog_late = dlog + (dK_early * j.K_early).sum(1)
        dP, dM = (_across(x, j.h).reshape(-1, j.h, j.h) for x in (d.P, d.Mqk))
        # Added after the product: baddbmm_ into a strided view would run block by block.
        dK_early.add_(torch.bmm(dP.transpose(1, 2), j.K_late).baddbmm_(dM.transpose(1, 2), j.Q_late))
        dK_late.add_(torch.bmm(dP, j.K_early))
        dQ_late.add_(torch.bmm(dM, j.K_early))
        dlog = torch.stack([dlog_early, dlog_late], 1).view(-1, K)
    dM_diag = d.Mqk.diagonal(dim1=-2, dim2=-1)[..., None]
    dq_decayed, dk_decayed = d.Q_plus.mul_(p.a), d.K_plus.mul_(p.a)
    dg = torch.addcmul(dlog.view(q.shape), dq_decayed, q).addcmul_(dk_decayed, k)
    dq = torch.addcmul(dq_decayed, dM_diag, k)
    dk = dk_decayed.add_(d.K_end).addcmul_(dM_diag, q)
    return dq, dk, dg
