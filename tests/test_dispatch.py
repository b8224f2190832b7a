"""Which backend runs, and the reasons against the others."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import TARGETS, Case, inputs_of, leaves

import flash_kda
from flash_kda import dispatch


def test_every_backend_is_a_target() -> None:
    """A backend that no test runs would be a hole."""
    assert set(flash_kda.BACKENDS) == {target.backend for target in TARGETS}


@pytest.fixture
def call() -> Any:
    return Case(T=3).build()


def test_auto_never_takes_the_reference(call: Any) -> None:
    with flash_kda.record_backends() as ran:
        flash_kda.kda(**call)
        flash_kda.kda(**call, backend="reference")
        flash_kda.kda(**call, backend="cpu")
    assert ran == ["cpu", "reference", "cpu"]


def test_records_nest_and_end(call: Any) -> None:
    with flash_kda.record_backends() as outer:
        flash_kda.kda(**call)
        with flash_kda.record_backends() as inner:
            flash_kda.kda(**call, backend="reference")
        flash_kda.kda(**call)
    flash_kda.kda(**call)
    assert (outer, inner) == (["cpu", "cpu"], ["reference"])


def test_explain_gives_a_reason_for_every_other_backend() -> None:
    problem = flash_kda.Problem(device="cpu", T=10, H=2)
    for asked in ("auto", *flash_kda.BACKENDS):
        answer = flash_kda.explain(problem, asked)
        assert answer.problem is problem
        assert answer.reasons.keys() == set(flash_kda.BACKENDS) - {answer.backend}
        assert all(answer.reasons.values())
        head = f"{answer.backend} would run" if answer.backend else "no backend can run"
        assert str(answer).startswith(f"{head} Problem(")
        if asked in ("auto", "cpu"):
            assert answer.backend == "cpu"
        else:
            assert answer.backend in (asked, None)
            assert answer.reasons["cpu"] == f"backend={asked!r} was asked for"


def test_explain_refuses_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"^backend: got 'gpu', expected 'auto' or one of .*'cpu'"):
        flash_kda.explain(flash_kda.Problem(), "gpu")


def test_no_backend_lists_every_reason() -> None:
    answer = flash_kda.explain(flash_kda.Problem(device="vulkan"))
    assert answer.backend is None
    assert answer.reasons.keys() == set(flash_kda.BACKENDS)
    assert "no backend can run" in str(answer)
    assert "vulkan" in answer.reasons["cpu"]


@pytest.fixture
def unable(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(supports=lambda problem: "it is tired", run=None)
    monkeypatch.setattr(dispatch, "load", lambda name: module)


@pytest.mark.usefixtures("unable")
def test_a_call_that_no_backend_can_run(call: Any) -> None:
    """No silent fall-back: not to another backend when one was named, and not to the reference."""
    for asked in ("auto", "cpu"):
        with flash_kda.record_backends() as ran, pytest.raises(NotImplementedError) as caught:
            flash_kda.kda(**call, backend=asked)
        assert ran == []
        assert "not cpu: it is tired" in str(caught.value)
        assert re.search("not reference: (runs only when asked for|backend='cpu' was asked for)", str(caught.value))


def test_a_backend_that_cannot_be_imported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dispatch._MODULES, "cpu", "flash_kda.backends.missing")
    assert "cannot be imported" in flash_kda.explain(flash_kda.Problem(device="cpu")).reasons["cpu"]


def test_problem_of_a_call() -> None:
    case = Case(lengths=(3, 0, 4), tail=2, H=2, HV=4, K=3, V=5, gate="softplus", dtype="bfloat16")
    call = case.build()
    shape = {"B": 1, "T": 9, "H": 2, "K": 3, "V": 5, "HV": 4, "N": 3}
    options = {"gate": "softplus", "packed": True, "device": "cpu", "copyable": False}
    expected = flash_kda.Problem(**shape, dtype=torch.bfloat16, **options)
    assert flash_kda.Problem.of(inputs_of(call)) == expected
    for name in ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"):
        taped, _ = leaves(call, (name,))
        assert flash_kda.Problem.of(inputs_of(taped)).grad, f"{name} wants a gradient"
        with torch.no_grad():
            assert not flash_kda.Problem.of(inputs_of(taped)).grad
    assert flash_kda.Problem.of(inputs_of(call | {"initial_state": None})).state_dtype == torch.float32
    half = call | {"initial_state": call["initial_state"].bfloat16()}
    assert flash_kda.Problem.of(inputs_of(half)).state_dtype == torch.bfloat16
