"""Hostile numbers: inputs that made other kernels overflow, drift or look at the wrong rows."""

from __future__ import annotations

import math

import pytest
import torch
from cases import Call, Case, Target, inputs_of, leaves, oracle, run, spans_of, targets
from compare import assert_close, assert_outputs, assert_states
from repeated import repeated_key, state_of_rounded_keys
from torch import Tensor

import flash_kda
from flash_kda.backends.triton.config import CHUNK
from flash_kda.reference import kda_recurrent

pytestmark = pytest.mark.parametrize("target", targets())


def check(target: Target, call: Call, tolerance: float | None = None) -> tuple[Tensor, Tensor]:
    """Run, and compare with the definition; returns what came."""
    want, want_state = oracle(call)
    o, state = run(target, call)
    assert state is not None
    assert bool(o.isfinite().all())
    assert bool(state.isfinite().all())
    assert_outputs(o, want, call, tolerance or target.tolerance)
    assert_states(state, want_state, tolerance or target.tolerance)
    return o, state


def check_gradients(target: Target, call: Call, tolerance: float = 1e-4, floor: float = 1e-12) -> None:
    """Finite, and those of autograd through the recurrence in float64 (where these are above ``floor``)."""
    taped, found = leaves(call)
    o, state = run(target, taped)
    assert state is not None
    weights = torch.linspace(-1, 1, o.shape[-1], device=o.device)
    grads = torch.autograd.grad((o * weights).sum() + state.sum(), list(found.values()))
    wide = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in call.items()}
    exact, exact_found = leaves(wide)
    o64, state64 = kda_recurrent(inputs_of(exact))
    assert state64 is not None
    want = torch.autograd.grad((o64 * weights.double()).sum() + state64.sum(), list(exact_found.values()))
    for name, d, w in zip(found, grads, want, strict=True):
        assert bool(d.isfinite().all()), f"d{name} is not finite"
        error, size = (d.double() - w).abs().max(), w.abs().max()
        assert error <= tolerance * size + floor, f"d{name}: error {error:.3g} beside values of {size:.3g}"


def test_one_key_repeated(target: Target) -> None:
    """Near-collinear keys over 16384 tokens: the series for (I + L)^-1 diverges, substitution does not."""
    T = 16384 if target.backend != "reference" else 1024
    call = repeated_key(T, 128, 128, target.device)
    if target.device == "cpu":
        # A key that is never exactly of length one leaves each token's rounding in the state; the recurrence in float32
        # is no better.
        check(target, call, 5e-4)
        return
    o, state = run(target, call)
    assert state is not None
    want, _ = oracle(call)
    assert_outputs(o, want, call, target.tolerance)
    # In half precision this is what is wrong with the state, and nothing else.
    assert_states(state, state_of_rounded_keys(call, CHUNK), target.tolerance)


def test_one_key_repeated_with_negative_eigenvalues(target: Target) -> None:
    """beta near 2 reflects: nothing is forgotten, and the values grow to hundreds."""
    check(target, repeated_key(512, 16, 8, target.device) | {"allow_neg_eigval": True}, 1e-3)


def test_one_key_repeated_backward(target: Target) -> None:
    call = repeated_key(192, 16, 8, target.device)
    call["q"] = torch.randn(1, 192, 1, 16, generator=torch.Generator().manual_seed(8)).to(target.device)
    check_gradients(target, {n: x.float() if isinstance(x, Tensor) else x for n, x in call.items()}, 1e-4, 1e-6)


@pytest.mark.parametrize("bound", [-5.0, -3.0])
def test_saturated_gate_over_whole_chunks(target: Target, bound: float) -> None:
    """Every channel at the lower bound: 64 tokens decay by e^-320, far beyond float32."""
    T = 1024 if target.backend != "reference" else 256
    check(target, Case(T=T, H=3, K=64, V=32, strength="saturated", lower_bound=bound).build(target.device))


@pytest.mark.parametrize("g", [-1.3, -1.4, -2.0, -5.0, -5.914, -20.0, -87.0, -89.0, -104.0, -1000.0, -1e30, -math.inf])
@pytest.mark.parametrize("sparse", [False, True])
def test_given_decay_of_any_size(target: Target, g: float, sparse: bool) -> None:
    """Decays that add up beyond 88 inside one chunk, forward and backward; everywhere, or at every fifth token."""
    case = Case(T=130, H=1, HV=2, K=8, V=6, gate="log", strength="slow")
    call = case.build(target.device)
    if sparse:
        call["g"][:, ::5] = g
    else:
        call["g"].fill_(g)
    check(target, call)
    check_gradients(target, call)


