"""The Triton backend without a GPU: in the interpreter, compiled for four architectures, configured and launched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from unittest import mock

import compiling
import interpreted
import pytest
import torch
from compiling import DEVICES, H200, Build, Built, Dtypes, every
from interpreting import interpreted_cases

from flash_kda.backends import triton as backend
from flash_kda.backends.triton.config import HARD_PROGRAMS, MOST_LOOKED_AT, MOST_STAGES, Config, Device, configure
from flash_kda.types import GateKind, Inputs, LowerBoundGate, Problem

if TYPE_CHECKING:
    from flash_kda.backends.triton.launch import Launch

# The interpreter.


@interpreted_cases(interpreted)
def test_interpreter(went_wrong: str | None) -> None:
    """The kernels' arithmetic against the definition in float64."""
    assert went_wrong is None, went_wrong


# Compilation for each architecture.


@dataclass(frozen=True)
class ForwardBuild(Build):
    """One kernel of the forward: ``all``, ``easy``, ``hard`` or ``recurrence``."""

    kernel: str

    @property
    def config(self) -> Config:
        return configure(self.problem, self.device)

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

    def launch(self) -> tuple[Dtypes, Launch]:
        dtypes, launches = described(self.problem, self.config)
        return dtypes, launches[{"all": 0, "easy": 0, "hard": 1, "recurrence": -1}[self.kernel]]


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


def budget(build: ForwardBuild) -> int:
    c = build.config
    limited = build.kernel == "recurrence" and c.recurrence_registers is not None
    kind = ("limited" if limited else build.kernel, c.split)
    of_hopper = HOPPER_BUDGETS.get(kind) if build.capability == 90 else None
    return (BUDGETS[kind] if of_hopper is None else of_hopper).get(c.BK, 0)


def stage_bytes(c: Config) -> int:
    """One chunk in flight in the recurrence: three tiles, two squares, v and the decay."""
    return (3 * c.C * c.BK + 2 * c.C * c.C * (2 if c.split else 1) + c.C * c.BV) * c.element_bytes + 4 * c.BK


def shared_bytes(c: Config) -> int:
    """Shared memory of the recurrence at most: the chunks in flight, the newest without its decay, and the output."""
    return c.stages * stage_bytes(c) - 4 * c.BK + c.C * c.BV * c.element_bytes


def builds() -> list[ForwardBuild]:
    """Every variant that ``configure`` chooses over K, V, dtypes, lengths and numbers of programs.

    All of them for compute capability 9.0; for the others, K of at least 128, where limits are near, and sequences that
    are long or of one chunk.
    """
    found: dict[tuple[object, ...], ForwardBuild] = {}
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
            build = ForwardBuild(capability, replace(problem, gate=gate), kernel)
            found.setdefault(build.variant, build)
        build = ForwardBuild(capability, problem, "recurrence")
        found.setdefault(build.variant, build)
        if (K, V, T) == (128, 128, 8192):
            build = replace(build, problem=replace(problem, packed=True))
            found.setdefault(build.variant, build)
    return list(found.values())


def described(problem: Problem, config: Config, inputs: Inputs | None = None) -> tuple[Dtypes, list[Launch]]:
    """The launches of one forward call, and the dtypes of all that they are passed, by name."""
    from flash_kda.backends.triton import forward

    inputs = inputs or compiling.meta_inputs(problem)
    final = torch.empty(inputs.state_shape, dtype=inputs.state_dtype, device="meta")
    plan = mock.Mock()
    forward.launch(inputs, torch.empty_like(inputs.v), final, plan)
    (call, *results), (tensors,) = plan.call_args.args, plan.return_value.call_args.args
    scratch, launches = forward.describe(call, config, *results)
    dtypes = compiling.dtypes_of(forward.TENSORS, tensors, inputs.q.dtype)
    return dtypes | {name: dtype for name, (_, dtype) in scratch.items()}, launches


def test_gate_parameters_reach_the_kernels_in_float32() -> None:
    """The checks admit float64; the kernels read float32."""
    pytest.importorskip("triton")
    problem = Problem(B=1, T=32, H=2, K=16, V=16)
    wide = LowerBoundGate(*(torch.empty(n, dtype=torch.float64, device="meta") for n in (2, 32)))
    dtypes, _ = described(problem, configure(problem, H200), compiling.meta_inputs(problem).replace(gate=wide))
    assert dtypes["A_log"] == dtypes["dt_bias"] == torch.float32


