"""Arguments of ``kda_decode_step`` that are refused, the problem that a call poses, and what is remembered."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Call, Case, variants
from compare import unchanged
from decoding import DecodeCase
from remembering import Remembering, assert_gradients_are_seen
from stepping import StepCase, checked

import flash_kda

BASE = StepCase(DecodeCase(Case(B=3, T=1, H=2, HV=4, K=3, V=5), padding=False, known=True), bias=True)
zeros, ints = torch.zeros, torch.tensor


def second(name: str, x: Any) -> dict[str, Any]:
    """The base call's filters or biases with another one of k."""
    return {name: [BASE.build()[name][0], x, BASE.build()[name][2]]}


WRONG: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"q": [1.0]}, TypeError, "q: got list, expected a torch.Tensor"),
    ({"k": zeros(3, 1, 2, 4)}, ValueError, "k: got shape (3, 1, 2, 4), expected [B, T, H, K]"),
    (
        {"q": zeros(3, 2, 2, 3), "k": zeros(3, 2, 2, 3), "v": zeros(3, 2, 4, 5), "g": zeros(3, 2, 4, 3),
         "beta": zeros(3, 2, 4), "indices": None},
        ValueError,
        "q: got T = 2 tokens a row, expected 1; kda_decode takes up to 16",
    ),
    ({"gate": None}, TypeError, "gate: got NoneType, expected LowerBoundGate"),
    ({"scale": [1.0]}, TypeError, "scale: got [1.0], expected a number"),
    ({"qk_l2norm": None}, TypeError, "qk_l2norm: got None, expected True or False"),
    ({"state_layout": "kk"}, ValueError, "state_layout: got 'kk', expected 'vk' or 'kv'"),
    ({"z": None}, TypeError, "z: got NoneType, expected a torch.Tensor"),
    ({"z": ints([1])}, TypeError, "z: got torch.int64, expected one of bfloat16, float16, float32, float64"),
    ({"z": zeros(3, 1, 4, 6)}, ValueError, "z: got shape (3, 1, 4, 6), expected [N, 1, HV, V] = (3, 1, 4, 5)"),
    ({"z": zeros(3, 1, 4, 10)[..., ::2]}, ValueError, "z: got last-dimension stride 2, expected 1"),
    ({"z": zeros(3, 1, 4, 5, device="meta")}, ValueError, "z: got device meta, expected cpu"),
    ({"pool": None}, TypeError, "pool: got NoneType, expected a torch.Tensor"),
    ({"pool": zeros(8, 4, 3, 5)}, ValueError, "pool: got shape (8, 4, 3, 5), expected [slots, HV, V, K] with"),
    ({"conv_pool": None}, TypeError, "conv_pool: got NoneType, expected a torch.Tensor"),
    ({"conv_pool": zeros(8, 3, 32).int()}, TypeError, "conv_pool: got torch.int32, expected one of bfloat16, float16"),
    (
        {"conv_pool": zeros(7, 3, 32)},
        ValueError,
        "conv_pool: got shape (7, 3, 32), expected [slots, W - 1, channels of q, k and v] = (8, 3, 32)",
    ),
    ({"conv_pool": zeros(8, 32, 3)}, ValueError, "conv_pool: got shape (8, 32, 3), expected [slots, W - 1, channels"),
    ({"conv_pool": zeros(1, 3, 32).expand(8, 3, 32)}, ValueError, "conv_pool: got strides (0, 32, 1), expected states"),
    ({"conv_pool": zeros(8, 3, 32, device="meta")}, ValueError, "conv_pool: got device meta, expected cpu"),
    ({"conv_weights": None}, TypeError, "conv_weights: got NoneType, expected three tensors, of q, k and v"),
    ({"conv_weights": zeros(3, 32, 4)}, TypeError, "conv_weights: got Tensor, expected three tensors"),
    ({"conv_weights": [zeros(6, 4)] * 2}, ValueError, "conv_weights: got 2 of them, expected three tensors"),
    (second("conv_weights", None), TypeError, "conv_weights of k: got NoneType, expected a torch.Tensor"),
    (second("conv_weights", zeros(6, 4).int()), TypeError, "conv_weights of k: got torch.int32, expected one of"),
    (
        second("conv_weights", zeros(4, 6)),
        ValueError,
        "conv_weights of k: got shape (4, 6), expected [6, W] or [6, 1, W], W of 1 or more",
    ),
    (second("conv_weights", zeros(6, 2, 4)), ValueError, "conv_weights of k: got shape (6, 2, 4), expected [6, W] or"),
    (second("conv_weights", zeros(6)), ValueError, "conv_weights of k: got shape (6,), expected [6, W] or [6, 1, W]"),
    (second("conv_weights", zeros(6, 0)), ValueError, "conv_weights of k: got shape (6, 0), expected [6, W] or"),
    (second("conv_weights", zeros(6, 3)), ValueError, "conv_weights of k: got W = 3, expected 4, that of q"),
    (second("conv_weights", zeros(6, 4, device="meta")), ValueError, "conv_weights of k: got device meta"),
    ({"conv_biases": zeros(32)}, TypeError, "conv_biases: got Tensor, expected three tensors, of q, k and v"),
    ({"conv_biases": []}, ValueError, "conv_biases: got 0 of them, expected three tensors"),
    (second("conv_biases", None), TypeError, "conv_biases of k: got NoneType, expected a torch.Tensor"),
    (second("conv_biases", zeros(7)), ValueError, "conv_biases of k: got shape (7,), expected [channels] = (6,)"),
    (second("conv_biases", zeros(12)[::2]), ValueError, "conv_biases of k: got last-dimension stride 2, expected 1"),
    ({"norm_weight": None}, TypeError, "norm_weight: got NoneType, expected a torch.Tensor"),
    ({"norm_weight": zeros(4)}, ValueError, "norm_weight: got shape (4,), expected [V] = (5,)"),
    ({"norm_weight": zeros(10)[::2]}, ValueError, "norm_weight: got last-dimension stride 2, expected 1"),
    ({"norm_eps": "1"}, TypeError, "norm_eps: got '1', expected a number"),
    ({"norm_eps": -1e-5}, ValueError, "norm_eps: got -1e-05, expected a finite number of 0 or more"),
    ({"norm_eps": float("nan")}, ValueError, "norm_eps: got nan, expected a finite number of 0 or more"),
    ({"indices": [0, 1, 2]}, TypeError, "indices: got list, expected a torch.Tensor"),
    ({"indices": ints([0.0] * 3)}, TypeError, "indices: got torch.float32, expected one of int32, int64"),
    ({"indices": ints([0, 1])}, ValueError, "indices: got shape (2,), expected [N] or [N, W] with N = 3"),
    ({"indices": ints([[0], [1], [2]])}, ValueError, "indices: got shape (3, 1), expected [N] = (3,)"),
    (
        {"indices": None, "pool": zeros(2, 4, 5, 3), "conv_pool": zeros(2, 3, 32)},
        ValueError,
        "pool: got 2 slots, expected one for each of N = 3 rows without indices",
    ),
    ({"has_initial_state": ints([1, 1, 0])}, TypeError, "has_initial_state: got torch.int64, expected"),
    ({"has_initial_state": ints([True])}, ValueError, "has_initial_state: got shape (1,), expected [N] = (3,)"),
    ({"pad_index": True}, TypeError, "pad_index: got True, expected an int"),
    ({"out": 0}, TypeError, "out: got int, expected a torch.Tensor"),
    ({"out": zeros(3, 1, 4, 5).half()}, TypeError, "out: got torch.float16, expected one of float32"),
    ({"out": zeros(3, 1, 4, 6)}, ValueError, "out: got shape (3, 1, 4, 6), expected [B, T, HV, V]"),
    ({"backend": "gpu"}, ValueError, "backend: got 'gpu', expected 'auto' or one of"),
)  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[w[2][:40] for w in WRONG])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], message: str, grad: bool) -> None:
    """The right exception in words, before anything is written."""
    call = BASE.build()
    with unchanged(call), torch.set_grad_enabled(grad), pytest.raises(error, match="^" + re.escape(message)):
        flash_kda.kda_decode_step(**call | changes)


