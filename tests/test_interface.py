"""Every option of ``kda`` on every backend, against the definition in numpy float64."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from cases import CASES, TENSORS, Call, Case, Target, leaves, on_device, oracle, parameters, run, targets
from compare import assert_outputs, assert_same_bits, assert_states, bits
from torch import Tensor

import flash_kda

pytestmark = pytest.mark.parametrize("target", targets())


@cache
def expected(case: Case) -> tuple[Tensor, Tensor]:
    return oracle(case.build())


def snapshot(call: Call) -> dict[str, Tensor]:
    gate = {name: getattr(call["gate"], name, None) for name in ("A_log", "dt_bias")}
    tensors = {name: call[name] for name in (*TENSORS, "cu_seqlens")} | gate
    return {name: bits(x).clone() for name, x in tensors.items() if x is not None}


@pytest.mark.parametrize("case", parameters(CASES))
def test_definition(target: Target, case: Case) -> None:
    call = case.build(target.device)
    before = snapshot(call)
    o, state = run(target, call)
    want, want_state = expected(case)
    assert o.dtype == call["v"].dtype
    assert o.is_contiguous()
    assert_outputs(o, want, call, target.tolerance)
    if not case.final:
        assert state is None
    else:
        assert state is not None
        given = call["initial_state"]
        assert state.is_contiguous()
        wide = torch.float64 if case.dtype == "float64" else torch.float32
        assert state.dtype == (wide if given is None else given.dtype)
        assert_states(state, want_state, target.tolerance)
        for n, length in enumerate(case.lengths or (case.T,) * case.B):
            if length == 0:
                kept = torch.zeros_like(state[n]) if given is None else given[n]
                assert_same_bits(state[n], kept, f"state {n} of an empty sequence")
    after = snapshot(call)
    assert all(torch.equal(before[name], after[name]) for name in before), "an input was changed"


@pytest.mark.parametrize("case", parameters(CASES[::4]))
def test_same_bits_twice(target: Target, case: Case) -> None:
    call = case.build(target.device)
    for name, x, y in zip(("o", "state"), run(target, call), run(target, call), strict=True):
        assert_same_bits(x, y, name)


@pytest.mark.parametrize("case", parameters((Case(T=300, H=3, K=64, V=64), Case(lengths=(3, 70, 0, 64, 200), K=24))))
def test_same_bits_twice_with_many_threads(target: Target, case: Case) -> None:
    """Outputs, states and gradients; everywhere else the tests run in one thread."""
    runs = []
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for _ in range(3):
            call, found = leaves(case.build(target.device))
            o, state = run(target, call)
            assert state is not None
            runs.append((o, state, *torch.autograd.grad(o.sum() + state.square().sum(), list(found.values()))))
    finally:
        torch.set_num_threads(before)
    for again in runs[1:]:
        for name, x, y in zip(("o", "state", *found), again, runs[0], strict=True):
            assert_same_bits(x, y, name)


@pytest.mark.parametrize("case", parameters(CASES[1::6]))
def test_wanting_a_gradient_changes_no_bit(target: Target, case: Case) -> None:
    call = case.build(target.device)
    with_tape, _ = leaves(call)
    for name, x, y in zip(("o", "state"), run(target, with_tape), run(target, call), strict=True):
        assert_same_bits(x, y, name)


def test_layouts_are_equivalent(target: Target) -> None:
    case = Case(V=9, lengths=(5, 0, 66))
    vk = case.build(target.device)
    kv = vk | {"state_layout": "kv", "initial_state": vk["initial_state"].transpose(-1, -2).contiguous()}
    o, state = run(target, vk)
    o2, state2 = run(target, kv)
    assert_same_bits(o2, o, "o")
    assert state is not None
    assert state2 is not None
    assert state.is_contiguous()
    assert state2.is_contiguous()
    assert_same_bits(state2.transpose(-1, -2), state, "state")


def test_no_final_state_changes_no_output(target: Target) -> None:
    call = Case(lengths=(5, 0, 66)).build(target.device)
    assert_same_bits(run(target, call, output_final_state=False)[0], run(target, call)[0], "o")


def test_beta_logits(target: Target) -> None:
    """Logits given, and their sigmoid taken by the caller, agree."""
    call = Case(dtype="float64").build(target.device)
    o, _ = run(target, call)
    o2, _ = run(target, call, beta=torch.sigmoid(call["beta"]), beta_is_logit=False)
    torch.testing.assert_close(o2, o, rtol=1e-12, atol=1e-12)


def test_gates_agree_with_the_log_gate(target: Target) -> None:
    for gate in ("lower_bound", "softplus"):
        call = Case(gate=gate, dtype="float64", initial=False).build(target.device)
        from flash_kda.reference import decay

        o, _ = run(target, call)
        o2, _ = run(target, call, g=decay(call["g"], call["gate"]), gate=flash_kda.LogGate())
        torch.testing.assert_close(o2, o, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_slices_of_one_projection(target: Target, dtype: str) -> None:
    """q, k, v, g and beta as slices of one fused projection (beta with its pitch) give what copies give."""
    case = Case(B=2, T=70, H=2, HV=4, K=12, V=20, dtype=dtype)
    call = case.build(target.device)
    widths = {"q": 2 * 12, "k": 2 * 12, "v": 4 * 20, "g": 4 * 12, "beta": 4}
    fused = torch.full((2, 70, sum(widths.values()) + 9), torch.nan, dtype=call["q"].dtype, device=target.device)
    views: Call = {}
    offset = 3
    for name, width in widths.items():
        part = fused[..., offset : offset + width]
        part.copy_(call[name].flatten(2))
        views[name] = part if name == "beta" else part.unflatten(-1, call[name].shape[2:])
        assert views[name].untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
        offset += width
    before = bits(fused).clone()
    copies = {name: x.contiguous() for name, x in views.items()}
    want, want_state = oracle(call | copies)
    o, state = run(target, call | views)
    assert_outputs(o, want, call, target.tolerance)
    assert state is not None
    assert_states(state, want_state, target.tolerance)
    assert torch.equal(bits(fused), before)


def test_strides_of_any_kind(target: Target) -> None:
    """Every second token of a longer tensor, heads before tokens, heads expanded from one (stride 0)."""
    case = Case(B=2, T=70, H=3, K=12, V=20)
    call = case.build(target.device)

    def every_second_token(x: Tensor) -> Tensor:
        wide = torch.full((x.shape[0], 2 * x.shape[1], *x.shape[2:]), torch.nan, dtype=x.dtype, device=x.device)
        wide[:, ::2] = x
        return wide[:, ::2]

    def heads_first(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    views = {
        "q": call["q"][:, :, :1].expand_as(call["q"]),
        "k": every_second_token(call["k"]),
        "v": heads_first(call["v"]),
        "g": heads_first(call["g"]),
        "beta": heads_first(call["beta"]),
        "initial_state": call["initial_state"][:1].expand_as(call["initial_state"]),
    }
    want, want_state = oracle(call | views)
    o, state = run(target, call | views)
    assert_outputs(o, want, call, target.tolerance)
    assert state is not None
    assert_states(state, want_state, target.tolerance)
    assert state.is_contiguous()


def test_tokens_of_a_batch_expanded_from_one(target: Target) -> None:
    call = Case(B=3, T=40).build(target.device)
    views = {name: call[name][:1].expand_as(call[name]) for name in ("q", "k", "g", "beta")}
    want, _ = oracle(call | views)
    assert_outputs(run(target, call | views)[0], want, call, target.tolerance)


def test_memory_around_the_tensors_is_not_read(target: Target) -> None:
    """K = 60 and 100 with 1e30 before and behind every row's storage."""
    for K, V in ((60, 100), (100, 60)):
        case = Case(T=17, H=1, K=K, V=V)
        call = case.build(target.device)

        def embed(x: Tensor) -> Tensor:
            wide = torch.full((x.numel() + 512,), 1e30, dtype=x.dtype, device=x.device)
            wide[256:-256] = x.flatten()
            return wide[256:-256].view_as(x)

        views = {name: embed(call[name]) for name in TENSORS}
        assert_outputs(run(target, call | views)[0], oracle(call)[0], call, target.tolerance)


