"""Launching kernels with little work on the host.

Triton's own launch finds the compiled kernel from every argument anew, which costs more than some of our kernels run.
Calls that differ in nothing but addresses share a :class:`Plan`. It holds the kernels that Triton chose at the first of
them and every argument but the pointers: a later call collects its pointers and launches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass, field
from functools import cache, lru_cache, reduce
from operator import itemgetter, or_
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
from torch import Tensor
from triton.runtime import driver

# Pieces of one allocation, by name: elements and dtype.
Scratch: TypeAlias = Mapping[str, tuple[int, torch.dtype]]
# Of every piece, in bytes.
ALIGNMENT = 128


@dataclass(frozen=True)
class Matrix:
    """A tensor as a matrix whose blocks the hardware copies.

    Attributes:
        tensor: its name. rows, columns: of the matrix; columns lie side by side.
        stride: between rows, in elements. block: rows and columns of one copy.
    """

    tensor: str
    rows: int
    columns: int
    stride: int
    block: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch, but for its tensors.

    Attributes:
        kernel: a jitted function whose parameters are matrices, called ``d_`` and a name, then tensors, called ``p_``
            and a name, and then values.
        programs: of a grid of one dimension.
        values: at least those that the kernel takes, by name.
        options: Triton's own, such as ``num_warps``.
        matrices: those that the kernel takes, by name; the kernel is one of Gluon's.
    """

    kernel: Any
    programs: int
    values: Mapping[str, Any]
    options: Mapping[str, Any]
    matrices: Mapping[str, Matrix] = field(default_factory=dict)

    @property
    def tensors(self) -> list[str]:
        """Names of the tensors, without ``p_``, in the order of the kernel's parameters."""
        return _names(self.kernel)[1]

    @property
    def arguments(self) -> list[Any]:
        """What follows the tensors."""
        return [self.values[name] for name in _names(self.kernel)[2]]

    @property
    def operands(self) -> list[Matrix]:
        """The matrices in the order of the kernel's parameters."""
        return [self.matrices[name] for name in _names(self.kernel)[0]]


@cache
def _names(kernel: Any) -> tuple[list[str], list[str], list[str]]:
    """Names of a kernel's matrices and tensors, without ``d_`` and ``p_``, and of its other parameters."""
    names = kernel.arg_names
    matrices = [name for name in names if name.startswith("d_")]
    tensors = [name for name in names if name.startswith("p_")]
    return [x[2:] for x in matrices], [x[2:] for x in tensors], names[len(matrices) + len(tensors) :]


def _descriptor(matrix: Matrix, tensor: Tensor | None) -> Any:
    """Gluon's descriptor of a matrix."""
    if tensor is None:
        raise ValueError(f"{matrix.tensor}: got no tensor, expected one with {matrix.rows} rows")
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    dtypes = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32, torch.int32: gl.int32}
    layout = gl.NVMMASharedLayout.get_default_for(list(matrix.block), dtypes[tensor.dtype])
    shape, strides = [matrix.rows, matrix.columns], [matrix.stride, 1]
    return TensorDescriptor(tensor, shape, strides, list(matrix.block), layout)


class _Step(NamedTuple):
    """A launch for any addresses: ``run(programs, 1, 1, stream, *fixed, *matrices, *pick(pointers), *arguments)``.

    ``matrices`` are ``encode(*sources(pointers))``, and none where there is no ``encode``.
    """

    run: Callable[..., object]
    programs: int
    fixed: tuple[Any, ...]
    sources: Callable[[Sequence[int]], tuple[int, ...]]
    encode: Callable[..., Sequence[Any]] | None
    pick: Callable[[Sequence[int]], tuple[int, ...]]
    arguments: tuple[Any, ...]


# Descriptors remembered per matrix, and sets of them per launch: memory of the same few addresses comes back from
# torch's allocator.
_MOST_DESCRIPTORS = 64


