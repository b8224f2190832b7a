"""Whether the ways of running the same tokens agree, with each other and with the recurrence in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flash_kda
from flash_kda.nn import ByteLM, DeltaRule, LMCache
from flash_kda.types import LowerBoundGate, SoftplusGate

# Largest relative error (RMS error over RMS value) of the worst head and block of rows. Float32 rounds at 6e-8 and a
# whole chunk of it comes to a few 1e-7; a matrix product that had dropped to bfloat16 or TF32 would show 1e-3.
OPERATOR_LIMIT = 5e-6
# Logits pass through all layers, and norms and gates amplify what the layers before them rounded.
LOGITS_LIMIT = 2e-5
BLOCK = 64


@dataclass(frozen=True, eq=False)
class Captured:
    """What one layer passed to :func:`flash_kda.kda`: q, k ``[1, T, H, K]``, v, g, beta, and its gate."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    gate: LowerBoundGate | SoftplusGate
    allow_neg_eigval: bool

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.g, self.beta


@dataclass(frozen=True)
class Agreement:
    """One comparison. ``relative`` is RMS error over RMS value of everything, ``worst`` that of the worst block."""

    subject: str
    way: str
    against: str
    max_error: float
    mean_error: float
    rmse: float
    relative: float
    worst: float
    limit: float

    @property
    def ok(self) -> bool:
        # Written so that a NaN fails.
        return self.worst <= self.limit


def capture(model: ByteLM, tokens: Tensor) -> list[Captured]:
    """Run ``tokens [1, T]`` through the model and keep what every layer hands to the delta rule."""
    found: list[Captured] = []

    def keep(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        q, k, v, g, beta = (x.detach().clone() for x in args)
        neg = bool(getattr(module, "allow_neg_eigval", False))
        found.append(Captured(len(found), q, k, v, g, beta, kwargs["gate"], neg))

    rules = [module for module in model.modules() if isinstance(module, DeltaRule)]
    hooks = [rule.register_forward_pre_hook(keep, with_kwargs=True) for rule in rules]
    try:
        with torch.no_grad():
            model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def run_operator(
    c: Captured, pieces: Sequence[int], dtype: torch.dtype = torch.float32, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Output ``[1, T, HV, V]`` and final state ``[1, HV, V, K]`` of the rows cut into pieces, the state handed on."""
    state: Tensor | None = None
    outputs = []
    with torch.no_grad():
        for q, k, v, g, beta in zip(*(torch.split(x.to(dtype), list(pieces), 1) for x in c.rows), strict=True):
            o, state = flash_kda.kda(
                q,
                k,
                v,
                g,
                beta,
                gate=c.gate,
                # A copy with dense rows, because a state may come back as a transposed view.
                initial_state=None if state is None else state.contiguous(),
                output_final_state=True,
                allow_neg_eigval=c.allow_neg_eigval,
                backend=backend,
            )
            outputs.append(o)
    if state is None:
        raise ValueError(f"pieces: got {list(pieces)}, expected at least one")
    return torch.cat(outputs, 1), state


def run_model(model: ByteLM, tokens: Tensor, pieces: Sequence[int]) -> Tensor:
    """Logits ``[1, T, 256]`` of ``tokens [1, T]`` cut into pieces, the cache handed on."""
    cache: LMCache | None = None
    outputs = []
    with torch.no_grad():
        for piece in torch.split(tokens, list(pieces), 1):
            logits, cache = model(piece, cache, return_cache=True)
            outputs.append(logits)
    return torch.cat(outputs, 1)


def exact_copy(model: ByteLM) -> ByteLM:
    """The model in float64 with every layer on the reference recurrence."""
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if isinstance(module, DeltaRule):
            module.backend = "reference"
    return exact


def cuts(T: int) -> dict[str, list[int]]:
    """The three ways to cut T tokens: whole, uneven pieces around the chunk size, single tokens."""
    pieces, left = [], T
    for n in (1, 63, 64, 65, 7, 130):
        pieces.append(min(n, left))
        left -= pieces[-1]
    return {
        "whole prefill": [T],
        "prefill in pieces": [n for n in (*pieces, left) if n],
        "token by token": [1] * T,
    }


def compare(subject: str, way: str, against: str, got: Tensor, want: Tensor, limit: float) -> Agreement:
    """Judge ``got`` against ``want``, both ``[rows, heads, size]``, per head and block of BLOCK rows."""
    want = want.double()
    error = got.double() - want
    rms = want.square().mean().sqrt()
    worst = torch.zeros((), dtype=torch.float64)
    for e, w in zip(torch.split(error, BLOCK), torch.split(want, BLOCK), strict=True):
        # A block of almost nothing is measured against a thousandth of the whole, not against itself.
        scale = w.square().mean((0, 2)).sqrt().clamp(min=float(rms) * 1e-3)
        worst = torch.maximum(worst, (e.square().mean((0, 2)).sqrt() / scale).max())
    rmse = error.square().mean().sqrt()
    return Agreement(
        subject=subject,
        way=way,
        against=against,
        max_error=float(error.abs().max()),
        mean_error=float(error.abs().mean()),
        rmse=float(rmse),
        relative=float(rmse / rms),
        worst=float(worst),
        limit=limit,
    )


EXACT = "float64 recurrence"


def compare_ways(subject: str, results: dict[str, Tensor], exact: Tensor, limit: float) -> list[Agreement]:
    """Every way against the exact answer, and every way against the first."""
    first, *others = results
    rows = [compare(subject, way, EXACT, got, exact, limit) for way, got in results.items()]
    return rows + [compare(subject, way, first, results[way], results[first], limit) for way in others]


def check_layer(c: Captured) -> tuple[list[Agreement], dict[str, Tensor]]:
    """Output and final state of one layer's real activations; also the output errors ``[T, HV, V]`` of each way."""
    T = c.q.shape[1]
    o_exact, s_exact = run_operator(c, [T], torch.float64, "reference")
    outputs, states = {}, {}
    for way, pieces in cuts(T).items():
        o, s = run_operator(c, pieces)
        # Heads in the middle: rows of a state are its V rows.
        outputs[way], states[way] = o[0], s[0].transpose(0, 1)
    name = f"layer {c.layer + 1}"
    rows = compare_ways(f"{name} output", outputs, o_exact[0], OPERATOR_LIMIT)
    rows += compare_ways(f"{name} state", states, s_exact[0].transpose(0, 1), OPERATOR_LIMIT)
    return rows, {way: o.double() - o_exact[0] for way, o in outputs.items()}


def check_model(model: ByteLM, tokens: Tensor) -> list[Agreement]:
    """Logits of the whole model for ``tokens [1, T]``; exact is the model in float64 on the recurrence."""
    T = tokens.shape[1]
    exact = run_model(exact_copy(model), tokens, [T])
    results = {way: run_model(model, tokens, pieces)[0][:, None] for way, pieces in cuts(T).items()}
    return compare_ways("logits", results, exact[0][:, None], LOGITS_LIMIT)
