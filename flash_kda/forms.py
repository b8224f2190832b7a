"""Calls of few forms that come again and again, so that what a form needs is worked out once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from flash_kda import dispatch
from flash_kda.types import Gate

R = TypeVar("R")


class Form:
    """Calls that differ in nothing that the checks look at but the values of tensors, and all want gradients or none.

    Attributes:
        known: the backend's name and how such calls are run, a function of the call's tensors, A_log and dt_bias; once
            one of them has passed the checks.
    """

    known: tuple[str, Callable[[Any, Tensor | None, Tensor | None], Any]] | None = None


# Typed: an option that is 1 and not True is another.
@lru_cache(maxsize=4096, typed=True)
def form(*_: Any) -> Form:
    """The form of calls with this function, tensors (all but their data), gate, options and backend."""
    return Form()


def run(
    kind: Sequence[Any],
    tensors: Any,
    gate: Gate,
    options: tuple[Any, ...],
    backend: str,
    check: Callable[[], Any],
    launch: Callable[[dispatch.Backend, Any], tuple[R, Callable[[Any, Tensor | None, Tensor | None], R] | None]],
    differentiable: bool = False,
) -> R:
    """Run a call: with its checks, or as one of its form was run before.

    Args:
        kind: tells the function, and what else neither tensors nor options tell.
        check: the checked call, with a ``problem``.
        launch: runs a checked call on a backend; its result, and the call as a function of its tensors or None.
        differentiable: whether that function of a call that wants gradients gives them; otherwise such calls are
            checked every time.
    """
    A_log, dt_bias = getattr(gate, "A_log", None), getattr(gate, "dt_bias", None)
    found: Form | None = None
    given = (*tensors, A_log, dt_bias)
    try:
        wanted = torch.is_grad_enabled() and True in [x is not None and x.requires_grad for x in given]
        if differentiable or not wanted:
            # Where a tensor is contiguous its shape says all that its strides do.
            found = form(
                *(*kind, wanted),
                *[x if x is None else (x.shape, x.is_contiguous() or x.stride(), x.dtype, x.device) for x in given],
                *(type(gate), getattr(gate, "lower_bound", None), *options, backend),
            )
    except (AttributeError, TypeError):
        pass  # something is no tensor or no number: the checks will say what
    if found is not None and found.known is not None:
        name, runner = found.known
        dispatch.record(name)
        result: R = runner(tensors, A_log, dt_bias)
        return result
    call = check()
    name, module = dispatch.choose(call.problem, backend)
    result, new = launch(module, call)
    if found is not None and new is not None:
        found.known = name, new
    return result
