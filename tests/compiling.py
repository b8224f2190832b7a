"""Kernels without a GPU: launches described on tensors without data, and what the compiler makes of them."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from flash_kda.backends.triton.config import Device
from flash_kda.types import Inputs, LogGate, LowerBoundGate, Problem, SoftplusGate

if TYPE_CHECKING:
    from flash_kda.backends.triton.launch import Launch

Dtypes = dict[str, torch.dtype]

DEVICES = {
    80: Device(80, 108, 166912, 167936),
    90: Device(90, 132, 232448, 233472),
    100: Device(100, 148, 232448, 233472),
    120: Device(120, 170, 101376, 102400),
}
H200 = DEVICES[90]
TENSOR_MEMORY = 512  # columns


def devices() -> list[Any]:
    return [pytest.param(device, id=f"sm_{capability}") for capability, device in DEVICES.items()]


# Launches on tensors without data.


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def meta_inputs(problem: Problem) -> Inputs:
    """The problem's arguments as tensors without data."""
    p = problem
    HV, N = p.HV or p.H, p.N or p.B
    A_log, dt_bias = meta(HV), meta(HV, p.K)
    gates = {"lower_bound": LowerBoundGate(A_log, dt_bias), "softplus": SoftplusGate(A_log, dt_bias), "log": LogGate()}
    return Inputs(
        q=meta(p.B, p.T, p.H, p.K, dtype=p.dtype),
        k=meta(p.B, p.T, p.H, p.K, dtype=p.dtype),
        v=meta(p.B, p.T, HV, p.V, dtype=p.dtype),
        g=meta(p.B, p.T, HV, p.K, dtype=p.dtype),
        beta=meta(p.B, p.T, HV, dtype=p.dtype),
        gate=gates[p.gate],
        scale=p.K**-0.5,
        initial_state=meta(N, HV, p.V, p.K, dtype=p.state_dtype),
        output_final_state=True,
        cu_seqlens=meta(N + 1, dtype=torch.int32) if p.packed else None,
        qk_l2norm=True,
        beta_is_logit=True,
        allow_neg_eigval=False,
        state_layout="vk",
    )


def meta_rows(problem: Problem, layout: str) -> Inputs:
    """The same for a call whose states are in a pool."""
    return meta_inputs(problem).replace(initial_state=None, output_final_state=False, state_layout=layout)


def meta_pool(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """Four slots for each sequence, and one."""
    N, *shape = inputs.state_shape
    return meta(4 * N + 1, *shape, dtype=dtype)


def dtypes_of(names: Sequence[str], tensors: Sequence[Tensor | None], absent: torch.dtype) -> Dtypes:
    """The dtypes of what launches are passed, by name; of q, say, for what is ``absent``, as it is stood in for."""
    return {name: absent if x is None else x.dtype for name, x in zip(names, tensors, strict=True)}


def assert_nothing_is_missing(launch: Launch, dtypes: Dtypes) -> None:
    """Every parameter of the kernel has what it needs."""
    names, first = launch.kernel.arg_names, len(launch.tensors)
    assert set(launch.tensors) <= set(dtypes)
    assert [f"p_{name}" for name in launch.tensors] == names[:first], "tensors come first"
    assert set(names[first:]) <= set(launch.values)
    assert first + len(launch.arguments) == len(names)
    for parameter in launch.kernel.params[first:]:
        if parameter.is_constexpr:
            continue
        # Strides are integers that Triton may specialise on; of other numbers it must not.
        is_stride = re.fullmatch(r"\w+_[bchkntvw]", parameter.name) is not None
        assert is_stride or parameter.do_not_specialize, parameter.name
        assert not is_stride or type(launch.values[parameter.name]) is int, parameter.name


# Compilation.


@dataclass(frozen=True)
class Built:
    """What became of a kernel.

    Attributes:
        stack: what a thread spills, in bytes.
        wide_loads, wide_stores: of 16 bytes by a thread.
        order: loads from and stores to memory, and barriers, as the compiler has them in the end.
        late_loads: of 16 bytes by a thread, after the first exchange between threads of a warp in the machine's code.
        unrounded: products that a lane adds as they are to another lane's rounded one, in the machine's code.
    """

    error: str | None = None
    registers: int = 0
    stack: int = 0
    shared: int = 0
    tensor_memory: int = 0
    wgmma: bool = False
    wide_loads: int = 0
    wide_stores: int = 0
    order: tuple[str, ...] = ()
    late_loads: int = 0
    unrounded: int = 0


def source_of(launch: Launch, dtypes: Dtypes) -> Any:
    """What Triton compiles for a launch with aligned pointers, specialised as its launch does."""
    from triton.compiler import ASTSource

    types = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8", torch.int32: "i32"}
    types |= {torch.int64: "i64", torch.bool: "i1"}
    signature: dict[str, str] = {}
    constants, divisible = {}, []
    for i, parameter in enumerate(launch.kernel.params):
        name, free = parameter.name, not parameter.do_not_specialize
        if name.startswith("p_"):
            signature[name] = f"*{types[dtypes[name[2:]]]}"
            if not parameter.do_not_specialize_on_alignment:
                divisible.append(i)
            continue
        value = launch.values[name]
        if parameter.is_constexpr or (free and value == 1):
            signature[name] = "constexpr"
            constants[name] = value
            continue
        signature[name] = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
        if free and value % 16 == 0:
            divisible.append(i)
    return ASTSource(launch.kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in divisible})


