"""The Hopper backend: when it runs, its configurations, compilation without a GPU, and its results on one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from cases import Call, Case, inputs_of, leaves, oracle, spans_of
from compare import assert_outputs, assert_same_bits, assert_states, bits
from compiling import DEVICES, Dtypes, assert_fits, compile_launch, dtypes_of, meta_inputs, source_of
from conftest import forget
from cutting import short_segments
from jitted import Compiled, Jitted, launch_on_the_cpu

import flash_kda
from flash_kda.backends import hopper
from flash_kda.backends.hopper import config as hopper_config
from flash_kda.backends.hopper.config import HopperConfig, configure, later_segments, segment
from flash_kda.backends.triton.config import configure as configure_portable
from flash_kda.bench import harness
from flash_kda.types import Problem

if TYPE_CHECKING:
    from flash_kda.backends.triton.launch import Launch

DEVICE = DEVICES[90]
TOLERANCE = 6e-3


# When it runs.


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"gate": "softplus"}, None),
        ({"V": 256, "packed": True, "N": 3}, None),
        ({"dtype": torch.float16}, "bfloat16"),
        ({"K": 64}, "K = 128"),
        ({"V": 96}, "multiples of 64"),
        ({"qk_l2norm": False}, "normalise"),
        ({"beta_is_logit": False}, "logits"),
        ({"copyable": False}, "side by side"),
        ({"T": 64}, "three chunks"),
        ({"packed": True, "N": 128}, "three chunks"),
        ({"T": 2**31, "H": 1}, "32 bits"),
        ({"T": 2**20, "H": 1024}, "32 bits"),
        ({"grad": True}, None),
        ({"op": "decode"}, "decoding"),
        ({"op": "step"}, "decoding"),
        ({"device": "cpu"}, "CUDA"),
    ],
)
def test_supports(changes: dict[str, Any], reason: str | None) -> None:
    why = hopper.supports(replace(Problem(), **changes))
    assert why is None if reason is None else reason in (why or "")


@pytest.mark.usefixtures("on_hopper")
def test_other_devices_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    with monkeypatch.context() as m:
        m.setattr(triton, "__version__", "3.9.1")
        assert "tested with Triton 3.6.x" in (hopper.supports(Problem()) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert "compute capability 9.0" in (hopper.supports(Problem()) or "")


@pytest.mark.parametrize(
    ("spoil", "copyable"),
    [
        (lambda call: {}, True),
        (lambda call: {"g": call["g"].float()}, False),
        (lambda call: {"q": call["q"].transpose(1, 2).contiguous().transpose(1, 2)}, False),
        (lambda call: {"v": torch.empty(2, 96, 2, 129, dtype=torch.bfloat16)[..., :128]}, False),
        (lambda call: {"k": torch.empty(2, 96, 300, dtype=torch.bfloat16)[..., :256].unflatten(2, (2, 128))}, False),
        (lambda call: {"k": torch.empty(2, 96, 264, dtype=torch.bfloat16)[..., :256].unflatten(2, (2, 128))}, True),
        (lambda call: {"beta": torch.empty(2, 100, 2)[:, :96]}, False),
    ],
    ids=[
        "plain",
        "float32 gate",
        "heads first",
        "padded heads",
        "uneven rows",
        "part of a projection",
        "batch of beta",
    ],
)
def test_copyable(spoil: Any, copyable: bool) -> None:
    call = bfloat16(Case(B=2, T=96, K=128, V=128))
    assert inputs_of(call | spoil(call)).problem.copyable == copyable


# Configurations.


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (Problem(T=8192, H=64), (1, None)),
        (Problem(T=8192, H=96), (2, None)),
        (Problem(B=8, T=1024, H=64), (2, None)),
        (Problem(B=8, T=1024, H=64, V=64), (1, None)),
        (Problem(T=8192, H=12), (1, 1440)),
        (Problem(T=8192, H=33), (1, 2944)),
        (Problem(T=8192, H=34), (1, None)),
        (Problem(T=65536, H=8), (1, 7456)),
        (Problem(T=2048, H=8), (1, None)),
        (Problem(T=4096, H=8), (1, 480)),
        (Problem(T=4096, H=32), (1, None)),
        (Problem(T=65536, H=8, V=256), (1, None)),
        (Problem(T=73600, H=8, N=64, packed=True), (1, 8384)),
        (Problem(T=8292, H=12, N=101, packed=True), (1, 1440)),
        (Problem(T=8192, H=32, N=32, packed=True), (2, None)),
    ],
    ids=str,
)
def test_configure(problem: Problem, expected: tuple[int, int | None]) -> None:
    c = configure(problem, DEVICE)
    assert (c.parts, c.segment) == expected


def test_segments_cover_all_tokens_and_fill_the_device() -> None:
    for T, H, packed in itertools.product((8192, 8193, 10000, 2**20), (1, 2, 8, 16), (False, True)):
        p = Problem(T=T, H=H, N=3 if packed else None, packed=packed)
        tokens = segment(p, DEVICE)
        assert tokens is not None
        assert tokens % hopper_config.CHUNK == 0
        later = later_segments(p, tokens)
        assert (later + 1) * tokens >= T
        assert later * H * 2 <= DEVICE.multiprocessors
        # No fewer than fit, unless the scan over them would take longer than the walks.
        least = math.sqrt(hopper_config.TWO_WALKS * T / hopper_config.SCAN_STEP)
        most = min(DEVICE.multiprocessors // (2 * H), math.floor(least))
        assert tokens - hopper_config.CHUNK <= T / (most + 0.8)


# Compilation without a GPU.


def described(problem: Problem, config: HopperConfig) -> tuple[Dtypes, list[Launch]]:
    """The launches of one forward call, and the dtypes of all that they are passed, by name."""
    from flash_kda.backends.hopper import forward
    from flash_kda.backends.triton import forward as portable

    inputs = meta_inputs(problem)
    inputs = inputs.replace(g=inputs.g.to(inputs.q.dtype))
    final = torch.empty(inputs.state_shape, dtype=inputs.state_dtype, device="meta")
    planner = mock.Mock()
    portable.launch(inputs, torch.empty_like(inputs.v), final, planner)
    (call, *results), (tensors,) = planner.call_args.args, planner.return_value.call_args.args
    scratch, launches = forward.describe(call, config, configure_portable(problem, DEVICE), *results)
    dtypes = dtypes_of(portable.TENSORS, tensors, torch.bfloat16)
    return dtypes | {name: dtype for name, (_, dtype) in scratch.items()}, launches


def test_few_programs_for_hard_chunks() -> None:
    """Four for each multiprocessor, less one, in every launch over them."""
    from flash_kda.backends.hopper import backward
    from flash_kda.backends.triton.common import EASY, HARD

    problem = Problem(T=8192, H=64, gate="softplus")
    forward = described(problem, configure(problem, DEVICE))[1]
    halves = backward.describe(meta_inputs(problem).signature, configure_portable(problem, DEVICE), DEVICE, None)
    for launches in (forward, *(half[1] for half in halves)):
        # Only these kernels have a choice.
        chosen = {x.values["CHUNKS"]: x.programs for x in launches if "CHUNKS" in x.kernel.arg_names}
        assert set(chosen) == {EASY.value, HARD.value}
        assert chosen[HARD.value] == 4 * DEVICE.multiprocessors - 1


def gluon_source_of(launch: Launch, dtypes: Dtypes) -> Any:
    """What Triton compiles for a launch of one of Gluon's kernels, or of its own."""
    from triton._utils import canonicalize_dtype
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    if not launch.matrices:
        return source_of(launch, dtypes)
    types = {torch.float32: gl.float32, torch.bfloat16: gl.bfloat16, torch.int32: gl.int32}
    # With its matrices as values, which ``source_of`` knows.
    values = {**launch.values, **{f"d_{name}": 0 for name in launch.matrices}}
    plain = source_of(replace(launch, values=values, matrices={}), dtypes)
    signature = {}
    for name in launch.kernel.arg_names:
        if name.startswith("d_"):
            matrix = launch.matrices[name[2:]]
            dtype, (rows, columns) = types[dtypes[matrix.tensor]], matrix.block
            layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
            signature[name] = f"tensordesc<{canonicalize_dtype(dtype)}[{rows},{columns}],{layout}>"
        else:
            signature[name] = plain.signature[name]
    names = launch.kernel.arg_names
    constants = {(names.index(k),) if isinstance(k, str) else k: v for k, v in plain.constants.items()}
    return GluonASTSource(launch.kernel, signature, constexprs=constants, attrs=plain.attrs)


