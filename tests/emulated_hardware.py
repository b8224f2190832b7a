"""The hardware under emulated Gluon kernels: see ``emulated_gluon``. Shared memory, barriers, copies and products.

Asynchronous work is done as late as the kernel allows: a copy arrives when somebody waits for it, a product is made and
a copy out is written when the kernel waits for it. Partitions of a program take turns at barriers. What would be a race
on a GPU is an error:

- reading shared memory that nothing was stored in, or that a copy is on its way to;
- hardware reading what threads stored without a fence and a barrier;
- an operand of a product, or what a copy out reads, that changed before the kernel waited for it;
- storing where a copy out may still read, and arriving at a barrier while other threads may not have come so far;
- using a product too early, copies of other sizes than a barrier expects, and barriers that nobody reaches.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

# What an element of shared memory is: never stored; about to be copied to; stored by a thread; that with a fence; and
# what everybody and the hardware may read.
UNSET, COPYING, STORED, FENCED, READY = range(5)


# Registers, and matrices in global memory.


class Value(Tensor):
    """What a program has in registers."""

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Tensor:
        return self.view(dtype) if bitcast else super().to(dtype)

    # In a kernel a name gets another value, and whoever was passed the old one keeps it.
    __iadd__ = Tensor.__add__
    __isub__ = Tensor.__sub__
    __imul__ = Tensor.__mul__
    __iand__ = Tensor.__and__
    __ior__ = Tensor.__or__
    __ixor__ = Tensor.__xor__


def value(x: Any, dtype: torch.dtype | None = None) -> Value:
    """Of a number or a tensor."""
    return torch.as_tensor(x, dtype=dtype).as_subclass(Value)


@dataclass
class Descriptor:
    """A matrix whose blocks the hardware copies: what lies outside is zero, and is not written."""

    data: Tensor
    block: tuple[int, int]
    layout: None = None

    @property
    def block_type(self) -> Any:
        return SimpleNamespace(nbytes=math.prod(self.block) * self.data.element_size())

    def _inside(self, at: Sequence[Any]) -> Tensor:
        row, column = (int(x) for x in at)
        assert row >= 0
        assert column >= 0
        return self.data[row : row + self.block[0], column : column + self.block[1]]

    def load(self, at: Sequence[Any]) -> Tensor:
        x, found = self.data.new_zeros(self.block), self._inside(at)
        x[: found.shape[0], : found.shape[1]] = found
        return x

    def store(self, at: Sequence[Any], x: Tensor) -> None:
        into = self._inside(at)
        into.copy_(x[: into.shape[0], : into.shape[1]])


# Partitions of a program that take turns, and what each has under way.


class Abandoned(BaseException):
    """Another partition failed."""


@dataclass(eq=False)
class Partition:
    warps: int
    products: list[Product] = field(default_factory=list)
    copies: list[CopyOut] = field(default_factory=list)
    # What it stored in shared memory and has not shown to all yet.
    stored: list[Shared] = field(default_factory=list)
    # Copies that one thread knows to have been read, and whether all threads have done what this one has.
    read: list[CopyOut] = field(default_factory=list)
    is_together: bool = True
    is_done: bool = False
    waits_for: tuple[Barrier, int] | None = None
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def parts(self) -> None:
        """A thread did something that others may not have done yet; those of one warp go together."""
        self.is_together = self.warps == 1

    def goes_on(self) -> bool:
        return not self.is_done and (self.waits_for is None or self.waits_for[0].is_past(self.waits_for[1]))

    def finish(self) -> None:
        assert not self.products, "products that nobody waited for"
        assert not self.copies, "copies out of shared memory that nobody waited for"


class Program:
    """One program: a grid's number, barriers, and whose turn it is.

    Args:
        last_first: of the partitions that could go on, the last one does: the one that copies, as far ahead as
            barriers let it. Otherwise it goes on when nobody else can.
    """

    def __init__(self, number: int, programs: int, warps: int, last_first: bool) -> None:
        self.number, self.programs, self.warps, self.last_first = number, programs, warps, last_first
        self.current = Partition(warps)
        self.partitions: list[Partition] = []
        self.barriers: list[Barrier] = []
        self.error: BaseException | None = None
        self.finished = threading.Semaphore(0)

    def _next(self) -> Partition | None:
        order = self.partitions[::-1] if self.last_first else self.partitions
        return next((x for x in order if x.goes_on()), None)

    def pause(self, waits_for: tuple[Barrier, int] | None = None) -> None:
        """Let another partition go on, and return when it is this one's turn and it need not wait."""
        me = self.current
        me.waits_for = waits_for
        if me not in self.partitions:
            assert me.goes_on(), "the only partition waits for ever"
            return
        following = self._next()
        assert following is not None, "every partition waits for ever"
        if following is not me:
            self.current = following
            following.turn.release()
            me.turn.acquire()
            if self.error:
                raise Abandoned
        me.waits_for = None

    def _run(self, me: Partition, function: Callable[..., None], arguments: Sequence[Any]) -> None:
        me.turn.acquire()
        try:
            if not self.error:
                function(*arguments)
                me.finish()
        except Abandoned:
            pass
        except BaseException as error:
            self.error = error
        me.is_done = True
        waiting = [x for x in self.partitions if not x.is_done]
        if not waiting:
            self.finished.release()
            return
        following = self._next()
        if following is None:
            self.error = self.error or AssertionError("every partition that is left waits for ever")
            following = waiting[0]
        # After an error each is woken in turn, to give up.
        self.current = waiting[0] if self.error else following
        self.current.turn.release()

    def specialize(
        self, functions: Sequence[tuple[Callable[..., None], Sequence[Any]]], warps: Sequence[int], _: Any
    ) -> None:
        whole = self.current
        assert len(warps) == len(functions) - 1
        self.partitions = [Partition(n) for n in (self.warps, *warps)]
        threads = [
            threading.Thread(target=self._run, args=(x, *given), daemon=True)
            for x, given in zip(self.partitions, functions, strict=True)
        ]
        for thread in threads:
            thread.start()
        first = self._next()
        assert first is not None
        self.current = first
        first.turn.release()
        self.finished.acquire()
        for thread in threads:
            thread.join()
        self.current, self.partitions = whole, []
        if self.error:
            raise self.error

    def finish(self) -> None:
        self.current.finish()
        assert not any(x.copies for x in self.barriers), "copies into shared memory that nobody waited for"


