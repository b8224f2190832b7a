"""What is alike in backends whose ``run`` is differentiable and keeps nothing, for callers that have no tape."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch
from torch import Tensor

from flash_kda.types import Inputs, Problem, gate_parameters, with_parameters

Run: TypeAlias = Callable[[Inputs], tuple[Tensor, Tensor | None]]
Gradients: TypeAlias = tuple[Tensor | None, ...]


def kept_bytes(problem: Problem) -> int:
    """None: there is nothing that it would pay to keep."""
    return 0


def run_off_tape(run: Run, inputs: Inputs) -> tuple[Tensor, Tensor | None, None]:
    """Output and final state; see ``run_keeping`` of ``dispatch.Backend``."""
    with torch.no_grad():
        return *run(inputs), None


def gradients_by_tape(run: Run, inputs: Inputs, do: Tensor, dS: Tensor | None) -> Gradients:
    """Gradients of q, k, v, g, beta, A_log, dt_bias and initial_state; None for what is absent."""
    # Inside an operator torch records nothing for its thread; a thread of its own records.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_by_tape, run, inputs, do, dS).result()


def _by_tape(run: Run, inputs: Inputs, do: Tensor, dS: Tensor | None) -> Gradients:
    given = (*inputs[:5], *gate_parameters(inputs.gate), inputs.initial_state)
    leaves = [None if x is None else x.detach().requires_grad_() for x in given]
    q, k, v, g, beta, A_log, dt_bias, S0 = leaves
    gate = with_parameters(inputs.gate, A_log, dt_bias)
    call = inputs.replace(q=q, k=k, v=v, g=g, beta=beta, gate=gate, initial_state=S0, output_final_state=dS is not None)
    wanted = [x for x in leaves if x is not None]
    with torch.enable_grad():
        o, S = run(call)
        pairs = [(o, do)] if S is None or dS is None else [(o, do), (S, dS)]
        pairs = [(x, d) for x, d in pairs if x.requires_grad]
        found = iter(
            torch.autograd.grad([x for x, _ in pairs], wanted, [d for _, d in pairs], allow_unused=True)
            if pairs
            else [None] * len(wanted)
        )
    grads = [None if x is None else next(found) for x in leaves]
    return tuple(torch.zeros_like(x) if d is None and x is not None else d for d, x in zip(grads, given, strict=True))
