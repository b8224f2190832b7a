"""A forward on the GPU as a differentiable function.

Only the inputs are kept, and what was prepared of them unless the call is to recompute it; all else is made again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from flash_kda.backends.once import first_derivatives
from flash_kda.backends.triton.backward import Found
from flash_kda.backends.triton.backward import backward as triton_backward
from flash_kda.backends.triton.forward import forward_of_gradients as triton_forward
from flash_kda.types import ForwardTensors, Inputs, Maybe, Runner, gate_parameters, with_parameters

# Output and final states of a checked call, and what is kept; see ``forward.forward_of_gradients``.
Forward: TypeAlias = Callable[[Inputs], tuple[Tensor, Maybe, Maybe]]
# Gradients of a checked call from those of its results, and from what was kept; see ``backward.backward``.
Backward: TypeAlias = Callable[[Inputs, Maybe, Maybe, Maybe], Found]


# In the order of :class:`TapedKDA`: q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens.
Taped: TypeAlias = tuple[Tensor | None, ...]


class TapedKDA(torch.autograd.Function):
    """Arguments: the backend's name, forward and backward as functions of the tensors, and these."""

    @staticmethod
    def forward(
        ctx: Any,
        backend: str,
        forward: Callable[[Taped], tuple[Tensor, Maybe, Maybe]],
        backward: Callable[[Taped, Maybe, Maybe, Maybe], Found],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.backend, ctx.found = backend, backward
        o, S, kept = forward(tensors)
        # Saved as the inputs are: what looks after saved tensors, such as activation checkpointing, then has it, too.
        ctx.save_for_backward(*tensors, kept)
        return o, S

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dS: Tensor | None) -> tuple[Tensor | None, ...]:
        *saved, kept = ctx.saved_tensors
        tensors: Taped = tuple(saved)
        with torch.no_grad():
            grads = ctx.found(tensors, do, dS, kept)
        wanted = ctx.needs_input_grad[3:]
        grads = tuple(d if want else None for d, want in zip(grads, wanted, strict=False))
        return None, None, None, *first_derivatives(ctx.backend, grads, (*tensors[:-1], do, dS)), None


def without_tensors(inputs: Inputs) -> Inputs:
    """The call's options and the kind of its gate."""
    nothing = dict.fromkeys(("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens"))
    return inputs.replace(gate=with_parameters(inputs.gate, None, None), **nothing)


def with_tensors(call: Inputs, tensors: Taped) -> Inputs:
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
    x, call = inputs, without_tensors(inputs)
    tensors = (x.q, x.k, x.v, x.g, x.beta, *gate_parameters(x.gate), x.initial_state, x.cu_seqlens)
    o, S = TapedKDA.apply(
        backend,
        lambda tensors: forward(with_tensors(call, tensors)),
        lambda tensors, *given: backward(with_tensors(call, tensors), *given),
        *tensors,
    )
    return o, S


def runner_with_grad(
    inputs: Inputs,
    backend: str,
    plain: Runner,
    forward: Forward = triton_forward,
    backward: Backward = triton_backward,
) -> Runner:
    """:func:`run_with_grad` for all calls of this call's form.

    Args:
        plain: the same without gradients.
    """
    call, signature = without_tensors(inputs), inputs.signature
    bias = gate_parameters(inputs.gate)[1]
    bias_shape = None if bias is None else bias.shape

    def checked(tensors: Taped) -> Inputs:
        given = with_tensors(call, tensors)
        # That of the form's first call: its own differs by strides of single entries at most.
        given.__dict__["signature"] = signature
        return given

    def ahead(tensors: Taped) -> tuple[Tensor, Maybe, Maybe]:
        if not call.recompute:
            return forward(checked(tensors))
        q, k, v, g, beta, A_log, dt_bias, S0, cu = cast(Any, tensors)
        return *plain((q, k, v, g, beta, S0, cu, None, None), A_log, dt_bias), None

    def back(tensors: Taped, do: Maybe, dS: Maybe, kept: Maybe) -> Found:
        return backward(checked(tensors), do, dS, kept)

    def run(tensors: ForwardTensors, A_log: Maybe, dt_bias: Maybe) -> tuple[Tensor, Maybe]:
        q, k, v, g, beta, S0, cu, _, _ = tensors
        if dt_bias is not None and bias_shape is not None and dt_bias.shape != bias_shape:
            dt_bias = dt_bias.reshape(bias_shape)
        o, S = TapedKDA.apply(backend, ahead, back, q, k, v, g, beta, A_log, dt_bias, S0, cu)
        return o, S

    return run