def test_decays_that_differ_by_channel(target: Target) -> None:
    """One channel keeps everything, one forgets at once: no common anchor serves both."""
    call = Case(T=200, H=1, K=6, V=6, gate="log").build(target.device)
    call["g"][:] = torch.tensor([0.0, -1e-6, -0.5, -5.0, -90.0, -math.inf], device=target.device)
    check(target, call)
    check_gradients(target, call)


@pytest.mark.parametrize("raw", [100.0, -100.0, 1000.0])
@pytest.mark.parametrize("gate", ["lower_bound", "softplus"])
def test_raw_gates_far_out(target: Target, gate: str, raw: float) -> None:
    call = Case(T=70, H=1, K=8, V=8, gate=gate).build(target.device)
    call["g"].fill_(raw)
    check(target, call)
    check_gradients(target, call)


def test_slow_decay_over_many_tokens(target: Target) -> None:
    """Decays of 1e-5 a token over 4096 tokens: a decay rounded to half precision would be lost or doubled."""
    T = 4096 if target.backend != "reference" else 512
    call = Case(T=T, H=1, K=16, V=16, gate="log").build(target.device)
    call["g"].fill_(-1e-5)
    call["beta"].sub_(6.0)
    check(target, call)


@pytest.mark.parametrize("gate", ["lower_bound", "softplus"])
def test_slow_gate_decays_at_the_right_rate(target: Target, gate: str) -> None:
    """With k = 0 the state is S0 e^(sum g): sums of gates near 1e-5 keep 5 digits."""
    T, raw = 1000, -13.0
    call = Case(T=T, H=1, K=4, V=4, gate=gate, A_log=False, dt_bias=None, l2norm=False).build(target.device)
    call["g"].fill_(raw)
    call["k"].zero_()
    _, state = run(target, call)
    g = -5.0 / (1 + math.exp(-raw)) if gate == "lower_bound" else -math.log1p(math.exp(raw))
    torch.testing.assert_close(state, call["initial_state"] * math.exp(T * g), rtol=2e-5, atol=1e-6)


def test_beta_is_not_rounded(target: Target) -> None:
    """Half-precision q, k, v with a float32 beta between two bfloat16 numbers: the state sees all its digits."""
    call = Case(T=1, H=1, K=4, V=4, dtype="bfloat16", gate="log", initial=False, l2norm=False, logit=False).build()
    call = {name: x.to(target.device) if isinstance(x, Tensor) else x for name, x in call.items()}
    call["beta"].fill_(1 - 1 / 1024)
    _, state = run(target, call)
    want = (1 - 1 / 1024) * call["v"][0, 0, 0].float()[:, None] * call["k"][0, 0, 0].float()
    torch.testing.assert_close(state[0, 0], want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1e15, 1e-15])
def test_huge_and_tiny_values(target: Target, size: float) -> None:
    call = Case(T=70, H=1, K=8, V=8).build(target.device)
    o, _ = run(target, call)
    changed = call | {"v": call["v"] * size, "initial_state": call["initial_state"] * size}
    check(target, changed)
    o2, _ = run(target, changed)
    torch.testing.assert_close(o2 / size, o, rtol=1e-4, atol=1e-5)


def test_huge_keys_are_normalised(target: Target) -> None:
    """Squares near float32's end."""
    call = Case(T=70, H=1, K=8, V=8).build(target.device)
    check(target, call | {"q": call["q"] * 1e18, "k": call["k"] * 1e18})


def test_zero_keys_write_nothing(target: Target) -> None:
    call = Case(T=70, H=1, K=8, V=8).build(target.device)
    call["k"][:, 10:50] = 0.0
    call["q"][:, 20:60] = 0.0
    o, _ = check(target, call)
    assert not o[:, 20:60].count_nonzero()
    check_gradients(target, call)


def test_zero_keys_and_no_decay_keep_the_state(target: Target) -> None:
    call = Case(T=130, H=2, K=8, V=8, gate="log").build(target.device)
    call["k"].zero_()
    call["g"].zero_()
    _, state = run(target, call)
    assert torch.equal(state, call["initial_state"])


@pytest.mark.parametrize("T", [1, 15, 17, 31, 63, 65, 127])
def test_a_partial_tail_neither_decays_nor_writes(target: Target, T: int) -> None:
    """sigmoid(0) and gate(0) are not zero: rows past the end must be masked after the activation."""
    call = Case(T=T, H=1, K=8, V=8, l2norm=False, scale=1.0).build(target.device)
    S = call["initial_state"]
    zero = {name: torch.zeros_like(call[name]) for name in ("q", "k", "v", "beta")}
    # Raw gates of -300 decay by nothing; the padding's zeros would decay by e^-2.5 a row.
    g = torch.full_like(call["g"], -300.0)
    gate = flash_kda.LowerBoundGate()
    _, state = run(target, call | zero | {"g": g, "gate": gate})
    assert torch.equal(state, S)


