"""Calls of few forms that come again and again, so that what a form needs is worked out once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from flash_kda import dispatch
from flash_kda.types import Gate

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # of a torch without it: keys tell all the same
    TensorGuards = None  # type: ignore[assignment,misc]

R = TypeVar("R")


class Form:
    """Calls that differ in nothing that the checks look at but the values of tensors, and all want gradients or none.

    Attributes:
        key: all of such a call but the tensors' data; see :func:`run`.
        known: the backend's name and how such calls are run, a function of the call's tensors, A_log and dt_bias; once
            one of them has passed the checks.
        recent: one of them, by which others are recognised.
    """

    def __init__(self, *key: Any) -> None:
        self.key = list(key)
        self.known: tuple[str, Callable[[Any, Tensor | None, Tensor | None], Any]] | None = None
        self.recent: Recent | None = None


class Recent:
    """A call of a known form, by which the next of that form is recognised without a key.

    torch compares tensors with what it noted of others in a third of the time that their part of a key takes. It looks
    at more than a key holds, such as inference mode: whoever is not recognised may be of the form all the same.
    """

    def __init__(
        self, found: Form, types: list[type], others: tuple[Any, ...], given: tuple[Tensor | None, ...]
    ) -> None:
        present = [i for i, x in enumerate(given) if x is not None]
        absent = [i for i, x in enumerate(given) if x is None]
        self.form, self.types, self.others = found, types, others
        self.present = itemgetter(*present)
        self.absent = itemgetter(*absent) if absent else _nothing
        self.none = self.absent((None,) * len(given))
        noted = TensorGuards(*self.present(given), dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self.looks_alike: Callable[..., bool] = noted.check


def _nothing(given: tuple[Any, ...]) -> None:
    """In place of the entries that are None, where none is."""


def _noted(found: Form, *of_call: Any) -> Recent | None:
    """A recent call, or None where torch has no such comparison or not of such tensors."""
    if TensorGuards is None:
        return None
    try:
        return Recent(found, *of_call)
    except (TypeError, RuntimeError):
        return None


form = lru_cache(maxsize=4096)(Form)
# The last call's, since most calls are like the one before: to compare takes half the time of finding it.
_last = Form()
_recent: Recent | None = None


def forget() -> None:
    """Forget all forms."""
    global _last, _recent
    form.cache_clear()
    _last, _recent = Form(), None


def _by_key(
    types: list[type], others: tuple[Any, ...], given: tuple[Tensor | None, ...], differentiable: bool
) -> Form | None:
    """A call's form, or None where it wants gradients and such calls are checked every time; see :func:`run`.

    Args:
        others: what is no tensor, and last whether gradients are recorded; types: of these.
    """
    global _last
    *rest, is_taped = others
    key: list[Any] = [*types, *rest]
    wanted, add = False, key.append
    for x in given:
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
    if wanted and not differentiable:
        return None
    add(wanted)
    last = _last
    if key != last.key:
        _last = last = form(*key)
    return last


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
    global _recent
    A_log, dt_bias = getattr(gate, "A_log", None), getattr(gate, "dt_bias", None)
    given = (*tensors, A_log, dt_bias)
    found: Form | None = None
    recent = _recent
    try:
        # An option that is 1 and not True is another. Types come first, so that only values of one type are compared.
        others = (kind, type(gate), getattr(gate, "lower_bound", None), *options, backend, torch.is_grad_enabled())
        types = [*map(type, others)]
        if (
            recent is not None
            and types == recent.types
            and others == recent.others
            and recent.absent(given) == recent.none
            and recent.looks_alike(*recent.present(given))
        ):
            found = recent.form
        else:
            recent, found = None, _by_key(types, others, given, differentiable)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        pass  # something is no tensor or no number: the checks will say what
    if found is not None and found.known is not None:
        if recent is None:
            # Noted anew if it is of this form and did not recognise it.
            if found.recent is None or found.recent is _recent:
                found.recent = _noted(found, types, others, given)
            _recent = found.recent
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
