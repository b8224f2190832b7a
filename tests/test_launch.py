"""What a call costs on the host: it is worked out once per form, and a launch is told apart by all it must be."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Call, Case, inputs_of, oracle
from compare import assert_outputs, assert_same_bits
from jitted import STREAM, Compiled, Jitted, launch_on_the_cpu
from torch import Tensor

import flash_kda
from flash_kda import api, checks, dispatch
from flash_kda.bench import harness
from flash_kda.types import Signature, gate_parameters

pytest.importorskip("triton")
import triton
import triton.language as tl

from flash_kda.backends.triton import forward, launch
from flash_kda.backends.triton.launch import Launch, Plan


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Nor is one needed, and no plan is known."""
    if request.node.get_closest_marker("gpu") is None:
        launch_on_the_cpu(monkeypatch)
    forward.plan.cache_clear()
    yield
    forward.plan.cache_clear()


# A plan.

CPU = torch.device("cpu")
SCRATCH = {"first": (3, torch.float32), "second": (8, torch.int8), "none": (0, torch.int8)}
HOOK: Any = object()


def plan_of(kernel: Jitted, *more: Jitted, **values: Any) -> Plan:
    """Tensors x, y and absent; ``values`` for A and B."""
    launches = [Launch(f, 5, {"A": 1, "B": 2, "unused": 3} | values, {"num_warps": 4}) for f in (kernel, *more)]
    return Plan(CPU, ("x", "y", "absent"), SCRATCH, launches)


def kernel(**options: Any) -> Jitted:
    return Jitted("p_second", "p_x", "p_absent", "p_y", "p_none", "p_first", "B", "A", **options)


def tensors() -> tuple[Tensor, Tensor, None]:
    return torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), None


def test_first_launch_is_tritons() -> None:
    """Pieces do not overlap and are aligned; the first tensor stands in for what is absent or empty."""
    f = kernel()
    x, y, _ = tensors()
    plan_of(f)((x, y, None))
    ((grid, (second, given_x, absent, given_y, none, first, *rest), options),) = f.by_triton
    assert (grid, rest, options) == ((5,), [2, 1], {"num_warps": 4})
    assert given_x is x
    assert given_y is y
    assert absent is none is x
    assert (first.dtype, first.numel()) == SCRATCH["first"][::-1]
    assert (second.dtype, second.numel()) == SCRATCH["second"][::-1]
    assert second.data_ptr() - first.data_ptr() == launch.ALIGNMENT
    assert not f.direct


def test_later_launches_are_direct() -> None:
    """With the pointers of their own tensors, through the compiled kernel of the first."""
    f = kernel()
    plan = plan_of(f)
    plan(tensors())
    x, y, _ = tensors()
    with mock.patch.object(torch, "empty", wraps=torch.empty) as empty:
        plan((x, y, None))
    assert len(f.by_triton) == 1
    assert empty.call_count == 1, "one allocation for all scratch memory"
    ((key, arguments),) = f.direct
    start = arguments[-3]
    fixed = (key, "cooperative", "pdl", None, None, ("packed",), None, None, None)
    pointers = (start + launch.ALIGNMENT, x.data_ptr(), x.data_ptr(), y.data_ptr(), x.data_ptr(), start)
    assert arguments == (5, 1, 1, STREAM, *fixed, *pointers, 2, 1)


@pytest.mark.parametrize("scratch", [{}, {"none": (0, torch.int8)}], ids=["none", "empty"])
def test_no_memory_is_allocated_for_no_scratch(scratch: launch.Scratch) -> None:
    """The first tensor stands in for a piece without elements, at the first launch and at later ones."""
    f = Jitted("p_x", "p_y", *(f"p_{name}" for name in scratch), "A")
    plan = Plan(CPU, ("x", "y"), scratch, [Launch(f, 5, {"A": 1}, {})])
    x, y, _ = tensors()
    with mock.patch.object(torch, "empty", side_effect=AssertionError("allocated")):
        plan((x, y))
        plan((x, y))
    given = [x, y, *(x for _ in scratch)]
    ((_, (*passed, _), _),) = f.by_triton
    assert all(a is b for a, b in zip(passed, given, strict=True))
    ((_, arguments),) = f.direct
    assert arguments[-len(given) - 1 :] == (*(z.data_ptr() for z in given), 1)


