"""The kernel of the decode step: in the interpreter, compiled for four architectures, configured, launched."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import compiling
import interpreted_step
import on_a_gpu
import pytest
import torch
from cases import Call, Case, Target, parameters
from compare import assert_same_bits
from compiling import DEVICES, Build, Built, Dtypes, every, meta
from decoding import BASE, DecodeCase, first_rows
from interpreting import interpreted_cases
from jitted import Jitted, assert_dense_gate, assert_no_shared_launch, launch_on_the_cpu, launched_directly
from stepping import CASES, ROWS, StepCase, check, rows_case, run
from test_step_checks import BASE as PLAIN
from test_step_checks import other_forms
from torch import Tensor

import flash_kda
from flash_kda import forms
from flash_kda.backends.triton.config import STEP_CHANNELS, StepConfig, configure_step
from flash_kda.bench import harness
from flash_kda.types import DecodeInputs, Problem, StepInputs, gate_parameters

if TYPE_CHECKING:
    from flash_kda.backends.triton.launch import Launch

# The interpreter.


@interpreted_cases(interpreted_step)
def test_interpreter(went_wrong: str | None) -> None:
    """The kernel's arithmetic and addresses against the definition in float64."""
    assert went_wrong is None, went_wrong


# Compilation for each architecture.


@dataclass(frozen=True)
class StepBuild(Build):
    """The kernel of the step, with the filters and last inputs that a model has."""

    layout: str = "vk"
    W: int = 4
    bias: bool = False
    known: bool = False
    conv_dtype: torch.dtype = torch.bfloat16

    @property
    def config(self) -> StepConfig:
        return configure_step(self.problem, self.layout)

    def __str__(self) -> str:
        p = self.problem
        state, conv = ("bf16" if x == torch.bfloat16 else "fp32" for x in (p.state_dtype, self.conv_dtype))
        flags = "".join(f"-{name}" for name in ("bias", "known") if getattr(self, name))
        return (
            f"sm_{self.capability}-{state}-{self.layout}-H{p.H}-HV{p.HV or p.H}-K{p.K}-V{p.V}-W{self.W}-{conv}{flags}"
            f"-{p.gate}"
        )

    def call(self) -> StepInputs:
        """The arguments as tensors without data."""
        p = self.problem
        inputs = compiling.meta_rows(p, self.layout)
        decode = DecodeInputs(
            inputs=inputs,
            pool=compiling.meta_pool(inputs, p.state_dtype),
            indices=meta(p.B, dtype=torch.int32),
            num_accepted=None,
            has_initial_state=meta(p.B, dtype=torch.bool) if self.known else None,
            pad_index=-1,
            write_states=True,
            out=None,
        )
        channels = [math.prod(x.shape[2:]) for x in (inputs.q, inputs.k, inputs.v)]
        return StepInputs(
            decode=decode,
            z=torch.empty_like(inputs.v),
            conv_pool=meta(len(decode.pool), self.W - 1, sum(channels), dtype=self.conv_dtype),
            conv_weights=tuple(meta(n, self.W) for n in channels),
            conv_biases=tuple(meta(n) for n in channels) if self.bias else None,
            norm_weight=meta(p.V),
            norm_eps=1e-5,
        )

    def launch(self) -> tuple[Dtypes, Launch]:
        from flash_kda.backends.triton import step_launch

        call = self.call()
        inputs = call.decode.inputs
        (launch,) = step_launch.plan(call, self.config, torch.empty_like(inputs.v)).launches
        return compiling.dtypes_of(
            step_launch.TENSORS, (*call.tensors, *gate_parameters(inputs.gate)), inputs.q.dtype
        ), launch


def builds() -> list[StepBuild]:
    """Shipped configurations over states, layouts, sizes and kinds of calls."""

    def problem(**changes: Any) -> Problem:
        return Problem(**{"B": 128, "T": 1, "H": 12, "state_dtype": torch.float32, "op": "step"} | changes)

    found: list[StepBuild] = []
    for state, layout in itertools.product((torch.float32, torch.bfloat16), ("vk", "kv")):
        found.append(StepBuild(90, problem(state_dtype=state), layout))
        found.append(StepBuild(90, problem(state_dtype=state, K=16, V=16), layout))
    for K, V in ((64, 64), (100, 60), (128, 256), (256, 128), (256, 256), (200, 100), (16, 256)):
        found.append(StepBuild(90, problem(K=K, V=V)))
    found += [StepBuild(90, problem(gate=gate)) for gate in ("softplus", "log")]
    found += [
        StepBuild(90, problem(), bias=True, known=True),
        StepBuild(90, problem(), conv_dtype=torch.float32),
        StepBuild(90, problem(dtype=torch.float32), conv_dtype=torch.float32, bias=True),
        *(StepBuild(90, problem(), W=W) for W in (1, 2, 3)),
        StepBuild(90, problem(HV=24), layout="kv"),
    ]
    for capability in DEVICES:
        found.append(StepBuild(capability, problem(), known=True))
        found.append(StepBuild(capability, problem(), layout="kv"))
        found.append(StepBuild(capability, problem(HV=24)))
        found.append(StepBuild(capability, problem(K=256, V=256)))
    return found