def test_uninitialised_memory_is_not_read(target: Target) -> None:
    """With every fresh ``torch.empty`` filled with NaN, forward and backward are as before."""
    call = Case(lengths=(0, 3, 70, 64), tail=5, V=9).build(target.device)
    wanted = []
    for poison in (False, True):
        torch.use_deterministic_algorithms(poison)
        try:
            taped, found = leaves(call)
            o, state = run(target, taped)
            assert state is not None
            grads = torch.autograd.grad(o.square().sum() + state.square().sum(), list(found.values()))
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(bool(x.isfinite().all()) for x in (o, state, *grads))
        wanted.append((o, state, *grads))
    for name, clean, poisoned in zip(("o", "state", *found), *wanted, strict=True):
        torch.testing.assert_close(poisoned, clean, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("cuts", [(64,), (1, 2, 3), (16, 32, 48, 64, 80), (63, 65), (0, 0, 40, 40)], ids=str)
@pytest.mark.parametrize("gate", ["lower_bound", "softplus", "log"])
def test_split_prefill(target: Target, cuts: tuple[int, ...], gate: str) -> None:
    """Whole = pieces with the state handed on."""
    case = Case(T=100, V=9, gate=gate)
    call = case.build(target.device)
    want, want_state = oracle(call)
    state, rows = call["initial_state"], []
    for a, b in itertools.pairwise((0, *cuts, case.T)):
        piece = {name: call[name][:, a:b] for name in ("q", "k", "v", "g", "beta")}
        o, state = run(target, call | piece, initial_state=state)
        rows.append(o)
    assert_outputs(torch.cat(rows, 1), want, call, target.tolerance)
    assert_states(state, want_state, target.tolerance)


def test_token_by_token(target: Target) -> None:
    call = Case(B=2, T=40, V=9).build(target.device)
    want, want_state = oracle(call)
    state, rows = call["initial_state"], []
    for t in range(40):
        piece = {name: call[name][:, t : t + 1] for name in ("q", "k", "v", "g", "beta")}
        o, state = run(target, call | piece, initial_state=state)
        rows.append(o)
    assert_outputs(torch.cat(rows, 1), want, call, target.tolerance)
    assert_states(state, want_state, target.tolerance)


def test_heads_have_their_own_gates(target: Target) -> None:
    """One head forgets at once, one keeps all: nothing of head 0's gate reaches the others."""
    call = Case(H=1, HV=4, K=8, V=8).build(target.device)
    gate = flash_kda.LowerBoundGate(
        torch.tensor([-3.0, 0.0, 1.0, 2.0]), torch.linspace(-9, 9, 32).reshape(4, 8), lower_bound=-4.0
    )
    call["gate"] = on_device(gate, target.device)
    want, want_state = oracle(call)
    o, state = run(target, call)
    assert_outputs(o, want, call, target.tolerance)
    assert state is not None
    assert_states(state, want_state, target.tolerance)
    for h in range(4):
        alone = flash_kda.LowerBoundGate(call["gate"].A_log[h : h + 1], call["gate"].dt_bias[h : h + 1], -4.0)
        cut = {name: call[name][:, :, h : h + 1] for name in ("v", "g", "beta")}
        o_h, _ = run(target, call | cut, gate=alone, initial_state=call["initial_state"][:, h : h + 1])
        torch.testing.assert_close(o_h, o[:, :, h : h + 1], rtol=1e-4, atol=1e-5)


def test_asymmetric_state_is_not_transposed(target: Target) -> None:
    """K = V and an initial state that is far from symmetric, read by a key and query of one channel."""
    K = 16
    S = torch.arange(K * K, dtype=torch.float32, device=target.device).reshape(1, 1, K, K)
    zeros = torch.zeros(1, 1, 1, K, device=target.device)
    q = zeros.clone()
    q[..., 1] = 1.0
    call = Case(T=1, H=1, K=K, V=K, gate="log", l2norm=False, scale=1.0).build(target.device)
    call |= {"q": q, "k": zeros, "v": zeros, "g": zeros, "beta": zeros[..., 0], "initial_state": S}
    for layout, row in (("kv", S[0, 0, 1]), ("vk", S[0, 0, :, 1])):
        o, state = run(target, call | {"state_layout": layout})
        assert state is not None
        assert o[0, 0, 0].tolist() == row.tolist()
        assert_same_bits(state, S, "state")