def test_problem_of_a_call() -> None:
    rows = Case(B=3, T=1, H=2, HV=4, K=3, V=5, gate="softplus", state_dtype="bfloat16")
    call = StepCase(DecodeCase(rows), bias=True).build()
    expected = flash_kda.Problem(
        B=3, T=1, H=2, K=3, V=5, HV=4, N=3, dtype=torch.float32, state_dtype=torch.bfloat16, gate="softplus",
        device="cpu", copyable=False, op="step",
    )  # fmt: skip
    assert checked(call).problem == expected
    for name in ("q", "z", "pool", "conv_pool", "norm_weight"):
        taped = call | {name: call[name].clone().requires_grad_()}
        assert checked(taped).problem.grad
        with torch.no_grad():
            assert not checked(taped).problem.grad


def test_explain_knows_the_step() -> None:
    plain = flash_kda.Problem(B=128, T=1, H=12, op="step", device="cpu")
    assert flash_kda.explain(plain).backend == "cpu"
    taped = flash_kda.explain(replace(plain, grad=True))
    assert taped.backend is None
    assert taped.reasons["cpu"].startswith("decoding computes no gradients; call it under torch.no_grad()")


# What is remembered.


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> Remembering:
    return Remembering.in_place(monkeypatch, "run_step")


@torch.no_grad()
def test_a_second_call_of_a_form_is_direct(remembering: Remembering) -> None:
    """With this call's tensors in the order of the checked ones, not with the first call's; and it is recorded."""
    first, second = BASE.build(), BASE.build()
    out = torch.empty_like(first["v"])
    with flash_kda.record_backends() as ran:
        flash_kda.kda_decode_step(**first, out=out, backend="cpu")
        assert not remembering.direct
        flash_kda.kda_decode_step(**second, out=out, backend="cpu")
    assert ran == ["cpu", "cpu"]
    ((tensors, A_log, dt_bias),) = remembering.direct
    mine = checked(second | {"out": out}).tensors
    assert len(tensors) == len(mine) == 18
    assert all(x is y for x, y in zip(tensors, mine, strict=True))
    assert (A_log, dt_bias) == (second["gate"].A_log, second["gate"].dt_bias)
    (call,) = remembering.checked
    assert call.tensors[0] is first["q"]


