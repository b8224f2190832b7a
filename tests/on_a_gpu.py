"""What calls on a pool must keep on a GPU: graphs replay them, and they neither wait nor compile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Call, Target, tensors_of
from compare import assert_same_bits
from decoding import first_rows
from torch import Tensor

from flash_kda import forms

# ``kda_decode``, say, and ``run`` of the same.
Function = Callable[..., Tensor]
Run = Callable[..., Tensor]


def turned(case: Any, seed: int) -> Any:
    """Other values, and lengths in another order of the sequences: as many of each, as a graph takes them."""
    lengths = case.rows.lengths
    if lengths:
        by = seed % len(lengths)
        lengths = lengths[by:] + lengths[:by]
    return replace(case, seed=seed, rows=case.rows.but(seed=seed, lengths=lengths))


def assert_replays_are_eager(
    target: Target, run: Run, function: Function, buffers: Call, others: Iterable[Call]
) -> None:
    """A captured call, replayed with the others' values in its tensors, gives the bits of their plain calls."""
    out = torch.empty_like(buffers["v"])
    run(target, buffers, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(**buffers, out=out, backend=target.backend)
    for i, call in enumerate(others):
        # The gate's parameters belong to the model: they stay. So do other weights, but they may change in place.
        call["gate"] = buffers["gate"]
        for name, x in tensors_of(call).items():
            tensors_of(buffers)[name].copy_(x)
        out.fill_(torch.nan)
        graph.replay()
        assert_same_bits(out, run(target, call), f"o of replay {i}")
        for name, x in tensors_of(buffers).items():
            assert_same_bits(x, tensors_of(call)[name], f"{name} after replay {i}")


@contextmanager
def no_wait(*, allocations: int) -> Iterator[None]:
    """Nothing in here waits for the GPU, and so many pieces of its memory are allocated."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + allocations


def compilations(monkeypatch: pytest.MonkeyPatch, kernel: Any = None) -> list[str]:
    """What Triton compiles from now on; a ``kernel`` is as if never compiled, and then no form is known either."""
    import triton

    found: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **what: found.append(what["repr"]))
    if kernel is not None:
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
        forms.forget()
    return found


def assert_outputs_alone_are_allocated(
    target: Target, run: Run, function: Function, kernel: Any, calls: Sequence[Call]
) -> None:
    """After the first call nothing waits or compiles the kernel, and memory is for outputs that are not given."""

    def compiled() -> int:
        return sum(len(caches[0]) for caches in kernel.device_caches.values())

    outs = [torch.empty_like(call["v"]) for call in calls]
    run(target, calls[0], out=outs[0])
    before = compiled()
    with no_wait(allocations=0):
        for call, out in zip([*calls, *calls], [*outs, *outs], strict=True):
            function(**call, out=out, backend=target.backend)
    with no_wait(allocations=1):
        o = function(**calls[0], backend=target.backend)
    assert o.shape == outs[0].shape
    assert compiled() == before


def assert_rows_are_rows_alone(target: Target, run: Run, build: Callable[[], Call], rows: Iterable[int]) -> None:
    """Some rows of a large call have the bits that they have alone, and so have their slots."""
    call, single = build(), build()
    o = run(target, call)
    for n in rows:
        row = first_rows(single, slice(n, n + 1))
        assert_same_bits(run(target, row), o[n : n + 1], f"row {n}")
        for name in {"pool", "conv_pool"} & call.keys():
            slots = row["indices"].flatten().long()
            assert_same_bits(single[name][slots], call[name][slots], f"{name} of row {n}")