def _encoder(matrix: Matrix, metadata: Mapping[str, Any]) -> Callable[[int], Sequence[Any]]:
    """What the launcher of Triton 3.6 takes of a matrix, as a function of its address."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    shape, strides = [matrix.rows, matrix.columns], [matrix.stride, 1]
    kind = (metadata["swizzle"], metadata["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[metadata["elem_type"]])
    fill = driver.active.utils.fill_tma_descriptor

    @lru_cache(maxsize=_MOST_DESCRIPTORS)
    def encode(pointer: int) -> Sequence[Any]:
        return (fill(pointer, *kind, metadata["block_size"], shape, strides, 0), *shape, *strides)

    return encode


def _joint_encoder(encoders: Sequence[Callable[[int], Sequence[Any]]]) -> Callable[..., Sequence[Any]]:
    """What the launcher takes of all matrices of a launch, as a function of their addresses."""

    @lru_cache(maxsize=_MOST_DESCRIPTORS)
    def encode(*pointers: int) -> Sequence[Any]:
        return tuple([x for one, pointer in zip(encoders, pointers, strict=True) for x in one(pointer)])

    return encode


def _pick(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """The entries at some positions."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda entries: tuple([entries[i] for i in positions])


def _is_known() -> bool:
    """Whether this is the Triton whose launcher is known from inside."""
    return str(triton.__version__).startswith("3.6.")


def _runner(compiled: Any, has_matrices: bool) -> tuple[Callable[..., object], tuple[Any, ...]] | None:
    """``run`` and ``fixed`` of a compiled kernel's step; None from the interpreter and from an unknown Triton."""
    try:
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    except AttributeError:
        return None
    no_hooks = (None, None, None)
    if _is_known() and not run.global_scratch_size and not run.profile_scratch_size:
        # All that is left of the launcher's Python part for a kernel that asks for no memory of Triton's own.
        settings = (run.launch_cooperative_grid, run.launch_pdl)
        launch = run.launch
        if has_matrices:
            # Its wrapper would make every descriptor anew.
            launch = inspect.getclosurevars(launch).nonlocals["launcher"]
        return launch, (function, *settings, None, None, metadata, *no_hooks)
    return run, (function, metadata, *no_hooks)


