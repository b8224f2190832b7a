"""Which backend runs a problem, and why each other one does not."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, cast

from torch import Tensor

from flash_kda.types import (
    DecodeInputs,
    Decoder,
    Inputs,
    Prefiller,
    PrefillInputs,
    Problem,
    Runner,
    StepInputs,
    Stepper,
)


class Backend(Protocol):
    """What a module under ``flash_kda.backends`` offers."""

    def supports(self, problem: Problem) -> str | None:
        """None if the backend can run ``problem``, otherwise the reason why not."""

    def run(
        self, inputs: Inputs, out: Tensor | None = None, final_state: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Output ``[B, T, HV, V]`` and final state (None unless asked for), written to ``out`` and ``final_state``.

        Both may be strided; ``final_state`` may be the initial state itself. None means a new tensor.
        """

    def runner(self, inputs: Inputs) -> Runner | None:
        """``run`` as a function of a call's tensors, for later calls of this one's form.

        None if that spares no host work, or if values must be checked in every call.
        """

    def kept_bytes(self, problem: Problem) -> int:
        """What the forward of such a call with ``recompute=False`` keeps for its backward. Sizes may be symbols."""

    def run_keeping(self, inputs: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Output, final state and what is kept, ``[kept_bytes]`` uint8, off the tape.

        None is kept with ``recompute``, and where memory is aligned in a way that other kernels are for.
        """

    def gradients(
        self, inputs: Inputs, do: Tensor, dS: Tensor | None, kept: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, g, beta, A_log, dt_bias ``[HV, K]`` and initial_state, off the tape.

        From those of the output and of the final state (None for zero), and from what ``run_keeping`` kept; None for a
        tensor that is absent.
        """

    def run_decode(self, call: DecodeInputs) -> tuple[Tensor, Decoder | None]:
        """Output ``[B, T, HV, V]`` of a decode call, whose pool is updated; ``problem.op`` was ``"decode"``.

        And the call as a function of its tensors, for later ones of its form, if that spares host work.
        """

    def run_prefill(self, call: PrefillInputs) -> tuple[Tensor, Prefiller | None]:
        """As ``run_decode``, of a prefill call; ``problem.op`` was ``"prefill"``."""

    def run_step(self, call: StepInputs) -> tuple[Tensor, Stepper | None]:
        """As ``run_decode``, of a decode step, whose two pools are updated; ``problem.op`` was ``"step"``."""


# In the order of preference. The reference is exact and slow: it runs only when asked for by name.
_MODULES = {
    "hopper": "flash_kda.backends.hopper",
    "triton": "flash_kda.backends.triton",
    "cpu": "flash_kda.backends.cpu",
    "reference": "flash_kda.backends.reference",
}
BACKENDS = tuple(_MODULES)
_ON_REQUEST = frozenset({"reference"})

_record: ContextVar[list[str] | None] = ContextVar("flash_kda_backends_that_ran", default=None)


@dataclass(frozen=True)
class Explanation:
    """The answer of :func:`flash_kda.explain`: the backend that would run and the reasons against the others."""

    problem: Problem
    backend: str | None
    reasons: dict[str, str]

    def __str__(self) -> str:
        head = f"{self.backend} would run" if self.backend else "no backend can run"
        return "\n".join([f"{head} {self.problem}", *(f"  not {name}: {why}" for name, why in self.reasons.items())])


def load(name: str) -> Backend:
    """The backend called ``name``; its module is imported on first use."""
    return cast(Backend, importlib.import_module(_MODULES[name]))


def why_not(name: str, problem: Problem) -> str | None:
    """The reason why backend ``name`` cannot run ``problem``, or None. A missing optional package is a reason."""
    try:
        return load(name).supports(problem)
    except ImportError as error:
        return f"cannot be imported ({error})"


def explain(problem: Problem, backend: str = "auto") -> Explanation:
    """Say which backend would run ``problem``, and why each other one would not.

    Args:
        problem: shapes, dtypes and options; see :class:`flash_kda.Problem`.
        backend: as for :func:`flash_kda.kda`.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected 'auto' or one of {', '.join(map(repr, BACKENDS))}")
    chosen: str | None = None
    reasons: dict[str, str] = {}
    for name in BACKENDS:
        if backend not in ("auto", name):
            reasons[name] = f"backend={backend!r} was asked for"
            continue
        is_left_out = backend == "auto" and name in _ON_REQUEST
        why = f"runs only when asked for with backend={name!r}" if is_left_out else why_not(name, problem)
        if why is None and chosen is None:
            chosen = name
        else:
            reasons[name] = why or f"{chosen} comes first"
    return Explanation(problem, chosen, reasons)


def run(
    inputs: Inputs, backend: str, out: Tensor | None = None, final_state: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Run a checked call on the backend that :func:`explain` names, into ``out`` and ``final_state`` where given.

    Raises:
        NotImplementedError: no backend fits; the message lists every reason.
    """
    return choose(inputs.problem, backend)[1].run(inputs, out, final_state)


def kept_bytes(problem: Problem, backend: str) -> int:
    """What is kept of a call with ``recompute=False``; 0 if no backend fits. Sizes may be symbols, so nothing is
    remembered here.
    """
    name = explain(problem, backend).backend
    return 0 if name is None else load(name).kept_bytes(problem)


def run_keeping(inputs: Inputs, backend: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As :func:`run`, off the tape, and what is kept for :func:`gradients`."""
    return choose(inputs.problem, backend)[1].run_keeping(inputs)


def gradients(
    inputs: Inputs, backend: str, do: Tensor, dS: Tensor | None, kept: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Gradients of a checked call by the backend that :func:`explain` names for its problem with gradients.

    Raises:
        NotImplementedError: no backend fits; the message lists every reason.
    """
    return choose(inputs.signature.problem_with_gradient, backend)[1].gradients(inputs, do, dS, kept)


def choose(problem: Problem, backend: str) -> tuple[str, Backend]:
    """The backend that :func:`explain` names for a problem, recorded as running.

    Raises:
        NotImplementedError: no backend fits; the message lists every reason.
    """
    chosen = _choose(problem, backend)
    if chosen is None:
        raise NotImplementedError(str(explain(problem, backend)))
    record(chosen[0])
    return chosen


def record(name: str) -> None:
    """Tell :func:`record_backends` that a backend runs."""
    ran = _record.get()
    if ran is not None:
        ran.append(name)


@lru_cache(maxsize=4096)
def _choose(problem: Problem, backend: str) -> tuple[str, Backend] | None:
    """What :func:`explain` chooses, remembered: serving repeats few problems, and asking every backend takes time."""
    name = explain(problem, backend).backend
    return None if name is None else (name, load(name))


@contextmanager
def record_backends() -> Iterator[list[str]]:
    """Collect the names of the backends that run inside the block, in order.

    >>> with flash_kda.record_backends() as ran:
    ...     flash_kda.kda(...)
    >>> ran
    ['cpu']
    """
    ran: list[str] = []
    token = _record.set(ran)
    try:
        yield ran
    finally:
        _record.reset(token)
