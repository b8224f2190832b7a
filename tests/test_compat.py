"""FlashKDA's and FLA's interfaces: the same numbers as ``kda``, every option, and errors before anything is written."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, Call, Case, inputs_of, leaves, oracle, parameters
from compare import assert_outputs, assert_same_bits, assert_states, bits
from through_fla import ROWS, FellThrough, as_fla, fall_through, real_fla
from torch import Tensor

import flash_kda
from flash_kda import dispatch
from flash_kda.compat import fla as compat
from flash_kda.compat import flashkda

ROOT = Path(__file__).parents[1]
FWD_CASES = tuple(
    c for c in CASES if c.gate == "lower_bound" and c.layout == "vk" and c.l2norm and c.logit and not c.neg
)
SMALL = Case(B=2, T=6, H=2, HV=4, K=3, V=5)
# What FlashKDA itself takes.
OWN = Case(T=20, H=2, K=128, V=128, dtype="bfloat16")


# FlashKDA's interface


def as_fwd(call: Call, **changes: Any) -> dict[str, Any]:
    """The arguments of ``fwd`` for a call of ``kda``, with results that hold NaN."""
    gate = call["gate"]
    out = torch.full(call["v"].shape, torch.nan, dtype=call["v"].dtype, device=call["v"].device)
    n = call["q"].shape[0] if call["cu_seqlens"] is None else call["cu_seqlens"].numel() - 1
    (HV, V), K = call["v"].shape[2:], call["q"].shape[3]
    state_dtype = torch.float64 if call["q"].dtype == torch.float64 else torch.float32
    if call["initial_state"] is not None:
        state_dtype = call["initial_state"].dtype
    final = torch.full((n, HV, V, K), torch.nan, dtype=state_dtype, device=out.device)
    return {
        **{name: call[name] for name in (*ROWS, "scale", "initial_state", "cu_seqlens")},
        "out": out,
        "final_state": final if call["output_final_state"] else None,
        "A_log": gate.A_log,
        "dt_bias": gate.dt_bias,
        "lower_bound": gate.lower_bound,
    } | changes


def fwd(arguments: dict[str, Any], backend: str = "cpu") -> None:
    with flash_kda.record_backends() as ran:
        assert flash_kda.fwd(**arguments) is None
    assert ran == [backend]


@pytest.mark.parametrize("case", parameters(FWD_CASES))
def test_fwd_equals_kda(case: Case) -> None:
    call = case.build()
    o, state = flash_kda.kda(**call)
    arguments = as_fwd(call)
    fwd(arguments)
    assert_same_bits(arguments["out"], o, "out")
    assert_same_bits(arguments["final_state"], state, "final_state")


def test_the_cases_of_fwd_cover_its_options() -> None:
    assert {c.dtype for c in FWD_CASES} == {"bfloat16", "float16", "float32", "float64"}
    assert {c.state_dtype for c in FWD_CASES} == {"float32", "bfloat16", "float64"}
    assert {(c.A_log, c.dt_bias) for c in FWD_CASES} >= {(False, None), (False, "full"), (True, None), (True, "flat")}
    assert {c.cu_dtype for c in FWD_CASES if c.lengths} == {"int32", "int64"}
    assert {(c.initial, c.final) for c in FWD_CASES} == {(a, b) for a in (False, True) for b in (False, True)}


@pytest.mark.parametrize("side", ["bfloat16", "float32"])
def test_fwd_as_fla_and_sglang_call_it(side: str) -> None:
    """Seven arguments by position, the others by name, in FlashKDA's dtypes and sizes; then everything by position."""
    call = OWN.build()
    call |= {name: call[name].to(getattr(torch, side)) for name in ("g", "beta")}
    want, want_state = oracle(call)
    names = ("A_log", "dt_bias", "lower_bound", "initial_state", "final_state", "cu_seqlens")
    first, second = as_fwd(call, scale=128**-0.5), as_fwd(call, scale=128**-0.5)
    for x in (first, second):
        head = [x[name] for name in (*ROWS, "scale", "out")]
        tail = {name: x[name] for name in names}
        flash_kda.fwd(*head, **tail) if x is first else flash_kda.fwd(*head, *tail.values(), None)
        assert_outputs(x["out"], want, call, 1e-5)
        assert_states(x["final_state"], want_state, 1e-5)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lengths", [None, (0, 5, 66, 0)], ids=str)
