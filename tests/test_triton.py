"""The Triton backend without a GPU: in the interpreter, compiled for four architectures, configured and launched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import interpreted
import pytest
import torch
from compiling import builds_under_way, registers_and_stack
from interpreting import selected_results
from torch import Tensor

from flash_kda.backends.triton.config import MOST_STAGES, Config, Device, configure
from flash_kda.types import GateKind, Inputs, LogGate, LowerBoundGate, Problem, SoftplusGate

if TYPE_CHECKING:
    from flash_kda.backends.triton.launch import Launch

DEVICES = {
    80: Device(80, 108, 166912, 167936),
    90: Device(90, 132, 232448, 233472),
    100: Device(100, 148, 232448, 233472),
    120: Device(120, 170, 101376, 102400),
}


# The interpreter.


@pytest.fixture(scope="module")
def interpreted_results(request: pytest.FixtureRequest) -> dict[str, str | None]:
    """What the selected cases gave."""
    return selected_results(request, interpreted, test_interpreter.__name__)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", interpreted.CASES)
def test_interpreter(name: str, interpreted_results: dict[str, str | None]) -> None:
    """The kernels' arithmetic against the definition in float64."""
    error = interpreted_results[name]
    assert error is None, error


# Compilation for each architecture.


@dataclass(frozen=True)
class Build:
    """One kernel of one problem on one architecture. ``kernel``: ``all``, ``easy``, ``hard`` or ``recurrence``."""

    kernel: str
    capability: int
    problem: Problem

    @property
    def config(self) -> Config:
        return configure(self.problem, DEVICES[self.capability])

    @property
    def variant(self) -> tuple[object, ...]:
        """What tells two builds apart, as far as the configuration does."""
        c = self.config
        if self.kernel == "recurrence":
            return (self.kernel, self.capability, c, self.problem.packed)
        return (self.kernel, self.capability, replace(c, BV=0, stages=0, recurrence_registers=None))

    def __str__(self) -> str:
        c, p = self.config, self.problem
        name = f"sm_{self.capability}-{self.kernel}-{'bf16' if c.split else 'fp32'}-K{p.K}"
        if self.kernel != "recurrence":
            return name
        registers = "" if c.recurrence_registers is None else f"-{c.recurrence_registers}registers"
        return f"{name}-V{p.V}-{c.stages}stages{registers}{'-packed' if p.packed else ''}"


@dataclass(frozen=True)
class Built:
    """What became of a build: ``stack`` is what a thread spills, in bytes."""

    error: str | None = None
    shared: int = 0
    tensor_memory: int = 0
    registers: int = 0
    stack: int = 0
    wgmma: bool = False


# Bytes that a thread may spill: by kernel ("limited": the recurrence under a register limit), whether tiles are
# bfloat16, and BK. What is absent may spill nothing.
BUDGETS = {
    ("all", True): {128: 64, 256: 128},
    ("all", False): {64: 96, 128: 384, 256: 256},
    ("easy", True): {128: 96, 256: 192},
    ("easy", False): {64: 96, 128: 384, 256: 256},
    ("hard", True): {64: 384, 128: 512, 256: 384},
    ("hard", False): {64: 512, 128: 512, 256: 384},
    ("recurrence", True): {16: 32, 128: 256, 256: 192},
    ("recurrence", False): {64: 96, 128: 160, 256: 384},
    ("limited", True): {},
}
# wgmma leaves registers free: the same for compute capability 9.0.
HOPPER_BUDGETS = {
    ("recurrence", True): {128: 32, 256: 192},
    ("recurrence", False): {64: 96, 128: 160, 256: 384},
    ("limited", True): {128: 192},
}
TENSOR_MEMORY = 512  # columns


def budget(build: Build) -> int:
    c = build.config
    limited = build.kernel == "recurrence" and c.recurrence_registers is not None
    kind = ("limited" if limited else build.kernel, c.split)
    of_hopper = HOPPER_BUDGETS.get(kind) if build.capability == 90 else None
    return (BUDGETS[kind] if of_hopper is None else of_hopper).get(c.BK, 0)


