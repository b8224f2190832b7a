"""The decode kernel: in the interpreter, compiled for four architectures, configured, launched; graphs on a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import arithmetic
import compiling
import interpreted_decode
import on_a_gpu
import pytest
import torch
from cases import Call, Case, Target, parameters
from compare import assert_same_bits
from compiling import DEVICES, H200, Build, Built, Dtypes, every, meta
from decoding import BASE, CASES, PACKED, ROWS, DecodeCase, check, first_rows, run
from interpreting import interpreted_cases
from jitted import Jitted, assert_dense_gate, assert_no_shared_launch, launch_on_the_cpu, launched_directly
from test_decode_checks import EACH, other_forms
from torch import Tensor

import flash_kda
from flash_kda import forms
from flash_kda.backends.triton.config import DecodeConfig, Device, configure_decode
from flash_kda.bench import harness
from flash_kda.types import DecodeInputs, Problem, gate_parameters

if TYPE_CHECKING:
    from flash_kda.backends.triton.launch import Launch

# The interpreter.


@interpreted_cases(interpreted_decode)
def test_interpreter(went_wrong: str | None) -> None:
    """The kernel's arithmetic and addresses against the definition in float64."""
    assert went_wrong is None, went_wrong


# Compilation for each architecture.


@dataclass(frozen=True)
class DecodeBuild(Build):
    """The decode kernel. ``index``: ``one`` slot a row, or ``each`` token its slot."""

    layout: str = "vk"
    index: str = "one"

    @property
    def config(self) -> DecodeConfig:
        return configure_decode(self.problem, self.device, self.layout)

    def __str__(self) -> str:
        p = self.problem
        state = "bf16" if p.state_dtype == torch.bfloat16 else "fp32"
        how = "packed" if p.packed else f"T{p.T}"
        return (
            f"sm_{self.capability}-{state}-{self.layout}-K{p.K}-V{p.V}-BV{self.config.BV}-{how}-{self.index}-{p.gate}"
        )

    def call(self) -> DecodeInputs:
        """The arguments as tensors without data."""
        p, i32 = self.problem, torch.int32
        inputs = compiling.meta_rows(p, self.layout)
        N, each = inputs.num_sequences, self.index == "each"
        return DecodeInputs(
            inputs=inputs,
            pool=compiling.meta_pool(inputs, p.state_dtype),
            indices=meta(N, 4, dtype=i32) if each else meta(N, dtype=i32),
            num_accepted=meta(N, dtype=i32) if each else None,
            has_initial_state=meta(N, dtype=torch.bool) if p.packed else None,
            pad_index=-1,
            write_states=True,
            out=None,
        )

    def launch(self) -> tuple[Dtypes, Launch]:
        from flash_kda.backends.triton import decode_launch

        call = self.call()
        (launch,) = decode_launch.plan(call, self.config, torch.empty_like(call.inputs.v)).launches
        tensors = (*call.tensors, *gate_parameters(call.inputs.gate))
        return compiling.dtypes_of(decode_launch.TENSORS, tensors, call.inputs.q.dtype), launch