def test_launches_keep_their_order() -> None:
    first, second = kernel(), kernel()
    second.by_triton, second.direct = first.by_triton, first.direct
    plan = plan_of(first, second, A=9)
    plan(tensors())
    plan(tensors())
    assert len(first.by_triton) == len(first.direct) == 2


def test_alignment_tells_launches_apart() -> None:
    """An address that Triton compiles another kernel for goes through Triton once more, and then has its own."""
    f = kernel()
    plan = plan_of(f)
    y = torch.zeros(9, dtype=torch.bfloat16)
    for _ in range(3):
        for shift in (0, 1, 8):  # 16 bytes on, it is aligned again
            plan((torch.zeros(4), y[shift:], None))
    assert len(f.by_triton) == 2
    assert len(f.direct) == 7
    aligned = [key[0][3] for key, _ in f.direct]
    assert aligned == [(torch.bfloat16, shift != 1) for shift in (8, 0, 1, 8, 0, 1, 8)]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_told(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever watches launches is told by Triton of every one."""
    f = kernel()
    plan = plan_of(f)
    plan(tensors())
    for watching in (SimpleNamespace(calls=[print]), print):  # a chain, or a lone function as in older versions
        with monkeypatch.context() as m:
            m.setattr(launch.triton.knobs.runtime, hook, watching)
            plan(tensors())
    assert len(f.by_triton) == 3
    plan(tensors())
    assert (len(f.by_triton), len(f.direct)) == (3, 1)


def test_versions_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the launcher is another, or a kernel wants memory of Triton's, the launcher's Python part runs as well."""
    wanting = kernel(compile=lambda key, direct: Compiled(key, direct, scratch=64))
    other = kernel()
    for f, version in ((wanting, "3.6.1"), (other, "3.7.0")):
        monkeypatch.setattr(launch.triton, "__version__", version)
        plan = plan_of(f)
        plan(tensors())
        plan(tensors())
        assert len(f.by_triton) == 1
        ((key, arguments),) = f.direct
        assert arguments[:9] == (5, 1, 1, STREAM, key, ("packed",), None, None, None)
    # The interpreter compiles nothing, and an unknown Triton has nothing that is known: all launches go through it.
    for compiled in (None, SimpleNamespace(run=print)):
        f = kernel(compile=lambda *_, compiled=compiled: compiled)
        plan = plan_of(f)
        plan(tensors())
        plan(tensors())
        assert len(f.by_triton) == 2


@triton.jit
def twice(p_x, A):
    tl.store(p_x, tl.load(p_x) * 2 + A)


@triton.jit
def wrong(p_x, A):
    tl.store(p_x, tl.load(p_x) + tl.arange(0, 3))


@triton.jit
def thrice(p_x, A):
    tl.store(p_x, tl.load(p_x) * 3 + A)


@pytest.fixture
def compiles_for_an_h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton's own compilation, without the driver that it asks what for, into a cache of its own."""
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    asked = {"get_current_device": 0, "get_current_stream": STREAM, "get_current_target": target}
    active = SimpleNamespace(**{name: lambda *_, x=x: x for name, x in asked.items()})
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    for kernel in (twice, wrong, thrice):
        kernel.device_caches.clear()


def compiled(kernel: Any) -> int:
    return len(kernel.device_caches[0][0])


@pytest.mark.triton36
@pytest.mark.usefixtures("compiles_for_an_h200")
def test_kernels_are_compiled_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other's compilation to have begun; a caller's own mode of compilation is left alone."""
    both, compile_one = threading.Barrier(2, timeout=60), triton.compiler.compile

    def compile_both(*given: Any, **options: Any) -> Any:
        both.wait()
        return compile_one(*given, **options)

    monkeypatch.setattr(triton.compiler, "compile", compile_both)
    calls = [(Launch(kernel, 1, {"A": 1}, {"num_warps": 1}), (torch.zeros(4), 1)) for kernel in (twice, thrice)]
    with ThreadPoolExecutor(1) as pool, triton.AsyncCompileMode(pool) as mode:
        launch._compile_together(calls)
        assert not mode.raw_futures
    assert compiled(twice) == compiled(thrice) == 1
    launch._compile_together(calls)  # or the barrier would break
    assert not both.broken


@pytest.mark.triton36
@pytest.mark.usefixtures("compiles_for_an_h200")
def test_what_does_not_compile_is_left_to_its_launch() -> None:
    calls = [(Launch(kernel, 1, {"A": 1}, {"num_warps": 1}), (torch.zeros(4), 1)) for kernel in (wrong, twice)]
    launch._compile_together(calls)
    assert (compiled(wrong), compiled(twice)) == (0, 1)
    with pytest.raises(triton.CompilationError):
        wrong.warmup(torch.zeros(4), 1, grid=(1,), num_warps=1)


@pytest.mark.usefixtures("compiles_for_an_h200")
def test_another_triton_compiles_one_kernel_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    launch._compile_together([(Launch(kernel, 1, {"A": 1}, {}), (torch.zeros(4), 1)) for kernel in (twice, thrice)])
    assert compiled(twice) == compiled(thrice) == 0


def test_a_plan_compiles_its_kernels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first launch, with the arguments that it gets; one kernel alone goes the usual way."""
    seen: list[Any] = []
    monkeypatch.setattr(launch, "_compile_together", seen.append)
    first, second = kernel(), kernel()
    plan = plan_of(first, second)
    for _ in range(3):
        plan(tensors())
    (calls,) = seen
    assert [x.kernel for x, _ in calls] == [first, second]
    assert [tuple(arguments) for _, arguments in calls] == [x.by_triton[0][1] for x in (first, second)]


def test_names_must_be_known() -> None:
    with pytest.raises(KeyError, match="C"):
        plan_of(Jitted("p_x", "p_y", "C"))(tensors())
    with pytest.raises(KeyError, match="z"):
        plan_of(Jitted("p_x", "p_z", "A"))(tensors())


# Calls.

BASE = Case(B=2, T=40, H=2, HV=4, K=16, V=24, dtype="bfloat16")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> tuple[Jitted, Jitted]:
    """In place of the real ones, with their parameters."""
    return Jitted.in_place(monkeypatch, forward, "prepare"), Jitted.in_place(monkeypatch, forward, "recurrence")


def kda(call: Call) -> None:
    flash_kda.kda(**call, backend="triton")


def test_a_repeated_call_collects_pointers_only(kernels: tuple[Jitted, Jitted]) -> None:
    """Nothing is checked, chosen, described or looked up in Triton a second time."""
    call = BASE.build()
    kda(call)
    worked_out = (checks.check_signature.cache_info().misses, forward.plan.cache_info().misses)
    again = mock.Mock(side_effect=AssertionError("worked out again"))
    with (
        mock.patch.object(forward, "describe", again),
        mock.patch.object(api, "check", again),
        mock.patch.object(dispatch, "choose", again),
    ):
        for _ in range(3):
            kda({name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()})
    assert worked_out == (checks.check_signature.cache_info().misses, forward.plan.cache_info().misses)
    for f in kernels:
        assert len(f.by_triton) == 1
        assert len(f.direct) == 3


@pytest.mark.parametrize("case", [BASE, BASE.but(initial=False), BASE.but(final=False)], ids=str)
def test_a_known_form_writes_its_own_results(case: Case, kernels: tuple[Jitted, Jitted]) -> None:
    """New tensors as a checked call makes them, and the call's own inputs."""
    (o, state), *later = [flash_kda.kda(**(call := case.but(seed=seed).build()), backend="triton") for seed in range(3)]
    for again, state_again in later:
        assert (again.shape, again.stride(), again.dtype) == (o.shape, o.stride(), o.dtype)
        assert (state is None) == (state_again is None)
        if state is not None and state_again is not None:
            assert (state_again.shape, state_again.dtype) == (state.shape, state.dtype)
    recurrence = kernels[1]
    arguments = recurrence.direct[-1][1]
    names = [name for name in recurrence.arg_names if name.startswith("p_")]
    given = dict(zip(names, arguments[-len(recurrence.arg_names) :], strict=False))
    assert given["p_o"] == later[-1][0].data_ptr()
    assert given["p_v"] == call["v"].data_ptr()
    if case.final:
        assert given["p_S"] == later[-1][1].data_ptr()
    if case.initial:
        assert given["p_S0"] == call["initial_state"].data_ptr()


def test_results_of_the_caller_are_written_in_a_known_form(kernels: tuple[Jitted, Jitted]) -> None:
    """By FlashKDA's interface, strided ones too, and the state in place."""
    call = BASE.but(V=16).build()
    out, S = widened(torch.empty_like(call["v"])), widened(call["initial_state"])
    with mock.patch.object(dispatch, "explain", return_value=SimpleNamespace(backend="triton")):
        for _ in range(3):
            rows = {name: call[name] for name in ("q", "k", "v", "g", "beta", "scale")}
            gate = call["gate"]
            flash_kda.fwd(
                **rows,
                out=out,
                A_log=gate.A_log,
                dt_bias=gate.dt_bias,
                lower_bound=-5.0,
                initial_state=S,
                final_state=S,
            )
    recurrence = kernels[1]
    assert len(recurrence.by_triton) == 1
    names = [name for name in recurrence.arg_names if name.startswith("p_")]
    for _, arguments in recurrence.direct:
        given = dict(zip(names, arguments[-len(recurrence.arg_names) :], strict=False))
        assert (given["p_o"], given["p_S0"], given["p_S"]) == (out.data_ptr(), S.data_ptr(), S.data_ptr())
    assert len(recurrence.direct) == 2


@pytest.mark.parametrize("what", ["A_log", "dt_bias", "cu_seqlens"])
def test_what_kernels_cannot_read_is_converted(what: str, kernels: tuple[Jitted, Jitted]) -> None:
    """The checks admit parameters in float64, and strides, in every call of the form."""
    call = Case(lengths=(5, 20), H=2, K=16, V=24).build()
    gate, cu = call["gate"], call["cu_seqlens"]
    changes: Call = {
        "A_log": {"gate": flash_kda.LowerBoundGate(gate.A_log.double(), gate.dt_bias)},
        "dt_bias": {"gate": flash_kda.LowerBoundGate(gate.A_log, gate.dt_bias.t().contiguous().t())},
        "cu_seqlens": {"cu_seqlens": cu.repeat_interleave(2)[::2]},
    }
    other = call | changes[what]
    for f in kernels:
        f.compile = lambda *_: None
    for _ in range(3):
        kda(other)
        for f in kernels:
            given = dict(zip(f.arg_names, f.by_triton[-1][1], strict=True))
            for name, x in (("p_A_log", gate.A_log), ("p_dt_bias", gate.dt_bias), ("p_cu", cu)):
                if name in given:
                    assert_same_bits(given[name], x, name)
                    assert given[name].is_contiguous()
    assert len(kernels[0].by_triton) == 3


@pytest.mark.parametrize("case", [BASE.but(T=0), BASE.but(B=0), BASE.but(B=1, lengths=(), tail=5)], ids=str)
def test_nothing_is_launched_for_nothing(case: Case, kernels: tuple[Jitted, Jitted]) -> None:
    """Zeros, and the states that came, in every call."""
    for seed in range(3):
        call = case.but(seed=seed).build()
        o, state = flash_kda.kda(**call, backend="triton")
        assert not o.count_nonzero()
        assert_same_bits(state, call["initial_state"], "state")
    assert not any(f.by_triton for f in kernels)


def test_a_call_in_parts_is_in_parts_again(kernels: tuple[Jitted, Jitted], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no form that would launch it whole."""
    monkeypatch.setattr(forward, "MOST_ROWS", 40 * 4)
    for count in (1, 2, 3):
        with mock.patch.object(forward, "launch", wraps=forward.launch) as launched:
            kda(BASE.build())
        assert launched.call_count == 2, count


def test_a_known_form_keeps_no_tensor(kernels: tuple[Jitted, Jitted]) -> None:
    call = BASE.build()
    followed = [weakref.ref(x) for x in (*call.values(), *gate_parameters(call["gate"])) if isinstance(x, Tensor)]
    for _ in range(2):
        followed += [weakref.ref(x) for x in flash_kda.kda(**call, backend="triton") if x is not None]
    del call
    for f in kernels:
        assert f.direct
        f.by_triton.clear()
    assert len(followed) == 12
    assert not any(x() is not None for x in followed)


def test_one_device_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """So nobody asks for it, and the launch is the plan itself."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    plan = plan_of(kernel())
    assert launch.on_device(CPU, plan) is plan


def test_another_current_device(kernels: tuple[Jitted, Jitted], monkeypatch: pytest.MonkeyPatch) -> None:
    """A known form is launched on its tensors' device, which is made the current one where it is not."""
    call = BASE.build()
    kda(call)
    kda(call)
    made = mock.MagicMock()
    monkeypatch.setattr(torch.cuda, "device", made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    kda(call)
    made.assert_called_once_with(call["q"].device)
    assert made.return_value.__enter__.call_count == made.return_value.__exit__.call_count == 1
    assert [len(f.direct) for f in kernels] == [2, 2]


def shifted(x: Tensor) -> Tensor:
    """The same values at an address that is not aligned to 16 bytes."""
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view_as(x).copy_(x)


def widened(x: Tensor) -> Tensor:
    """The same values in rows that are longer."""
    return torch.empty(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype, device=x.device)[..., : x.shape[-1]].copy_(x)


def variants(call: Call) -> Iterator[tuple[str, Call]]:
    """Calls that compute something else, or the same from something else, and may not share a launch."""
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        yield f"{name} not aligned", call | {name: shifted(call[name])}
        yield f"strides of {name}", call | {name: widened(call[name])}
    yield "strides of beta", call | {"beta": call["beta"].transpose(1, 2).contiguous().transpose(1, 2)}
    yield "dtype of g", call | {"g": call["g"].bfloat16()}
    yield "dtype of beta", call | {"beta": call["beta"].bfloat16()}
    yield "dtype of the states", call | {"initial_state": call["initial_state"].bfloat16()}
    yield "dtype of the rows", call | {name: call[name].half() for name in ("q", "k", "v")}
    yield "no initial state", call | {"initial_state": None}
    yield "no final state", call | {"output_final_state": False}
    yield (
        "layout of the states",
        call
        | {
            "state_layout": "kv",
            "initial_state": call["initial_state"].mT.contiguous(),
        },
    )
    yield "scale", call | {"scale": 0.5}
    yield "large scale", call | {"scale": 100.0}
    yield "no normalisation", call | {"qk_l2norm": False}
    yield "beta itself", call | {"beta_is_logit": False}
    yield "negative eigenvalues", call | {"allow_neg_eigval": True}
    gate = call["gate"]
    A_log, dt_bias = gate.A_log, gate.dt_bias
    yield "another bound", call | {"gate": flash_kda.LowerBoundGate(A_log, dt_bias, -1.0)}
    yield "no A_log", call | {"gate": flash_kda.LowerBoundGate(None, dt_bias)}
    yield "no dt_bias", call | {"gate": flash_kda.LowerBoundGate(A_log, None)}
    yield "softplus gate", call | {"gate": flash_kda.SoftplusGate(A_log, dt_bias)}
    yield "log gate", call | {"gate": flash_kda.LogGate()}
    first = {name: call[name][:1] for name in ("q", "k", "v", "g", "beta")}
    ends = torch.tensor([0, 9, 40], device=call["q"].device)
    yield "one sequence", call | first | {"initial_state": call["initial_state"][:1]}
    yield "packed", call | first | {"cu_seqlens": ends}
    yield "packed, 32 bits", call | first | {"cu_seqlens": ends.int()}
    yield "other lengths", call | {name: call[name][:, :33] for name in ("q", "k", "v", "g", "beta")}


VARIANTS = [name for name, _ in variants(BASE.build())]


@pytest.mark.parametrize("index", range(len(VARIANTS)), ids=VARIANTS)
def test_what_differs_shares_no_launch(index: int, kernels: tuple[Jitted, Jitted]) -> None:
    call = BASE.build()
    _, other = list(variants(call))[index]
    for _ in range(2):
        kda(call)
        kda(other)
    for f in kernels:
        assert len(f.by_triton) >= 2
        assert [key for key, _ in f.direct] == f.keys, "a launch of another call"
        for (grid, given, _), (_, direct) in zip(f.by_triton, f.direct, strict=True):
            values = [x for x in given if not isinstance(x, Tensor)]
            assert direct[:4] == (*grid, 1, 1, STREAM)
            assert direct[-len(values) :] == tuple(values)
    assert any(f.keys[0] != f.keys[-1] for f in kernels)


def test_one_batch_row_has_no_stride(kernels: tuple[Jitted, Jitted]) -> None:
    """Of several rows it is passed; of one it would only have kernels compiled anew for another T."""
    for B, T in ((1, 40), (1, 33), (2, 40)):
        kda(Case(B=B, T=T, H=3, K=16, V=24).build())
    for f in kernels:
        rows = [name for name in f.arg_names if name.endswith("_b")]
        given = [dict(zip(f.arg_names, arguments, strict=True)) for _, arguments, _ in f.by_triton]
        assert "beta_b" in rows
        assert all(given[i][name] == 0 for i in (0, 1) for name in rows)
        assert given[2]["beta_b"] == 40 * 3


def test_results_of_the_caller_share_no_launch(kernels: tuple[Jitted, Jitted]) -> None:
    """Strides of out and final state, and the final state's dtype, where it is not the initial one's."""
    inputs = inputs_of(BASE.build() | {"initial_state": None})
    out, final = torch.empty_like(inputs.v), torch.empty(inputs.state_shape)
    given = [(out, final), (widened(out), final), (out, widened(final)), (out, final.bfloat16()), (out, None)]
    for _ in range(2):
        for results in given:
            forward.launch(inputs, *results)
    recurrence = kernels[1]
    assert recurrence.keys == [key for key, _ in recurrence.direct]
    assert len(set(map(repr, recurrence.keys))) == len(given)


def test_equal_signatures_are_one_object() -> None:
    call = BASE.build()
    first = inputs_of(call).signature
    assert inputs_of({name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}).signature is first
    for name, other in variants(call):
        # Addresses are no part of it.
        assert (inputs_of(other).signature is first) == ("aligned" in name), name


def test_a_changed_value_has_its_own_signature() -> None:
    inputs = inputs_of(BASE.build())
    assert inputs.initial_state is not None
    half = inputs.replace(initial_state=inputs.initial_state.bfloat16())
    assert half.problem.state_dtype == torch.bfloat16
    assert half.signature is Signature.of(*half)
    assert half.signature is not inputs.signature


def test_both_zeros_are_one_scale(kernels: tuple[Jitted, Jitted]) -> None:
    """They are equal, so one signature serves both; what is launched does not depend on which came first."""
    call = BASE.build()
    for scale in (-0.0, 0.0):
        kda(call | {"scale": scale})
    given = dict(zip(kernels[1].arg_names, kernels[1].by_triton[0][1], strict=True))
    assert math.copysign(1.0, given["scale"]) == 1.0
    assert len(kernels[1].direct) == 1


# On a GPU.

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("index", range(len(VARIANTS)), ids=VARIANTS)
@torch.no_grad()
def test_direct_launches_compute_the_same(index: int) -> None:
    """The bits of Triton's own launch, after calls that differ in one thing have been launched."""
    call = BASE.build("cuda")
    for _ in range(2):
        kda(call)
    _, other = list(variants(call))[index]
    results = [flash_kda.kda(**other, backend="triton") for _ in range(2)]
    with mock.patch.object(launch, "_hooked", return_value=True):
        o, state = flash_kda.kda(**other, backend="triton")
    for again, state_again in results:
        assert_same_bits(again, o, "o")
        assert (state is None) == (state_again is None)
        if state is not None:
            assert_same_bits(state_again, state, "state")
    # Twice what other tests allow: some of these keys are not normalised, and the states so much worse conditioned.
    assert_outputs(o, oracle(other)[0], other, 1.2e-2)


@gpu
@torch.no_grad()
def test_host_time() -> None:
    """Enqueueing a call takes little: the bound is a generous one, for slow hosts."""
    call = Case(T=512, H=64, K=128, V=128, dtype="bfloat16").build("cuda")

    def run() -> tuple[Tensor, Tensor]:
        o, state = flash_kda.kda(**call, backend="triton")
        assert state is not None
        return o, state

    run()
    run()
    assert harness.host_us([run], rounds=10, calls=20) < 150
