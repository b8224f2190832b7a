"""``kda_prefill``: wrong arguments, gradients, ``explain``, what is remembered of a call's form, torch.compile."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, Target, skip_if_declined, targets
from compare import unchanged
from operators import assert_one_operator
from prefilling import PACKED, PrefillCase, checked
from torch import Tensor

import flash_kda
from flash_kda import Checkpoints

BASE = PrefillCase(Case(lengths=(40, 0, 33), H=2, HV=4, K=3, V=5), padding=False, checkpoints="placed")
BATCH = PrefillCase(Case(B=2, T=40, H=2, HV=4, K=3, V=5), padding=False)
ints = torch.tensor
STATES = torch.zeros(9, 4, 5, 3)


def of(offsets: Any = (16, 32), ends: Any = (0, 1, 1, 2), states: Any = STATES, indices: Any = None) -> Any:
    """Checkpoints of three sequences; tuples become tensors."""
    made = [ints(x) if isinstance(x, tuple) else x for x in (offsets, ends, states, indices)]
    return {"checkpoints": Checkpoints(*made)}


WRONG: tuple[tuple[PrefillCase, dict[str, Any], type[Exception], str], ...] = (
    (BASE, {"q": [1.0]}, TypeError, "q: got list, expected a torch.Tensor"),
    (BASE, {"gate": None}, TypeError, "gate: got NoneType, expected LowerBoundGate"),
    (BASE, {"scale": [1.0]}, TypeError, "scale: got [1.0], expected a number"),
    (BASE, {"state_layout": "kk"}, ValueError, "state_layout: got 'kk', expected 'vk' or 'kv'"),
    (BASE, {"cu_seqlens": ints([0, 40, 30, 73])}, ValueError, "cu_seqlens: got 30 after 40 at index 2"),
    (BASE, {"pool": None}, TypeError, "pool: got NoneType, expected a torch.Tensor"),
    (BASE, {"pool": STATES.half()}, TypeError, "pool: got torch.float16, expected one of float32"),
    (BASE, {"pool": STATES.mT.contiguous()}, ValueError, "pool: got shape (9, 4, 3, 5), expected [slots, HV, V, K]"),
    (BASE, {"pool": torch.zeros(9, 4, 3, 5).mT}, ValueError, "pool: got last-dimension stride 5, expected 1"),
    (BASE, {"pool": STATES[:1].expand(9, 4, 5, 3)}, ValueError, "pool: got strides (0, 15, 3, 1)"),
    (BASE, {"indices": [0, 1, 2]}, TypeError, "indices: got list, expected a torch.Tensor"),
    (BASE, {"indices": ints([0.0, 1.0, 2.0])}, TypeError, "indices: got torch.float32, expected one of int32, int64"),
    (BASE, {"indices": ints([0, 1])}, ValueError, "indices: got shape (2,), expected [N]"),
    (BASE, {"indices": ints([[0], [1], [2]])}, ValueError, "indices: got shape (3, 1), expected [N] = (3,)"),
    (BASE, {"indices": None, "pool": STATES[:2]}, ValueError, "pool: got 2 slots, expected one for each of N = 3 rows"),
    (BASE, {"has_initial_state": ints([1, 1, 0])}, TypeError, "has_initial_state: got torch.int64, expected"),
    (BASE, {"has_initial_state": ints([True])}, ValueError, "has_initial_state: got shape (1,), expected [N] = (3,)"),
    (BASE, {"pad_index": None}, TypeError, "pad_index: got None, expected an int"),
    (BASE, {"pad_index": 2**31}, ValueError, "pad_index: got 2147483648, expected an int of 32 bits"),
    (BASE, {"write_states": 1}, TypeError, "write_states: got 1, expected True or False"),
    (BASE, {"out": 0}, TypeError, "out: got int, expected a torch.Tensor"),
    (BASE, {"out": torch.zeros(1, 76, 4, 6)}, ValueError, "out: got shape (1, 76, 4, 6), expected [B, T, HV, V]"),
    (BASE, {"checkpoints": ints([16])}, TypeError, "checkpoints: got Tensor, expected flash_kda.Checkpoints or None"),
    (BASE, of(offsets=None), TypeError, "checkpoints.offsets: got NoneType, expected a torch.Tensor"),
    (BASE, of(offsets=[16, 32]), TypeError, "checkpoints.offsets: got list, expected a torch.Tensor"),
    (BASE, of(offsets=(16.0, 32.0)), TypeError, "checkpoints.offsets: got torch.float32, expected one of int32, int64"),
    (BASE, of(offsets=((16, 32),)), ValueError, "checkpoints.offsets: got shape (1, 2), expected [M]"),
    (BASE, of(ends=None), TypeError, "checkpoints.cu_offsets: got NoneType, expected a torch.Tensor"),
    (BASE, of(ends=(0, 1, 2)), ValueError, "checkpoints.cu_offsets: got shape (3,), expected [N + 1] = (4,)"),
    (BATCH, of(), ValueError, "checkpoints.cu_offsets: got shape (4,), expected [N + 1] = (3,)"),
    (BASE, of(ends=(1, 1, 1, 2)), ValueError, "checkpoints.cu_offsets: got first entry 1, expected 0"),
    (BASE, of(ends=(0, 1, 0, 2)), ValueError, "checkpoints.cu_offsets: got 0 after 1 at index 2"),
    (BASE, of(ends=(0, 1, 1, 3)), ValueError, "checkpoints.cu_offsets: got last entry 3, expected at most M = 2"),
    (BASE, of((32, 16), (0, 2, 2, 2)), ValueError, "checkpoints.offsets: got 16 after 32 in sequence 0, expected incr"),
    (BASE, of((8, 8), (0, 0, 0, 2)), ValueError, "checkpoints.offsets: got 8 after 8 in sequence 2, expected incr"),
    (BASE, of(states=None), ValueError, "checkpoints: got neither states nor indices, expected either or both"),
    (BASE, of(states=0), TypeError, "checkpoints.states: got int, expected a torch.Tensor"),
    (BASE, of(states=STATES.half()), TypeError, "checkpoints.states: got torch.float16, expected one of float32"),
    (
        BASE,
        of(states=STATES.mT.contiguous()),
        ValueError,
        "checkpoints.states: got shape (9, 4, 3, 5), expected [places, HV, V, K] with (4, 5, 3) after the first",
    ),
    (BASE, of(states=STATES[:1]), ValueError, "checkpoints.states: got 1 places, expected one for each of M = 2"),
    (BASE, of(states=STATES[:1].expand(9, 4, 5, 3)), ValueError, "checkpoints.states: got strides (0, 15, 3, 1)"),
    (BASE, of(states=STATES.to("meta")), ValueError, "checkpoints.states: got device meta, expected cpu"),
    (BASE, of(indices=(0, 1, 2)), ValueError, "checkpoints.indices: got shape (3,), expected [M] = (2,)"),
    (BASE, of(indices=(0.0, 1.0)), TypeError, "checkpoints.indices: got torch.float32, expected one of int32, int64"),
    (BASE, {"backend": "gpu"}, ValueError, "backend: got 'gpu', expected 'auto' or one of"),
)


@pytest.mark.parametrize(("case", "changes", "error", "message"), WRONG, ids=[w[3][:60] for w in WRONG])
def test_wrong_arguments(case: PrefillCase, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    """The right exception in words, before anything is written."""
    call = case.build()
    if changes.get("pool", 0) is None or isinstance(changes.get("pool"), Tensor):
        call["checkpoints"] = None
    with unchanged(call), pytest.raises(error, match="^" + re.escape(message)):
        flash_kda.kda_prefill(**call | changes)


def test_the_old_way_of_passing_states_is_no_argument() -> None:
    """States are passed through the pool alone."""
    call = BASE.build()
    for name, value in (("initial_state", STATES[:3]), ("output_final_state", True)):
        with pytest.raises(TypeError, match=name):
            flash_kda.kda_prefill(**call, **{name: value})
    for name in ("pool", "indices", "checkpoints"):
        rows = {key: call[key] for key in ("q", "k", "v", "g", "beta", "gate", "cu_seqlens")}
        with pytest.raises(TypeError, match=name):
            flash_kda.kda(**rows, **{name: call[name]})


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "pool", "A_log", "dt_bias", "states"])
def test_gradients_are_refused_in_words(name: str) -> None:
    call = BASE.build()
    if name in call:
        call[name] = call[name].clone().requires_grad_()
    elif name == "states":
        c = call["checkpoints"]
        call["checkpoints"] = replace(c, states=c.states.clone().requires_grad_())
    else:
        call["gate"] = replace(call["gate"], **{name: getattr(call["gate"], name).clone().requires_grad_()})
    for backend in ("auto", "cpu", "reference"):
        with pytest.raises(NotImplementedError, match="prefill into a pool computes no gradients"):
            flash_kda.kda_prefill(**call, backend=backend)
    with torch.no_grad():
        o = flash_kda.kda_prefill(**call)
    assert not o.requires_grad


def test_problem_of_a_call() -> None:
    call = PrefillCase(BASE.rows.but(state_dtype="bfloat16", gate="softplus")).build()
    expected = flash_kda.Problem(
        B=1, T=73, H=2, K=3, V=5, HV=4, N=3, dtype=torch.float32, state_dtype=torch.bfloat16, gate="softplus",
        packed=True, device="cpu", copyable=False, op="prefill", checkpoints=True,
    )  # fmt: skip
    assert checked(call).problem == expected
    assert checked(call | {"checkpoints": None}).problem == replace(expected, checkpoints=False)


def test_explain() -> None:
    """Every backend has its say; the reason of the one without such kernels names what is missing."""
    answer = flash_kda.explain(flash_kda.Problem(device="cpu", op="prefill", checkpoints=True))
    assert answer.backend == "cpu"
    assert answer.reasons.keys() == {"reference", "triton", "hopper"}


def test_hopper_takes_what_it_takes_without_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """On its own device, with its reasons against other sizes."""
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", "3.6.0")
    from flash_kda.backends import hopper

    monkeypatch.setattr(hopper, "triton_supports", lambda problem: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for checkpoints in (False, True):
        prefill = flash_kda.Problem(op="prefill", checkpoints=checkpoints)
        assert hopper.supports(prefill) is None
        for changes, reason in (({"K": 64}, "K = 128"), ({"packed": True, "N": 128}, "three chunks")):
            assert reason in (hopper.supports(replace(prefill, **changes)) or "")  # type: ignore[arg-type]


CASES = (
    BASE,
    PrefillCase(PACKED, checkpoints="pool", known=True),
    PrefillCase(PACKED.but(layout="kv", gate="softplus"), checkpoints="none", index=False),
    PrefillCase(PACKED.but(gate="log"), checkpoints="own", write=False),
)


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("target", targets())
def test_one_operator(target: Target, case: PrefillCase, with_out: bool) -> None:
    """The compiled call gives the bits of the plain one, and updates pool and checkpoints."""
    torch.compiler.reset()
    call, plain = case.build(target.device), case.build(target.device)
    skip_if_declined(target, checked(call).problem)
    assert_one_operator(target, flash_kda.kda_prefill, call, plain, with_out=with_out)
