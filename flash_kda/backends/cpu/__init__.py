"""Chunkwise KDA on the CPU: batched float32 matrix products, differentiable, exact for any gate."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_kda.backends.cpu.autograd import run_with_grad
from flash_kda.backends.cpu.kernel import forward, states_out
from flash_kda.backends.reference import deliver
from flash_kda.types import Inputs, Problem


def supports(problem: Problem) -> str | None:
    """Everything that lies on the CPU."""
    return None if problem.device == "cpu" else f"runs on the CPU; the tensors are on {problem.device}"


def run(inputs: Inputs, out: Tensor | None = None, final_state: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Output in v's dtype and final state, in float32 arithmetic (float64 for float64 inputs)."""
    if inputs.problem.grad:
        o, S = run_with_grad(inputs)
    else:
        with torch.no_grad():
            o, states, _ = forward(inputs)
            S = states_out(states, inputs)
    return deliver(o, S if inputs.output_final_state else None, out, final_state)