def builds() -> list[DecodeBuild]:
    """Shipped configurations over states, layouts, sizes, kinds of calls and numbers of programs."""
    found: dict[tuple[object, ...], DecodeBuild] = {}

    def add(build: DecodeBuild) -> None:
        p = build.problem
        key = (build.capability, build.config, p.V, p.K, p.state_dtype, p.gate, p.packed, p.T == 1)
        found.setdefault((*key, build.layout, build.index), build)

    def problem(B: int, T: int, **changes: Any) -> Problem:
        return Problem(B=B, T=T, H=12, state_dtype=torch.float32, op="decode", **changes)

    for state, layout, B in itertools.product((torch.float32, torch.bfloat16), ("vk", "kv"), (1, 32, 128)):
        add(DecodeBuild(90, replace(problem(B, 1), state_dtype=state), layout))
        add(DecodeBuild(90, replace(problem(B, 4), state_dtype=state), layout, "each"))
    for K, V in ((16, 16), (64, 64), (100, 60), (256, 256), (128, 256)):
        add(DecodeBuild(90, problem(128, 1, K=K, V=V)))
        add(DecodeBuild(90, problem(128, 4, K=K, V=V), index="each"))
        add(DecodeBuild(90, problem(128, 1, K=K, V=V), layout="kv"))
    for gate, T in (("softplus", 1), ("log", 4)):
        add(DecodeBuild(90, problem(128, T, gate=gate)))
    add(DecodeBuild(90, problem(128, 1, dtype=torch.float32)))
    for capability in DEVICES:
        for B in (1, 128):
            add(DecodeBuild(capability, problem(B, 1)))
        add(DecodeBuild(capability, problem(128, 4), index="each"))
        add(DecodeBuild(capability, replace(problem(1, 512, packed=True), N=128), index="each"))
        add(DecodeBuild(capability, problem(128, 1), layout="kv"))
        add(DecodeBuild(capability, problem(128, 4, K=256, V=256), index="each"))
    return list(found.values())


@every(builds())
def test_compiles(build: DecodeBuild, built: Built) -> None:
    """Nothing spills, states move in pieces of 16 bytes, and lanes that hold the same sum have the same bits of it."""
    c, p = build.config, build.problem
    compiling.assert_fits(built, build.capability)
    # One warp: enough programs share a multiprocessor to keep its loads under way.
    assert built.registers <= (168 if p.K == c.BK else 255)
    assert not built.unrounded
    if p.K >= 64 and p.K == c.BK:
        pieces = c.BV * c.BK * p.state_dtype.itemsize // (16 * 32)
        assert built.wide_loads >= pieces
        assert built.wide_stores == pieces
    if build.layout == "vk" and (p.K, p.state_dtype) == (128, torch.float32):
        # Sums over K and the vectors along it stay in the warp; only the output passes through shared memory.
        assert built.shared <= 4 * c.BV
    if p.T == 1 and not p.packed:
        assert built.late_loads == 0, "a load waits for another one to have been used"


def of_one_form(state: torch.dtype, layout: str, K: int) -> list[DecodeBuild]:
    """Calls that a row with its token can be part of: with one token a row and many, few rows and many, packed ones."""
    one = Problem(B=128, T=1, H=12, K=K, state_dtype=state, op="decode")
    packed = replace(one, B=1, T=512, N=128, packed=True)
    rows = [replace(one, B=B, T=T) for B in (1, 9, 128) for T in (1, 4)]
    found = [DecodeBuild(90, p, layout, "one" if p.T == 1 else "each") for p in (*rows, packed)]
    if state == torch.float32:
        # States in bfloat16 leave a loop packed by two, which hides what made them.
        found += [DecodeBuild(90, p, layout) for p in (*rows, packed) if p.T > 1]
    return found


@pytest.mark.offline
@pytest.mark.parametrize("K", [64, 128, 256])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_every_column_of_every_call_is_the_same_arithmetic(layout: str, state: torch.dtype, K: int) -> None:
    """So tokens at once have the bits of tokens one by one, and a row those of a row alone."""
    pytest.importorskip("triton")
    found = [build.ptx() for build in of_one_form(state, layout, K)]
    assert len(set.union(*map(arithmetic.of_a_column, found))) == 1
    assert len({frozenset(arithmetic.of_powers(ptx)) for ptx in found}) == 1


# Configurations.


