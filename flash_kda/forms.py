"""Calls of few forms that come again and again, so that what a form needs is worked out once."""

from __future__ import annotations

from collections.abc import Callable
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
        key: all of such a call but the tensors' data; see :func:`run`.
        known: the backend's name and how such calls are run, a function of the call's tensors, A_log and dt_bias; once
            one of them has passed the checks.
    """

    def __init__(self, *key: Any) -> None:
        self.key = list(key)
        self.known: tuple[str, Callable[[Any, Tensor | None, Tensor | None], Any]] | None = None


form = lru_cache(maxsize=4096)(Form)
# The last call's, since most calls are like the one before: to compare takes half the time of finding it.
_last = Form()


def forget() -> None:
    """Forget all forms."""
    global _last
    form.cache_clear()
    _last = Form()


def run(
    kind: tuple[Any, ...],
    tensors: Any,
    gate: Gate,
    options: tuple[Any, ...],
    backend: str,
    check: Callable[[Any, Gate, tuple[Any, ...]], Any],
    launch: Callable[[dispatch.Backend, Any], tuple[R, Callable[[Any, Tensor | None, Tensor | None], R] | None]],
    differentiable: bool = False,
) -> R:
    """Run a call: with its checks, or as one of its form was run before.

    Args:
        kind: tells the function, and what else neither tensors nor options tell.
        check: the checked call, with a ``problem``, of the tensors, the gate and the options.
        launch: runs a checked call on a backend; its result, and the call as a function of its tensors or None.
        differentiable: whether that function of a call that wants gradients gives them; otherwise such calls are
            checked every time.
    """
    global _last
    A_log, dt_bias = getattr(gate, "A_log", None), getattr(gate, "dt_bias", None)
    found: Form | None = None
    try:
        others = (getattr(gate, "lower_bound", None), *options, backend)
        # An option that is 1 and not True is another. Types come first, so that only values of one type are compared.
        key: list[Any] = [kind, type(gate), *map(type, others), *others]
        wanted, is_taped, add = False, torch.is_grad_enabled(), key.append
        for x in (*tensors, A_log, dt_bias):
            if x is None:
                add(None)
            else:
                add(x.shape)
                # Where a tensor is contiguous its shape says all that its strides do.
                add(x.is_contiguous() or x.stride())
                add(x.dtype)
                add(x.device)
                if is_taped and x.requires_grad:
                    wanted = True
        if differentiable or not wanted:
            add(wanted)
            last = _last
            if key != last.key:
                last = form(*key)
            _last = found = last
    except (AttributeError, TypeError, RuntimeError):
        pass  # something is no tensor or no number: the checks will say what
    if found is not None and found.known is not None:
        name, runner = found.known
        dispatch.record(name)
        result: R = runner(tensors, A_log, dt_bias)
        return result
    call = check(tensors, gate, options)
    name, module = dispatch.choose(call.problem, backend)
    result, new = launch(module, call)
    if found is not None and new is not None:
        found.known = name, new
    return result