# Bytes that a thread may spill.
BUILDS = {
    "whole": (Problem(T=8192, H=64), [("prepare_warp", 0), ("walk", 0)]),
    "shared": (Problem(T=8192, H=96), [("prepare_warp", 0), ("walk", 0)]),
    "two": (Problem(T=8192, H=96, V=64), [("prepare_warp", 0), ("walk", 0)]),
    "packed": (Problem(T=8192, H=96, N=6, packed=True), [("prepare_warp", 16), ("walk", 0)]),
    "softplus": (Problem(T=8192, H=64, gate="softplus"), [("prepare_warp", 64), ("prepare", 512), ("walk", 0)]),
    "cut": (Problem(T=8192, H=8), [("prepare_warp", 0), ("walk", 0), ("scan_segments", 0), ("walk", 0)]),
    "cut-packed": (
        Problem(T=8192, H=8, N=2, packed=True),
        [("prepare_warp", 16), ("cut_sequences", 0), ("walk", 0), ("scan_segments", 0), ("walk", 0)],
    ),
}


@pytest.mark.offline
@pytest.mark.parametrize("name", BUILDS)
def test_kernels_compile(name: str) -> None:
    """Every kernel fits into the device, spills no more than its budget, and eight programs prepare at a time."""
    pytest.importorskip("triton")
    problem, expected = BUILDS[name]
    dtypes, launches = described(problem, configure(problem, DEVICE))
    assert [x.kernel.__name__ for x in launches] == [kernel for kernel, _ in expected]
    for launch, (kernel, budget) in zip(launches, expected, strict=True):
        built = compile_launch(launch, dtypes, 90, gluon_source_of)
        assert_fits(built, 90, budget)
        if kernel == "prepare_warp":
            programs = hopper_config.PREPARE_PROGRAMS
            assert programs * (built.shared + 1024) <= DEVICE.shared_memory_per_multiprocessor
        if kernel == "walk":
            assert built.wgmma, "no wgmma"