def problems() -> Iterator[Problem]:
    for state, K, V, (B, H) in itertools.product(
        (torch.float32, torch.bfloat16),
        (16, 20, 64, 100, 128, 200, 256),
        (16, 40, 64, 128, 256),
        ((1, 1), (1, 12), (32, 12), (256, 32)),
    ):
        yield Problem(B=B, T=1, H=H, K=K, V=V, state_dtype=state, op="decode")


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("device", compiling.devices())
def test_configurations_are_sound(device: Device, layout: str) -> None:
    for problem in problems():
        c = configure_decode(problem, device, layout)
        assert c == configure_decode.__wrapped__(problem, device, layout)
        assert problem.K <= c.BK < 2 * max(problem.K, 9)
        assert c.BK & (c.BK - 1) == c.BV & (c.BV - 1) == 0
        assert c.BK * c.BV <= 4096
        # As many threads of the warp share a row, whatever the number of programs: the order of sums depends on it.
        per_thread = 16 // problem.state_dtype.itemsize
        if layout == "vk":
            assert 32 * per_thread <= c.BK * c.BV
        else:
            assert c == configure_decode(replace(problem, B=999), device, layout)
            assert c.BV * problem.state_dtype.itemsize == 32
        assert c == configure_decode(replace(problem, H=1, HV=problem.H), device, layout), "HV counts, not H"


def test_few_rows_use_every_multiprocessor() -> None:
    few, many = (Problem(B=B, T=1, H=12, op="decode") for B in (1, 128))
    assert H200.multiprocessors <= 12 * 128 // configure_decode(few, H200, "vk").BV
    assert configure_decode(many, H200, "vk").BV > configure_decode(few, H200, "vk").BV


# Launches.


@pytest.mark.parametrize("build", builds()[:2] + builds()[-2:], ids=str)
def test_every_parameter_has_what_it_needs(build: DecodeBuild) -> None:
    pytest.importorskip("triton")
    dtypes, launch = build.launch()
    compiling.assert_nothing_is_missing(launch, dtypes)
    assert set(launch.tensors) == set(dtypes)
    p = build.problem
    assert launch.programs == (p.N or p.B) * p.H * -(-p.V // build.config.BV)


def test_batch_strides_of_one_row_do_not_matter() -> None:
    """Packed calls of any number of tokens compile one kernel, and so do a row alone and a row cut out of many."""
    pytest.importorskip("triton")
    build = next(build for build in builds() if build.problem.packed)
    longer = replace(build, problem=replace(build.problem, T=600))
    (_, a), (_, b) = (x.launch() for x in (build, longer))
    assert a.values["T"] != b.values["T"]
    assert {**a.values, "T": 600} == b.values


@pytest.fixture
def jitted(monkeypatch: pytest.MonkeyPatch) -> Jitted:
    """In place of the kernel."""
    launch_on_the_cpu(monkeypatch)
    from flash_kda.backends.triton import decode_launch

    return Jitted.in_place(monkeypatch, decode_launch.kernels, "decode")


@torch.no_grad()
def test_a_known_form_is_launched_directly(jitted: Jitted) -> None:
    """With its own tensors; what is absent is stood in for, and the output is all that is allocated."""
    case = DecodeCase(PACKED.but(lengths=(1, 2)), known=True)
    calls = [case.build() for _ in range(3)]
    o, pointers = launched_directly(jitted, flash_kda.kda_decode, calls, allocations=1)
    x, gate = calls[-1], calls[-1]["gate"]
    given = [*(x[name] for name in ROWS), gate.A_log, gate.dt_bias, x["cu_seqlens"], x["pool"], x["indices"]]
    assert pointers == [t.data_ptr() for t in (*given, x["q"], x["has_initial_state"], o)]


@pytest.mark.parametrize("other", other_forms())
@torch.no_grad()
def test_what_differs_shares_no_launch(other: Call, jitted: Jitted) -> None:
    assert_no_shared_launch(jitted, flash_kda.kda_decode, EACH.build, other)


@torch.no_grad()
def test_gate_parameters_reach_the_kernel_dense_in_float32(jitted: Jitted) -> None:
    assert_dense_gate(jitted, flash_kda.kda_decode, DecodeCase().build())


@pytest.mark.parametrize("rows", [BASE.but(B=0), BASE.but(T=0)], ids=str)
@torch.no_grad()
def test_nothing_is_launched_for_nothing(rows: Case, jitted: Jitted) -> None:
    for _ in range(2):
        assert not run(Target("triton"), DecodeCase(rows).build()).numel()
    assert not jitted.by_triton


@torch.no_grad()
def test_both_zeros_are_one_scale(jitted: Jitted) -> None:
    """They are equal, so they are one form; what is launched does not depend on which came first."""
    for scale in (-0.0, 0.0):
        flash_kda.kda_decode(**EACH.build() | {"scale": scale}, backend="triton")
    given = dict(zip(jitted.arg_names, jitted.by_triton[0][1], strict=True))
    assert math.copysign(1.0, given["scale"]) == 1.0
    assert len(jitted.direct) == 1


# On a GPU.

gpu = pytest.mark.gpu
TRITON = Target("triton", "cuda", partial=True)


@gpu
@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(BASE.but(K=128, V=128, dtype="bfloat16"), known=True),
        DecodeCase(BASE.but(T=4, K=128, V=128), index="each", accepted=True, extra=1),
        DecodeCase(PACKED.but(lengths=(1, 4, 0, 2, 3, 1), tail=2, K=64, V=64), index="each", accepted=True, known=True),
        DecodeCase(PACKED.but(lengths=(1, 1, 1, 0, 0, 0), tail=5), pad=0),
        DecodeCase(BASE.but(T=2, layout="kv", state_dtype="bfloat16"), index="own"),
    ],
    ids=str,
)
def test_replay_is_eager(case: DecodeCase) -> None:
    """A captured call, replayed with other rows, states, indices, lengths and counts, gives the bits of a plain one."""
    others = [on_a_gpu.turned(case, seed).build("cuda") for seed in range(1, 6)]
    on_a_gpu.assert_replays_are_eager(TRITON, run, flash_kda.kda_decode, case.build("cuda"), others)