def stage_bytes(c: Config) -> int:
    """One chunk in flight in the recurrence: three tiles, two squares, v and the decay."""
    return (3 * c.C * c.BK + 2 * c.square_elements + c.C * c.BV) * c.element_bytes + 4 * c.BK


def shared_bytes(c: Config) -> int:
    """Shared memory of the recurrence at most: the chunks in flight, the newest without its decay, and the output."""
    return c.stages * stage_bytes(c) - 4 * c.BK + c.C * c.BV * c.element_bytes


def builds() -> list[Build]:
    """Every variant that ``configure`` chooses over K, V, dtypes, lengths and numbers of programs.

    All of them for compute capability 9.0; for the others, K of at least 128, where limits are near, and sequences that
    are long or of one chunk.
    """
    found: dict[tuple[object, ...], Build] = {}
    for capability, dtype, K, V, T, (B, H) in itertools.product(
        DEVICES,
        (torch.bfloat16, torch.float32),
        (16, 64, 128, 256),
        (16, 64, 128, 256),
        (32, 64, 96, 8192),
        ((1, 8), (8, 64)),
    ):
        if capability != 90 and (K < 128 or T in (64, 96)):
            continue
        problem = Problem(B=B, T=T, H=H, K=K, V=V, dtype=dtype)
        for kernel, gate in (("all", "lower_bound"), ("easy", "softplus"), ("hard", "softplus")):
            build = Build(kernel, capability, replace(problem, gate=gate))
            found.setdefault(build.variant, build)
        build = Build("recurrence", capability, problem)
        found.setdefault(build.variant, build)
        if (K, V, T) == (128, 128, 8192):
            build = replace(build, problem=replace(problem, packed=True))
            found.setdefault(build.variant, build)
    return list(found.values())


def meta_inputs(problem: Problem) -> Inputs:
    """The problem's arguments as tensors without data."""
    p = problem
    HV, N = p.HV or p.H, p.N or p.B

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    A_log, dt_bias = empty(HV), empty(HV, p.K)
    gates = {"lower_bound": LowerBoundGate(A_log, dt_bias), "softplus": SoftplusGate(A_log, dt_bias), "log": LogGate()}
    return Inputs(
        q=empty(p.B, p.T, p.H, p.K, dtype=p.dtype),
        k=empty(p.B, p.T, p.H, p.K, dtype=p.dtype),
        v=empty(p.B, p.T, HV, p.V, dtype=p.dtype),
        g=empty(p.B, p.T, HV, p.K, dtype=p.dtype),
        beta=empty(p.B, p.T, HV, dtype=p.dtype),
        gate=gates[p.gate],
        scale=p.K**-0.5,
        initial_state=empty(N, HV, p.V, p.K, dtype=p.state_dtype),
        output_final_state=True,
        cu_seqlens=empty(N + 1, dtype=torch.int32) if p.packed else None,
        qk_l2norm=True,
        beta_is_logit=True,
        allow_neg_eigval=False,
        state_layout="vk",
    )


def described(
    problem: Problem, config: Config, inputs: Inputs | None = None
) -> tuple[dict[str, torch.dtype], list[Launch]]:
    """The launches of one forward call, and the dtypes of all that they are passed, by name."""
    from flash_kda.backends.triton import forward

    inputs = inputs or meta_inputs(problem)
    final = torch.empty(inputs.state_shape, dtype=inputs.state_dtype, device="meta")
    plan = mock.Mock()
    forward.launch(inputs, torch.empty_like(inputs.v), final, plan)
    (call, *results), (tensors,) = plan.call_args.args, plan.return_value.call_args.args
    scratch, launches = forward.describe(call, config, *results)
    given = zip(forward.TENSORS, tensors, strict=True)
    dtypes = {name: inputs.q.dtype if x is None else x.dtype for name, x in given}
    return dtypes | {name: dtype for name, (_, dtype) in scratch.items()}, launches


