"""A forward on the GPU as a differentiable function: only the inputs are kept, everything else is made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flash_kda.backends.once import first_derivatives
from flash_kda.backends.triton.backward import Found
from flash_kda.backends.triton.backward import backward as triton_backward
from flash_kda.backends.triton.forward import forward as triton_forward
from flash_kda.types import Inputs, gate_parameters, with_parameters

# Output and final states of a checked call, into the tensors given.
Forward: TypeAlias = Callable[[Inputs, Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]
# Gradients of a checked call from those of its results; see ``flash_kda.backends.triton.backward.backward``.
Backward: TypeAlias = Callable[[Inputs, Tensor | None, Tensor | None], Found]


class TapedKDA(torch.autograd.Function):
    """Arguments: the backend's name, its forward and its backward, the call without its tensors, then q, k, v, g, beta,
    A_log, dt_bias, initial_state, cu_seqlens.
    """

    @staticmethod
    def forward(
        ctx: Any, backend: str, forward: Forward, backward: Backward, call: Inputs, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.backend, ctx.found, ctx.call = backend, backward, call
        ctx.save_for_backward(*tensors)
        return forward(with_tensors(call, tensors), None, None)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dS: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors: tuple[Tensor | None, ...] = ctx.saved_tensors
        with torch.no_grad():
            grads = ctx.found(with_tensors(ctx.call, tensors), do, dS)
        wanted = ctx.needs_input_grad[4:]
        grads = tuple(d if want else None for d, want in zip(grads, wanted, strict=False))
        return None, None, None, None, *first_derivatives(ctx.backend, grads, (*tensors[:-1], do, dS)), None


def without_tensors(inputs: Inputs) -> Inputs:
    """The call's options and the kind of its gate."""
    nothing = dict.fromkeys(("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens"))
    return inputs.replace(gate=with_parameters(inputs.gate, None, None), **nothing)


def with_tensors(call: Inputs, tensors: tuple[Tensor | None, ...]) -> Inputs:
    """The call with tensors in the order of :class:`TapedKDA`."""
    q, k, v, g, beta, A_log, dt_bias, S0, cu = tensors
    gate = with_parameters(call.gate, A_log, dt_bias)
    return call.replace(q=q, k=k, v=v, g=g, beta=beta, gate=gate, initial_state=S0, cu_seqlens=cu)


def run_with_grad(
    inputs: Inputs,
    backend: str = "triton",
    forward: Forward = triton_forward,
    backward: Backward = triton_backward,
) -> tuple[Tensor, Tensor | None]:
    """Output and final states of a backend's forward on the tape."""
    x = inputs
    tensors = (x.q, x.k, x.v, x.g, x.beta, *gate_parameters(x.gate), x.initial_state, x.cu_seqlens)
    o, S = TapedKDA.apply(backend, forward, backward, without_tensors(x), *tensors)
    return o, S