# Launches.


class Described(Compiled):
    """A compiled kernel with matrices, whose launcher Triton wraps."""

    def __init__(self, count: int, key: Any, direct: list[Any]) -> None:
        super().__init__(key, direct)
        launcher = self.run.launch

        def wrapped(*arguments: Any) -> None:
            launcher(*arguments)

        self.run.launch = wrapped
        each = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": (32, 64)}
        self.metadata = SimpleNamespace(tensordesc_meta=[each] * count)


@pytest.fixture
def jitted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Jitted]:
    """In place of the kernels, with their parameters; tensors on the CPU are launched, and need no driver."""
    launch_on_the_cpu(monkeypatch)
    from flash_kda.backends.hopper import forward
    from flash_kda.backends.triton import forward as portable
    from flash_kda.backends.triton import launch

    found = {}
    for module, name in ((forward, "prepare_warp"), (forward, "walk"), (portable, "prepare"), (portable, "recurrence")):
        found[name] = Jitted.in_place(monkeypatch, module, name)
        if count := sum(x.startswith("d_") for x in found[name].arg_names):
            found[name].compile = partial(Described, count)
    launch.driver.active.utils = SimpleNamespace(fill_tma_descriptor=lambda *arguments: ("descriptor", arguments[0]))
    monkeypatch.setattr(hopper, "supports", lambda problem: None)
    for module in (forward, portable):
        module.plan.cache_clear()
    return found


def shifted(x: torch.Tensor, elements: int = 1) -> torch.Tensor:
    """The same values some elements past an address that is aligned to 16 bytes."""
    return torch.empty(x.numel() + elements, dtype=x.dtype, device=x.device)[elements:].view_as(x).copy_(x)


def test_a_known_form_is_launched_directly(jitted: dict[str, Jitted]) -> None:
    """With its own tensors, as matrices too."""
    for seed in range(3):
        call = bfloat16(PLAIN.but(seed=seed))
        with mock.patch.object(hopper, "run", wraps=hopper.run) as run:
            o, state = flash_kda.kda(**call)
        assert run.called == (seed == 0)
    walk, prepare = jitted["walk"], jitted["prepare_warp"]
    assert len(walk.by_triton) == len(prepare.by_triton) == 1
    assert len(walk.direct) == len(prepare.direct) == 2
    given = walk.direct[-1][1]
    assert {o.data_ptr(), state.data_ptr(), call["initial_state"].data_ptr()} <= {x for x in given if type(x) is int}
    passed = [x for _, given in (prepare.direct[-1], walk.direct[-1]) for x in given if isinstance(x, tuple)]
    described = {x[-1] for x in passed if x[0] == "descriptor"}
    # Among the others are parts of the scratch memory.
    assert {call[name].data_ptr() for name in "qkgv"} <= described
    assert not jitted["prepare"].by_triton