_PROGRAM: Program | None = None


@contextmanager
def running(number: int, programs: int, warps: int, last_first: bool) -> Iterator[None]:
    """One program of a launch; see :class:`Program`."""
    global _PROGRAM
    _PROGRAM = Program(number, programs, warps, last_first)
    try:
        yield
        _PROGRAM.finish()
    finally:
        _PROGRAM = None


def program() -> Program:
    assert _PROGRAM is not None, "no kernel is running"
    return _PROGRAM


# Shared memory, barriers, copies and products.


def same_bits(x: Tensor, y: Tensor) -> bool:
    kinds = {2: torch.int16, 4: torch.int32}
    return torch.equal(x.contiguous().view(kinds[x.element_size()]), y.contiguous().view(kinds[y.element_size()]))


@dataclass(eq=False)
class Shared:
    """Shared memory, or a view of it; ``state`` says for each element what it is."""

    data: Tensor
    state: Tensor
    barriers: dict[int, Barrier]

    def _view(self, change: Callable[[Tensor], Tensor]) -> Shared:
        return Shared(change(self.data), change(self.state), self.barriers)

    def index(self, i: Any) -> Shared:
        assert 0 <= int(i) < len(self.data)
        return self._view(lambda x: x[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        assert 0 <= start <= start + length <= self.data.shape[dim]
        return self._view(lambda x: x.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return self._view(lambda x: x.permute(order))

    def reshape(self, shape: tuple[int, ...]) -> Shared:
        return self._view(lambda x: x.view(shape))

    def load(self, *_: Any) -> Value:
        assert bool((self.state > COPYING).all()), "read before anything was stored or copied there"
        program().current.parts()
        return value(self.data.clone())

    def store(self, x: Value) -> None:
        assert x.dtype == self.data.dtype
        assert x.shape == self.data.shape
        assert not bool((self.state == COPYING).any()), "stored where a copy is on its way to"
        me = program().current
        assert not any(self.meets(x.source) for x in (*me.copies, *me.read)), "stored where a copy may still read"
        self.data.copy_(x)
        self.state.fill_(STORED)
        me.stored.append(self)
        me.parts()

    def meets(self, other: Shared) -> bool:
        """Whether some element may be in both."""
        first, last = self.data.data_ptr(), other.data.data_ptr()
        return first < last + other.span and last < first + self.span

    @property
    def span(self) -> int:
        """Bytes from the first element to the last."""
        steps = zip(self.data.shape, self.data.stride(), strict=True)
        return (1 + sum((n - 1) * step for n, step in steps)) * self.data.element_size()

    def seen_by_hardware(self) -> Tensor:
        assert bool((self.state == READY).all()), "read by hardware without a copy, or a fence and a barrier, before"
        return self.data.clone()

    @property
    def barrier(self) -> Barrier:
        return self.barriers[self.data.storage_offset()]


def garbage(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point else -77


def allocate(dtype: torch.dtype, shape: list[int], *_: Any) -> Shared:
    return Shared(torch.full(shape, garbage(dtype), dtype=dtype), torch.full(shape, UNSET, dtype=torch.uint8), {})


@dataclass(eq=False)
class Barrier:
    """One that completes a phase when all have arrived and all bytes have."""

    count: int
    left: int
    phase: int = 0
    bytes: int = 0
    copies: list[CopyIn] = field(default_factory=list)

    def arrive(self, count: int = 1) -> None:
        assert count <= self.left, "more arrived than a barrier counts"
        self.left -= count
        self._complete()

    def _complete(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase ^ 1, self.count

    def is_past(self, phase: int) -> bool:
        """Whether the phase of this parity is over; copies arrive now, if it depends on them."""
        while self.phase == phase and self.copies:
            copy = self.copies.pop(0)
            copy.into.data.copy_(copy.source.load(copy.at))
            copy.into.state.fill_(READY)
            self.bytes -= copy.source.block_type.nbytes
            assert self.bytes >= 0, "more was copied than a barrier expects"
            self._complete()
        return self.phase != phase


@dataclass(eq=False)
class CopyIn:
    source: Descriptor
    at: Sequence[Any]
    into: Shared


@dataclass(eq=False)
class CopyOut:
    into: Descriptor
    at: Sequence[Any]
    source: Shared
    seen: Tensor

    def finish(self) -> None:
        assert same_bits(self.source.seen_by_hardware(), self.seen), "changed while a copy read it"
        self.into.store(self.at, self.seen)


@dataclass(eq=False)
class Product:
    """One that is under way; operands that are in registers cannot change."""

    operands: list[Value | Shared]
    acc: Value | Product | None
    result: Value | None = None

    def __post_init__(self) -> None:
        self.seen = [x.seen_by_hardware() if isinstance(x, Shared) else x for x in self.operands]
        a, b = self.seen
        assert a.dtype == b.dtype == torch.bfloat16

    def finish(self) -> None:
        for x, seen in zip(self.operands, self.seen, strict=True):
            if isinstance(x, Shared):
                assert same_bits(x.seen_by_hardware(), seen), "an operand changed while a product read it"
        a, b = self.seen
        self.result = dot(a, b, self.acc.result if isinstance(self.acc, Product) else self.acc)


def dot(a: Tensor, b: Tensor, acc: Tensor | None) -> Value:
    x = a.as_subclass(Tensor).float() @ b.as_subclass(Tensor).float()
    assert acc is None or acc.shape == x.shape
    return value(x if acc is None else acc + x)


def warpgroup_mma(a: Value | Shared, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
    product = Product([a, b], acc if use_acc else None)
    program().current.products.append(product)
    return product if is_async else warpgroup_mma_wait(0, (product,))


def warpgroup_mma_wait(outstanding: int, deps: Sequence[Product]) -> Any:
    products = program().current.products
    while len(products) > outstanding:
        products.pop(0).finish()
        program().current.parts()
    assert all(x.result is not None for x in deps), "used before it was waited for"
    return deps[0].result if len(deps) == 1 else tuple(x.result for x in deps)


def fence() -> None:
    for x in program().current.stored:
        x.state[x.state == STORED] = FENCED


def thread_barrier() -> None:
    me = program().current
    for x in me.stored:
        x.state[x.state == FENCED] = READY
    me.read, me.is_together = [], True
    me.stored = [x for x in me.stored if bool((x.state == STORED).any())]
    program().pause()


def init(bar: Shared, count: int) -> None:
    bar.barriers[bar.data.storage_offset()] = Barrier(count, count)
    program().barriers.append(bar.barrier)


def wait(bar: Shared, phase: int) -> None:
    program().pause((bar.barrier, int(phase)))


def expect(bar: Shared, nbytes: int) -> None:
    assert program().current.is_together, "one thread arrives, and others may not be so far"
    bar.barrier.bytes += nbytes
    bar.barrier.arrive()


def arrive(bar: Shared, count: int = 1) -> None:
    assert program().current.is_together, "one thread arrives, and others may not be so far"
    bar.barrier.arrive(count)
    program().pause()


def copy_in(source: Descriptor, at: Sequence[Any], bar: Shared, into: Shared) -> None:
    assert tuple(into.data.shape) == source.block
    assert into.data.dtype == source.data.dtype
    assert not bool((into.state == COPYING).any()), "two copies to one place"
    into.data.fill_(garbage(into.data.dtype))
    into.state.fill_(COPYING)
    bar.barrier.copies.append(CopyIn(source, at, into))
    program().pause()


def copy_out(into: Descriptor, at: Sequence[Any], source: Shared) -> None:
    assert tuple(source.data.shape) == into.block
    assert source.data.dtype == into.data.dtype
    program().current.copies.append(CopyOut(into, at, source, source.seen_by_hardware()))


def store_wait(pendings: int) -> None:
    me = program().current
    while len(me.copies) > pendings:
        me.copies[0].finish()
        copy = me.copies.pop(0)
        if me.warps > 1:
            me.read.append(copy)
