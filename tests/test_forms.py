"""``kda`` and ``fwd`` by forms: what is remembered of a call, what is not, and what is checked all the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Call, Case, variants
from conftest import forget
from remembering import Remembering
from test_compat import as_fwd
from test_launch import widened
from torch import Tensor

import flash_kda
from flash_kda import api, dispatch, forms
from flash_kda.compat import flashkda
from flash_kda.types import gate_parameters

BASE = Case(B=2, T=40, H=2, HV=4, K=3, V=5, dtype="bfloat16")
PACKED = Case(lengths=(5, 0, 20), tail=3, H=2, HV=4, K=3, V=5)
TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")


class RememberingRuns(Remembering):
    """As ``kda`` and ``fwd`` ask it: to run a call, and what runs the others of its form."""

    def run(self, inputs: Any, *results: Tensor | None) -> tuple[Tensor, Tensor | None]:
        self.checked.append(inputs)
        return torch.zeros_like(inputs.v), None

    def runner(self, inputs: Any) -> Any:
        return lambda *arguments: self.direct.append(arguments) or (torch.ones(1), torch.ones(1))


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> Remembering:
    return RememberingRuns.in_place(monkeypatch)


@torch.no_grad()
@pytest.mark.parametrize("case", [BASE, PACKED], ids=str)
def test_a_second_call_of_a_form_is_direct(case: Case, remembering: Remembering) -> None:
    """With this call's tensors, not the first one's; nothing is checked, and it is recorded all the same."""
    first, second = case.build(), case.but(seed=1).build()
    with flash_kda.record_backends() as ran:
        o, _ = flash_kda.kda(**first, backend="cpu")
        with mock.patch.object(api, "check", side_effect=AssertionError("checked again")):
            again, state = flash_kda.kda(**second, backend="cpu")
    assert ran == ["cpu", "cpu"]
    assert len(remembering.checked) == 1
    assert torch.equal(o, torch.zeros_like(first["v"]))
    assert again.item() == 1
    assert state is not None
    ((tensors, *of_gate),) = remembering.direct
    assert all(x is second[name] for x, name in zip(tensors, TENSORS, strict=False))
    assert tensors[7:] == (None, None)
    assert all(a is b for a, b in zip(of_gate, gate_parameters(second["gate"]), strict=True))


def other_forms() -> list[Any]:
    """Right calls that differ from BASE's in one thing that is not a tensor's values."""
    call = BASE.build()
    gate, S = call["gate"], call["initial_state"]
    first = {name: call[name][:1] for name in ("q", "k", "v", "g", "beta", "initial_state")}
    ends = torch.tensor([0, 40])
    changes: dict[str, Any] = {
        **{f"strides of {name}": {name: widened(call[name])} for name in ("q", "k", "v", "g", "beta", "initial_state")},
        "dtype of the rows": {name: call[name].half() for name in ("q", "k", "v")},
        "dtype of g": {"g": call["g"].bfloat16()},
        "dtype of beta": {"beta": call["beta"].bfloat16()},
        "dtype of the state": {"initial_state": S.bfloat16()},
        "no initial state": {"initial_state": None},
        "no final state": {"output_final_state": False},
        "layout": {"state_layout": "kv", "initial_state": S.mT.contiguous()},
        "scale": {"scale": 0.5},
        "qk_l2norm": {"qk_l2norm": False},
        "beta_is_logit": {"beta_is_logit": False},
        "allow_neg_eigval": {"allow_neg_eigval": True},
        "recompute": {"recompute": False},
        "bound": {"gate": flash_kda.LowerBoundGate(gate.A_log, gate.dt_bias, -4.0)},
        "no amplitude": {"gate": flash_kda.LowerBoundGate(None, gate.dt_bias)},
        "no bias": {"gate": flash_kda.LowerBoundGate(gate.A_log, None)},
        "flat bias": {"gate": flash_kda.LowerBoundGate(gate.A_log, gate.dt_bias.flatten())},
        "double amplitude": {"gate": flash_kda.LowerBoundGate(gate.A_log.double(), gate.dt_bias)},
        "softplus": {"gate": flash_kda.SoftplusGate(gate.A_log, gate.dt_bias)},
        "log": {"gate": flash_kda.LogGate()},
        "one sequence": first,
        "packed": first | {"cu_seqlens": ends},
        "fewer tokens": {name: call[name][:, :33] for name in ("q", "k", "v", "g", "beta")},
        "backend": {"backend": "reference"},
    }
    return variants(call, changes)


@pytest.mark.parametrize("call", other_forms())
@torch.no_grad()
def test_another_form_is_checked_anew(call: Call, remembering: Remembering) -> None:
    flash_kda.kda(**BASE.build(), backend="cpu")
    flash_kda.kda(**{"backend": "cpu"} | call)
    assert len(remembering.checked) == 2
    assert not remembering.direct


@torch.no_grad()
def test_a_stride_that_nothing_is_reached_by_makes_no_form(remembering: Remembering) -> None:
    """That of a dimension with one entry; a tensor with gaps has one of its own."""
    call = BASE.but(B=1).build()
    q = call["q"]
    same = q.as_strided(q.shape, (7, *q.stride()[1:]))
    for x in (q, same, q, widened(q), widened(q)):
        flash_kda.kda(**call | {"q": x}, backend="cpu")
    assert (len(remembering.checked), len(remembering.direct)) == (2, 3)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"])
def test_a_gradient_is_seen_in_a_known_form(name: str, remembering: Remembering) -> None:
    call = BASE.build()
    if name in call:
        call[name].requires_grad_()
    else:
        call["gate"] = replace(call["gate"], **{name: getattr(call["gate"], name).requires_grad_()})
    for _ in range(2):
        flash_kda.kda(**BASE.build(), backend="cpu")
    for direct in (1, 2, 3):
        flash_kda.kda(**call, backend="cpu")
        assert (len(remembering.checked), len(remembering.direct)) == (2, direct)
    assert remembering.checked[1].problem.grad
    with torch.no_grad():
        flash_kda.kda(**call, backend="cpu")
    assert (len(remembering.checked), len(remembering.direct)) == (2, 4)


def test_a_form_that_no_backend_remembers_with_gradients(remembering: Remembering) -> None:
    """It is checked every time, and the same without gradients is not."""
    taped = BASE.build()
    taped["q"].requires_grad_()
    with mock.patch.object(remembering, "runner", return_value=None):
        for _ in range(2):
            flash_kda.kda(**taped, backend="cpu")
    for _ in range(2):
        flash_kda.kda(**BASE.build(), backend="cpu")
    assert (len(remembering.checked), len(remembering.direct)) == (3, 1)


# Arguments that differ from those of a known form, some of them equal to right ones but for their type.
WRONG: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"q": [1.0]}, TypeError, "q: got list, expected a torch.Tensor"),
    ({"k": torch.zeros(2, 40, 2, 4, dtype=torch.bfloat16)}, ValueError, r"k: got shape \(2, 40, 2, 4\)"),
    ({"v": torch.zeros(2, 40, 4, 5)}, TypeError, "v: got torch.float32, expected torch.bfloat16"),
    ({"g": torch.zeros(2, 40, 4, 3, device="meta")}, ValueError, "g: got device meta, expected cpu"),
    ({"g": torch.zeros(2, 40, 3, 4).mT}, ValueError, "g: got last-dimension stride 4"),
    ({"beta": None}, TypeError, "beta: got NoneType"),
    ({"initial_state": torch.zeros(2, 4, 5, 3).half()}, TypeError, "initial_state: got torch.float16"),
    ({"cu_seqlens": torch.tensor([0, 40])}, ValueError, "cu_seqlens: got a batch of 2"),
    ({"gate": None}, TypeError, "gate: got NoneType"),
    ({"gate": flash_kda.LowerBoundGate(torch.zeros(3))}, ValueError, r"A_log: got shape \(3,\)"),
    ({"scale": "1"}, TypeError, "scale: got '1'"),
    ({"output_final_state": 1}, TypeError, "output_final_state: got 1, expected True or False"),
    ({"qk_l2norm": 1}, TypeError, "qk_l2norm: got 1"),
    ({"beta_is_logit": 1.0}, TypeError, "beta_is_logit: got 1.0"),
    ({"allow_neg_eigval": 0}, TypeError, "allow_neg_eigval: got 0"),
    ({"recompute": 0}, TypeError, "recompute: got 0, expected True or False"),
    ({"state_layout": ["vk"]}, ValueError, "state_layout: got"),
    ({"backend": "gpu"}, ValueError, "backend: got 'gpu'"),
)


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[message for *_, message in WRONG])
@torch.no_grad()
def test_errors_come_after_a_known_form_as_before(
    changes: dict[str, Any], error: type[Exception], message: str, remembering: Remembering
) -> None:
    call = BASE.build() | {"backend": "cpu"}
    found = []
    for _ in range(2):
        for _ in range(2):
            with pytest.raises(error, match=f"^{message}") as caught:
                flash_kda.kda(**call | changes)
            found.append(str(caught.value))
        flash_kda.kda(**call)
    assert len(set(found)) == 1
    assert (len(remembering.checked), len(remembering.direct)) == (1, 1)


@torch.no_grad()
def test_a_wrong_option_is_refused_after_another_like_it(remembering: Remembering) -> None:
    """Whatever comparing the two gives."""
    for _ in range(3):
        with pytest.raises(TypeError, match=r"^scale: got tensor"):
            flash_kda.kda(**BASE.build() | {"scale": torch.ones(2)}, backend="cpu")
    assert not remembering.checked


@torch.no_grad()
def test_forms_in_turn(remembering: Remembering) -> None:
    """Each is found again, though it is not the last call's; and noted once, not in every turn."""
    with mock.patch.object(forms, "_noted", wraps=forms._noted) as noted:
        for _ in range(3):
            for B in (1, 2, 3):
                flash_kda.kda(**BASE.but(B=B).build(), backend="cpu")
    assert (len(remembering.checked), len(remembering.direct)) == (3, 6)
    assert noted.call_count == 3