def test_fwd_in_place(lengths: tuple[int, ...] | None, state_dtype: str) -> None:
    """``final_state`` is ``initial_state``, as a tensor of its own and as slots of a larger pool."""
    call = Case(lengths=lengths, K=9, V=12, state_dtype=state_dtype).build()
    o, state = flash_kda.kda(**call)
    S = call["initial_state"].clone()
    pool = torch.full((3 * len(S), *S.shape[1:]), torch.nan, dtype=S.dtype)
    pool[1::3] = S
    for place in (S, pool[1::3]):
        arguments = as_fwd(call, initial_state=place, final_state=place)
        fwd(arguments)
        assert_same_bits(arguments["out"], o, "out")
        assert_same_bits(place, state, "state")
    assert bool(pool[0::3].isnan().all())
    assert bool(pool[2::3].isnan().all())


def test_fwd_strided() -> None:
    """Rows that are slices of one projection, results that are slices of larger buffers, 32-bit boundaries."""
    case = Case(lengths=(5, 0, 60), tail=3, H=2, HV=4, K=12, V=20, dtype="bfloat16", cu_dtype="int32")
    call = case.build()
    call |= {name: call[name].bfloat16() for name in ("g", "beta")}
    widths = {"q": 24, "k": 24, "v": 80, "g": 48, "beta": 4}
    fused = torch.full((1, 68, sum(widths.values()) + 9), torch.nan, dtype=torch.bfloat16)
    views, offset = {}, 3
    for name, width in widths.items():
        views[name] = fused[..., offset : offset + width].unflatten(-1, call[name].shape[2:])
        views[name].copy_(call[name])
        offset += width
    before = fused.clone()
    buffer = torch.full((2, 68, 6, 32), torch.nan, dtype=torch.bfloat16)
    states = torch.full((5, 4, 20, 16), torch.nan)
    out, final = buffer[:1, :, 1:5, :20], states[1:4, ..., :12]
    fwd(as_fwd(call | views, out=out, final_state=final))
    o, state = flash_kda.kda(**call)
    assert_same_bits(out, o, "out")
    assert_same_bits(final, state, "final_state")
    assert torch.equal(bits(fused), bits(before))
    assert int(buffer.isfinite().sum()) == out.numel()
    assert int(states.isfinite().sum()) == final.numel()


@pytest.mark.parametrize("initial", ["float32", "bfloat16", None])
@pytest.mark.parametrize("final", ["float32", "bfloat16"])
def test_fwd_states_of_different_dtypes(initial: str | None, final: str) -> None:
    """The wider of the two carries the state; a bfloat16 initial state does not round a float32 final one."""
    call = Case(T=70, V=8, initial=initial is not None, state_dtype=initial or "float32").build()
    S0 = call["initial_state"]
    o, state = flash_kda.kda(**call | {"initial_state": None if S0 is None else S0.float()})
    assert state is not None
    arguments = as_fwd(call, final_state=torch.empty(state.shape, dtype=getattr(torch, final)))
    fwd(arguments)
    assert_same_bits(arguments["out"], o, "out")
    assert_same_bits(arguments["final_state"], state.to(arguments["final_state"].dtype), "final_state")


def test_fwd_wants_no_gradients() -> None:
    """Inputs that require them change nothing, and the results are not on the tape."""
    call = Case(T=20).build()
    taped, _ = leaves(call)
    arguments, plain = as_fwd(taped), as_fwd(call)
    fwd(arguments)
    fwd(plain)
    for name in ("out", "final_state"):
        assert not arguments[name].requires_grad
        assert_same_bits(arguments[name], plain[name], name)
    assert torch.is_grad_enabled()


def test_workspace() -> None:
    call = SMALL.build()
    plain = as_fwd(call)
    fwd(plain)
    size = flash_kda.get_workspace_size(12, 4, 2)
    for workspace in (torch.empty(size, dtype=torch.uint8), torch.full((10**5,), torch.nan)):
        arguments = as_fwd(call, workspace=workspace)
        fwd(arguments)
        assert_same_bits(arguments["out"], plain["out"], "out")


