"""The float64 answer for long sequences: chunks in parallel, states one product per chunk.

The chunk form of docs/derivation.md, with each chunk's map of the state spelled out as ``S -> A S + B``: only these
products follow each other, one for 16 tokens, where the recurrence launches a dozen kernels for every token.
:func:`verify` compares the two on a short case.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_kda.checks import check
from flash_kda.reference import activate, kda_recurrent
from flash_kda.reference.recurrent import initial_states, spans
from flash_kda.types import Inputs, LowerBoundGate, SoftplusGate

# Tokens per chunk, and how many chunks of all heads are in work at once: pairs of tokens take 256 KiB a chunk.
CHUNK = 16
AT_ONCE = 1024
# Largest difference from the recurrence, relative to the largest value, that float64 rounding may leave.
AGREEMENT = 1e-12


def _slab(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs ``[M, n, C, V]`` of n chunks of M independent sequences, and the state after them.

    Args:
        q, k, g: activated, ``[M, n, C, K]``; v: ``[M, n, C, V]``; beta: ``[M, n, C]``. S: ``[M, K, V]`` before them.
    """
    C = q.shape[2]
    i = torch.arange(C, device=q.device)
    below = (i[:, None] >= i)[..., None]
    G = g.cumsum(2)
    # [M, n, C, C, K], selected before the exponential: nothing above the diagonal is ever computed.
    pair = torch.where(below, G[..., :, None, :] - G[..., None, :, :], -torch.inf).exp()
    both = (k[..., None, :, :] * pair) @ torch.stack([k, q], -1)
    L, Mqk = both[..., 0].tril(-1) * beta[..., None], both[..., 1]
    eye = torch.eye(C, dtype=q.dtype, device=q.device)
    K_plus, K_end = k * G.exp(), k * pair[..., -1, :, :]
    right = torch.cat([K_plus, v], -1) * beta[..., None]
    W, U = torch.linalg.solve_triangular(eye + L, right, upper=False, unitriangular=True).split(
        [k.shape[-1], v.shape[-1]], -1
    )
    A = torch.diag_embed(G[..., -1, :].exp()) - K_end.transpose(-1, -2) @ W
    B = K_end.transpose(-1, -2) @ U
    before = []
    for c in range(q.shape[1]):
        before.append(S)
        S = torch.baddbmm(B[:, c], A[:, c], S)
    states = torch.stack(before, 1)
    return (q * G.exp()) @ states + Mqk @ (U - W @ states), S


def exact(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Output ``[B, T, HV, V]`` and final state (in the call's layout), both float64 and not rounded to other dtypes.

    Log decays must be finite.
    """
    B, T = inputs.q.shape[:2]
    HV, V = inputs.v.shape[2:]
    found = spans(inputs)
    device = inputs.q.device
    first = torch.tensor([b * T + start for b, start, _ in found], device=device)
    length = torch.tensor([end - start for _, start, end in found], device=device)
    S = initial_states(inputs, torch.float64)
    N = S.shape[0]
    S = S.reshape(N * HV, *S.shape[2:])
    flat = {name: getattr(inputs, name).flatten(0, 1) for name in ("q", "k", "v", "g", "beta")}
    o = torch.zeros(B * T, HV, V, dtype=torch.float64, device=device)
    longest = max((end - start for _, start, end in found), default=0)
    step = CHUNK * max(1, AT_ONCE // max(1, N * HV))
    for start in range(0, longest, step):
        size = min(step, -(-(longest - start) // CHUNK) * CHUNK)
        t = start + torch.arange(size, device=device)
        inside = t < length[:, None]
        rows = torch.where(inside, first[:, None] + t, 0)
        part = activate(inputs.replace(**{name: x[rows] for name, x in flat.items()}), torch.float64)

        def chunks(x: Tensor, inside: Tensor = inside, size: int = size) -> Tensor:
            """``[N, size, HV, ...]`` as ``[N * HV, n, C, ...]``; rows past a sequence's end change nothing."""
            x = torch.where(inside.view(*inside.shape, *[1] * (x.ndim - 2)), x, 0.0)
            return x.transpose(1, 2).reshape(N * HV, size // CHUNK, CHUNK, *x.shape[3:])

        q, k, v, g, beta = (chunks(x) for x in part)
        out, S = _slab(q, k, v, g, beta, S)
        o[rows[inside]] = out.reshape(N, HV, size, V).transpose(1, 2)[inside]
    states = S.view(N, HV, *S.shape[1:])
    return o.view(B, T, HV, V), states.transpose(-1, -2) if inputs.state_layout == "vk" else states


def verify(device: torch.device | str) -> float:
    """Compare with the recurrence on four uneven packed sequences, for both gates.

    Returns:
        The largest difference over the largest value.

    Raises:
        RuntimeError: it is more than rounding.
    """
    rng = torch.Generator().manual_seed(0)
    lengths, H, D = (37, 0, 1, 70), 2, 32
    T = sum(lengths)
    q, k, v, g = (torch.randn(1, T, H, D, generator=rng, dtype=torch.float64).to(device) for _ in range(4))
    beta = torch.randn(1, T, H, generator=rng, dtype=torch.float64).to(device)
    S0 = torch.randn(len(lengths), H, D, D, generator=rng, dtype=torch.float64).to(device)
    A_log, dt_bias = torch.randn(H, generator=rng).to(device), 3 * torch.randn(H, D, generator=rng).to(device)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=device)
    worst = 0.0
    for gate in (LowerBoundGate(A_log, dt_bias), SoftplusGate(A_log, dt_bias)):
        inputs = check(
            q, k, v, g, beta, gate=gate, scale=None, initial_state=S0, output_final_state=True, cu_seqlens=cu_seqlens,
            qk_l2norm=True, beta_is_logit=True, allow_neg_eigval=False, state_layout="vk",
        )  # fmt: skip
        for got, right in zip(exact(inputs), kda_recurrent(inputs), strict=True):
            if right is not None:
                worst = max(worst, float((got - right).abs().max() / right.abs().max()))
    if not worst <= AGREEMENT:
        raise RuntimeError(f"the exact answer differs from the recurrence by {worst:.1e}, at most {AGREEMENT} expected")
    return worst