def _told_of(compiled: Any, what: str) -> str:
    """What the disassembler tells of a compiled kernel."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        (cubin := Path(folder, "kernel.cubin")).write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, what, cubin]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def registers_and_stack(compiled: Any) -> tuple[int, int]:
    """Registers of a thread of a compiled kernel, and the bytes that it spills."""
    usage = _told_of(compiled, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2])


def unrounded(sass: str) -> int:
    """How many products are rounded for another lane, and joined unrounded with what that lane has in exchange."""
    made: dict[str, tuple[str, Any]] = {}
    count = 0
    for kind, text in re.findall(r"\*/ +(?:@!?U?P\w+ +)?([A-Z]\w*)\S* +(.*?);", sass):
        first, *others = [x.strip().removesuffix(".reuse") for x in text.split(",")]
        if kind == "SHFL":  # predicate, result, source
            made[others[0]] = (kind, made.get(others[1]))
            continue
        if kind == "FFMA" and made.get(others[2]) == ("SHFL", ("FMUL", {*others[:2]})):
            count += 1
        made[first] = (kind, {*others[:2]})
    return count


def compiled_by_triton(source: Any, launch: Launch, capability: int) -> Any:
    """Triton's compiled kernel of a launch."""
    import triton
    from triton.backends.compiler import GPUTarget

    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))


def compile_launch(
    launch: Launch, dtypes: Dtypes, capability: int, source_of: Callable[[Launch, Dtypes], Any] = source_of
) -> Built:
    """Compile a launch whose tensors have these dtypes in this process; errors are told, not raised."""
    try:
        compiled = compiled_by_triton(source_of(launch, dtypes), launch, capability)
    except Exception as error:
        return Built(error=f"{type(error).__name__}: {error}")
    registers, stack = registers_and_stack(compiled)
    ptx, ttgir, sass = compiled.asm["ptx"], compiled.asm["ttgir"], _told_of(compiled, "-sass")
    return Built(
        registers=registers,
        stack=stack,
        shared=compiled.metadata.shared,
        tensor_memory=getattr(compiled.metadata, "tmem_size", None) or 0,
        wgmma="wgmma.mma_async" in ptx,
        wide_loads=ptx.count("ld.global.v4.b32"),
        wide_stores=ptx.count("st.global.v4.b32"),
        order=tuple(re.findall(r"tt\.load|tt\.store|gpu\.barrier", ttgir)),
        late_loads=len(re.findall(r"\bLDG\.E\S*\.128\b", sass.partition("SHFL")[2])),
        unrounded=unrounded(sass),
    )


def assert_fits(built: Built, capability: int, spills: int = 0) -> None:
    """It compiled, fits into the device, and spills no more than these bytes."""
    assert built.error is None, built.error
    assert built.shared <= DEVICES[capability].shared_memory
    assert built.tensor_memory <= TENSOR_MEMORY
    assert built.stack <= spills, f"{built.stack} bytes of spills with {built.registers} registers"


@dataclass(frozen=True)
class Build(ABC):
    """A kernel of one problem on one architecture. Its string is the id of its test."""

    capability: int
    problem: Problem

    @property
    def device(self) -> Device:
        return DEVICES[self.capability]

    @abstractmethod
    def launch(self) -> tuple[Dtypes, Launch]:
        """The kernel's launch, and the dtypes of all that is passed, by name."""

    def compile(self) -> Built:
        dtypes, launch = self.launch()
        return compile_launch(launch, dtypes, self.capability)

    def ptx(self) -> str:
        dtypes, launch = self.launch()
        ptx: str = compiled_by_triton(source_of(launch, dtypes), launch, self.capability).asm["ptx"]
        return ptx


def every(builds: Sequence[Build]) -> Callable[..., Any]:
    """For a test that is told a ``build`` and what became of it, as ``built``: a test for each of them."""
    cases = pytest.mark.parametrize("build", [pytest.param(build, id=str(build)) for build in builds])
    return lambda test: pytest.mark.offline(cases(test))


@contextmanager
def under_way(builds: Sequence[Build]) -> Iterator[Mapping[Build, Future[Built]]]:
    """The builds, under way in two processes."""
    pytest.importorskip("triton")
    # Not a fork: torch's threads would not be in it.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield {build: pool.submit(build.compile) for build in builds}
        pool.shutdown(cancel_futures=True)
