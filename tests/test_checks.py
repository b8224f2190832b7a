"""Wrong arguments: the right exception, naming the argument, what came and what was expected, before anything runs."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from cases import TENSORS, Call, Case
from compare import bits

import flash_kda

BASE = Case(B=2, T=6, H=2, HV=4, K=3, V=5)
PACKED = Case(lengths=(2, 4), H=2, HV=4, K=3, V=5)
ints = torch.tensor


def kda(call: Call) -> Any:
    return flash_kda.kda(**call)


def gate(**arguments: Any) -> flash_kda.LowerBoundGate:
    return flash_kda.LowerBoundGate(**arguments)


WRONG_TYPE: tuple[tuple[dict[str, Any], str], ...] = (
    *(({name: [1.0]}, f"{name}: got list, expected a torch.Tensor") for name in ("q", "k", "v", "g", "beta")),
    *(({name: None}, f"{name}: got NoneType, expected a torch.Tensor") for name in ("q", "beta")),
    ({"q": np.zeros((2, 6, 2, 3))}, "q: got ndarray, expected a torch.Tensor"),
    ({"q": torch.zeros(2, 6, 2, 3, dtype=torch.int64)}, "q: got torch.int64, expected one of bfloat16, float16"),
    ({"beta": torch.zeros(2, 6, 4, dtype=torch.bool)}, "beta: got torch.bool, expected one of bfloat16, float16"),
    ({"g": torch.zeros(2, 6, 4, 3, dtype=torch.complex64)}, "g: got torch.complex64, expected one of"),
    ({"k": torch.zeros(2, 6, 2, 3, dtype=torch.bfloat16)}, "k: got torch.bfloat16, expected torch.float32"),
    ({"v": torch.zeros(2, 6, 4, 5, dtype=torch.float64)}, "v: got torch.float64, expected torch.float32"),
    ({"gate": None}, "gate: got NoneType, expected LowerBoundGate, SoftplusGate or LogGate"),
    ({"gate": "softplus"}, "gate: got str, expected LowerBoundGate, SoftplusGate or LogGate"),
    ({"gate": flash_kda.LogGate}, "gate: got type, expected LowerBoundGate, SoftplusGate or LogGate"),
    ({"gate": gate(A_log=0.0)}, "A_log: got float, expected a torch.Tensor"),
    ({"gate": gate(A_log=torch.zeros(4, dtype=torch.bfloat16))}, "A_log: got torch.bfloat16, expected one of float32"),
    ({"gate": gate(dt_bias=0.0)}, "dt_bias: got float, expected a torch.Tensor"),
    ({"gate": gate(dt_bias=torch.zeros(4, 3).half())}, "dt_bias: got torch.float16, expected one of float32"),
    ({"gate": gate(lower_bound="-5")}, "lower_bound: got '-5', expected"),
    ({"gate": gate(lower_bound=None)}, "lower_bound: got None, expected"),
    ({"initial_state": 0}, "initial_state: got int, expected a torch.Tensor"),
    (
        {"initial_state": torch.zeros(2, 4, 5, 3).half()},
        "initial_state: got torch.float16, expected one of float32",
    ),
    ({"scale": "big"}, "scale: got 'big', expected"),
    ({"scale": [1.0]}, "scale: got [1.0], expected"),
    *(
        ({name: value}, f"{name}: got {value!r}, expected True or False")
        for name in ("output_final_state", "qk_l2norm", "beta_is_logit", "allow_neg_eigval", "recompute")
        for value in (1, None, "yes")
    ),
)

WRONG_VALUE: tuple[tuple[dict[str, Any], str], ...] = (
    ({"q": torch.zeros(6, 2, 3)}, "q: got shape (6, 2, 3), expected [B, T, H, K]"),
    ({"v": torch.zeros(6, 4, 5)}, "v: got shape (6, 4, 5), expected [B, T, HV, V]"),
    ({"k": torch.zeros(2, 6, 2, 4)}, "k: got shape (2, 6, 2, 4), expected [B, T, H, K] = (2, 6, 2, 3)"),
    ({"k": torch.zeros(2, 6, 4, 3)}, "k: got shape (2, 6, 4, 3), expected [B, T, H, K] = (2, 6, 2, 3)"),
    ({"v": torch.zeros(2, 7, 4, 5)}, "v: got shape (2, 7, 4, 5), expected [B, T, HV, V] = (2, 6, 4, 5)"),
    ({"v": torch.zeros(1, 6, 4, 5)}, "v: got shape (1, 6, 4, 5), expected [B, T, HV, V] = (2, 6, 4, 5)"),
    ({"v": torch.zeros(2, 6, 3, 5)}, "v: got HV = 3 value heads, expected a multiple of the H = 2 heads of q and k"),
    ({"v": torch.zeros(2, 6, 1, 5)}, "v: got HV = 1 value heads, expected a multiple of the H = 2"),
    ({"q": torch.zeros(2, 6, 0, 3)}, "q, v: got shapes (2, 6, 0, 3) and (2, 6, 4, 5), expected H, K, HV and V of 1"),
    ({"v": torch.zeros(2, 6, 4, 0)}, "q, v: got shapes (2, 6, 2, 3) and (2, 6, 4, 0), expected H, K, HV and V of 1"),
    ({"g": torch.zeros(2, 6, 4)}, "g: got shape (2, 6, 4), expected [B, T, HV, K] = (2, 6, 4, 3)"),
    ({"g": torch.zeros(2, 6, 2, 3)}, "g: got shape (2, 6, 2, 3), expected [B, T, HV, K] = (2, 6, 4, 3)"),
    ({"g": torch.zeros(2, 8, 4, 3)}, "g: got shape (2, 8, 4, 3), expected [B, T, HV, K] = (2, 6, 4, 3)"),
    ({"beta": torch.zeros(2, 6, 2)}, "beta: got shape (2, 6, 2), expected [B, T, HV] = (2, 6, 4)"),
    ({"beta": torch.zeros(2, 6, 4, 1)}, "beta: got shape (2, 6, 4, 1), expected [B, T, HV] = (2, 6, 4)"),
    ({"beta": torch.zeros(2, 8, 4)}, "beta: got shape (2, 8, 4), expected [B, T, HV] = (2, 6, 4)"),
    *(
        ({name: torch.zeros(2, 6, 3, h).transpose(-1, -2)}, f"{name}: got last-dimension stride {h}, expected 1")
        for name, h in (("q", 2), ("k", 2), ("g", 4))
    ),
    ({"v": torch.zeros(2, 6, 4, 10)[..., ::2]}, "v: got last-dimension stride 2, expected 1"),
    ({"q": torch.zeros(2, 6, 2, 1).expand(2, 6, 2, 3)}, "q: got last-dimension stride 0, expected 1"),
    ({"gate": gate(A_log=torch.zeros(2))}, "A_log: got shape (2,), expected [HV] = (4,)"),
    ({"gate": gate(A_log=torch.zeros(1, 1, 4, 1))}, "A_log: got shape (1, 1, 4, 1), expected [HV] = (4,)"),
    # One bias per head is what a serving engine once passed: HV numbers, read as HV * K.
    ({"gate": gate(dt_bias=torch.zeros(4))}, "dt_bias: got shape (4,), expected [HV, K] = (4, 3) or [HV * K] = (12,)"),
    ({"gate": gate(dt_bias=torch.zeros(3, 4))}, "dt_bias: got shape (3, 4), expected [HV, K] = (4, 3)"),
    ({"gate": flash_kda.SoftplusGate(dt_bias=torch.zeros(6))}, "dt_bias: got shape (6,), expected [HV, K] = (4, 3)"),
    *(
        ({"gate": gate(lower_bound=x)}, f"lower_bound: got {x}, expected a value in [-5.0, 0)")
        for x in (0.0, 1.0, -5.001, -math.inf, math.nan)
    ),
    ({"initial_state": torch.zeros(2, 4, 3, 5)}, "initial_state: got shape (2, 4, 3, 5), expected [N, HV, V, K]"),
    (
        {"initial_state": torch.zeros(2, 4, 5, 3), "state_layout": "kv"},
        "initial_state: got shape (2, 4, 5, 3), expected [N, HV, K, V] = (2, 4, 3, 5)",
    ),
    ({"initial_state": torch.zeros(3, 4, 5, 3)}, "initial_state: got shape (3, 4, 5, 3), expected [N, HV, V, K]"),
    ({"initial_state": torch.zeros(2, 2, 5, 3)}, "initial_state: got shape (2, 2, 5, 3), expected [N, HV, V, K]"),
    ({"initial_state": torch.zeros(2, 4, 3, 5).mT}, "initial_state: got last-dimension stride 5, expected 1"),
    ({"scale": math.nan}, "scale: got nan, expected a finite number"),
    ({"scale": math.inf}, "scale: got inf, expected a finite number"),
    (
        {"allow_neg_eigval": True, "beta_is_logit": False},
        "allow_neg_eigval: got True with beta_is_logit=False",
    ),
    ({"state_layout": "kd"}, "state_layout: got 'kd', expected 'vk' or 'kv'"),
    ({"state_layout": None}, "state_layout: got None, expected 'vk' or 'kv'"),
    ({"backend": "cuda"}, "backend: got 'cuda', expected 'auto' or one of"),
    ({"backend": None}, "backend: got None, expected 'auto' or one of"),
    *(
        ({name: torch.zeros(shape, device="meta")}, f"{name}: got device meta, expected cpu, where q is")
        for name, shape in (
            ("k", (2, 6, 2, 3)),
            ("v", (2, 6, 4, 5)),
            ("g", (2, 6, 4, 3)),
            ("beta", (2, 6, 4)),
            ("initial_state", (2, 4, 5, 3)),
        )
    ),
    ({"gate": gate(A_log=torch.zeros(4, device="meta"))}, "A_log: got device meta, expected cpu, where q is"),
    ({"gate": gate(dt_bias=torch.zeros(4, 3, device="meta"))}, "dt_bias: got device meta, expected cpu, where q is"),
    (
        {"cu_seqlens": ints([0, 6])},
        "cu_seqlens: got a batch of 2 with packed sequences, expected q of shape [1, T, H, K]",
    ),
)

WRONG_PACKING: tuple[tuple[Any, type[Exception], str], ...] = (
    ([0, 2, 6], TypeError, "cu_seqlens: got list, expected a torch.Tensor"),
    (ints([0.0, 2.0, 6.0]), TypeError, "cu_seqlens: got torch.float32, expected int32 or int64"),
    (ints([0, 2, 6], dtype=torch.int16), TypeError, "cu_seqlens: got torch.int16, expected int32 or int64"),
    (ints([[0, 2, 6]]), ValueError, "cu_seqlens: got shape (1, 3), expected [N + 1]"),
    (ints([], dtype=torch.int64), ValueError, "cu_seqlens: got shape (0,), expected [N + 1]"),
    (ints(6), ValueError, "cu_seqlens: got shape (), expected [N + 1]"),
    (ints([1, 2, 6]), ValueError, "cu_seqlens: got first entry 1, expected 0"),
    (ints([-1, 2, 6]), ValueError, "cu_seqlens: got first entry -1, expected 0"),
    (ints([0, 5, 4]), ValueError, "cu_seqlens: got 4 after 5 at index 2, expected non-decreasing entries"),
    (ints([0, -2, 6]), ValueError, "cu_seqlens: got -2 after 0 at index 1, expected non-decreasing entries"),
    (ints([0, 2, 7], dtype=torch.int32), ValueError, "cu_seqlens: got last entry 7, expected at most T = 6"),
    (
        torch.zeros(3, dtype=torch.int64, device="meta"),
        ValueError,
        "cu_seqlens: got device meta, expected cpu, where q",
    ),
)


@pytest.fixture(scope="module", autouse=True)
def _a_right_call_went_before() -> None:
    """What is remembered of a right call excuses no wrong one."""
    kda(BASE.build())
    kda(PACKED.build())


def refused(call: Call, kind: type[Exception], message: str) -> None:
    before = {name: bits(x).clone() for name in TENSORS if isinstance(x := call[name], torch.Tensor) and x.is_cpu}
    with flash_kda.record_backends() as ran, pytest.raises(kind, match=f"^{re.escape(message)}") as caught:
        kda(call)
    assert type(caught.value) is kind
    assert ran == [], "a backend ran although the call was refused"
    assert all(torch.equal(x, bits(call[name])) for name, x in before.items())


@pytest.mark.parametrize(("changes", "message"), WRONG_TYPE, ids=[m for _, m in WRONG_TYPE])
def test_type_errors(changes: dict[str, Any], message: str) -> None:
    refused(BASE.build() | changes, TypeError, message)


@pytest.mark.parametrize(("changes", "message"), WRONG_VALUE, ids=[m for _, m in WRONG_VALUE])
def test_value_errors(changes: dict[str, Any], message: str) -> None:
    refused(BASE.build() | changes, ValueError, message)


@pytest.mark.parametrize(("cu_seqlens", "kind", "message"), WRONG_PACKING, ids=[m for *_, m in WRONG_PACKING])
def test_packing_errors(cu_seqlens: Any, kind: type[Exception], message: str) -> None:
    refused(PACKED.build() | {"cu_seqlens": cu_seqlens}, kind, message)


@pytest.mark.parametrize("call", [BASE.build(), PACKED.build()])
def test_the_calls_that_are_spoilt_above_are_right(call: Call) -> None:
    kda(call)


def test_options_have_names() -> None:
    """Nothing after beta can be passed by position."""
    call = BASE.build()
    with pytest.raises(TypeError, match="positional"):
        flash_kda.kda(*(call[name] for name in TENSORS[:5]), call["gate"])  # type: ignore[misc]


def test_what_is_accepted_at_the_edges() -> None:
    call = BASE.build()
    kda(call | {"gate": gate(lower_bound=-5.0)})
    kda(call | {"gate": gate(lower_bound=-1e-6)})
    kda(call | {"gate": gate(lower_bound=-1)})
    kda(call | {"scale": 1})
    kda(call | {"scale": np.float32(0.5)})
    kda(call | {"initial_state": call["initial_state"].double()})
    kda(call | {"g": call["g"].bfloat16(), "beta": call["beta"].half()})
    # A last dimension of one element has no stride to speak of.
    one = Case(T=6, K=1, V=1).build()
    kda(one | {"q": one["q"].expand(1, 6, 2, 2)[..., 1:]})