def test_workspace_size() -> None:
    for arguments in ((0, 1), (8192, 96), (8192, 96, 6)):
        assert type(flash_kda.get_workspace_size(*arguments)) is int
    assert flash_kda.get_workspace_size(T_total=8192, H=96, N=6) == 0
    with pytest.raises(ValueError, match=r"^T_total: got -1, expected 0 or more"):
        flash_kda.get_workspace_size(-1, 2)
    with pytest.raises(TypeError, match=r"^H: got 2.0, expected an integer"):
        flash_kda.get_workspace_size(1, 2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^N: got True, expected an integer"):
        flash_kda.get_workspace_size(1, 2, True)


def test_a_workspace_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is that of :func:`get_workspace_size` for the call's tokens, value heads and sequences."""
    asked = []
    monkeypatch.setattr(flashkda, "get_workspace_size", lambda *sizes: asked.append(sizes) or 64)
    fwd(as_fwd(SMALL.build(), workspace=torch.empty(16)))
    arguments = as_fwd(SMALL.build(), workspace=torch.empty(63, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"^workspace: got 63 bytes, strides .*, expected 64, contiguous"):
        flash_kda.fwd(**arguments)
    assert asked == [(12, 4, 2)] * 2
    assert bool(arguments["out"].isnan().all())


FWD_ERRORS: tuple[tuple[type[Exception], dict[str, Any], str], ...] = (
    (TypeError, {"out": None}, "out: got NoneType, expected a torch.Tensor"),
    (
        ValueError,
        {"out": torch.zeros(2, 6, 4, 3)},
        r"out: got shape (2, 6, 4, 3), expected [B, T, HV, V] = (2, 6, 4, 5)",
    ),
    (
        TypeError,
        {"out": torch.zeros(2, 6, 4, 5).half()},
        "out: got torch.float16, expected torch.float32, the dtype of v",
    ),
    (ValueError, {"out": torch.zeros(2, 6, 4, 5, device="meta")}, "out: got device meta, expected cpu"),
    (ValueError, {"out": torch.zeros(2, 6, 5, 4).transpose(2, 3)}, "out: got strides (120, 20, 1, 4), expected"),
    (ValueError, {"out": torch.zeros(2, 6, 1, 5).expand(2, 6, 4, 5)}, "out: got strides (30, 5, 0, 1), expected"),
    (TypeError, {"final_state": 1}, "final_state: got int, expected a torch.Tensor"),
    (
        ValueError,
        {"final_state": torch.zeros(2, 4, 3, 5)},
        "final_state: got shape (2, 4, 3, 5), expected [N, HV, V, K]",
    ),
    (
        ValueError,
        {"final_state": torch.zeros(3, 4, 5, 3)},
        "final_state: got shape (3, 4, 5, 3), expected [N, HV, V, K]",
    ),
    (
        TypeError,
        {"final_state": torch.zeros(2, 4, 5, 3).half()},
        "final_state: got torch.float16, expected one of float32",
    ),
    (ValueError, {"final_state": torch.zeros(2, 4, 5, 3, device="meta")}, "final_state: got device meta, expected cpu"),
    (ValueError, {"final_state": torch.zeros(2, 4, 3, 5).mT}, "final_state: got strides (60, 15, 1, 5), expected"),
    (
        ValueError,
        {"final_state": torch.zeros(1, 4, 5, 3).expand(2, -1, -1, -1)},
        "final_state: got strides (0, 15, 3, 1)",
    ),
    (TypeError, {"workspace": 10**6}, "workspace: got int, expected a torch.Tensor"),
    (ValueError, {"workspace": torch.zeros(9, device="meta")}, "workspace: got device meta, expected cpu"),
    (ValueError, {"workspace": torch.zeros(18)[::2]}, "workspace: got 36 bytes, strides (2,), expected 0, contiguous"),
    (TypeError, {"lower_bound": None}, "lower_bound: got None, expected a number"),
    (ValueError, {"lower_bound": 0.0}, "lower_bound: got 0.0, expected a value in [-5.0, 0)"),
    (TypeError, {"A_log": torch.zeros(4).bfloat16()}, "A_log: got torch.bfloat16, expected one of float32"),
    (ValueError, {"A_log": torch.zeros(2)}, "A_log: got shape (2,), expected [HV] = (4,)"),
    (ValueError, {"dt_bias": torch.zeros(4, 4)}, "dt_bias: got shape (4, 4), expected [HV, K] = (4, 3)"),
    (ValueError, {"beta": torch.zeros(2, 6, 2)}, "beta: got shape (2, 6, 2), expected [B, T, HV] = (2, 6, 4)"),
    (TypeError, {"initial_state": torch.zeros(2, 4, 5, 3).half()}, "initial_state: got torch.float16, expected one of"),
    (ValueError, {"cu_seqlens": torch.tensor([0, 6])}, "cu_seqlens: got a batch of 2 with packed sequences"),
    (TypeError, {"scale": "1"}, "scale: got '1', expected a number"),
)


@pytest.mark.parametrize(("error", "changes", "message"), FWD_ERRORS, ids=lambda x: x if isinstance(x, str) else "")
def test_fwd_errors_come_before_anything_is_written(error: type[Exception], changes: Any, message: str) -> None:
    arguments = as_fwd(SMALL.build()) | changes
    written = {name: arguments[name] for name in ("out", "final_state") if isinstance(arguments[name], Tensor)}
    written = {name: x for name, x in written.items() if x.device.type == "cpu"}
    before = {name: bits(x).clone() for name, x in written.items()}
    with pytest.raises(error) as caught:
        flash_kda.fwd(**arguments)
    assert str(caught.value).startswith(message)
    for name, x in written.items():
        assert torch.equal(bits(x), before[name]), f"{name} was written"


def test_fwd_refuses_results_over_its_inputs() -> None:
    call = Case(T=6, H=2, K=4, V=4).build()
    for name in ("q", "k", "v", "g"):
        with pytest.raises(ValueError, match=rf"^out: got the memory of {name}, expected memory of its own"):
            flash_kda.fwd(**as_fwd(call, out=call[name]))
    base = torch.randn(1, 2, 4, 8)
    before, S = base.clone(), base[..., :4]
    other = base.view(-1)[: S.numel()].view(S.shape)
    with pytest.raises(
        ValueError, match=r"^final_state: got the memory of initial_state as torch.float32 with strides"
    ):
        flash_kda.fwd(**as_fwd(call, initial_state=S, final_state=other))
    assert_same_bits(base, before, "initial_state")


def test_fwd_without_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(supports=lambda problem: "it is tired", run=None)
    monkeypatch.setattr(dispatch, "load", lambda name: module)
    arguments = as_fwd(SMALL.build())
    with pytest.raises(NotImplementedError, match="it is tired"):
        flash_kda.fwd(**arguments)
    assert bool(arguments["out"].isnan().all())
    assert bool(arguments["final_state"].isnan().all())


# FLA's interface

FLA_CASES = tuple(
    c for c in CASES if not (c.gate == "softplus" and not c.A_log) and not (c.initial and c.state_dtype == "bfloat16")
)
FUNCTIONS = {"chunk": compat.chunk_kda, "recurrent": compat.fused_recurrent_kda}
functions = pytest.mark.parametrize("name", FUNCTIONS)


def same(name: str, arguments: dict[str, Any], call: Call) -> None:
    """FLA's function gives the bits of ``kda``."""
    o, state = flash_kda.kda(**call)
    with flash_kda.record_backends() as ran:
        o2, state2 = FUNCTIONS[name](**arguments)
    assert ran == ["cpu"]
    assert_same_bits(o2, o, "o")
    assert_same_bits(state2, state, "state")


@functions
@pytest.mark.parametrize("case", parameters(FLA_CASES))
def test_fla_functions_equal_kda(name: str, case: Case) -> None:
    call = case.build()
    same(name, as_fla(call), call)


def test_the_cases_of_fla_cover_its_options() -> None:
    seen = [{k: v for k, v in as_fla(c.build()).items() if not isinstance(v, Tensor)} for c in FLA_CASES]
    for option in ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"):
        assert {x[option] for x in seen} == {True, False}, option
    assert {x["state_v_first"] for x in seen} == {True, False}
    assert {c.gate for c in FLA_CASES} == {"lower_bound", "softplus", "log"}


@functions
@pytest.mark.parametrize("gate", ["lower_bound", "softplus", "log"])
def test_gradients_through_fla_functions(name: str, gate: str) -> None:
    """Every input's gradient, bit for bit that of ``kda``."""
    case = Case(T=40, H=1, HV=2, K=6, V=5, gate=gate, layout="kv", dt_bias="flat")
    grads = []
    for run in (lambda call: flash_kda.kda(**call), lambda call: FUNCTIONS[name](**as_fla(call))):
        taped, found = leaves(case.build())
        o, state = run(taped)
        grads.append(
            dict(zip(found, torch.autograd.grad(o.sum() + state.square().sum(), list(found.values())), strict=True))
        )
    assert grads[0].keys() >= {*ROWS, "initial_state"} | ({"A_log", "dt_bias"} if gate != "log" else set())
    for leaf, want in grads[0].items():
        assert_same_bits(grads[1][leaf], want, f"d{leaf}")


@functions
def test_a_gradient_that_no_backend_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that says so, where FLA's recurrent function returns a constant."""
    module = types.SimpleNamespace(supports=lambda p: "computes no gradients yet" if p.grad else None, run=None)
    monkeypatch.setattr(dispatch, "load", lambda name: module)
    taped, _ = leaves(SMALL.build())
    with pytest.raises(NotImplementedError, match="computes no gradients yet"):
        FUNCTIONS[name](**as_fla(taped))


@functions
def test_parameters_as_models_hold_them(name: str) -> None:
    """A_log ``[1, 1, HV, 1]`` and dt_bias in bfloat16: widened, with gradients in the shape and dtype given."""
    call = Case(T=20, K=6, V=5).build()
    gate = call["gate"]
    A_log, dt_bias = gate.A_log.bfloat16(), gate.dt_bias.bfloat16()
    wide = call | {"gate": replace(gate, A_log=A_log.float(), dt_bias=dt_bias.float())}
    same(name, as_fla(call, A_log=A_log.view(1, 1, -1, 1), dt_bias=dt_bias), wide)
    A_log, dt_bias = (x.requires_grad_() for x in (A_log.view(1, 1, -1, 1), dt_bias))
    o, _ = FUNCTIONS[name](**as_fla(call, A_log=A_log, dt_bias=dt_bias))
    for x, d in zip((A_log, dt_bias), torch.autograd.grad(o.sum(), [A_log, dt_bias]), strict=True):
        assert (d.shape, d.dtype) == (x.shape, x.dtype)
        assert bool(d.count_nonzero())


@pytest.mark.parametrize(
    "changes",
    [
        {"safe_gate": True},
        {"safe_gate": True, "use_gate_in_kernel": False},
        {"disable_recompute": True},
        {"disable_recompute": False},
        {"chunk_size": 32},
        {"cu_seqlens_cpu": torch.tensor([0, 1, 70])},
        {"return_intermediate_states": False, "cp_context": None, "use_graph": False, "max_num_seqs": None},
    ],
    ids=str,
)
def test_arguments_without_effect(changes: dict[str, Any]) -> None:
    call = Case(lengths=(30, 40)).build()
    if not changes.get("use_gate_in_kernel", True):
        call |= {"gate": flash_kda.LogGate(), "g": -call["g"].abs()}
    same("chunk", as_fla(call) | changes, call)


def test_disable_recompute_is_told() -> None:
    call = SMALL.build()
    for changes, recompute in (({}, True), ({"disable_recompute": False}, True), ({"disable_recompute": True}, False)):
        assert inspect.unwrap(compat.chunk_kda)(**as_fla(call) | changes).recompute == recompute


@functions
def test_parameters_are_not_read_without_the_gate(name: str) -> None:
    call = Case(gate="log").build()
    same(name, as_fla(call, A_log=torch.zeros(2), dt_bias=torch.zeros(32), lower_bound=-5.0), call)


@functions
def test_the_old_name_of_the_layout(name: str) -> None:
    for layout, value in (("vk", True), ("kv", False)):
        call = Case(V=9, layout=layout).build()
        arguments = as_fla(call, state_v_first=False, transpose_state_layout=value)
        with pytest.warns(DeprecationWarning, match="state_v_first") as warned:
            same(name, arguments, call)
        assert [w.filename for w in warned] == [__file__]
    with pytest.raises(ValueError, match=r"^transpose_state_layout: got it beside state_v_first"):
        FUNCTIONS[name](**as_fla(call, state_v_first=True, transpose_state_layout=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_initial_states(dtype: torch.dtype) -> None:
    """Widened by the recurrent function, refused by the chunk one; the final state is float32, as FLA's."""
    call = Case(V=9, layout="kv").build()
    S = call["initial_state"].to(dtype)
    same("recurrent", as_fla(call, initial_state=S), call | {"initial_state": S.float()})
    with pytest.raises(TypeError, match=rf"^initial_state: got {dtype}, expected float32"):
        compat.chunk_kda(**as_fla(call, initial_state=S))


REFUSED = ("return_intermediate_states", "cp_context", "use_graph", "max_num_seqs")


@pytest.mark.parametrize("argument", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(argument: str) -> None:
    value = 4 if argument == "max_num_seqs" else True
    with pytest.raises(NotImplementedError, match=rf"^{argument}: got {value}, which is not implemented"):
        compat.chunk_kda(**as_fla(SMALL.build(), **{argument: value}))


@functions
@pytest.mark.parametrize("argument", ["head_first", "ssm_state_indices", "out", "g_bias"])
def test_unknown_arguments_are_refused_by_name(name: str, argument: str) -> None:
    with pytest.raises(TypeError, match=rf"_kda\(\) got an unexpected keyword argument '{argument}'"):
        FUNCTIONS[name](**as_fla(SMALL.build()), **{argument: None})


FLA_ERRORS: tuple[tuple[type[Exception], dict[str, Any], str], ...] = (
    (ValueError, {"A_log": None, "lower_bound": None}, "A_log: got None with use_gate_in_kernel and no lower_bound"),
    (ValueError, {"lower_bound": -6.0}, "lower_bound: got -6.0, expected a value in"),
    (ValueError, {"allow_neg_eigval": True, "use_beta_sigmoid_in_kernel": False}, "allow_neg_eigval: got True without"),
    (ValueError, {"dt_bias": torch.zeros(4)}, "dt_bias: got shape (4,), expected"),
    (TypeError, {"A_log": 0.0}, "A_log: got float, expected a torch.Tensor"),
    (
        ValueError,
        {"state_v_first": False},
        "initial_state: got shape (2, 4, 5, 3), expected [N, HV, K, V] = (2, 4, 3, 5)",
    ),
    (ValueError, {"beta": torch.zeros(2, 6, 4, 5)}, "beta: got shape (2, 6, 4, 5), expected [B, T, HV]"),
    (ValueError, {"cu_seqlens": torch.tensor([0, 6])}, "cu_seqlens: got a batch of 2 with packed sequences"),
    (TypeError, {"output_final_state": 1}, "output_final_state: got 1, expected True or False"),
)
CHUNK_ERRORS: tuple[tuple[type[Exception], dict[str, Any], str], ...] = (
    (ValueError, {"safe_gate": True, "lower_bound": None}, "lower_bound: got None with safe_gate"),
    (ValueError, {"chunk_size": 16}, "chunk_size: got 16, expected one of 32, 64"),
)


@functions
@pytest.mark.parametrize(("error", "changes", "message"), FLA_ERRORS, ids=lambda x: x if isinstance(x, str) else "")
def test_fla_errors(name: str, error: type[Exception], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(error) as caught:
        FUNCTIONS[name](**as_fla(SMALL.build()) | changes)
    assert str(caught.value).startswith(message)
    assert (compat.why_not(**as_fla(SMALL.build()) | changes) or "").startswith(message)


@pytest.mark.parametrize(("error", "changes", "message"), CHUNK_ERRORS, ids=lambda x: x if isinstance(x, str) else "")
def test_errors_of_the_chunk_function(error: type[Exception], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(error) as caught:
        compat.chunk_kda(**as_fla(SMALL.build()) | changes)
    assert str(caught.value).startswith(message)


def test_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = as_fla(SMALL.build())
    with flash_kda.record_backends() as ran:
        assert compat.why_not(**arguments) is None
        assert compat.why_not(**arguments, cp_context=1) == (
            "cp_context: got 1, which is not implemented; expected its default"
        )
        assert "unexpected keyword argument 'head_first'" in (compat.why_not(**arguments, head_first=True) or "")
        module = types.SimpleNamespace(supports=lambda problem: "it is tired", run=None)
        monkeypatch.setattr(dispatch, "load", lambda name: module)
        assert "it is tired" in (compat.why_not(**arguments) or "")
    assert ran == []


# Registration with FLA's dispatcher, FLA's own and one of the same contract in fifty lines


class FakeBackend:
    backend_type, priority = "base", 5
    implementation: Callable[..., Any] | None = None
    verifier: Callable[..., Any] | None = None

    @classmethod
    def is_available(cls) -> bool:
        return True

    def is_enabled(self) -> bool:
        return True


def fake_fla() -> tuple[types.ModuleType, types.ModuleType]:
    """``fla.backends`` and ``fla.ops.kda`` with the contract that FLA 0.6 has."""
    backends, kda = types.ModuleType("fla.backends"), types.ModuleType("fla.ops.kda")
    registries: dict[Any, dict[str, FakeBackend]] = {}

    def register(entry: Callable[..., Any], *, backend: type[FakeBackend], verifier: Callable[..., Any]) -> Any:
        def decorator(implementation: Callable[..., Any]) -> Callable[..., Any]:
            made = backend()
            made.implementation, made.verifier = implementation, verifier
            registries[inspect.unwrap(entry)][made.backend_type] = made
            return implementation

        return decorator

    def dispatched(default: Callable[..., Any]) -> Callable[..., Any]:
        mine = registries.setdefault(default, {})

        @functools.wraps(default)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for made in sorted(mine.values(), key=lambda b: b.priority):
                if made.is_available() and made.is_enabled() and made.verifier is not None:
                    try:
                        accepted, _ = made.verifier(*args, **kwargs)
                    except Exception:
                        continue
                    if accepted and made.implementation is not None:
                        return made.implementation(*args, **kwargs)
            return default(*args, **kwargs)

        return wrapper

    def chunk_kda(q: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise FellThrough(f"fla's own kernels, for q {q.shape}")

    backends.BaseBackend, backends.register = FakeBackend, register  # type: ignore[attr-defined]
    kda.chunk_kda = dispatched(chunk_kda)  # type: ignore[attr-defined]
    return backends, kda


@pytest.fixture(params=["fake", "real"])
def fla(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """``fla.backends`` and ``fla.ops.kda``, with nothing of ours registered before and after."""
    if request.param == "real":
        modules = real_fla()
        monkeypatch.setattr(importlib.import_module("fla.ops.kda.chunk").ChunkKDAFunction, "apply", fall_through)
    else:
        modules = fake_fla()
        for name in ("fla", "fla.ops"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, "fla.backends", modules[0])
        monkeypatch.setitem(sys.modules, "fla.ops.kda", modules[1])
    yield modules
    compat.unregister()


def through(kda: Any, call: Call, **changes: Any) -> list[str]:
    """FLA's chunk_kda: the backends of ours that ran for it; their result must be that of ``kda``."""
    with flash_kda.record_backends() as ran:
        try:
            o, state = kda.chunk_kda(**as_fla(call, **changes))
        except FellThrough:
            return ran
    want, want_state = flash_kda.kda(**call)
    assert_same_bits(o, want, "o")
    assert_same_bits(state, want_state, "state")
    return ran


def test_register_and_unregister(fla: tuple[Any, Any]) -> None:
    call = Case(lengths=(5, 0, 30), V=9).build()
    kda = fla[1]
    assert through(kda, call) == []
    for _ in range(2):
        compat.register()
        assert through(kda, call) == ["cpu"]
    for _ in range(2):
        compat.unregister()
        assert through(kda, call) == []
    compat.register(priority=1)
    assert through(kda, call) == ["cpu"]


@pytest.mark.parametrize("case", parameters(tuple(c for c in FLA_CASES if c.B)[::9]))
def test_calls_that_come_through_fla(fla: tuple[Any, Any], case: Case) -> None:
    compat.register()
    assert through(fla[1], case.build()) == ["cpu"]


def test_gradients_through_fla(fla: tuple[Any, Any]) -> None:
    compat.register()
    taped, found = leaves(Case(T=20, K=6, V=5).build())
    o, _ = fla[1].chunk_kda(**as_fla(taped))
    assert all(bool(d.count_nonzero()) for d in torch.autograd.grad(o.square().sum(), list(found.values())))


@pytest.mark.parametrize("argument", [a for a in REFUSED if a not in ("cp_context", "use_graph")])
def test_what_we_cannot_do_stays_with_fla(fla: tuple[Any, Any], argument: str) -> None:
    compat.register()
    call = Case(T=20).build()
    assert through(fla[1], call, **{argument: 2}) == []
    assert through(fla[1], call) == ["cpu"]


def test_a_backend_that_is_not_ours_keeps_its_place(fla: tuple[Any, Any]) -> None:
    """At priority 3, FLA's for the adapter that it brings: after ours by default, before ours if ours has 4."""
    backends, kda = fla
    mark = object()
    other = type("Other", (backends.BaseBackend,), {"backend_type": "other", "priority": 3})
    on = [True]
    backends.register(kda.chunk_kda, backend=other, verifier=lambda *_, **__: (on[0], None))(lambda *_, **__: mark)
    arguments = as_fla(Case(T=5).build())
    assert kda.chunk_kda(**arguments) is mark
    compat.register()
    assert kda.chunk_kda(**arguments) is not mark
    with pytest.raises(RuntimeError, match="another backend takes every call first"):
        compat.register(priority=4)
    assert kda.chunk_kda(**arguments) is mark
    on[0] = False


def test_a_dispatcher_that_was_lost(fla: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """FLA's function without its wrapper (flash-linear-attention issue 1110): an error, and nothing stays behind."""
    kda = fla[1]
    with monkeypatch.context() as patch:
        patch.setattr(kda, "chunk_kda", inspect.unwrap(kda.chunk_kda))
        with pytest.raises(RuntimeError, match="chunk_kda does not ask its backends"):
            compat.register()
    assert through(kda, Case(T=5).build()) == []


def test_a_function_without_backends(fla: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla[1], "chunk_kda", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="chunk_kda does not ask its backends"):
        compat.register()


def test_register_needs_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "fla" or name.startswith("fla.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fla", None)
    compat.unregister()
    with pytest.raises(ImportError, match=r"^register: needs fla-core 0\.6 or later"):
        compat.register()


@pytest.mark.parametrize("priority", ["1", 1.0, None, True])
def test_register_wants_an_integer(priority: Any) -> None:
    with pytest.raises(TypeError, match=r"^priority: got .*, expected an integer"):
        compat.register(priority)


# With FLA itself


def test_signatures_are_those_of_fla() -> None:
    """Names, order and defaults of what may be given by position, and every other keyword that FLA reads."""
    _, kda = real_fla()
    for ours, theirs in ((compat.chunk_kda, kda.chunk_kda), (compat.fused_recurrent_kda, kda.fused_recurrent_kda)):
        want = [p for p in inspect.signature(theirs).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
        got = list(inspect.signature(ours).parameters.values())
        assert [(p.name, p.default) for p in got[: len(want)]] == [(p.name, p.default) for p in want]
        assert all(p.kind == p.KEYWORD_ONLY for p in got[len(want) :])
        assert inspect.signature(ours).return_annotation == "tuple[Tensor, Tensor | None]"
    source = inspect.getsource(inspect.unwrap(kda.chunk_kda))
    extra = {p.name for p in inspect.signature(compat.chunk_kda).parameters.values() if p.kind == p.KEYWORD_ONLY}
    assert {name for name in extra if f'"{name}"' in source or f"'{name}'" in source} == extra


def test_fla_finds_fwd_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLA's own adapter calls ``flash_kda.fwd`` with nothing registered; registered, ours comes before it."""
    _, kda = real_fla()
    call = OWN.build()
    called = []
    original = flash_kda.fwd
    monkeypatch.setattr(flash_kda, "fwd", lambda *args, **kwargs: called.append(1) or original(*args, **kwargs))
    try:
        with torch.no_grad():
            assert through(kda, call, safe_gate=True) == ["cpu"]
            assert called == [1]
            compat.register()
            assert through(kda, call, safe_gate=True) == ["cpu"]
            assert called == [1]
    finally:
        compat.unregister()


def test_dispatch_switched_off_in_fla() -> None:
    real_fla()
    code = "import flash_kda.compat.fla as f\ntry: f.register()\nexcept RuntimeError as error: print(error)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"FLA_DISABLE_BACKEND_DISPATCH": "1"},
    )
    assert "chunk_kda does not ask its backends" in done.stdout, done.stderr


@pytest.mark.parametrize("part", [2, 3], ids=["without fla", "with fla"])
def test_the_guide_runs(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The code of docs/drop-in.md up to FLA, in its order; the third block needs FLA. The others: test_adapters."""
    if part == 3:
        real_fla()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "drop-in.md").read_text(), re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, Any] = {}
    try:
        for block in blocks[:part]:
            exec(block, names)
    finally:
        compat.unregister()
    assert_same_bits(names["o"], names["out"], "o")
    assert_same_bits(names["final"], names["state"], "final")
    assert capsys.readouterr().out == ("['cpu'] None\n" if part == 3 else "")


# On a GPU

FLA_SHAPES = (
    *(Case(B=B, T=T, H=H, K=128, V=128, dtype="bfloat16") for B, T, H in ((1, 1024, 4), (2, 2048, 8), (1, 4096, 16))),
    Case(lengths=(256, 244, 500), H=4, K=128, V=128, dtype="bfloat16"),
    Case(lengths=(100, 200, 900, 800), H=8, K=128, V=128, dtype="bfloat16"),
    Case(lengths=(101, 202, 902, 1802, 1089), H=16, K=128, V=128, dtype="bfloat16", cu_dtype="int32"),
)


def chosen_for(call: Call) -> str:
    """The backend for a call on this GPU: only some are for the Hopper kernels, where there are any."""
    explained = flash_kda.explain(inputs_of(call).problem)
    assert explained.backend in ("hopper", "triton")
    return explained.backend


@pytest.mark.gpu
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("case", parameters(FLA_SHAPES))
def test_fla_on_a_gpu(case: Case, registered: bool) -> None:
    """FLA's own shapes through FLA's function: by its adapter, and by the one that :func:`register` puts before it."""
    _, kda = real_fla()
    call = case.build("cuda")
    if not registered:
        # As FlashKDA takes them; FLA's adapter hands over float32 ones as well.
        call |= {name: call[name].bfloat16() for name in ("g", "beta")}
    want, want_state = oracle(call)
    try:
        if registered:
            compat.register()
        with torch.no_grad(), flash_kda.record_backends() as ran:
            o, state = kda.chunk_kda(**as_fla(call, safe_gate=True))
    finally:
        compat.unregister()
    # float32 gates are not for the Hopper kernels.
    assert ran == ["triton" if registered else chosen_for(call)]
    assert_outputs(o, want, call, 6e-3)
    assert_states(state, want_state, 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("final", ["float32", "bfloat16", "in place", None])
@pytest.mark.parametrize("initial", ["float32", "bfloat16"])
@pytest.mark.parametrize("lengths", [None, (1, 0, 130, 16)], ids=str)
def test_fwd_on_a_gpu(lengths: tuple[int, ...] | None, initial: str, final: str | None) -> None:
    case = OWN.but(T=130, lengths=lengths, tail=3 if lengths else 0, state_dtype=initial, cu_dtype="int32")
    call = case.build("cuda")
    call |= {name: call[name].bfloat16() for name in ("g", "beta")}
    want, want_state = oracle(call)
    S = call["initial_state"]
    place = S if final == "in place" else None
    if final in ("float32", "bfloat16"):
        place = torch.full(S.shape, torch.nan, dtype=getattr(torch, final), device="cuda")
    arguments = as_fwd(call, final_state=place)
    fwd(arguments, chosen_for(call))
    assert_outputs(arguments["out"], want, call, 6e-3)
    if place is not None:
        assert_states(place, want_state, 6e-3)
