"""Launches without a GPU: in place of a jitted function of Triton, what it is launched with, and whether past it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Call
from compare import assert_same_bits
from compiling import H200
from torch import Tensor

from flash_kda import LowerBoundGate

STREAM = 7


class Compiled:
    """What a plan uses of a compiled kernel; ``direct`` gets its key and the arguments of every launch past Triton."""

    packed_metadata = ("packed",)

    def __init__(self, key: Any, direct: list[Any], *, scratch: int = 0) -> None:
        def run(*arguments: Any) -> None:
            direct.append((key, arguments))

        self.function = key
        self.run = mock.Mock(side_effect=run, global_scratch_size=scratch, profile_scratch_size=0)
        self.run.launch_cooperative_grid, self.run.launch_pdl = "cooperative", "pdl"
        self.run.launch.side_effect = run


class Jitted:
    """A jitted function that compiles by ``compile`` and records launches: through Triton, and past it.

    The key of a compiled kernel is all that Triton could compile for: values, options, and what tensors look like.
    """

    def __init__(self, *names: str, compile: Any = Compiled) -> None:
        self.arg_names = list(names)
        self.compile = compile
        self.by_triton: list[tuple[Any, ...]] = []
        self.keys: list[Any] = []
        self.direct: list[tuple[Any, ...]] = []

    @classmethod
    def in_place(cls, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Jitted:
        """In place of a module's kernel, with its parameters."""
        found = cls(*getattr(module, name).arg_names)
        monkeypatch.setattr(module, name, found)
        return found

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.by_triton.append((grid, arguments, options))
            seen = [(x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else x for x in arguments]
            self.keys.append((tuple(seen), tuple(options.items())))
            return self.compile(self.keys[-1], self.direct)

        return call


def launch_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches need no driver, and the tensors' device, the CPU, is the current one and has the facts of an H200."""
    pytest.importorskip("triton")
    from flash_kda.backends import triton as backend
    from flash_kda.backends.triton import decode_launch, forward, launch

    active = SimpleNamespace(get_current_stream=lambda index: STREAM)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch.triton, "__version__", "3.6.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(backend, "supports", lambda problem: None)
    for module in (decode_launch, forward):
        monkeypatch.setattr(module, "device_facts", lambda index: H200)


def values_of(arguments: Sequence[Any]) -> list[Any]:
    return [value for value in arguments if not isinstance(value, Tensor)]


def launched_directly(
    jitted: Jitted, function: Callable[..., Tensor], calls: Sequence[Call], *, allocations: int
) -> tuple[Tensor, list[int]]:
    """Calls of one form: all but the first are launched past Triton, as it launched that one.

    Args:
        allocations: all that a direct call makes.

    Returns:
        The last one's output, and the last pointers that its kernel got, which are its tensors'.
    """
    for call in calls:
        with (
            mock.patch.object(torch, "empty", wraps=torch.empty) as empty,
            mock.patch.object(torch, "empty_like", wraps=torch.empty_like) as empty_like,
        ):
            o = function(**call, backend="triton")
    assert len(jitted.by_triton) == 1
    assert len(jitted.direct) == len(calls) - 1
    assert empty.call_count + empty_like.call_count == allocations
    key, arguments = jitted.direct[-1]
    (grid, given, _), values = jitted.by_triton[0], values_of(jitted.by_triton[0][1])
    assert key == jitted.keys[0]
    assert arguments[:4] == (*grid, 1, 1, STREAM)
    assert list(arguments[-len(values) :]) == values
    return o, list(arguments[len(arguments) - len(given) : -len(values)])


def assert_no_shared_launch(
    jitted: Jitted, function: Callable[..., Tensor], build: Callable[[], Call], other: Call
) -> None:
    """Each of the two forms, called in turn, has a launch of its own with its own values."""
    for _ in range(3):
        for call in (build(), other):
            function(**call, backend="triton")
    assert len(jitted.by_triton) == 2
    assert [key for key, _ in jitted.direct] == jitted.keys * 2
    for (_, direct), (_, given, _) in zip(jitted.direct, jitted.by_triton * 2, strict=True):
        values = values_of(given)
        assert list(direct[-len(values) :]) == values


def assert_dense_gate(jitted: Jitted, function: Callable[..., Tensor], call: Call) -> None:
    """The checks admit float64 and strides; the kernel gets dense float32, in every call of the form."""
    gate = call["gate"]
    wide = LowerBoundGate(gate.A_log.double(), gate.dt_bias.t().contiguous().t())
    seen: list[tuple[Tensor, Tensor]] = []
    jitted.compile = lambda *_: None
    for _ in range(3):
        function(**call | {"gate": wide}, backend="triton")
        given = dict(zip(jitted.arg_names, jitted.by_triton[-1][1], strict=True))
        seen.append((given["p_A_log"], given["p_dt_bias"]))
    for A_log, dt_bias in seen:
        assert_same_bits(A_log, gate.A_log, "A_log")
        assert_same_bits(dt_bias, gate.dt_bias, "dt_bias")
        assert dt_bias.is_contiguous()