@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 100, 500, 1000])
def test_final_state_for_every_remainder(target: Target, T: int) -> None:
    if target.backend == "reference" and T > 100:
        pytest.skip("the reference walks token by token: nothing depends on T")
    check(target, Case(T=T, H=1, K=12, V=8, strength="slow").build(target.device))


def test_sequences_after_empty_ones(target: Target) -> None:
    """[0, 0, 64, 64, 130]: every sequence equals its separate run."""
    call = Case(lengths=(0, 64, 0, 66, 0), K=8, V=8).build(target.device)
    o, state = check(target, call)
    for n, (_, first, end) in enumerate(spans_of(call)):
        rows = {name: call[name][:, first:end] for name in ("q", "k", "v", "g", "beta")}
        alone = call | rows | {"cu_seqlens": None, "initial_state": call["initial_state"][n : n + 1]}
        o_n, state_n = run(target, alone)
        torch.testing.assert_close(o_n, o[:, first:end])
        torch.testing.assert_close(state_n[0], state[n])


def test_terminal_padding_of_cu_seqlens(target: Target) -> None:
    """Repeated last entries are empty sequences: the others' results do not change, the padding's states stay."""
    call = Case(lengths=(20, 30, 0, 0, 0), tail=14, K=8, V=8).build(target.device)
    o, state = run(target, call)
    short = call | {"cu_seqlens": call["cu_seqlens"][:3], "initial_state": call["initial_state"][:2]}
    o2, state2 = run(target, short)
    assert torch.equal(o2, o)
    assert torch.equal(state2, state[:2])
    assert torch.equal(state[2:], call["initial_state"][2:])


def test_absent_amplitude_with_a_lower_bound(target: Target) -> None:
    """Without A_log the gate is lb sigmoid(g + dt_bias), the same as A_log = 0."""
    call = Case(T=70, K=8, V=8, A_log=False).build(target.device)
    o, _ = check(target, call)
    zero = flash_kda.LowerBoundGate(torch.zeros(2, device=target.device), call["gate"].dt_bias)
    assert torch.equal(run(target, call | {"gate": zero})[0], o)


def test_many_sequences_and_heads(target: Target) -> None:
    """2050 sequences times 32 heads: more than 65535 of anything that is numbered."""
    if target.backend == "reference":
        pytest.skip("the reference walks 32800 tokens one by one")
    call = Case(lengths=(16,) * 2050, H=32, K=4, V=2).build(target.device)
    o, state = run(target, call)
    assert state is not None
    for n in (0, 1, 1024, 2047, 2048, 2049):
        rows = {name: call[name][:, 16 * n : 16 * n + 16] for name in ("q", "k", "v", "g", "beta")}
        alone = call | rows | {"cu_seqlens": None, "initial_state": call["initial_state"][n : n + 1]}
        want, want_state = oracle(alone)
        assert_close(o[0, 16 * n : 16 * n + 16], want[0], target.tolerance, f"sequence {n}")
        assert_states(state[n : n + 1], want_state, target.tolerance, f"state {n}")


def test_a_wide_batch(target: Target) -> None:
    """B = 1024 with 64 value heads, one token each: 65536 programs where there is one for each."""
    if target.backend == "reference":
        pytest.skip("slow, and the reference numbers nothing")
    call = Case(B=1024, T=1, H=16, HV=64, K=3, V=2).build(target.device)
    want, want_state = oracle(call)
    o, state = run(target, call)
    torch.testing.assert_close(o.double().cpu(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.double().cpu(), want_state, rtol=1e-5, atol=1e-5)


def test_offsets_beyond_2_to_the_31(target: Target) -> None:
    """Rows that lie more than 2^31 elements apart: the storage is reserved, only the rows' pages are touched."""
    T, H, K = 4, 2, 8
    call = Case(T=T, H=H, K=K, V=K, dtype="bfloat16").build(target.device)
    stride = 2**30 - 5
    wide = torch.empty((T - 1) * stride + 4 * H * K, dtype=torch.bfloat16, device=target.device)
    views = {}
    for i, name in enumerate(("q", "k", "v", "g")):
        views[name] = wide.as_strided((1, T, H, K), (wide.numel(), stride, K, 1), i * H * K)
        views[name].copy_(call[name])
    assert views["g"][0, -1].storage_offset() > 2**31
    check(target, call | views)
