"""The CPU backend as a differentiable function: inputs and one state per chunk are kept, the rest is recomputed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_kda.backends.cpu.kernel import ROWS, backward, forward, states_out
from flash_kda.types import Inputs, LogGate


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
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dS: Tensor) -> tuple[Tensor | None, ...]:
        *rows, A_log, dt_bias = ctx.saved_tensors[:7]
        inputs: Inputs = ctx.inputs.replace(**dict(zip(ROWS, rows, strict=True)))
        if not isinstance(inputs.gate, LogGate):
            inputs = inputs.replace(gate=replace(inputs.gate, A_log=A_log, dt_bias=dt_bias))
        vk = inputs.state_layout == "vk"
        kept = list(ctx.saved_tensors[7:])
        dS = dS.to(torch.float64 if inputs.q.dtype == torch.float64 else torch.float32)
        grads = backward(inputs, kept, do, dS.transpose(-1, -2) if vk else dS)
        dS0 = None
        if ctx.initial_state_dtype is not None:
            dS0 = grads["states"].transpose(-1, -2) if vk else grads["states"]
            dS0 = dS0.to(ctx.initial_state_dtype)
        return None, *(grads[name] for name in ROWS), grads.get("A_log"), grads.get("dt_bias"), dS0


def run_with_grad(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Output and final states in the caller's layout, on the tape."""
    gate = inputs.gate
    A_log, dt_bias = (None, None) if isinstance(gate, LogGate) else (gate.A_log, gate.dt_bias)
    o, S = ChunkKDA.apply(inputs, *(getattr(inputs, name) for name in ROWS), A_log, dt_bias, inputs.initial_state)
    return o, S