@pytest.mark.parametrize("sizes", [{}, {"H": 1, "HV": 3, "K": 33, "V": 17, "dtype": torch.float32}], ids=str)
def test_any_rows_are_compiled_alike(sizes: dict[str, Any]) -> None:
    """How a row's sums are made depends neither on how many rows there are nor on where they lie."""
    pytest.importorskip("triton")
    from flash_kda.backends.triton.step import step

    sources = []
    for B in (1, 6, 128):
        problem = Problem(**{"B": B, "T": 1, "H": 12, "state_dtype": torch.float32, "op": "step"} | sizes)
        dtypes, launch = StepBuild(90, problem, known=True).launch()
        source = compiling.source_of(launch, dtypes)
        sources.append((source.signature, source.constants, source.attrs))
    assert sources[0] == sources[1] == sources[2]
    aligned = {x.name for x in step.params if x.name.startswith("p_") and not x.do_not_specialize_on_alignment}
    assert {name[2:] for name in aligned} == {
        *("A_log", "dt_bias", "S", "conv", "norm", "q_weight", "k_weight", "v_weight", "q_bias", "k_bias", "v_bias")
    }


@every(builds())
def test_compiles(build: StepBuild, built: Built) -> None:
    """Next to nothing spills, states move in pieces of 16 bytes, and last inputs are all read before one is written.

    And lanes that hold the same sum have the same bits of it.
    """
    c, p = build.config, build.problem
    # Four registers, where their number is limited and a thread has single channels.
    compiling.assert_fits(built, build.capability, 16 if c.registers and build.layout == "kv" else 0)
    assert built.registers <= (c.registers or 255)
    assert not built.unrounded
    # Vectors pass through it, and in the "kv" layout partial sums over K, but no states.
    assert built.shared < c.BK * c.BV
    if p.K >= 64 and p.K == c.BK:
        pieces = c.BV * c.BK * p.state_dtype.itemsize // (16 * 32 * c.warps)
        assert built.wide_loads >= pieces
        assert built.wide_stores >= pieces
    assert built.order.count("gpu.barrier") == 2
    order = ", ".join(built.order)
    inputs, state, after = (part.split(", ") for part in order.split("gpu.barrier"))
    assert "tt.store" not in inputs + state
    assert state.count("tt.load") == 1
    # Last inputs of q with k and of v, the state, and the output.
    assert after.count("tt.store") == 2 * (build.W - 1) + 2
    assert "tt.load" not in after
    if c.BV >= p.V and p.HV in (None, p.H):
        assert built.late_loads == 0, "a load waits for another one to have been used"


@pytest.mark.offline
def test_two_programs_share_a_multiprocessor() -> None:
    """Where it counts: while one computes, the other one's states are under way."""
    pytest.importorskip("triton")
    build = StepBuild(90, Problem(B=128, T=1, H=12, op="step"))
    built = build.compile()
    assert built.error is None, built.error
    assert 2 * build.config.warps * 32 * built.registers <= 65536


# Configurations.


@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_configurations_are_sound(layout: str) -> None:
    for state, K, V, (H, HV) in itertools.product(
        (torch.float32, torch.bfloat16),
        (16, 20, 64, 100, 128, 200, 256),
        (16, 40, 64, 128, 130, 256),
        ((1, 1), (12, 12), (4, 12)),
    ):
        problem = Problem(B=7, T=1, H=H, HV=HV, K=K, V=V, state_dtype=state, op="step")
        c = configure_step(problem, layout)
        assert K <= c.BK < 2 * max(K, 9)
        assert c.BK & (c.BK - 1) == c.BV & (c.BV - 1) == c.warps & (c.warps - 1) == 0
        assert c.BV < 2 * V
        per_thread = c.BK * c.BV // (32 * c.warps)
        assert 1 <= per_thread <= 64
        assert c.warps <= 8
        assert c.BV % c.rows == c.BK % c.piece == 0
        if layout == "vk" and per_thread >= STEP_CHANNELS:
            assert c.BV // c.rows * min(STEP_CHANNELS, c.BK) == per_thread, "along V"
            assert c.BK // c.piece * (16 // state.itemsize) == STEP_CHANNELS, "along K"
        assert c == configure_step(replace(problem, B=999), layout), "a row's bits depend on the number of rows"