GUARDS = forms.TensorGuards


def no_guards(*tensors: Tensor, **options: Any) -> Any:
    raise TypeError("no such options")


@pytest.mark.parametrize("guards", [GUARDS, None, no_guards], ids=["torch's", "none", "other ones"])
@torch.no_grad()
def test_the_form_of_the_call_before_needs_no_key(
    guards: Any, remembering: Remembering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch has its way of comparing; with another torch the key is sought."""
    monkeypatch.setattr(forms, "TensorGuards", guards)
    for seed in range(2):
        flash_kda.kda(**BASE.but(seed=seed).build(), backend="cpu")
    sought = mock.Mock(wraps=forms.form)
    monkeypatch.setattr(forms, "form", sought)
    monkeypatch.setattr(forms, "_last", forms.Form())
    flash_kda.kda(**BASE.but(seed=2).build(), backend="cpu")
    assert sought.call_count == (0 if guards is GUARDS else 1)
    assert (len(remembering.checked), len(remembering.direct)) == (1, 2)


def test_the_mode_of_a_call_is_seen(remembering: Remembering) -> None:
    """The same tensors without gradients, with them, and in inference mode, each after itself and after the others."""
    call = BASE.build()
    call["q"].requires_grad_()
    ran = []

    def runner(inputs: Any) -> Any:
        made_with = torch.is_grad_enabled()
        return lambda *_: ran.append((made_with, torch.is_grad_enabled())) or (torch.ones(1), None)

    modes = [torch.no_grad, torch.enable_grad, torch.inference_mode]
    with mock.patch.object(remembering, "runner", runner):
        for mode in (mode for first in modes for second in modes for mode in (first, first, second)):
            with mode():
                flash_kda.kda(**call, backend="cpu")
    assert len(remembering.checked) == 2
    assert len(ran) == 25
    assert all(made_with == wanted for made_with, wanted in ran)


class Incomparable:
    """As arrays of several entries: nothing that compares them is true or false."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")


