"""Chunkwise KDA on the CPU: batched float32 matrix products, differentiable, exact for any gate."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_kda.backends.cpu.autograd import run_with_grad
from flash_kda.backends.cpu.kernel import compute_dtype, forward, states_out
from flash_kda.backends.reference import deliver
from flash_kda.backends.stepwise import decode_stepwise, no_gradient, prefill_in_pieces, step_in_parts
from flash_kda.backends.taped import gradients_by_tape, run_off_tape
from flash_kda.backends.taped import kept_bytes as kept_bytes
from flash_kda.types import DecodeInputs, Inputs, PrefillInputs, Problem, StepInputs


def supports(problem: Problem) -> str | None:
    """Everything that lies on the CPU, decoding without gradients."""
    return no_gradient(problem) if problem.device == "cpu" else f"runs on the CPU; the tensors are on {problem.device}"


def run(inputs: Inputs, out: Tensor | None = None, final_state: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Output in v's dtype and final state, in float32 arithmetic (float64 for float64 inputs)."""
    if inputs.problem.grad:
        o, S = run_with_grad(inputs)
    else:
        with torch.no_grad():
            o, states, _ = forward(inputs)
            S = states_out(states, inputs)
    return deliver(o, S if inputs.output_final_state else None, out, final_state)


def runner(inputs: Inputs) -> None:
    """Nothing is kept for later calls: the values of every call are read and checked."""


def run_keeping(inputs: Inputs) -> tuple[Tensor, Tensor | None, None]:
    """Off the tape; see ``dispatch.Backend``."""
    return run_off_tape(run, inputs)


def gradients(inputs: Inputs, do: Tensor, dS: Tensor | None, kept: None = None) -> tuple[Tensor | None, ...]:
    """Off the tape; see ``dispatch.Backend``."""
    return gradients_by_tape(run, inputs, do, dS)


def run_decode(call: DecodeInputs) -> tuple[Tensor, None]:
    """Token by token; states have the dtype of computation inside and are rounded when they are stored.

    Nothing is kept for later calls: the values of every call are read and checked.
    """
    return decode_stepwise(call, run, compute_dtype(call.inputs)), None


def run_prefill(call: PrefillInputs) -> tuple[Tensor, None]:
    """Sequences in pieces from checkpoint to checkpoint; states have the dtype of computation inside."""
    return prefill_in_pieces(call, run, compute_dtype(call.inputs)), None


def run_step(call: StepInputs) -> tuple[Tensor, None]:
    """Part by part in the dtype of computation; what the pools keep is rounded when it is stored."""
    return step_in_parts(call, run, compute_dtype(call.decode.inputs)), None
