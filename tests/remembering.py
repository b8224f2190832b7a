"""A backend that is seen to know calls again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Call
from torch import Tensor

from flash_kda import Problem, dispatch


class Remembering:
    """On the CPU; it counts what it is asked, by ``entry`` or the methods of a subclass: new calls, and direct ones."""

    def __init__(self, entry: str | None = None) -> None:
        self.checked: list[Any] = []
        self.direct: list[tuple[Any, ...]] = []
        if entry is not None:
            setattr(self, entry, self._run)

    @classmethod
    def in_place(cls, monkeypatch: pytest.MonkeyPatch, entry: str | None = None) -> Remembering:
        """In place of every backend."""
        backend = cls(entry)
        monkeypatch.setattr(dispatch, "load", lambda name: backend)
        return backend

    def supports(self, problem: Problem) -> str | None:
        return None

    def _run(self, call: Any) -> tuple[Tensor, Any]:
        self.checked.append(call)
        return torch.zeros(1), lambda *arguments: self.direct.append(arguments) or torch.ones(1)


def assert_gradients_are_seen(
    remembering: Remembering, function: Callable[..., Any], build: Callable[[], Call], wanting: Call
) -> None:
    """Of a function without gradients: a call that wants one is checked every time, others of its form are not."""
    for _ in range(2):
        function(**build(), backend="cpu")
    assert len(remembering.checked) == len(remembering.direct) == 1
    for checked in (2, 3):
        function(**wanting, backend="cpu")
        assert len(remembering.checked) == checked
        assert remembering.checked[-1].problem.grad
    with torch.no_grad():
        function(**wanting, backend="cpu")
    assert len(remembering.direct) == 2