@pytest.mark.parametrize("name", ["q", "k", "v", "g"])
def test_alignment_of_a_known_form_chooses_the_kernels(name: str, jitted: dict[str, Jitted]) -> None:
    """What hardware copies must be aligned to 16 bytes in this very call; nothing else must."""
    call = bfloat16(PLAIN)
    other, state = call | {name: shifted(call[name])}, call | {"initial_state": shifted(call["initial_state"])}
    far = call | {name: shifted(call[name], 8)}

    def ran(call: Call) -> list[str]:
        before = {kernel: len(f.by_triton) + len(f.direct) for kernel, f in jitted.items()}
        with flash_kda.record_backends() as backends:
            flash_kda.kda(**call)
        assert backends == ["hopper"]
        return [kernel for kernel, f in jitted.items() if len(f.by_triton) + len(f.direct) > before[kernel]]

    own, portable = ["prepare_warp", "walk"], ["prepare", "recurrence"]
    for _ in range(2):
        assert [ran(x) for x in (call, other, state, far)] == [own, portable, own, own]
    assert len(jitted["recurrence"].by_triton) == len(jitted["recurrence"].direct) == 1
    assert len(jitted["walk"].by_triton) == 2
    assert len(jitted["walk"].direct) == 4


@pytest.mark.parametrize("name", ["q", "v"])
def test_the_first_call_of_a_form_may_be_unaligned(name: str, jitted: dict[str, Jitted]) -> None:
    call = bfloat16(PLAIN)
    for _ in range(2):
        flash_kda.kda(**call | {name: shifted(call[name])})
    assert not jitted["walk"].by_triton
    flash_kda.kda(**call)
    assert len(jitted["walk"].by_triton) == 1


# Results.


def bfloat16(case: Case, device: str = "cpu") -> Call:
    """The case with every tensor that is copied in blocks in bfloat16."""
    call = case.but(dtype="bfloat16").build(device)
    return call | {"g": call["g"].bfloat16()}


