"""What stays apart: sequences of a batch, tokens before a NaN, rows past the last sequence. And equal bits."""

from __future__ import annotations

import math

import pytest
import torch
from cases import Call, Case, Target, leaves, oracle, run, spans_of, targets
from compare import assert_close, assert_same_bits, assert_states
from torch import Tensor

pytestmark = pytest.mark.parametrize("target", targets())
ROWS = ("q", "k", "v", "g", "beta")
GATES = ("lower_bound", "softplus", "log")


def poisoned(call: Call, name: str, rows: slice, value: float) -> Call:
    x = call[name].clone()
    x[0, rows] = value
    return call | {name: x}


def gradients(target: Target, call: Call, names: tuple[str, ...] = (*ROWS, "initial_state")) -> dict[str, Tensor]:
    """Gradients of a loss that weighs every output and state differently."""
    taped, found = leaves(call, names)
    o, state = run(target, taped)
    weights = torch.linspace(-1, 1, o.numel(), device=o.device).view(o.shape).to(o.dtype)
    loss = (o * weights)[o.isfinite()].sum()
    if state is not None:
        loss = loss + state[state.isfinite()].sum()
    if not loss.requires_grad:
        return {name: torch.zeros_like(x) for name, x in found.items()}
    grads = torch.autograd.grad(loss, list(found.values()), materialize_grads=True)
    return dict(zip(found, grads, strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("gate", GATES)
def test_other_sequences_keep_their_bits(target: Target, gate: str, name: str, value: float) -> None:
    """The first 15 rows of sequence 2 are spoilt; 0, 1, 3 and 4 do not notice, in outputs, states and gradients."""
    case = Case(lengths=(64, 17, 20, 5, 64), K=8, V=8, gate=gate)
    call = case.build(target.device)
    spoilt = poisoned(call, name, slice(81, 96), value)
    o, state = run(target, call)
    o2, state2 = run(target, spoilt)
    assert state is not None
    assert state2 is not None
    if math.isnan(value):
        assert not bool(o2[0, 81].isfinite().all()), "the poison had no effect"
    d, d2 = gradients(target, call), gradients(target, spoilt)
    for n, (_, first, end) in enumerate(spans_of(call)):
        if n == 2:
            continue
        assert_same_bits(o2[0, first:end], o[0, first:end], f"o of sequence {n}")
        assert_same_bits(state2[n], state[n], f"state {n}")
        for row in ROWS:
            assert_same_bits(d2[row][0, first:end], d[row][0, first:end], f"d{row} of sequence {n}")
        assert_same_bits(d2["initial_state"][n], d["initial_state"][n], f"dstate {n}")


def test_other_batch_rows_keep_their_bits(target: Target) -> None:
    call = Case(B=3, T=65, K=8, V=8).build(target.device)
    for name in ROWS:
        x = call[name].clone()
        x[1, :7] = math.nan
        o, o2 = run(target, call)[0], run(target, call | {name: x})[0]
        for b in (0, 2):
            assert_same_bits(o2[b], o[b], f"row {b} with a NaN in {name}")
        assert not bool(o2[1, 0].isfinite().all())


def test_other_heads_stay_finite(target: Target) -> None:
    call = Case(T=65, H=3, K=8, V=8).build(target.device)
    o, _ = run(target, call)
    for name in ROWS:
        x = call[name].clone()
        x[:, 20, 1] = math.nan
        o2, _ = run(target, call | {name: x})
        torch.testing.assert_close(o2[:, :, ::2], o[:, :, ::2], rtol=1e-4, atol=1e-5)
        assert not bool(o2[:, 20, 1].isfinite().all())


@pytest.mark.parametrize("t", [1, 30, 63, 64, 70])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("gate", GATES)
def test_earlier_tokens_do_not_see_it(target: Target, gate: str, name: str, value: float, t: int) -> None:
    case = Case(T=71, H=1, HV=2, K=8, V=8, gate=gate)
    call = case.build(target.device)
    spoilt = poisoned(call, name, slice(t, t + 1), value)
    clean, _ = oracle(call)
    o, state = run(target, spoilt)
    assert_close(o[0, :t], clean[0, :t], target.tolerance, f"tokens before {t}")
    if math.isnan(value):
        assert not bool(o[0, t].isfinite().all()), "the poison had no effect"
        if name != "q":
            assert state is not None
            assert not bool(state.isfinite().all())


def test_one_channel_of_v_stays_one_channel(target: Target) -> None:
    """Columns of the state never mix: a NaN in one channel of v leaves the others right."""
    call = Case(T=70, H=1, K=8, V=8).build(target.device)
    v = call["v"].clone()
    v[0, 30, 0, 3] = math.nan
    want, want_state = oracle(call)
    o, state = run(target, call | {"v": v})
    keep = [c for c in range(8) if c != 3]
    assert state is not None
    assert_close(o[0][..., keep], want[0][..., keep], target.tolerance, "other channels")
    assert_states(state[:, :, keep], want_state[:, :, keep], target.tolerance)
    assert not bool(o[0, 30:, 0, 3].isfinite().any())


def test_a_spoilt_initial_state_stays_in_its_sequence(target: Target) -> None:
    call = Case(lengths=(20, 20, 20), K=8, V=8).build(target.device)
    S = call["initial_state"].clone()
    S[1, 0, 0, 0] = math.nan
    (o, state), (o2, state2) = run(target, call), run(target, call | {"initial_state": S})
    assert state is not None
    assert state2 is not None
    for n in (0, 2):
        assert_same_bits(o2[0, 20 * n : 20 * n + 20], o[0, 20 * n : 20 * n + 20], f"o of sequence {n}")
        assert_same_bits(state2[n], state[n], f"state {n}")
    assert not bool(o2[0, 20:40, 0, 0].isfinite().any())


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("lengths", [(), (0,), (5,), (64, 0, 3), (130, 0, 0)], ids=str)
def test_rows_past_the_end(target: Target, lengths: tuple[int, ...], name: str) -> None:
    """Rows from cu_seqlens[-1] on hold NaN: zeros come out, and neither a state nor any gradient sees them."""
    case = Case(lengths=lengths, tail=9, K=8, V=8)
    call = case.build(target.device)
    end = sum(lengths)
    spoilt = poisoned(call, name, slice(end, None), math.nan)
    (o, state), (o2, state2) = run(target, call), run(target, spoilt)
    assert not o2[:, end:].count_nonzero()
    assert_same_bits(o2, o, "o")
    assert_same_bits(state2, state, "state")
    names = (*ROWS, "initial_state", "A_log", "dt_bias")
    d, d2 = gradients(target, call, names), gradients(target, spoilt, names)
    for x in d:
        assert_same_bits(d2[x], d[x], f"d{x}")
    for row in ROWS:
        assert not d2[row][:, end:].count_nonzero(), f"d{row} past the end is not zero"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("H", "K", "V"), [(1, 16, 16), (1, 5, 7), (3, 60, 9), (4, 64, 64), (1, 128, 128)], ids=str)
def test_regrouping_changes_no_bit(target: Target, H: int, K: int, V: int, dtype: str) -> None:
    """Each sequence alone, in the pack, in the pack reversed and as a batch of one: the same bits, gradients too."""
    if not target.exact_batching:
        pytest.skip(f"{target} does not promise it")
    lengths = (1, 2, 3, 64, 17, 65, 1, 16, 130, 64, 5) if target.backend != "reference" else (1, 3, 17)
    case = Case(lengths=lengths, H=H, K=K, V=V, dtype=dtype)
    call = case.build(target.device)
    spans = [span[1:] for span in spans_of(call)]
    names = (*ROWS, "initial_state")

    def measure(call: Call) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        taped, found = leaves(call, names)
        o, state = run(target, taped)
        assert state is not None
        return (
            o.detach(),
            state.detach(),
            dict(zip(found, torch.autograd.grad([o, state], list(found.values()), [o, state]), strict=True)),
        )

    def choose(members: list[int], packed: bool = True) -> Call:
        rows = torch.cat([torch.arange(*spans[n]) for n in members]).to(target.device)
        ends = torch.tensor([0, *(spans[n][1] - spans[n][0] for n in members)]).cumsum(0)
        chosen = {name: call[name][:, rows] for name in ROWS}
        chosen["initial_state"] = call["initial_state"][members]
        return call | chosen | {"cu_seqlens": ends.to(target.device) if packed else None}

    def compare(members: list[int], packed: bool, label: str) -> None:
        o2, state2, d2 = measure(choose(members, packed))
        start = 0
        for i, n in enumerate(members):
            here, there = slice(start, start + spans[n][1] - spans[n][0]), slice(*spans[n])
            start = here.stop
            assert_same_bits(o2[:, here], o[:, there], f"{label}: o of sequence {n}")
            assert_same_bits(state2[i], state[n], f"{label}: state {n}")
            for row in ROWS:
                assert_same_bits(d2[row][:, here], d[row][:, there], f"{label}: d{row} of sequence {n}")
            assert_same_bits(d2["initial_state"][i], d["initial_state"][n], f"{label}: dstate {n}")

    o, state, d = measure(call)
    everyone = list(range(len(lengths)))
    compare(everyone[::-1], True, "reversed")
    compare(everyone[1::2], True, "every second one")
    for n in everyone:
        compare([n], True, f"{n} alone")
        compare([n], False, f"{n} as a batch of one")


@pytest.mark.parametrize("T", [1, 16, 64, 130])
def test_batch_size_changes_no_bit(target: Target, T: int) -> None:
    call = Case(B=5, T=T, H=2, K=24, V=20).build(target.device)
    o, state = run(target, call)
    assert state is not None
    for b in range(5):
        rows = {name: call[name][b : b + 1] for name in (*ROWS, "initial_state")}
        o2, state2 = run(target, call | rows)
        assert state2 is not None
        assert_same_bits(o2[0], o[b], f"o of row {b}")
        assert_same_bits(state2[0], state[b], f"state {b}")


@pytest.mark.parametrize("T", [1, 16, 64, 130])
def test_number_of_heads_changes_no_bit(target: Target, T: int) -> None:
    """A head computed alone gives the bits that it gives among others."""
    call = Case(T=T, H=5, K=24, V=20, gate="log").build(target.device)
    o, state = run(target, call)
    assert state is not None
    for h in range(5):
        rows = {name: call[name][:, :, h : h + 1].contiguous() for name in ROWS}
        o2, state2 = run(target, call | rows, initial_state=call["initial_state"][:, h : h + 1].contiguous())
        assert state2 is not None
        assert_same_bits(o2[:, :, 0], o[:, :, h], f"o of head {h}")
        assert_same_bits(state2[:, 0], state[:, h], f"state of head {h}")