# Launches.


@pytest.mark.parametrize("build", [builds()[0], builds()[1], builds()[-1]], ids=str)
def test_every_parameter_has_what_it_needs(build: StepBuild) -> None:
    pytest.importorskip("triton")
    dtypes, launch = build.launch()
    compiling.assert_nothing_is_missing(launch, dtypes)
    assert set(launch.tensors) == set(dtypes)
    assert launch.programs == build.problem.B * build.problem.H


@pytest.fixture
def jitted(monkeypatch: pytest.MonkeyPatch) -> Jitted:
    """In place of the kernel."""
    launch_on_the_cpu(monkeypatch)
    from flash_kda.backends.triton import step_launch

    return Jitted.in_place(monkeypatch, step_launch.kernels, "step")


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_known_form_is_launched_directly(bias: bool, jitted: Jitted) -> None:
    """In one launch with its own tensors; what is absent is stood in for, and the output is all that is allocated."""
    case = StepCase(DecodeCase(BASE, known=True), bias=bias)
    calls = [case.build() for _ in range(3)]
    o, pointers = launched_directly(jitted, flash_kda.kda_decode_step, calls, allocations=1)
    x = calls[-1]
    biases = x["conv_biases"] or [x["q"]] * 3
    given = [*(x[name] for name in ROWS), x["gate"].A_log, x["gate"].dt_bias, x["pool"], x["conv_pool"], x["indices"]]
    given += [x["has_initial_state"], *x["conv_weights"], *biases, x["norm_weight"], o]
    assert pointers == [t.data_ptr() for t in given]


@pytest.mark.parametrize("other", other_forms())
@torch.no_grad()
def test_what_differs_shares_no_launch(other: Call, jitted: Jitted) -> None:
    assert_no_shared_launch(jitted, flash_kda.kda_decode_step, PLAIN.build, other)


@torch.no_grad()
def test_gate_parameters_reach_the_kernel_dense_in_float32(jitted: Jitted) -> None:
    assert_dense_gate(jitted, flash_kda.kda_decode_step, StepCase().build())


@torch.no_grad()
def test_nothing_is_launched_for_nothing(jitted: Jitted) -> None:
    for _ in range(2):
        assert not run(Target("triton"), rows_case(B=0).build()).numel()
    assert not jitted.by_triton


# On a GPU.

gpu = pytest.mark.gpu
TRITON = Target("triton", "cuda", partial=True)
MODEL = Case(B=6, T=1, H=4, K=128, V=128, dtype="bfloat16")


@gpu
@pytest.mark.parametrize(
    "case",
    [
        StepCase(DecodeCase(MODEL, known=True), conv_dtype="bfloat16", z_dtype="bfloat16"),
        StepCase(DecodeCase(MODEL.but(HV=8, K=64, V=96), known=True, pad=0), bias=True),
        StepCase(DecodeCase(BASE.but(layout="kv", state_dtype="bfloat16"), index="own"), W=3),
    ],
    ids=str,
)
def test_replay_is_eager(case: StepCase) -> None:
    """A captured call, replayed with other rows, states, last inputs, indices and flags, gives a plain one's bits."""
    others = [replace(case, decode=on_a_gpu.turned(case.decode, seed)).build("cuda") for seed in range(1, 6)]
    on_a_gpu.assert_replays_are_eager(TRITON, run, flash_kda.kda_decode_step, case.build("cuda"), others)


@gpu
@pytest.mark.parametrize("case", parameters(CASES[::2]))
@torch.no_grad()
def test_a_known_form_gives_the_bits_of_a_checked_call(case: StepCase) -> None:
    first, second = (case.build("cuda") for _ in range(2))
    forms.forget()
    o = run(TRITON, first)
    assert_same_bits(run(TRITON, second), o, "o")
    assert forms.form.cache_info().currsize == 1
    for name in ("pool", "conv_pool"):
        assert_same_bits(second[name], first[name], name)


@gpu
@pytest.mark.parametrize("HV", [12, 24])
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_many_runs_give_the_same_bits(layout: str, HV: int) -> None:
    """Enough rows to fill the GPU many times over: what is read too late, or written too early, shows up."""
    rows = MODEL.but(B=300, H=12, HV=HV, layout=layout)
    case = StepCase(DecodeCase(rows, padding=False), conv_dtype="bfloat16")
    first = case.build("cuda")
    pools = {name: first[name].clone() for name in ("pool", "conv_pool")}
    o = run(TRITON, first)
    at = first["indices"].long()
    inputs = torch.cat([first[name].flatten(2) for name in ("q", "k", "v")], -1)
    assert_same_bits(first["conv_pool"][at], torch.cat([pools["conv_pool"][at], inputs], 1)[:, 1:], "last inputs")
    for i in range(30):
        again = first | {name: pool.clone() for name, pool in pools.items()}
        assert_same_bits(run(TRITON, again), o, f"o of run {i}")
        for name in pools:
            assert_same_bits(again[name], first[name], f"{name} of run {i}")


