"""Gluon kernels in Python: their own source, with what Gluon has made of torch's tensors.

Gluon has no interpreter. Here registers are tensors and layouts are nothing; ``emulated_hardware`` has what the threads
of a program share.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import emulated_hardware as hardware
import pytest
import torch
from emulated_hardware import Value, value
from torch import Tensor

if TYPE_CHECKING:
    from flash_kda.backends.triton.launch import Launch, Matrix

# The smallest normal float32.
TINY = 2.0**-126


# Global memory.


@dataclass
class Pointer:
    """An address, or many of them: elements of the storage behind ``data``, from its first one on."""

    data: Tensor | None
    at: Any = 0

    @property
    def dtype(self) -> Any:
        assert self.data is not None
        return SimpleNamespace(element_ty=self.data.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.data, self.at + other)

    @property
    def flat(self) -> Tensor:
        assert self.data is not None, "a pointer to a tensor that is not there"
        x = self.data.detach()
        elements = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return x.as_strided((elements,), (1,))


def _load(p: Pointer, mask: Any = True, other: Any = 0) -> Value:
    at, mask = torch.broadcast_tensors(torch.as_tensor(p.at), torch.as_tensor(mask))
    flat = p.flat
    assert not bool((mask & ((at < 0) | (at >= len(flat)))).any()), "a load outside of its tensor"
    if not len(flat):
        return value(torch.full(at.shape, other, dtype=flat.dtype))
    found = flat[torch.where(mask, at, 0).long()]
    return value(torch.where(mask, found, torch.full_like(found, other)))


def _store(p: Pointer, x: Any, mask: Any = True) -> None:
    flat = p.flat
    at, x, mask = torch.broadcast_tensors(torch.as_tensor(p.at), torch.as_tensor(x), torch.as_tensor(mask))
    at, x = at[mask].long(), x[mask]
    assert not bool(((at < 0) | (at >= len(flat))).any()), "a store outside of its tensor"
    flat[at] = x.as_subclass(Tensor).to(flat.dtype)


# The language.


def _reduce(xs: Any, dim: int, combine: Callable[..., Any]) -> Any:
    """In a tree, of one tensor or of several at once."""
    several = isinstance(xs, tuple)
    xs = tuple(xs) if several else (xs,)
    while xs[0].shape[dim] > 1:
        halves = [x.chunk(2, dim) for x in xs]
        assert all(a.shape == b.shape for a, b in halves)
        xs = combine(*(a for a, _ in halves), *(b for _, b in halves))
        xs = xs if several else (xs,)
    xs = tuple(x.squeeze(dim) for x in xs)
    return xs if several else xs[0]


def _least_or_most(largest: bool) -> Callable[[Value, int], Value]:
    """A NaN is no candidate, as on a GPU."""

    def found(x: Value, dim: int) -> Value:
        if x.dtype.is_floating_point:
            x = torch.where(x.isnan(), -math.inf if largest else math.inf, x)
        return x.amax(dim) if largest else x.amin(dim)

    return found


def _where(mask: Any, x: Any, y: Any) -> Value:
    if isinstance(x, int) and isinstance(y, int):
        x = value(x, torch.int32)
    return value(torch.where(torch.as_tensor(mask), x, y))


def _exp2(x: Value) -> Value:
    y = torch.exp2(x)
    return torch.where(y < TINY, 0.0, y)


def _static_range(*bounds: int) -> range:
    return range(*(int(x) for x in bounds))


def _layout(*_: Any) -> None:
    return None


LANGUAGE = SimpleNamespace(
    **{x: getattr(torch, x) for x in ("int8", "int32", "int64", "float16", "float32", "bfloat16")},
    **{x: getattr(torch, x) for x in ("abs", "exp", "log2", "rsqrt", "permute", "reshape", "zeros_like")},
    **dict.fromkeys(
        ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout", "SwizzledSharedLayout"), _layout
    ),
    NVMMASharedLayout=SimpleNamespace(get_default_for=_layout),
    constexpr=Any,
    int1=torch.bool,
    # Torch has no arithmetic of them, and these bits are in 64.
    uint32=torch.int64,
    exp2=_exp2,
    num_warps=lambda: 4,
    program_id=lambda _: value(hardware.program().number, torch.int32),
    num_programs=lambda _: hardware.program().programs,
    arange=lambda first, end, *_: value(torch.arange(first, end, dtype=torch.int32)),
    zeros=lambda shape, dtype, *_: value(torch.zeros(list(shape), dtype=dtype)),
    expand_dims=lambda x, dim: x.unsqueeze(dim),
    where=_where,
    minimum=lambda x, y: value(torch.fmin(torch.as_tensor(x), torch.as_tensor(y))),
    maximum=lambda x, y: value(torch.fmax(torch.as_tensor(x), torch.as_tensor(y))),
    min=_least_or_most(largest=False),
    max=_least_or_most(largest=True),
    sum=lambda x, dim: x.sum(dim, dtype=x.dtype),
    cumsum=lambda x, dim: x.cumsum(dim, dtype=x.dtype),
    reduce=_reduce,
    join=lambda x, y: torch.stack((x, y), -1),
    split=lambda x: x.unbind(-1),
    convert_layout=lambda x, *_, **__: x,
    # Conversions are all that the kernels have it for.
    inline_asm_elementwise=lambda asm, constraints, x, dtype, **_: x[0].to(dtype),
    to_tensor=lambda x: value(x, torch.int32),
    dot=lambda a, b, acc=None, **_: hardware.dot(a, b, acc),
    static_range=_static_range,
    range=lambda *bounds, **_: _static_range(*bounds),
    load=_load,
    store=_store,
    allocate_shared_memory=hardware.allocate,
    thread_barrier=hardware.thread_barrier,
    warp_specialize=lambda *given: hardware.program().specialize(*given),
)
HARDWARE = {
    "gl": LANGUAGE,
    "tl": LANGUAGE,
    "mbarrier": SimpleNamespace(
        init=hardware.init, wait=hardware.wait, expect=hardware.expect, arrive=hardware.arrive, MBarrierLayout=_layout
    ),
    "tma": SimpleNamespace(
        async_copy_global_to_shared=hardware.copy_in,
        async_copy_shared_to_global=hardware.copy_out,
        store_wait=hardware.store_wait,
    ),
    "fence_async_shared": hardware.fence,
    "warpgroup_mma": hardware.warpgroup_mma,
    "warpgroup_mma_wait": hardware.warpgroup_mma_wait,
    "mma_v2": hardware.dot,
}


def emulate(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Make Python of a module's device functions and constants, and of those that it has from other modules."""
    from triton.language.core import constexpr
    from triton.runtime.jit import JITFunction

    functions = [x for x in vars(module).values() if isinstance(x, JITFunction)]
    for name, x in list(vars(module).items()):
        if isinstance(x, JITFunction):
            monkeypatch.setattr(module, name, x.fn)
        elif isinstance(x, constexpr):
            monkeypatch.setattr(module, name, x.value)
        elif name in HARDWARE:
            monkeypatch.setattr(module, name, HARDWARE[name])
    if hasattr(module, "INTERPRETED"):
        # What has no inline assembly.
        monkeypatch.setattr(module, "INTERPRETED", True)
    for function in functions:
        emulate(monkeypatch, sys.modules[function.fn.__module__])