def run(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    with flash_kda.record_backends() as ran:
        result = flash_kda.kda(**call)
    assert ran == ["hopper"]
    return result


@pytest.fixture(params=[False, True], ids=["whole", "cut"])
def cut(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether sequences are cut into the shortest segments that fill the device."""
    with short_segments(request.param):
        yield request.param


PLAIN = Case(T=200, K=128, V=128)
CASES = (
    *(
        PLAIN.but(gate=gate, strength=s)
        for gate in ("lower_bound", "softplus")
        for s in ("strong", "slow", "saturated")
    ),
    *(PLAIN.but(gate="log", strength=s) for s in ("strong", "slow", "saturated", "hostile")),
    *(PLAIN.but(T=T, B=2, initial=T % 2 == 1) for T in (65, 96, 97, 129, 320)),
    *(PLAIN.but(T=130, H=H, HV=HV) for H, HV in ((1, 3), (2, 4), (40, 80))),
    *(PLAIN.but(T=130, V=V, H=H) for V, H in ((64, 2), (64, 150), (256, 2), (256, 80))),
    PLAIN.but(lengths=(70, 0, 129, 1, 300), tail=40),
    PLAIN.but(lengths=(0, 0, 500, 3, 0), cu_dtype="int32", HV=6),
    PLAIN.but(lengths=(96,) * 9, layout="kv", state_dtype="bfloat16"),
    PLAIN.but(lengths=(5, 700), gate="log", strength="hostile"),
    PLAIN.but(lengths=(31, 333), gate="softplus", tail=1, initial=False),
    PLAIN.but(neg=True, strength="slow", layout="kv"),
    PLAIN.but(A_log=False, dt_bias=None),
    PLAIN.but(scale=-300.0),
    PLAIN.but(final=False),
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results(case: Case, cut: bool) -> None:
    """Output and final states against the definition in float64, per head and per block of rows."""
    call = bfloat16(case, "cuda")
    o, state = run(call)
    expected, expected_state = oracle(call)
    # A block of few rows may be as far off as the other kernels of this precision are.
    baseline, _ = flash_kda.kda(**call, backend="triton")
    assert_outputs(o, expected, call, TOLERANCE, baseline=baseline)
    if state is not None:
        assert_states(state, expected_state, TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "value"), [("v", math.nan), ("k", math.inf), ("q", math.nan), ("g", math.nan)])
def test_poison_stays_where_it_belongs(name: str, value: float, cut: bool) -> None:
    call = bfloat16(PLAIN.but(lengths=(300, 150, 77)), "cuda")
    clean, clean_state = run(call)
    x = call[name].clone()
    x[0, 350].view(-1)[0] = value
    bad = call | {name: x}
    o, state = run(bad)
    expected, expected_state = oracle(bad)
    assert state is not None
    assert clean_state is not None
    assert not o[0, 350].isfinite().all(), "the poison had no effect"
    assert_outputs(o, expected, bad, TOLERANCE)
    assert_states(state, expected_state, TOLERANCE)
    for n, (_, first, end) in enumerate(spans_of(call)):
        if n != 1:
            assert_same_bits(o[0, first:end], clean[0, first:end], "o of another sequence")
            assert_same_bits(state[n], clean_state[n], "another state")


@pytest.mark.gpu
def test_poison_past_the_end_of_every_sequence(cut: bool) -> None:
    call = bfloat16(PLAIN.but(lengths=(97, 150), tail=30), "cuda")
    clean, clean_state = run(call)
    spoilt = {}
    for name in ("q", "k", "v", "g", "beta"):
        spoilt[name] = call[name].clone()
        spoilt[name][0, 247:] = math.nan
    o, state = run(call | spoilt)
    assert_same_bits(o, clean, "o")
    assert_same_bits(state, clean_state, "state")
    assert not o[0, 247:].any()


@pytest.mark.gpu
def test_large_keys_with_saturated_gates(cut: bool) -> None:
    """Beyond what the tiles' exponents hold the walk goes token by token, and is right."""
    call = bfloat16(PLAIN.but(strength="saturated", A_log=False, dt_bias=None), "cuda")
    call["k"] = call["k"] * 1e6
    o, state = run(call)
    expected, expected_state = oracle(call)
    assert_outputs(o, expected, call, TOLERANCE)
    assert_states(state, expected_state, TOLERANCE)


@pytest.mark.gpu
def test_same_bits_and_final_state_in_place(cut: bool) -> None:
    call = bfloat16(PLAIN.but(lengths=(300, 150, 0, 77, 600)), "cuda")
    o, state = run(call)
    for _ in range(20):
        again, state_again = run(call)
        assert_same_bits(again, o, "o")
        assert_same_bits(state_again, state, "state")
    from flash_kda.backends.hopper.forward import forward

    out, S = torch.full_like(o, math.nan), call["initial_state"].clone()
    forward(inputs_of(call | {"initial_state": S}), out, S)
    assert_same_bits(out, o, "o in place")
    assert_same_bits(S, state, "state in place")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_a_thousand_launches_give_the_same_bits(backend: str) -> None:
    """Forward of whole sequences and of cut ones, and thirty times forward and backward."""
    for case in (PLAIN.but(T=4096, H=4), PLAIN.but(lengths=(700, 0, 1348), H=64), PLAIN.but(T=600, gate="softplus")):
        call = bfloat16(case, "cuda") | {"backend": backend}
        o, state = flash_kda.kda(**call)
        changed = torch.zeros((), dtype=torch.bool, device="cuda")
        for _ in range(1000):
            again, state_again = flash_kda.kda(**call)
            changed |= (bits(again) != bits(o)).any() | (bits(state_again) != bits(state)).any()
        assert not changed, f"{case}: a launch gave other bits"
        taped, found = leaves(call)
        first = gradients(taped, found)
        for _ in range(30):
            for name, a, b in zip(found, gradients(taped, found), first, strict=True):
                assert_same_bits(a, b, f"d{name}")


def gradients(call: Call, found: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    o, state = flash_kda.kda(**call)
    assert state is not None
    return torch.autograd.grad(o.float().square().sum() + state.square().sum(), list(found.values()))


@pytest.mark.gpu
def test_unaligned_tensors_and_parts_of_a_projection() -> None:
    call = bfloat16(PLAIN, "cuda")
    o, state = run(call)
    wide = torch.full((1, 200, 3 * 256 + 8), math.nan, device="cuda", dtype=torch.bfloat16)
    parts = {}
    for i, name in enumerate(("q", "k", "v")):
        parts[name] = wide[..., 8 + i * 256 : 8 + (i + 1) * 256].unflatten(2, (2, 128)).copy_(call[name])
    o2, state2 = run(call | parts)
    assert_same_bits(o2, o, "o of a projection")
    assert_same_bits(state2, state, "state of a projection")
    flat = torch.empty(200 * 256 + 1, device="cuda", dtype=torch.bfloat16)[1:]
    o3, _ = run(call | {"q": flat.view(1, 200, 2, 128).copy_(call["q"])})
    expected, _ = oracle(call)
    assert_outputs(o3, expected, call, TOLERANCE)


@pytest.mark.gpu
def test_graph_replays_other_lengths(cut: bool) -> None:
    call = bfloat16(PLAIN.but(lengths=(300, 150, 50)), "cuda")
    other = torch.tensor([0, 10, 420, 490], device="cuda")
    expected = run(call | {"cu_seqlens": other})
    run(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = run(call)
    call["cu_seqlens"].copy_(other)
    graph.replay()
    assert_same_bits(o, expected[0], "o")
    assert_same_bits(state, expected[1], "state")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [PLAIN, PLAIN.but(initial=False, gate="softplus"), PLAIN.but(lengths=(300, 0, 150), tail=9, layout="kv")],
    ids=str,
)
@torch.no_grad()
def test_a_known_form_gives_the_bits_of_a_checked_call(case: Case) -> None:
    """Aligned or not, from other values in between, and into the caller's tensors."""
    call, other = bfloat16(case, "cuda"), bfloat16(case.but(seed=1), "cuda")
    calls = [call, call | {"q": shifted(call["q"])}, other]
    checked = []
    for x in calls:
        forget()
        checked.append(run(x))
    for _ in range(2):
        for x, (o, state) in zip(calls, checked, strict=True):
            again, state_again = run(x)
            assert_same_bits(again, o, "o")
            assert_same_bits(state_again, state, "state")
    if case.gate == "lower_bound" and case.layout == "vk":
        gate = call["gate"]
        rows = {name: call[name] for name in ("q", "k", "v", "g", "beta", "scale", "cu_seqlens")}
        for _ in range(3):
            out, S = torch.full_like(call["v"], math.nan), call["initial_state"].clone()
            results = {"out": out, "initial_state": S, "final_state": S}
            flash_kda.fwd(**rows, **results, A_log=gate.A_log, dt_bias=gate.dt_bias, lower_bound=gate.lower_bound)
            assert_same_bits(out, checked[0][0], "out")
            assert_same_bits(S, checked[0][1], "final_state")


@pytest.mark.gpu
@torch.inference_mode()
def test_host_time() -> None:
    """Enqueueing a call of a known form takes little: the bound is a generous one, for slow hosts."""
    call = bfloat16(Case(T=512, H=64, K=128, V=128), "cuda")
    run(call)
    run(call)
    assert harness.host_us([lambda: flash_kda.kda(**call)], rounds=10, calls=20) < 120


def test_packed_calls_take_turns_by_heads(jitted: dict[str, Jitted], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the workspace of one would be too large: views of the same rows, each turn's own heads."""
    from flash_kda.backends.triton import forward as portable

    case = PLAIN.but(lengths=(120, 0, 77), tail=3, H=3, HV=6)
    monkeypatch.setattr(portable, "MOST_ROWS", 2 * 2 * 200)
    call = bfloat16(case)
    o, state = flash_kda.kda(**call)
    assert state is not None
    for kernel in ("prepare_warp", "walk"):
        f = jitted[kernel]
        assert len(f.by_triton) + len(f.direct) == 2, "one launch for two heads of q, one for the third"
    starts = {x.data_ptr() for _, arguments, _ in jitted["walk"].by_triton for x in arguments if hasattr(x, "data_ptr")}
    assert {o[:, :, 0].data_ptr(), o[:, :, 4].data_ptr(), state[:, 4].data_ptr()} <= starts
    assert not jitted["recurrence"].by_triton