def assert_fetches_ahead(built: Built, config: Config, others: int = 0) -> None:
    """The recurrence takes no more shared memory than it must, with ``others`` bytes beside the chunks, nor less."""
    assert built.shared <= shared_bytes(config) + others
    if config.stages > 1:
        assert built.shared >= (config.stages - 1) * stage_bytes(config), "an operand is not fetched ahead"


def assert_uses_wgmma(built: Built, build: Build, config: Config) -> None:
    """Where it counts most."""
    if build.capability == 90 and config.split and (config.BK, config.BV) == (128, 64):
        assert built.wgmma, "no wgmma"


@every(builds())
def test_compiles(build: ForwardBuild, built: Built) -> None:
    """It compiles, fits into the device, spills no more than its budget, and uses wgmma where it counts most."""
    compiling.assert_fits(built, build.capability, budget(build))
    if build.kernel == "recurrence":
        assert_fetches_ahead(built, build.config)
        assert_uses_wgmma(built, build, build.config)


@pytest.mark.parametrize(
    ("version", "reason"),
    [("3.2.0", "needs Triton 3.5 or newer; this is 3.2.0"), ("3.5.1", None), ("3.10.0+git", None), ("4.0", None)],
)
def test_versions_of_triton(version: str, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", version)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for op in ("forward", "prefill", "decode", "step"):
        assert backend.supports(Problem(T=1 if op == "step" else 64, N=1, op=op)) == reason


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


@pytest.mark.parametrize("device", compiling.devices())
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


@pytest.mark.parametrize("device", compiling.devices())
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


@pytest.mark.parametrize("device", compiling.devices())
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
    one = Problem(B=1, T=32, H=64)
    assert configure(one, H200).stages == 1
    assert configure(one, H200).recurrence_registers is not None
    assert configure(replace(one, dtype=torch.float32), H200).recurrence_registers is None
    assert configure(replace(one, T=33), H200).recurrence_registers is None
    assert configure(replace(one, T=33), H200).stages == 2
    packed = replace(one, T=32 * 20, N=20, packed=True)
    assert configure(packed, H200) == configure(replace(one, B=20), H200)


@pytest.mark.parametrize("device", compiling.devices())
def test_programs_over_hard_chunks(device: Device) -> None:
    """An odd number, enough for every block, one for each of few, and no more than a few for each multiprocessor."""
    config = configure(Problem(B=1, T=8192, H=32), device)
    most = HARD_PROGRAMS * device.multiprocessors
    for blocks in (*range(1, 70), most - 1, most, most + 1, 8192, 16384, 32 * most, 100_000, 2**21):
        programs = config.hard_programs(blocks)
        assert programs % 2 == 1
        assert programs * MOST_LOOKED_AT >= blocks
        assert programs < most or (programs - 2) * MOST_LOOKED_AT < blocks
        assert programs >= min(blocks, most - 1)
        assert programs <= blocks + 1
    # No program looks at one head alone, nor at many heads of one chunk.
    programs = config.hard_programs(8192)
    assert len({i % programs for i in range(0, 8192, 32)}) == 256


def test_slots_of_kernels() -> None:
    """What the kernels count is what the host has allocated."""
    pytest.importorskip("triton")
    from flash_kda.backends.triton import common, forward

    for T, N, packed in itertools.product((1, 31, 32, 33, 64, 1000), (1, 2, 7), (False, True)):
        problem = Problem(B=1 if packed else N, T=T, H=1, N=N, packed=packed)
        assert common.slots.fn(T, N, 32, packed) == forward.slots(problem, 32)


# Launches.


def test_forward_launches() -> None:
    """One preparation for a bounded gate, two otherwise; every parameter of a kernel has what it needs."""
    pytest.importorskip("triton")
    gates: tuple[GateKind, ...] = ("lower_bound", "softplus", "log")
    for gate in gates:
        problem = Problem(B=2, T=70, H=2, HV=4, K=128, V=100, gate=gate)
        dtypes, launches = described(problem, configure(problem, H200))
        hard = [] if gate == "lower_bound" else [2 * 3 * 4 + 1]
        assert [launch.programs for launch in launches] == [2 * 3 * 4, *hard, 2 * 4 * 2]
        for launch in launches:
            compiling.assert_nothing_is_missing(launch, dtypes)
