"""Compiling before the first request: calls of zeros in the place of those to come."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from flash_kda import dispatch
from flash_kda.api import kda
from flash_kda.decode import kda_decode
from flash_kda.prefill import kda_prefill
from flash_kda.step import kda_decode_step
from flash_kda.types import (
    Checkpoints,
    Gate,
    LogGate,
    LowerBoundGate,
    Problem,
    SoftplusGate,
    StateLayout,
    gate_parameters,
    state_shape,
)

# Taps of a decode step's convolutions.
WIDTH = 4


def warmup(
    problems: Iterable[Problem],
    *,
    state_layout: StateLayout = "vk",
    allow_neg_eigval: bool = False,
    index_dtype: torch.dtype = torch.int32,
    backend: str = "auto",
) -> list[str]:
    """Compile what calls of these problems need, so that no request waits for a compiler.

    Each problem is called with zeros, once with dense tensors and once with parts of one projection whose rows are a
    multiple of 16 elements long, all in the problem's dtype (states in theirs, A_log and dt_bias in float32). Other
    dtypes, strides or alignment may compile anew. The calls are those of serving and training:

    - ``"forward"``: with an initial state, and the final one asked for;
    - ``"forward"`` with ``grad``: without states, forwards and backwards;
    - ``"decode"``: rows with a slot each, all padding; with T > 1 a slot per token, and ``num_accepted``;
    - ``"step"``: rows with a slot each, all padding, convolutions of width 4 without biases;
    - ``"prefill"``: the same with ``has_initial_state``, and with checkpoints into a tensor if the problem has some.

    Args:
        problems: see :class:`flash_kda.Problem`; ``copyable`` is not looked at. A gate that has parameters gets both.
        state_layout, allow_neg_eigval, backend: as for :func:`flash_kda.kda`.
        index_dtype: of indices, ``cu_seqlens`` and what else counts.

    Returns:
        The backend of each problem.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what came and what was expected.
        NotImplementedError: no backend can run a problem; the message gives each one's reason.
    """
    problems = list(problems)
    for i, p in enumerate(problems):
        if not isinstance(p, Problem):
            raise TypeError(f"problems: got a {type(p).__name__} at {i}, expected a Problem")
    found = []
    for p in problems:
        for is_projection in (False, True):
            options = {
                "gate": _gate(p),
                "qk_l2norm": p.qk_l2norm,
                "beta_is_logit": p.beta_is_logit,
                "allow_neg_eigval": allow_neg_eigval,
                "state_layout": state_layout,
                "backend": backend,
            }
            with dispatch.record_backends() as ran, torch.set_grad_enabled(p.grad):
                _CALLS[p.op](p, _rows(p, is_projection), options, index_dtype)
        found.append(ran[0])
    return found


def _gate(p: Problem) -> Gate:
    if p.gate == "log":
        return LogGate()
    HV = p.HV or p.H
    A_log, dt_bias = torch.zeros(HV, device=p.device), torch.zeros(HV, p.K, device=p.device)
    return LowerBoundGate(A_log, dt_bias) if p.gate == "lower_bound" else SoftplusGate(A_log, dt_bias)


def _rows(p: Problem, is_projection: bool) -> dict[str, Tensor]:
    """q, k, v, g, beta and z, each by itself or all of one tensor."""
    HV = p.HV or p.H
    shapes = {"q": (p.H, p.K), "k": (p.H, p.K), "v": (HV, p.V), "g": (HV, p.K), "beta": (HV, 1), "z": (HV, p.V)}
    if p.op != "step":
        del shapes["z"]
    widths = [heads * size for heads, size in shapes.values()]
    if is_projection:
        # Padded, so that every part and every row starts at a multiple of 16 elements.
        padded = [-(-width // 16) * 16 for width in widths]
        whole = torch.zeros(p.B, p.T, sum(padded), dtype=p.dtype, device=p.device)
        parts = [x[..., :width] for x, width in zip(whole.split(padded, -1), widths, strict=True)]
    else:
        parts = [torch.zeros(p.B, p.T, width, dtype=p.dtype, device=p.device) for width in widths]
    rows = {name: x.unflatten(-1, shape) for x, (name, shape) in zip(parts, shapes.items(), strict=True)}
    rows["beta"] = rows["beta"][..., 0]
    return {name: x.detach().requires_grad_(p.grad) for name, x in rows.items()}


def _boundaries(p: Problem, dtype: torch.dtype) -> Tensor | None:
    """As even as they can be, made on the device."""
    if not p.packed:
        return None
    N = p.N or 0
    return torch.arange(N + 1, device=p.device).mul(p.T).div(max(1, N), rounding_mode="floor").to(dtype)


def _states(p: Problem, layout: StateLayout, slots: int) -> Tensor:
    return torch.zeros(state_shape(slots, p.HV or p.H, p.K, p.V, layout), dtype=p.state_dtype, device=p.device)


def _padding(p: Problem, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, -1, dtype=dtype, device=p.device)


def _sequences(p: Problem) -> int:
    return (p.N or 0) if p.packed else p.B


def _forward(p: Problem, rows: Any, options: Any, dtype: torch.dtype) -> None:
    cu_seqlens = _boundaries(p, dtype)
    if not p.grad:
        S = _states(p, options["state_layout"], _sequences(p))
        kda(**rows, **options, initial_state=S, output_final_state=True, cu_seqlens=cu_seqlens)
        return
    parameters = [x.requires_grad_() for x in gate_parameters(options["gate"]) if x is not None]
    o, _ = kda(**rows, **options, cu_seqlens=cu_seqlens)
    torch.autograd.grad(o, [*rows.values(), *parameters], torch.zeros_like(o))


def _decode(p: Problem, rows: Any, options: Any, dtype: torch.dtype) -> None:
    N, accepted = _sequences(p), None
    indices = _padding(p, (N,), dtype)
    tokens = -(-p.T // max(1, N)) if p.packed else p.T
    if tokens > 1:
        indices, accepted = _padding(p, (N, tokens), dtype), torch.ones(N, dtype=dtype, device=p.device)
    pool = _states(p, options["state_layout"], 1)
    cu_seqlens = _boundaries(p, dtype)
    kda_decode(**rows, **options, pool=pool, indices=indices, num_accepted=accepted, cu_seqlens=cu_seqlens)


def _step(p: Problem, rows: Any, options: Any, dtype: torch.dtype) -> None:
    widths = [rows[name].flatten(2).shape[-1] for name in ("q", "k", "v")]
    given: Any = {"dtype": p.dtype, "device": p.device}
    kda_decode_step(
        **rows,
        **options,
        pool=_states(p, options["state_layout"], 1),
        conv_pool=torch.zeros(1, WIDTH - 1, sum(widths), **given),
        conv_weights=[torch.zeros(width, WIDTH, **given) for width in widths],
        norm_weight=torch.zeros(p.V, **given),
        indices=_padding(p, (p.B,), dtype),
    )


def _prefill(p: Problem, rows: Any, options: Any, dtype: torch.dtype) -> None:
    N = _sequences(p)
    checkpoints = None
    if p.checkpoints:
        none = torch.zeros(N, dtype=dtype, device=p.device)
        ends = torch.arange(N + 1, device=p.device).to(dtype)
        checkpoints = Checkpoints(none, ends, _states(p, options["state_layout"], max(1, N)))
    kda_prefill(
        **rows,
        **options,
        pool=_states(p, options["state_layout"], 1),
        indices=_padding(p, (N,), dtype),
        has_initial_state=torch.ones(N, dtype=torch.bool, device=p.device),
        checkpoints=checkpoints,
        cu_seqlens=_boundaries(p, dtype),
    )


_CALLS: dict[str, Callable[[Problem, Any, Any, torch.dtype], None]] = {
    "forward": _forward,
    "decode": _decode,
    "step": _step,
    "prefill": _prefill,
}