@torch.no_grad()
@pytest.mark.parametrize("name", ["initial_state", "cu_seqlens", "scale"])
def test_what_cannot_be_compared_is_refused(name: str, remembering: Remembering) -> None:
    call = BASE.but(initial=False).build() | {"backend": "cpu"}
    for _ in range(3):
        flash_kda.kda(**call)
        with pytest.raises(TypeError, match=f"^{name}: got "):
            flash_kda.kda(**call | {name: Incomparable()})
    assert (len(remembering.checked), len(remembering.direct)) == (1, 2)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@torch.no_grad()
def test_values_on_the_cpu_are_checked_in_every_call(backend: str) -> None:
    call = PACKED.build() | {"backend": backend}
    for _ in range(2):
        flash_kda.kda(**call)
        flash_kda.fwd(**as_fwd(call))
        call["cu_seqlens"][1] = 6
        call["cu_seqlens"][2] = 2
        for function in (lambda: flash_kda.kda(**call), lambda: flash_kda.fwd(**as_fwd(call))):
            with pytest.raises(ValueError, match="cu_seqlens: got 2 after 6 at index 2"):
                function()
        call["cu_seqlens"][1:3] = 5


@torch.no_grad()
def test_other_backends_meet_no_form(remembering: Remembering, monkeypatch: pytest.MonkeyPatch) -> None:
    """What every test begins with forgets forms together with choices."""
    for _ in range(2):
        flash_kda.kda(**BASE.build(), backend="cpu")
    assert len(remembering.direct) == 1
    other = RememberingRuns()
    monkeypatch.setattr(dispatch, "load", lambda name: other)
    forget()
    flash_kda.kda(**BASE.build(), backend="cpu")
    assert len(other.checked) == 1
    assert len(remembering.direct) == 1