@gpu
@pytest.mark.parametrize("case", parameters(CASES[::2]))
@torch.no_grad()
def test_a_known_form_gives_the_bits_of_a_checked_call(case: DecodeCase) -> None:
    first, second, other = (replace(case, seed=seed).build("cuda") for seed in (0, 0, 1))
    forms.forget()
    o = run(TRITON, first)
    run(TRITON, other)
    assert_same_bits(run(TRITON, second), o, "o")
    assert forms.form.cache_info().currsize == 1
    assert_same_bits(second["pool"], first["pool"], "pool")


@gpu
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("index", ["own", "one", "each"])
def test_no_wait_no_allocation_no_compilation(index: str, grad: bool) -> None:
    """After the first call: other numbers of rows, other values, other pad indices; checked or known."""
    from flash_kda.backends.triton import decode as kernels

    calls = [
        DecodeCase(Case(B=B, T=3, H=4, HV=8, K=128, V=128, seed=B), index=index, pad=pad, known=True).build("cuda")
        for B, pad in ((200, -1), (300, -1), (300, 0), (200, 0))
    ]
    with torch.set_grad_enabled(grad):
        on_a_gpu.assert_outputs_alone_are_allocated(TRITON, run, flash_kda.kda_decode, kernels.decode, calls)


@gpu
@torch.inference_mode()
def test_host_time() -> None:
    """Enqueueing a call of a known form takes little: the bound is a generous one, for slow hosts."""
    call = DecodeCase(Case(B=32, T=1, H=12, K=128, V=128, dtype="bfloat16")).build("cuda")
    run(TRITON, call)
    run(TRITON, call)

    def enqueue() -> Tensor:
        return flash_kda.kda_decode(**call, backend="triton")

    assert harness.host_us([enqueue], rounds=10, calls=20) < 100


