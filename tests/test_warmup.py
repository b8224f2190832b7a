"""Compiling before the first request: which calls are made, and that later ones find their kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Case
from decoding import DecodeCase
from prefilling import PrefillCase
from stepping import StepCase

import flash_kda
from flash_kda import dispatch
from flash_kda.types import Problem

FUNCTIONS = {"forward": "kda", "decode": "kda_decode", "step": "kda_decode_step", "prefill": "kda_prefill"}
SMALL = Problem(device="cpu", T=70, H=2, HV=4, K=16, V=24)
PROBLEMS = (
    *(
        replace(SMALL, gate=gate, grad=grad, packed=packed, N=3 if packed else None)
        for gate in ("lower_bound", "softplus", "log")
        for grad in (False, True)
        for packed in (False, True)
    ),
    replace(SMALL, B=3, T=5, dtype=torch.float32, state_dtype=torch.bfloat16, qk_l2norm=False, beta_is_logit=False),
    replace(SMALL, op="decode", B=5, T=1),
    replace(SMALL, op="decode", B=5, T=3, gate="softplus"),
    replace(SMALL, op="decode", T=10, packed=True, N=5),
    replace(SMALL, op="step", B=5, T=1),
    replace(SMALL, op="prefill", B=2),
    replace(SMALL, op="prefill", packed=True, N=3, checkpoints=True),
)


@pytest.fixture
def posed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Problem]]:
    """The problems of all calls."""
    found: list[Problem] = []
    choose = dispatch.choose

    def record(problem: Problem, backend: str) -> Any:
        found.append(problem)
        return choose(problem, backend)

    monkeypatch.setattr(dispatch, "choose", record)
    return found


def name_of(p: Problem) -> str:
    return f"{p.op}-{p.gate}-B{p.B}-T{p.T}{'-packed' * p.packed}{'-grad' * p.grad}"


@pytest.mark.parametrize("p", PROBLEMS, ids=name_of)
def test_the_calls_pose_the_problem(p: Problem, posed: list[Problem]) -> None:
    assert flash_kda.warmup([p]) == ["cpu"]
    known = {replace(x, copyable=True, N=None if not p.packed else x.N) for x in posed}
    assert known == {p}


@pytest.mark.parametrize("op", FUNCTIONS)
def test_dense_tensors_and_parts_of_a_projection(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_kda import warming

    called = mock.Mock(wraps=getattr(warming, FUNCTIONS[op]))
    monkeypatch.setattr(warming, FUNCTIONS[op], called)
    p = replace(SMALL, op=op, B=3, T=40 if op in ("forward", "prefill") else 1, HV=6)
    flash_kda.warmup([p], state_layout="kv", index_dtype=torch.int64, allow_neg_eigval=True)
    dense, parts = (call.kwargs for call in called.call_args_list)
    for name in ("q", "k", "v", "g", "beta", *(["z"] if op == "step" else [])):
        assert dense[name].is_contiguous()
        x = parts[name]
        assert x.shape == dense[name].shape
        assert not x.is_contiguous()
        assert x.stride(0) == parts["q"].stride(0), "rows of one tensor"
        assert all(x.stride(d) % 16 == 0 for d in range(2) if x.shape[d] > 1)
        assert x.storage_offset() % 16 == 0
        assert x.untyped_storage().data_ptr() == parts["q"].untyped_storage().data_ptr()
    assert parts["state_layout"] == "kv"
    assert parts["allow_neg_eigval"] is True
    if op != "forward":
        assert parts["indices"].dtype == torch.int64
        assert parts["indices"].tolist() == [-1] * 3, "rows that exist would be computed"


def test_drafts_have_a_slot_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_kda import warming

    called = mock.Mock(wraps=warming.kda_decode)
    monkeypatch.setattr(warming, "kda_decode", called)
    flash_kda.warmup([replace(SMALL, op="decode", B=5, T=3), replace(SMALL, op="decode", T=10, packed=True, N=4)])
    each, _, packed, _ = (call.kwargs for call in called.call_args_list)
    assert each["indices"].shape == (5, 3)
    assert each["num_accepted"].tolist() == [1] * 5
    assert packed["indices"].shape == (4, 3)
    assert packed["cu_seqlens"].tolist() == [0, 2, 5, 7, 10]


def test_what_cannot_be_warmed_is_said() -> None:
    with pytest.raises(TypeError, match="problems: got a dict at 1, expected a Problem"):
        flash_kda.warmup([SMALL, {}])
    with pytest.raises(NotImplementedError, match="not triton: runs on CUDA devices"):
        flash_kda.warmup([SMALL], backend="triton")
    with pytest.raises(NotImplementedError, match="computes no gradients"):
        flash_kda.warmup([replace(SMALL, op="decode", T=1, grad=True)])
    with pytest.raises(ValueError, match="state_layout"):
        flash_kda.warmup([SMALL], state_layout="kk")
    assert flash_kda.warmup([]) == []


def test_gradients_stay_as_they_were() -> None:
    """Neither the mode of the caller nor what it records changes."""
    with torch.no_grad(), flash_kda.record_backends() as ran:
        flash_kda.warmup([replace(SMALL, grad=True)])
        assert not torch.is_grad_enabled()
    assert ran == []


# On a GPU.

SIZES: dict[str, Any] = {"H": 4, "HV": 8, "K": 128, "V": 128, "dtype": "bfloat16", "cu_dtype": "int32"}
LATER: dict[str, Any] = {
    "forward": Case(T=300, **SIZES),
    "decode": DecodeCase(Case(B=40, T=1, **SIZES), index="one"),
    "step": StepCase(DecodeCase(Case(B=40, T=1, **SIZES), index="one")),
    "prefill": PrefillCase(Case(lengths=(100, 1, 60), **SIZES), known=True),
}


def served(op: str) -> dict[str, Any]:
    """A call as engines make it: all that the projections give is bfloat16."""
    call = LATER[op].build("cuda")
    for name in ("g", "beta", "z", "conv_pool", "norm_weight"):
        if name in call:
            call[name] = call[name].bfloat16()
    if op == "step":
        call["conv_weights"] = [x.bfloat16() for x in call["conv_weights"]]
    return call


def compiled() -> int:
    """Kernels that were compiled in this process."""
    from flash_kda.backends.hopper import pooled
    from flash_kda.backends.hopper import prepare as hopper_prepare
    from flash_kda.backends.hopper import recurrence as hopper_recurrence
    from flash_kda.backends.triton import decode, prepare, recurrence, step

    kernels: list[Any] = [decode.decode, step.step, prepare.prepare, recurrence.recurrence]
    kernels += [recurrence.pooled_recurrence, hopper_prepare.prepare_warp, hopper_recurrence.walk]
    kernels += [pooled.pooled_walk]
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


@pytest.mark.gpu
@pytest.mark.parametrize("op", LATER)
def test_nothing_compiles_afterwards(op: str) -> None:
    call, packed = served(op), op == "prefill"
    B, T = call["q"].shape[:2]
    p = Problem(B=B, T=T, H=4, HV=8, op=op, packed=packed, N=3 if packed else None, checkpoints=packed)
    start = compiled()
    flash_kda.warmup([p])
    before = compiled()
    assert before > start
    with torch.no_grad():
        getattr(flash_kda, FUNCTIONS[op])(**call)
    assert compiled() == before
