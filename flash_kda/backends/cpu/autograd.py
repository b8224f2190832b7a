"""The CPU backend as a differentiable function: inputs and one state per chunk are kept, the rest is recomputed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_kda.backends.cpu.kernel import ROWS, backward, forward, states_out
from flash_kda.backends.once import first_derivatives
from flash_kda.types import Inputs, gate_parameters, with_parameters


class ChunkKDA(torch.autograd.Function):
    """Arguments: the call without tensors that need gradients, then q, k, v, g, beta, A_log, dt_bias, initial_state."""

    @staticmethod
    def forward(ctx: Any, inputs: Inputs, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        o, S, kept = forward(inputs, keep_states=True)
        ctx.inputs = inputs.replace(**dict.fromkeys(ROWS), initial_state=None)
        ctx.initial_state_dtype = None if inputs.initial_state is None else inputs.initial_state.dtype
        ctx.save_for_backward(*tensors[:-1], *kept)
        return o, states_out(S, inputs)

    @staticmethod
    def backward(ctx: Any, do: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: under activation checkpointing what was saved is made again, and given out a single time.
        saved = ctx.saved_tensors
        rows, parameters, kept = saved[:5], saved[5:7], list(saved[7:])
        gate = with_parameters(ctx.inputs.gate, *parameters)
        inputs: Inputs = ctx.inputs.replace(**dict(zip(ROWS, rows, strict=True)), gate=gate)
        with torch.no_grad():
            found = backward(inputs, kept, do, dS)
        dS0 = None if ctx.initial_state_dtype is None else found["states"].to(ctx.initial_state_dtype)
        grads = (*(found[name] for name in ROWS), found.get("A_log"), found.get("dt_bias"), dS0)
        return None, *first_derivatives("cpu", grads, (*rows, *parameters, do, dS))


def run_with_grad(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Output and final states in the caller's layout, on the tape."""
    rows = (getattr(inputs, name) for name in ROWS)
    o, S = ChunkKDA.apply(inputs, *rows, *gate_parameters(inputs.gate), inputs.initial_state)
    return o, S