def _hooked() -> bool:
    """Whether anybody, such as a profiler, wants to be told of launches."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _compile_together(calls: Sequence[tuple[Launch, Sequence[Any]]]) -> None:
    """Have Triton compile the kernels of these launches, with their arguments, at the same time.

    What does not compile is left to its launch, which says why; and so is all of it to those of another Triton.
    """
    if len(calls) < 2 or not _is_known():
        return
    # In place of these the interpreter has functions that are never compiled.
    if not all(isinstance(launch.kernel, triton.JITFunction) for launch, _ in calls):
        return

    def compile_all() -> None:
        with ThreadPoolExecutor(len(calls)) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for launch, arguments in calls:
                launch.kernel.warmup(*arguments, grid=(launch.programs,), **launch.options)

    # In a context of its own, as the caller may be within such a mode.
    Context().run(compile_all)


def on_device(device: torch.device, launch: Callable[[Sequence[Tensor | None]], None]) -> Callable[..., None]:
    """A plan, or what stands for one, whichever device is the current one."""
    if torch.cuda.device_count() == 1:
        # It is: asking for it in every call takes time.
        return launch
    index = device.index

    def launch_there(tensors: Sequence[Tensor | None]) -> None:
        if torch.cuda.current_device() == index:
            launch(tensors)
        else:
            with torch.cuda.device(device):
                launch(tensors)

    return launch_there


class Plan:
    """The launches of all calls that differ in addresses alone, and the scratch memory that the launches share.

    A parameter that a kernel does not read still needs a pointer: the call's first tensor stands in for those that are
    None, and for pieces of the scratch memory without elements.

    Args:
        device: where the tensors are.
        tensors: names of what a call passes: tensors, and None where no call has one.
        scratch: allocated anew by every call, in one piece; nothing is allocated for none.
        launches: in order.
        otherwise: the plan of calls in which a tensor that is a kernel's matrix does not start at a multiple of 16
            bytes, as hardware copies must.
    """

    def __init__(
        self,
        device: torch.device,
        tensors: Sequence[str],
        scratch: Scratch,
        launches: Sequence[Launch],
        otherwise: Callable[[], Plan] | None = None,
    ) -> None:
        self.device, self.index = device, device.index
        self.scratch, self.launches = scratch, launches
        self.offsets: list[int] = []
        self.bytes = 0
        for elements, dtype in scratch.values():
            self.offsets.append(self.bytes)
            self.bytes += -(-elements * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self._position = {name: i for i, name in enumerate((*tensors, *scratch))}
        self._copied_names = {x.tensor for launch in launches for x in launch.matrices.values()} - scratch.keys()
        self._copied, self._otherwise = [self._position[name] for name in self._copied_names], otherwise
        # By which tensors are aligned to 16 bytes (None if all are): Triton compiles for that, and addresses differ
        # from call to call.
        self._steps: dict[tuple[bool, ...] | None, list[_Step]] = {}
        self._compiled: set[tuple[bool, ...] | None] = set()

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these launches take these of a call's tensors, where hardware copies them."""
        return all(x.data_ptr() % 16 == 0 for name, x in tensors.items() if name in self._copied_names)

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        """Launch on the current stream of the device, which must be the current device."""
        pointers = [0 if x is None else x.data_ptr() for x in tensors]
        aligned = None if reduce(or_, pointers) % 16 == 0 else tuple([pointer % 16 == 0 for pointer in pointers])
        if aligned and self._otherwise and not all(aligned[i] for i in self._copied):
            self._otherwise()(tensors)
            return
        memory = None
        if self.bytes:
            memory = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
            start = memory.data_ptr()
            pointers += [start + offset for offset in self.offsets]
        steps = self._steps.get(aligned)
        if steps is None or _hooked():
            self._launch_by_triton(tensors, memory, aligned)
            return
        stream = driver.active.get_current_stream(self.index)
        for run, programs, fixed, sources, encode, pick, arguments in steps:
            operands = encode(*sources(pointers)) if encode else ()
            run(programs, 1, 1, stream, *fixed, *operands, *pick(pointers), *arguments)

    def _launch_by_triton(
        self, tensors: Sequence[Tensor | None], memory: Tensor | None, aligned: tuple[bool, ...] | None
    ) -> None:
        """Launch as Triton does, which compiles where it must, and keep what it chose for the next call."""
        sizes = [(elements * dtype.itemsize, dtype) for elements, dtype in self.scratch.values()]
        pieces = [
            memory[at : at + n].view(dtype) if memory is not None and n else None
            for at, (n, dtype) in zip(self.offsets, sizes, strict=True)
        ]
        given = [*tensors, *pieces]
        prepared = []
        for launch in self.launches:
            positions = [self._position[name] for name in launch.tensors]
            pick = _pick([0 if given[i] is None else i for i in positions])
            sources = [self._position[x.tensor] for x in launch.operands]
            operands = [_descriptor(x, given[i]) for x, i in zip(launch.operands, sources, strict=True)]
            prepared.append((launch, pick, sources, [*operands, *pick(given), *launch.arguments]))
        if aligned not in self._compiled:
            self._compiled.add(aligned)
            _compile_together([(launch, arguments) for launch, _, _, arguments in prepared])
        steps = []
        for launch, pick, sources, arguments in prepared:
            compiled = launch.kernel[(launch.programs,)](*arguments, **launch.options)
            if (runner := _runner(compiled, bool(sources))) is not None and (not sources or _is_known()):
                described = compiled.metadata.tensordesc_meta if sources else []
                encoders = [_encoder(x, y) for x, y in zip(launch.operands, described, strict=True)]
                encode = _joint_encoder(encoders) if encoders else None
                values = tuple(launch.arguments)
                steps.append(_Step(runner[0], launch.programs, runner[1], _pick(sources), encode, pick, values))
        if len(steps) == len(self.launches):
            self._steps[aligned] = steps