@gpu
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_no_wait_no_allocation_no_compilation(grad: bool) -> None:
    """After the first call: other numbers of rows, other values, other pad indices; checked or known."""
    from flash_kda.backends.triton import step as kernels

    calls = [
        StepCase(DecodeCase(MODEL.but(B=B, HV=8, seed=B), pad=pad, known=True), bias=True).build("cuda")
        for B, pad in ((200, -1), (300, -1), (300, 0), (200, 0))
    ]
    with torch.set_grad_enabled(grad):
        on_a_gpu.assert_outputs_alone_are_allocated(TRITON, run, flash_kda.kda_decode_step, kernels.step, calls)


@gpu
@torch.inference_mode()
def test_host_time() -> None:
    """Enqueueing a call of a known form takes little: the bound is a generous one, for slow hosts."""
    call = StepCase(DecodeCase(MODEL.but(B=32, H=12))).build("cuda")
    run(TRITON, call)
    run(TRITON, call)

    def enqueue() -> Tensor:
        return flash_kda.kda_decode_step(**call, backend="triton")

    assert harness.host_us([enqueue], rounds=10, calls=20) < 120


@gpu
@torch.inference_mode()
def test_padding_rows_compile_what_serving_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """After calls that touch nothing, no number of rows has Triton compile a kernel again, whatever slots there are."""
    from flash_kda.backends.triton import step as kernels

    compiled = on_a_gpu.compilations(monkeypatch, kernels.step)
    rows = 50
    case = StepCase(DecodeCase(MODEL.but(B=rows, H=12), known=True))
    buffers = case.build("cuda")
    before = {name: buffers[name].clone() for name in ("pool", "conv_pool")}
    for n in range(1, rows + 1):
        nobody = torch.full_like(buffers["indices"][:n], -1)
        assert not run(TRITON, first_rows(buffers, slice(n)) | {"indices": nobody}).count_nonzero()
    for name, x in before.items():
        assert_same_bits(buffers[name], x, name)
    assert compiled, "the hook is not called"
    compiled.clear()
    for n in range(1, rows + 1):
        other = replace(case, decode=on_a_gpu.turned(case.decode, n)).build("cuda")
        other |= {name: torch.cat([other[name], other[name][:n]]) for name in before}
        run(TRITON, first_rows(other, slice(n)))
    assert not compiled


@gpu
def test_pools_of_more_than_two_to_the_31_elements() -> None:
    rows = Case(B=2, T=1, H=2, K=16, V=16, state_dtype="bfloat16")
    case = StepCase(DecodeCase(rows, padding=False), conv_dtype="bfloat16")
    call, small = case.build("cuda"), case.build("cuda")
    at, slots = small["indices"].long(), 2**31 // (3 * 96) + 9
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("the GPU has not enough memory")
    where = torch.tensor([slots - 1, 5], device="cuda")
    for name in ("pool", "conv_pool"):
        call[name] = torch.zeros(slots, *small[name].shape[1:], dtype=torch.bfloat16, device="cuda")
        call[name][where] = small[name][at]
    o = run(TRITON, call | {"indices": where.int()})
    assert_same_bits(o, run(TRITON, small), "o")
    for name in ("pool", "conv_pool"):
        assert_same_bits(call[name][where], small[name][at], name)
        call[name][where] = 0
        # In parts: a count of the whole takes as much memory again.
        assert not any(bool(part.any()) for part in call[name].split(2**18))


@gpu
def test_more_rows_and_heads_than_a_grid_dimension_holds() -> None:
    case = StepCase(DecodeCase(Case(B=2050, T=1, H=64, K=16, V=16, dtype="bfloat16"), padding=False))
    on_a_gpu.assert_rows_are_rows_alone(TRITON, run, lambda: case.build("cuda"), (0, 1023, 2049))


@gpu
@pytest.mark.parametrize("B", [1, 20, 128])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_model_shapes(layout: str, state_dtype: str, B: int) -> None:
    """K = V = 128 as serving meets it, against the definition."""
    for conv, HV in (("bfloat16", 2), ("float32", 4)):
        rows = Case(B=B, T=1, H=2, HV=HV, K=128, V=128, dtype="bfloat16", layout=layout, state_dtype=state_dtype)
        check(TRITON, StepCase(DecodeCase(rows), conv_dtype=conv, z_dtype="bfloat16"))
