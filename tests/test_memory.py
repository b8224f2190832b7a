"""Memory of the CPU backend: linear in T, no tensor of [C, C, K], one state a chunk (not a token) kept for backward."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from cases import Call, Case, Target, leaves, run
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flash_kda.backends.cpu import plan

CPU = Target("cpu")
C = plan.CHUNK


class Watch(TorchDispatchMode):
    """The largest storage that an operation made (in bytes), and the most bytes alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.alive = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and _key(x) not in given | self._seen:
                self._follow(x.untyped_storage())
        return out

    def _follow(self, storage: Any) -> None:
        size, key = storage.nbytes(), storage._cdata
        self._seen.add(key)
        self.largest = max(self.largest, size)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._gone, size, key)

    def _gone(self, size: int, key: int) -> None:
        self.alive -= size
        self._seen.discard(key)


def _key(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def measure(call: Call, backward: bool) -> Watch:
    taped, found = leaves(call)
    with Watch() as watch:
        if backward:
            o, state = run(CPU, taped)
            assert state is not None
            torch.autograd.grad([o, state], list(found.values()), [torch.ones_like(o), torch.ones_like(state)])
        else:
            run(CPU, call)
    return watch


def test_the_watch_sees_what_it_should() -> None:
    with Watch() as watch:
        x = torch.zeros(1000)
        y = x.view(10, 100) + 1
        del y
        (x * 2).sum()
    assert watch.largest == 4000
    assert 8000 <= watch.peak <= 8100


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("H", "K", "V"), [(2, 16, 16), (1, 64, 32), (1, 128, 128)], ids=str)
def test_no_tensor_grows_with_the_square_of_a_chunk(
    H: int, K: int, V: int, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one chunk a group, nothing is larger than an input, a chunk's rows, its [C, C] and one state."""
    monkeypatch.setattr(plan, "GROUP_ELEMENTS", 1)
    T = 4 * C
    watch = measure(Case(T=T, H=H, K=K, V=V).build(), backward)
    bound = 4 * H * max(T * max(K, V), C * C, K * V)
    assert watch.largest <= bound
    assert bound < 4 * H * C * C * K


@pytest.mark.parametrize("lengths", [None, (1,) * 64 + (64,) * 15, (1000, 24)], ids=["whole", "many", "two"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_peak_is_linear_in_the_tokens(
    backward: bool, lengths: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the tokens, at most about twice the memory; and in all a few times the inputs."""
    monkeypatch.setattr(plan, "GROUP_ELEMENTS", 1 << 14)
    case = Case(T=1024, H=1, K=32, V=32, lengths=lengths, initial=False)
    twice = case.but(T=2048, lengths=lengths and lengths + lengths)
    once, double = measure(case.build(), backward), measure(twice.build(), backward)
    assert double.peak <= 2.2 * once.peak
    if lengths is None:
        inputs = 4 * (1024 * (4 * 32 + 1))
        working = 4 * 48 * (1 << 14)
        assert once.peak <= 3 * inputs + working, f"{once.peak} bytes beside inputs of {inputs}"


@pytest.mark.parametrize("group", [1, plan.GROUP_ELEMENTS])
def test_backward_keeps_one_state_a_chunk(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved are the inputs, uncopied, and at most the state before each chunk: none per token, no matrix of a chunk."""
    monkeypatch.setattr(plan, "GROUP_ELEMENTS", group)
    T, H, K, V = 10 * C, 2, 32, 16
    taped, found = leaves(Case(T=T, H=H, K=K, V=V).build())
    given = {x.untyped_storage().data_ptr() for x in found.values()}
    saved: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in given:
            saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o, _ = run(CPU, taped)
    assert o.grad_fn is not None
    assert 0 < sum(saved) <= T // C * H * K * V