def _descriptor(matrix: Matrix, tensor: Tensor | None) -> hardware.Descriptor:
    assert tensor is not None
    assert tensor.data_ptr() % 16 == 0
    shape, strides = (matrix.rows, matrix.columns), (matrix.stride, 1)
    return hardware.Descriptor(tensor.detach().as_strided(shape, strides), matrix.block)


def run(launch: Launch, tensors: Mapping[str, Tensor | None], *, last_first: bool = True) -> None:
    """A launch, program by program, on tensors by their names; see ``hardware.Program``."""
    given: dict[str, Any] = {}
    for parameter in launch.kernel.params:
        name = parameter.name
        if name.startswith("d_"):
            matrix = launch.matrices[name[2:]]
            given[name] = _descriptor(matrix, tensors[matrix.tensor])
        elif name.startswith("p_"):
            given[name] = Pointer(tensors[name[2:]])
        else:
            x = launch.values[name]
            is_constant = parameter.is_constexpr or x is None
            given[name] = x if is_constant else value(x, torch.float32 if isinstance(x, float) else torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        kernel = launch.kernel.fn
        emulate(patch, sys.modules[kernel.__module__])
        for number in range(launch.programs):
            with hardware.running(number, launch.programs, launch.options["num_warps"], last_first):
                kernel(**given)
