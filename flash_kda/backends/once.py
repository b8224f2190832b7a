"""Gradients that can be taken once: differentiating them again is an error, not silently a constant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _NoSecondDerivative(torch.autograd.Function):
    """Passes a first derivative on.

    Torch's ``once_differentiable`` says nothing where saved tensors want gradients and the gradient that comes in not.
    """

    @staticmethod
    def forward(ctx: Any, backend: str, d: Tensor, *sources: Tensor) -> Tensor:
        ctx.backend = backend
        return d.view_as(d)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise NotImplementedError(
            f"backend: the {ctx.backend} backend has no second derivatives; backend='reference' can be differentiated "
            "twice"
        )


def first_derivatives(
    backend: str, grads: Sequence[Tensor | None], sources: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """What the backward of a function returns, so that a second derivative fails with the name of the backend.

    Args:
        grads: the first derivatives. sources: the tensors that these depend on.
    """
    if not torch.is_grad_enabled():
        return tuple(grads)
    given = [x for x in sources if x is not None]
    return tuple(None if d is None else _NoSecondDerivative.apply(backend, d, *given) for d in grads)