@gpu
@pytest.mark.parametrize("index", ["one", "each"])
@torch.inference_mode()
def test_padding_rows_compile_what_serving_needs(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After calls that touch nothing, no number of rows has Triton compile a kernel again, whatever slots there are."""
    from flash_kda.backends.triton import decode as kernels

    compiled = on_a_gpu.compilations(monkeypatch, kernels.decode)
    rows = 50
    case = DecodeCase(Case(B=rows, T=3, H=12, K=128, V=128, dtype="bfloat16"), index=index, known=True)
    buffers = case.build("cuda")
    before = buffers["pool"].clone()
    for n in range(1, rows + 1):
        nobody = torch.full_like(buffers["indices"][:n], -1)
        o = run(TRITON, first_rows(buffers, slice(n)) | {"indices": nobody})
        assert not o.count_nonzero()
    assert_same_bits(buffers["pool"], before, "pool")
    assert compiled, "the hook is not called"
    compiled.clear()
    for n in range(1, rows + 1):
        other = on_a_gpu.turned(case, n).build("cuda")
        other["pool"] = torch.cat([other["pool"], other["pool"][:n]])
        run(TRITON, first_rows(other, slice(n)))
    assert not compiled


@gpu
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_pools_of_more_than_two_to_the_31_elements(state_dtype: str) -> None:
    case = DecodeCase(Case(B=2, T=2, H=2, K=128, V=128, state_dtype=state_dtype), padding=False)
    call, small = case.build("cuda"), case.build("cuda")
    dtype = small["pool"].dtype
    slots = 2**31 // (2 * 128 * 128) + 9
    if torch.cuda.mem_get_info()[0] < 3 * slots * 2 * 128 * 128 * dtype.itemsize // 2:
        pytest.skip("the GPU has not enough memory")
    call["pool"] = torch.zeros(slots, 2, 128, 128, dtype=dtype, device="cuda")
    call["indices"] = torch.tensor([slots - 1, 5], dtype=torch.int32, device="cuda")
    call["pool"][call["indices"].long()] = small["pool"][small["indices"].long()]
    o, want = run(TRITON, call), run(TRITON, small)
    assert_same_bits(o, want, "o")
    assert_same_bits(call["pool"][call["indices"].long()], small["pool"][small["indices"].long()], "states")
    call["pool"][call["indices"].long()] = 0
    # In parts: a count of the whole takes as much memory again.
    assert not any(bool(part.any()) for part in call["pool"].split(1024))


@gpu
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("T", "index"), [(1, "one"), (4, "one"), (4, "each")])
def test_a_row_of_many_is_that_row_alone(T: int, index: str, state_dtype: str, layout: str) -> None:
    """Bit for bit: many rows have larger programs than one."""
    rows = Case(B=128, T=T, H=12, K=128, V=128, dtype="bfloat16", state_dtype=state_dtype, layout=layout)
    case = DecodeCase(rows, index=index, accepted=index == "each", padding=False)
    on_a_gpu.assert_rows_are_rows_alone(TRITON, run, lambda: case.build("cuda"), (0, 1, 127))


@gpu
def test_more_rows_and_heads_than_a_grid_dimension_holds() -> None:
    case = DecodeCase(Case(B=2050, T=1, H=64, K=16, V=16, dtype="bfloat16"), padding=False)
    on_a_gpu.assert_rows_are_rows_alone(TRITON, run, lambda: case.build("cuda"), (0, 1023, 2049))


@gpu
@pytest.mark.parametrize("B", [1, 20, 128])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_model_shapes(layout: str, state_dtype: str, B: int) -> None:
    """K = V = 128 with every size of a program that serving meets, against the definition."""
    for T, index in ((1, "one"), (4, "each")):
        rows = Case(B=B, T=T, H=2, K=128, V=128, dtype="bfloat16", layout=layout, state_dtype=state_dtype)
        check(TRITON, DecodeCase(rows, index=index, accepted=index == "each"))