def test_gate_parameters_reach_the_kernels_in_float32() -> None:
    """The checks admit float64; the kernels read float32."""
    problem = Problem(B=1, T=32, H=2, K=16, V=16)
    wide = LowerBoundGate(*(torch.empty(n, dtype=torch.float64, device="meta") for n in (2, 32)))
    dtypes, _ = described(problem, configure(problem, DEVICES[90]), meta_inputs(problem).replace(gate=wide))
    assert dtypes["A_log"] == dtypes["dt_bias"] == torch.float32


def source_of(launch: Launch, dtypes: dict[str, torch.dtype]) -> Any:
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


def compile_launch(launch: Launch, dtypes: dict[str, torch.dtype], capability: int) -> Built:
    """Compile a launch whose tensors have these dtypes in this process; errors are told, not raised."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", capability, 32)
    try:
        compiled = triton.compile(source_of(launch, dtypes), target=target, options=dict(launch.options))
    except Exception as error:
        return Built(error=f"{type(error).__name__}: {error}")
    registers, stack = registers_and_stack(compiled)
    return Built(
        shared=compiled.metadata.shared,
        tensor_memory=getattr(compiled.metadata, "tmem_size", None) or 0,
        registers=registers,
        stack=stack,
        wgmma="wgmma.mma_async" in compiled.asm["ptx"],
    )


def compile_one(build: Build) -> Built:
    position = {"all": 0, "easy": 0, "hard": 1, "recurrence": -1}[build.kernel]
    dtypes, launches = described(build.problem, build.config)
    return compile_launch(launches[position], dtypes, build.capability)


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[dict[Build, Future[Built]]]:
    """The selected builds, under way."""
    yield from builds_under_way(request, test_compiles, compile_one)


@pytest.mark.offline
@pytest.mark.parametrize("build", [pytest.param(build, id=str(build)) for build in builds()])
def test_compiles(build: Build, compiled: dict[Build, Future[Built]]) -> None:
    """It compiles, fits into the device, spills no more than its budget, and uses wgmma where it counts most."""
    built, c, device = compiled[build].result(), build.config, DEVICES[build.capability]
    assert built.error is None, built.error
    assert built.shared <= device.shared_memory
    assert built.tensor_memory <= TENSOR_MEMORY
    assert built.stack <= budget(build), f"{built.stack} bytes of spills with {built.registers} registers"
    if build.kernel == "recurrence":
        assert built.shared <= shared_bytes(c)
        if c.stages > 1:
            assert built.shared >= (c.stages - 1) * stage_bytes(c), "an operand is not fetched ahead"
        if build.capability == 90 and c.split and (c.BK, c.BV) == (128, 64):
            assert built.wgmma, "no wgmma"


# Configurations.


def problems() -> Iterator[Problem]:
    """Over dtypes, sizes (not only powers of two), lengths, and numbers of programs from one to many."""
    for dtype, K, V, T, (B, H) in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32),
        (16, 20, 64, 100, 128, 200, 256),
        (16, 40, 64, 128, 256),
        (1, 32, 33, 96, 8192),
        ((1, 1), (1, 64), (2, 64), (64, 64)),
    ):
        yield Problem(B=B, T=T, H=H, K=K, V=V, dtype=dtype)


def devices() -> list[Any]:
    return [pytest.param(device, id=f"sm_{capability}") for capability, device in DEVICES.items()]


@pytest.mark.parametrize("device", devices())
def test_configurations_are_sound(device: Device) -> None:
    """Sizes cover the problem and divide each other; a second call, remembered or not, chooses the same."""
    for problem in problems():
        c = configure(problem, device)
        assert c == configure.__wrapped__(problem, device) == configure(replace(problem), device)
        assert problem.K <= c.BK < 2 * max(problem.K, 9)
        assert c.BK % c.BC == c.BK % c.hard_BC == 0
        assert min(c.BC, c.hard_BC, c.BV) >= 16  # what a product of matrices takes at least
        assert c.BV & (c.BV - 1) == 0
        assert max(problem.V, 9) > c.BV // 2
        assert 2 <= c.segments <= c.C
        assert c.C // c.segments * c.segments == c.C
        assert c.split == (problem.dtype != torch.float32)
        assert c == configure(replace(problem, H=problem.H // 2 or 1, HV=problem.H), device), "HV counts, not H"
        if problem.dtype == torch.float16:
            assert c == configure(replace(problem, dtype=torch.bfloat16), device)


@pytest.mark.parametrize("device", devices())
def test_stages_fit(device: Device) -> None:
    """Chunks in flight exist, and fit into shared memory: of two programs where there are many."""
    for problem in problems():
        c = configure(problem, device)
        assert 1 <= c.stages <= min(MOST_STAGES, -(-problem.T // c.C))
        programs = problem.B * problem.H * -(-problem.V // c.BV)
        if c.stages > 1:
            assert shared_bytes(c) <= device.shared_memory
            crowded = programs > device.multiprocessors and device.capability != 100  # there none can share
            if crowded and c.BK >= 64:  # of smaller tiles less than this bound is used
                assert 2 * (shared_bytes(c) + 1024) <= device.shared_memory_per_multiprocessor


@pytest.mark.parametrize("device", devices())
def test_one_wave_has_more_in_flight(device: Device) -> None:
    """A program that has a multiprocessor to itself fetches further ahead, up to the last that has."""
    alone = Problem(B=1, T=8192, H=device.multiprocessors // 2, K=128, V=128)
    shared = replace(alone, H=device.multiprocessors // 2 + 1)
    if device.capability == 100:  # a program takes all of the tensor memory: none can share
        assert configure(alone, device).stages == configure(shared, device).stages
    else:
        assert configure(alone, device).stages > configure(shared, device).stages


def test_one_chunk() -> None:
    """A sequence of one chunk has one stage and, in half precision, limited registers; packed lengths are guessed."""
    H200 = DEVICES[90]
    one = Problem(B=1, T=32, H=64)
    assert configure(one, H200).stages == 1
    assert configure(one, H200).recurrence_registers is not None
    assert configure(replace(one, dtype=torch.float32), H200).recurrence_registers is None
    assert configure(replace(one, T=33), H200).recurrence_registers is None
    assert configure(replace(one, T=33), H200).stages == 2
    packed = replace(one, T=32 * 20, N=20, packed=True)
    assert configure(packed, H200) == configure(replace(one, B=20), H200)


# Launches.


def test_forward_launches() -> None:
    """One preparation for a bounded gate, two otherwise; every parameter of a kernel has what it needs."""
    pytest.importorskip("triton")
    gates: dict[GateKind, int] = {"lower_bound": 2, "softplus": 3, "log": 3}
    for gate, count in gates.items():
        problem = Problem(B=2, T=70, H=2, HV=4, K=128, V=100, gate=gate)
        dtypes, launches = described(problem, configure(problem, DEVICES[90]))
        assert [launch.programs for launch in launches] == [2 * 3 * 4] * (count - 1) + [2 * 4 * 2]
        for launch in launches:
            assert set(launch.tensors) <= set(dtypes)
            assert len(launch.tensors) + len(launch.arguments) == len(launch.kernel.arg_names)
            first = len(launch.tensors)
            assert [f"p_{name}" for name in launch.tensors] == launch.kernel.arg_names[:first], "tensors come first"
            for parameter in launch.kernel.params[first:]:
                value = launch.values[parameter.name]
                # Strides are integers that Triton may specialise on; of other numbers it must not.
                is_stride = "_" in parameter.name and not parameter.is_constexpr and parameter.name != "lower_bound"
                assert parameter.is_constexpr or is_stride != parameter.do_not_specialize
                assert not is_stride or type(value) is int