def other_forms() -> list[Any]:
    """Valid calls that differ from the base in one thing that is not a tensor's values."""
    call = BASE.build()
    gate = call["gate"]
    changes: dict[str, Any] = {
        "k": zeros(2, 1, 3, 3).permute(2, 1, 0, 3),
        "g": call["g"].bfloat16(),
        "z": call["z"].bfloat16(),
        "z strides": {"z": zeros(3, 1, 4, 8)[..., :5]},
        "beta": zeros(3, 1, 8)[..., ::2],
        "pool": zeros(8, 4, 5, 4)[..., :3],
        "pool dtype": {"pool": call["pool"].bfloat16()},
        "slots": {"pool": zeros(20, 4, 5, 3), "conv_pool": zeros(20, 3, 32)},
        "conv_pool": zeros(8, 32, 3).mT,
        "conv_pool dtype": {"conv_pool": call["conv_pool"].bfloat16()},
        "width": {"conv_weights": [x[:, 1:].contiguous() for x in call["conv_weights"]], "conv_pool": zeros(8, 2, 32)},
        "weights": {"conv_weights": [x.bfloat16() for x in call["conv_weights"]]},
        "one weight": second("conv_weights", zeros(4, 6).T),
        "no biases": {"conv_biases": None},
        "biases": {"conv_biases": [x.bfloat16() for x in call["conv_biases"]]},
        "norm_weight": call["norm_weight"].bfloat16(),
        "norm_eps": 1e-6,
        "layout": {"state_layout": "kv", "pool": call["pool"].mT.contiguous()},
        "indices": call["indices"].long(),
        "column": {"indices": zeros(3, 2, dtype=torch.int32)[:, 1]},
        "no flags": {"has_initial_state": None},
        "out": zeros(3, 1, 4, 5),
        "scale": 0.5,
        "qk_l2norm": False,
        "allow_neg_eigval": True,
        "beta_is_logit": False,
        "pad_index": 0,
        "bound": {"gate": flash_kda.LowerBoundGate(gate.A_log, gate.dt_bias, -4.0)},
        "amplitude": {"gate": flash_kda.LowerBoundGate(None, gate.dt_bias)},
        "softplus": {"gate": flash_kda.SoftplusGate(gate.A_log, gate.dt_bias)},
        "rows": {name: call[name][:2] for name in ("q", "k", "v", "g", "beta", "z", "indices", "has_initial_state")},
    }
    return variants(call, changes)


@pytest.mark.parametrize("call", other_forms())
@torch.no_grad()
def test_another_form_is_checked_anew(call: Call, remembering: Remembering) -> None:
    flash_kda.kda_decode_step(**BASE.build(), backend="cpu")
    flash_kda.kda_decode_step(**call, backend="cpu")
    assert len(remembering.checked) == 2
    assert not remembering.direct


@torch.no_grad()
def test_the_step_and_decoding_share_no_form(remembering: Remembering) -> None:
    call = BASE.build()
    flash_kda.kda_decode_step(**call, backend="cpu")
    with pytest.raises(AttributeError, match="run_decode"):
        flash_kda.kda_decode(
            *(call[name] for name in ("q", "k", "v", "g", "beta")), gate=call["gate"], pool=call["pool"], backend="cpu"
        )


@pytest.mark.parametrize("name", ["q", "z", "pool", "conv_pool", "conv_weights", "conv_biases", "norm_weight", "A_log"])
def test_a_gradient_is_seen_in_a_known_form(name: str, remembering: Remembering) -> None:
    call = BASE.build()
    x = getattr(call["gate"], name) if name == "A_log" else call[name]
    (x[1] if isinstance(x, list) else x).requires_grad_()
    assert_gradients_are_seen(remembering, flash_kda.kda_decode_step, BASE.build, call)


@pytest.mark.parametrize(("name", "wrong"), [("norm_eps", True), ("qk_l2norm", 1), ("pad_index", -1.0)])
@torch.no_grad()
def test_an_equal_option_of_another_type_is_checked_anew(name: str, wrong: Any, remembering: Remembering) -> None:
    """1 == True: what one call has passed must not let another one pass."""
    call = BASE.build() | {"norm_eps": 1.0}
    for _ in range(2):
        flash_kda.kda_decode_step(**call, backend="cpu")
    with pytest.raises(TypeError, match=f"^{name}: "):
        flash_kda.kda_decode_step(**call | {name: wrong}, backend="cpu")
    assert len(remembering.checked) == len(remembering.direct) == 1