# FlashKDA's interface.

FWD = Case(B=2, T=40, H=2, HV=4, K=3, V=5)


def test_a_second_fwd_of_a_form_is_direct(remembering: Remembering) -> None:
    """Into its own tensors, with or without gradients that nobody wants, a workspace too."""
    first, second = (as_fwd(FWD.but(seed=seed).build(), workspace=torch.zeros(9)) for seed in (0, 1))
    second["q"].requires_grad_()
    flash_kda.fwd(**first)
    with (
        mock.patch.object(flashkda, "check", side_effect=AssertionError("checked again")),
        flash_kda.record_backends() as ran,
    ):
        flash_kda.fwd(**second)
    assert ran == ["hopper"]
    ((tensors, A_log, dt_bias),) = remembering.direct
    names = (*TENSORS, "out", "final_state")
    assert all(x is second[name] for x, name in zip(tensors, names, strict=True))
    assert A_log is second["A_log"]
    assert dt_bias is second["dt_bias"]


def other_forms_of_fwd() -> list[Any]:
    x = as_fwd(FWD.build())
    changes = {
        "out": widened(x["out"]),
        "final_state": widened(x["final_state"]),
        "initial_state": None,
        "workspace": torch.zeros(9),
        "scale": 0.5,
        "lower_bound": -4.0,
        "A_log": None,
        "no state": {"final_state": None},
    }
    return variants(x, changes)


@pytest.mark.parametrize("arguments", other_forms_of_fwd())
def test_another_form_of_fwd_is_checked_anew(arguments: dict[str, Any], remembering: Remembering) -> None:
    flash_kda.fwd(**as_fwd(FWD.build()))
    flash_kda.fwd(**arguments)
    assert len(remembering.checked) == 2
    assert not remembering.direct


def test_fwd_looks_at_memory_in_every_call(remembering: Remembering) -> None:
    """Addresses are no part of a form."""
    call = Case(B=2, T=6, H=2, K=4, V=4).build()
    memory = torch.zeros(2, 2, 4, 8)
    for final in (memory[..., :4].clone(), torch.zeros_like(memory)[..., :4]):
        flash_kda.fwd(**as_fwd(call, final_state=final))
    for name in ("q", "k", "v", "g"):
        with pytest.raises(ValueError, match=f"^out: got the memory of {name}, expected memory of its own"):
            flash_kda.fwd(**as_fwd(call, out=call[name]))
    initial = memory.view(-1)[:64].view(2, 2, 4, 4)
    with pytest.raises(
        ValueError, match=r"^final_state: got the memory of initial_state as torch.float32 with strides"
    ):
        flash_kda.fwd(**as_fwd(call, initial_state=initial, final_state=memory[..., :4]))
    assert not remembering.direct
    flash_kda.fwd(**as_fwd(call, initial_state=initial))
    flash_kda.fwd(**as_fwd(call, initial_state=initial, final_state=initial))
    assert (len(remembering.checked), len(remembering.direct)) == (2, 2)


@pytest.mark.parametrize(("initial", "final", "known"), [("bfloat16", "float32", 0), ("float32", "bfloat16", 1)])
def test_a_widened_state_is_widened_in_every_call(
    initial: str, final: str, known: int, remembering: Remembering
) -> None:
    for _ in range(2):
        call = FWD.but(state_dtype=initial).build()
        flash_kda.fwd(**as_fwd(call, final_state=torch.zeros(2, 4, 5, 3, dtype=getattr(torch, final))))
    assert (len(remembering.checked), len(remembering.direct)) == (2 - known, known)
    assert all(x.initial_state.dtype == torch.float32 for x in remembering.checked)
