"""``kda_decode``: wrong arguments, gradients, ``explain``, and what is remembered of a call's form."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Call, Case, variants
from compare import bits, unchanged
from decoding import DecodeCase, checked
from remembering import Remembering, assert_gradients_are_seen

import flash_kda
from flash_kda import forms

BASE = DecodeCase(Case(B=3, T=2, H=2, HV=4, K=3, V=5), padding=False)
EACH = DecodeCase(BASE.rows, index="each", accepted=True, padding=False)
PACKED = DecodeCase(Case(lengths=(2, 0, 3), H=2, HV=4, K=3, V=5), index="each", padding=False)
ints = torch.tensor

WRONG: tuple[tuple[DecodeCase, dict[str, Any], type[Exception], str], ...] = (
    (BASE, {"q": [1.0]}, TypeError, "q: got list, expected a torch.Tensor"),
    (
        BASE,
        {"k": torch.zeros(3, 2, 2, 4)},
        ValueError,
        "k: got shape (3, 2, 2, 4), expected [B, T, H, K]",
    ),
    (BASE, {"gate": None}, TypeError, "gate: got NoneType, expected LowerBoundGate"),
    (BASE, {"scale": [1.0]}, TypeError, "scale: got [1.0], expected a number"),
    (BASE, {"qk_l2norm": None}, TypeError, "qk_l2norm: got None, expected True or False"),
    (BASE, {"state_layout": "kk"}, ValueError, "state_layout: got 'kk', expected 'vk' or 'kv'"),
    (BASE, {"pool": None}, TypeError, "pool: got NoneType, expected a torch.Tensor"),
    (BASE, {"pool": torch.zeros(9, 4, 5, 3).half()}, TypeError, "pool: got torch.float16, expected one of float32"),
    (
        BASE,
        {"pool": torch.zeros(9, 4, 3, 5)},
        ValueError,
        "pool: got shape (9, 4, 3, 5), expected [slots, HV, V, K] with (4, 5, 3) after the first dimension",
    ),
    (
        BASE,
        {"pool": torch.zeros(9, 4, 5, 3), "state_layout": "kv"},
        ValueError,
        "pool: got shape (9, 4, 5, 3), expected [slots, HV, K, V] with (4, 3, 5)",
    ),
    (BASE, {"pool": torch.zeros(4, 5, 3)}, ValueError, "pool: got shape (4, 5, 3), expected [slots, HV, V, K]"),
    (BASE, {"pool": torch.zeros(9, 4, 3, 5).mT}, ValueError, "pool: got last-dimension stride 5, expected 1"),
    (
        BASE,
        {"pool": torch.zeros(1, 4, 5, 3).expand(9, 4, 5, 3)},
        ValueError,
        "pool: got strides (0, 15, 3, 1)",
    ),
    (BASE, {"pool": torch.zeros(9, 4, 5, 3, device="meta")}, ValueError, "pool: got device meta, expected cpu"),
    (BASE, {"indices": [0, 1, 2]}, TypeError, "indices: got list, expected a torch.Tensor"),
    (BASE, {"indices": ints([0.0, 1.0, 2.0])}, TypeError, "indices: got torch.float32, expected one of int32, int64"),
    (BASE, {"indices": ints([0, 1])}, ValueError, "indices: got shape (2,), expected [N] or [N, W] with N = 3"),
    (BASE, {"indices": ints([[[0]]] * 3)}, ValueError, "indices: got shape (3, 1, 1), expected [N] or [N, W]"),
    (BASE, {"indices": ints([[0], [1], [2]])}, ValueError, "indices: got W = 1 slots a row, expected at least one for"),
    (
        BASE,
        {"indices": torch.zeros(3, dtype=torch.int32, device="meta")},
        ValueError,
        "indices: got device meta",
    ),
    (
        BASE,
        {"indices": None, "pool": torch.zeros(2, 4, 5, 3)},
        ValueError,
        "pool: got 2 slots, expected one for each of N = 3 rows without indices",
    ),
    (BASE, {"num_accepted": ints([1, 1, 1])}, ValueError, "num_accepted: got a tensor, expected None unless indices"),
    (EACH, {"num_accepted": ints([1, 1])}, ValueError, "num_accepted: got shape (2,), expected [N] = (3,)"),
    (EACH, {"num_accepted": 1}, TypeError, "num_accepted: got int, expected a torch.Tensor"),
    (EACH, {"num_accepted": ints([True] * 3)}, TypeError, "num_accepted: got torch.bool, expected one of int32, int64"),
    (
        BASE,
        {"has_initial_state": ints([1, 1, 0])},
        TypeError,
        "has_initial_state: got torch.int64, expected",
    ),
    (BASE, {"has_initial_state": ints([True])}, ValueError, "has_initial_state: got shape (1,), expected [N] = (3,)"),
    (BASE, {"pad_index": None}, TypeError, "pad_index: got None, expected an int"),
    (BASE, {"pad_index": True}, TypeError, "pad_index: got True, expected an int"),
    (BASE, {"pad_index": 2**31}, ValueError, "pad_index: got 2147483648, expected an int of 32 bits"),
    (BASE, {"write_states": 1}, TypeError, "write_states: got 1, expected True or False"),
    (BASE, {"out": 0}, TypeError, "out: got int, expected a torch.Tensor"),
    (BASE, {"out": torch.zeros(3, 2, 4, 5).half()}, TypeError, "out: got torch.float16, expected one of float32"),
    (BASE, {"out": torch.zeros(3, 2, 4, 6)}, ValueError, "out: got shape (3, 2, 4, 6), expected [B, T, HV, V]"),
    (BASE, {"out": torch.zeros(3, 2, 4, 10)[..., ::2]}, ValueError, "out: got last-dimension stride 2, expected 1"),
    (PACKED, {"cu_seqlens": ints([0, 2, 2, 9])}, ValueError, "cu_seqlens: got last entry 9, expected at most T = 5"),
    (PACKED, {"indices": ints([[0, 1]] * 3)}, ValueError, "indices: got W = 2 slots a row, expected at least one for"),
    (BASE, {"backend": "gpu"}, ValueError, "backend: got 'gpu', expected 'auto' or one of"),
)


@pytest.mark.parametrize(("case", "changes", "error", "message"), WRONG, ids=[w[3][:40] for w in WRONG])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_wrong_arguments(
    case: DecodeCase, changes: dict[str, Any], error: type[Exception], message: str, grad: bool
) -> None:
    """The right exception in words, before anything is written."""
    call = case.build()
    with unchanged(call), torch.set_grad_enabled(grad), pytest.raises(error, match="^" + re.escape(message)):
        flash_kda.kda_decode(**call | changes)


@pytest.mark.parametrize("packed", [False, True])
def test_too_many_tokens(packed: bool) -> None:
    rows = BASE.rows.but(B=1, T=17, lengths=(1, 17) if packed else None)
    name = "cu_seqlens" if packed else "q"
    with pytest.raises(ValueError, match=f"^{name}: got a row of 17 tokens, expected at most 16; kda takes any number"):
        flash_kda.kda_decode(**DecodeCase(rows).build())


def test_problem_of_a_call() -> None:
    case = DecodeCase(Case(lengths=(3, 0, 4), tail=2, H=2, HV=4, K=3, V=5, gate="softplus", state_dtype="bfloat16"))
    expected = flash_kda.Problem(
        B=1, T=9, H=2, K=3, V=5, HV=4, N=3, dtype=torch.float32, state_dtype=torch.bfloat16, gate="softplus",
        packed=True, device="cpu", copyable=False, op="decode",
    )  # fmt: skip
    call = case.build()
    assert checked(call).problem == expected
    for name in ("q", "pool"):
        taped = call | {name: call[name].clone().requires_grad_()}
        assert checked(taped).problem.grad
        with torch.no_grad():
            assert not checked(taped).problem.grad


def test_explain_knows_decoding() -> None:
    plain = flash_kda.Problem(B=128, T=1, H=12, op="decode", device="cpu")
    answer = flash_kda.explain(plain)
    assert answer.backend == "cpu"
    assert "op='decode'" in str(answer)
    taped = flash_kda.explain(flash_kda.Problem(B=128, T=1, H=12, op="decode", device="cpu", grad=True))
    assert taped.backend is None
    assert taped.reasons["cpu"].startswith("decoding computes no gradients; call it under torch.no_grad()")


# What is remembered.


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> Remembering:
    return Remembering.in_place(monkeypatch, "run_decode")


@torch.no_grad()
def test_a_second_call_of_a_form_is_direct(remembering: Remembering) -> None:
    """With this call's tensors, not the first one's; and it is recorded all the same."""
    first, second = EACH.build(), EACH.build()
    out = torch.empty_like(first["v"])
    with flash_kda.record_backends() as ran:
        flash_kda.kda_decode(**first, out=out, backend="cpu")
        assert not remembering.direct
        flash_kda.kda_decode(**second, out=out, backend="cpu")
    assert ran == ["cpu", "cpu"]
    assert len(remembering.checked) == 1
    ((tensors, A_log, dt_bias),) = remembering.direct
    names = ("q", "k", "v", "g", "beta", "pool", "indices", "num_accepted", "has_initial_state", "cu_seqlens")
    assert all(x is second[name] for x, name in zip(tensors, names, strict=False))
    assert tensors[-1] is out
    assert A_log is second["gate"].A_log
    assert dt_bias is second["gate"].dt_bias


def other_forms() -> list[Any]:
    """Valid calls that differ from EACH's in one thing that is not a tensor's values."""
    call = EACH.build()
    gate = call["gate"]
    wide = torch.zeros(call["pool"].shape[0], 4, 5, 4)[..., :3]
    changes: dict[str, Any] = {
        "k": torch.zeros(2, 3, 2, 3).transpose(0, 1),
        "g": call["g"].bfloat16(),
        "beta": torch.zeros(3, 2, 8)[..., ::2],
        "pool": wide,
        "pool dtype": {"pool": call["pool"].bfloat16()},
        "slots": {"pool": torch.zeros(20, 4, 5, 3)},
        "layout": {"state_layout": "kv", "pool": call["pool"].mT.contiguous()},
        "indices": call["indices"].long(),
        "columns": {"indices": torch.zeros(3, 3, dtype=torch.int32)},
        "accepted": {"num_accepted": None},
        "has_initial_state": torch.ones(3, dtype=torch.bool),
        "out": torch.zeros(3, 2, 4, 5),
        "scale": 0.5,
        "qk_l2norm": False,
        "allow_neg_eigval": True,
        "beta_is_logit": False,
        "pad_index": 0,
        "write_states": False,
        "bound": {"gate": flash_kda.LowerBoundGate(gate.A_log, gate.dt_bias, -4.0)},
        "amplitude": {"gate": flash_kda.LowerBoundGate(None, gate.dt_bias)},
        "bias": {"gate": flash_kda.LowerBoundGate(gate.A_log, gate.dt_bias.flatten())},
        "softplus": {"gate": flash_kda.SoftplusGate(gate.A_log, gate.dt_bias)},
        "log": {"gate": flash_kda.LogGate()},
        "rows": {name: call[name][:2] for name in ("q", "k", "v", "g", "beta", "indices", "num_accepted")},
    }
    return variants(call, changes)


@pytest.mark.parametrize("call", other_forms())
@torch.no_grad()
def test_another_form_is_checked_anew(call: Call, remembering: Remembering) -> None:
    flash_kda.kda_decode(**EACH.build(), backend="cpu")
    flash_kda.kda_decode(**call, backend="cpu")
    assert len(remembering.checked) == 2
    assert not remembering.direct
    flash_kda.kda_decode(**EACH.build(), backend="reference")
    assert len(remembering.checked) == 3


@pytest.mark.parametrize("name", ["q", "g", "pool", "A_log", "dt_bias"])
def test_a_gradient_is_seen_in_a_known_form(name: str, remembering: Remembering) -> None:
    call = EACH.build()
    if name in call:
        call[name].requires_grad_()
    else:
        call["gate"] = replace(call["gate"], **{name: getattr(call["gate"], name).requires_grad_()})
    assert_gradients_are_seen(remembering, flash_kda.kda_decode, EACH.build, call)


def test_what_is_remembered_is_bounded() -> None:
    assert forms.form.cache_info().maxsize == 4096


# A right option, and one of another type that is equal to it.
EQUAL_BUT_WRONG: tuple[tuple[str, Any, Any], ...] = (
    ("qk_l2norm", True, 1),
    ("beta_is_logit", True, 1.0),
    ("allow_neg_eigval", False, 0),
    ("write_states", True, 1),
    ("pad_index", 1, True),
    ("pad_index", -1, -1.0),
    ("scale", 1.0, True),
)


@pytest.mark.parametrize("wrong_first", [True, False])
@pytest.mark.parametrize(("name", "right", "wrong"), EQUAL_BUT_WRONG)
@torch.no_grad()
def test_an_equal_option_of_another_type_is_checked_anew(
    name: str, right: Any, wrong: Any, wrong_first: bool, remembering: Remembering
) -> None:
    """1 == True: what one call has passed must not let another one pass, nor may a refusal refuse the right one."""

    def refused() -> None:
        with pytest.raises(TypeError, match=f"^{name}: "):
            flash_kda.kda_decode(**EACH.build() | {name: wrong}, backend="cpu")

    if wrong_first:
        refused()
    for _ in range(2):
        flash_kda.kda_decode(**EACH.build() | {name: right}, backend="cpu")
    refused()
    assert len(remembering.checked) == len(remembering.direct) == 1


@torch.no_grad()
def test_the_cpu_checks_every_call() -> None:
    """Its boundaries can be read, so a later call with bad ones is refused."""
    flash_kda.kda_decode(**PACKED.build())
    bad = PACKED.build() | {"cu_seqlens": torch.tensor([0, 3, 2, 5])}
    with pytest.raises(ValueError, match=r"^cu_seqlens: got 2 after 3"):
        flash_kda.kda_decode(**bad)


def test_the_code_of_the_serving_guide_runs() -> None:
    """In its order, and it does what its comments say."""
    text = (Path(__file__).parents[1] / "docs" / "serving.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, Any] = {}
    exec(blocks[0], names)
    assert names["pool"].flatten(1).any(1).nonzero().flatten().tolist() == [2, 5]
    assert not names["o"][1].count_nonzero()
    assert names["o"][0].count_nonzero()
    exec(blocks[1], names)
    assert names["pool"].flatten(1).any(1).all()
    assert not names["o"][1].count_nonzero()
    exec(blocks[2], names)
    assert names["o"].shape == (3, 1, 4, 64)
    assert [bool(row.any()) for row in names["o"]] == [True, False, True]
    assert names["conv_pool"].flatten(1).any(1).nonzero().flatten().tolist() == [1, 5]
    kept = bits(names["pool"]).clone()
    exec(blocks[3], names)
    assert torch.equal(bits(names["pool"]), kept)
    before = names["pool"].clone()
    exec(blocks[4], names)
    after = names["pool"]
    assert (after != before).flatten(1).any(1).nonzero().flatten().tolist() == [1, 3, 4, 6]
    assert names["o"][0, :131].flatten(1).any(1).all()
    assert not names["o"][0, 131:].count_nonzero()
    rows = {name: names[name][:, :128] for name in ("q", "k", "v", "g", "beta")}
    _, state = flash_kda.kda(**rows, gate=names["gate"], output_final_state=True)
    assert state is not None
    torch.testing.assert_close(after[6], state[0])
