"""The recurrence as a backend: slow, exact, differentiable, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_kda.backends.stepwise import decode_stepwise, no_gradient, prefill_in_pieces, step_in_parts
from flash_kda.backends.taped import gradients_by_tape, run_off_tape
from flash_kda.backends.taped import kept_bytes as kept_bytes
from flash_kda.reference import kda_recurrent
from flash_kda.types import DecodeInputs, Inputs, PrefillInputs, Problem, StepInputs


def supports(problem: Problem) -> str | None:
    """The reference runs everything, decoding without gradients."""
    return no_gradient(problem)


def run(inputs: Inputs, out: Tensor | None = None, final_state: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Compute in float64; the output is rounded once, at the end."""
    return deliver(*kda_recurrent(inputs, torch.float64), out, final_state)


def runner(inputs: Inputs) -> None:
    """Nothing is kept for later calls."""


def run_keeping(inputs: Inputs) -> tuple[Tensor, Tensor | None, None]:
    """Off the tape; see ``dispatch.Backend``."""
    return run_off_tape(run, inputs)


def gradients(inputs: Inputs, do: Tensor, dS: Tensor | None, kept: None = None) -> tuple[Tensor | None, ...]:
    """Off the tape; see ``dispatch.Backend``."""
    return gradients_by_tape(run, inputs, do, dS)


def run_decode(call: DecodeInputs) -> tuple[Tensor, None]:
    """Token by token; states are float64 inside and rounded when they are stored."""
    return decode_stepwise(call, run, torch.float64), None


def run_prefill(call: PrefillInputs) -> tuple[Tensor, None]:
    """Sequences in pieces from checkpoint to checkpoint; states are float64 inside and rounded when they are stored."""
    return prefill_in_pieces(call, run, torch.float64), None


def run_step(call: StepInputs) -> tuple[Tensor, None]:
    """Part by part in float64; what the pools keep is rounded when it is stored, the output once, at the end."""
    return step_in_parts(call, run, torch.float64), None


def deliver(
    o: Tensor, S: Tensor | None, out: Tensor | None, final_state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Copy results into the caller's tensors where there are any."""
    return (
        o if out is None else out.copy_(o),
        S if final_state is None or S is None else final_state.copy_(S),
    )
