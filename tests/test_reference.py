"""The reference pinned by numbers that do not come from it: by hand, by plain Python floats, by each definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import Case, inputs_of, oracle
from torch import Tensor

import flash_kda
from flash_kda.reference import activate, decay, kda_chunk, kda_recurrent, l2norm

LOG = flash_kda.LogGate()


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_two_tokens_by_hand() -> None:
    """K = 2, V = 1, decays (1/2, 1/4) then (1, 1/2), worked out on paper.

    S0 = (4, 8). Token 0: S' = (2, 2), k = (1, 0), v = 3, beta = 1/2: delta = 3 - 2 = 1, S1 = (2.5, 2);
    q = (1, 1): o = 4.5, times scale 2 = 9. Token 1: S' = (2.5, 1), k = (1, 2), v = 0.5, beta = 1: k S' = 4.5,
    delta = -4, S2 = (-1.5, -7); q = (2, -1): o = -3 + 7 = 4, times 2 = 8.
    """
    inputs = inputs_of(
        {
            "q": tensor([[[[1.0, 1.0]], [[2.0, -1.0]]]]),
            "k": tensor([[[[1.0, 0.0]], [[1.0, 2.0]]]]),
            "v": tensor([[[[3.0]], [[0.5]]]]),
            "g": tensor([[[[math.log(0.5), math.log(0.25)]], [[0.0, math.log(0.5)]]]]),
            "beta": tensor([[[0.5], [1.0]]]),
            "gate": LOG,
            "scale": 2.0,
            "initial_state": tensor([[[[4.0, 8.0]]]]),
            "output_final_state": True,
            "qk_l2norm": False,
            "beta_is_logit": False,
            "allow_neg_eigval": False,
            "state_layout": "vk",
        }
    )
    o, state = kda_recurrent(inputs)
    assert state is not None
    assert o.flatten().tolist() == pytest.approx([9.0, 8.0], abs=1e-14)
    assert state.flatten().tolist() == pytest.approx([-1.5, -7.0], abs=1e-14)
    o, state, chunks = kda_chunk(inputs, 2)
    assert state is not None
    assert o.flatten().tolist() == pytest.approx([9.0, 8.0], abs=1e-14)
    assert state.flatten().tolist() == pytest.approx([-1.5, -7.0], abs=1e-14)
    # L_10 = beta_1 k_1 . (k_0 e^{g_1}) = 1; Mqk_10 = 2 q_1 . (k_0 e^{g_1}) = 4; U is beta times each delta.
    (c,) = chunks
    assert c.L[0].tolist() == [[0.0, 0.0], [pytest.approx(1.0), 0.0]]
    assert c.T[0].tolist() == [[1.0, 0.0], [pytest.approx(-1.0), 1.0]]
    assert c.Mqk[0].flatten().tolist() == pytest.approx([2.0, 0.0, 4.0, 0.0])
    assert c.U.flatten().tolist() == pytest.approx([0.5, -4.0])


@pytest.mark.parametrize("T", [1, 2, 5])
def test_recurrence_in_plain_floats(T: int) -> None:
    """Two heads, K = 3, V = 2, nothing but Python floats and loops."""
    case = Case(T=T, H=1, HV=2, K=3, V=2, gate="log", l2norm=False, logit=False, scale=0.7, dtype="float64")
    call = case.build()
    o, state = kda_recurrent(inputs_of(call))
    assert state is not None
    for h in range(2):
        S = call["initial_state"][0, h].double().T.tolist()
        for t in range(T):
            q, k, v = call["q"][0, t, 0].tolist(), call["k"][0, t, 0].tolist(), call["v"][0, t, h].tolist()
            g, beta = call["g"][0, t, h].tolist(), call["beta"][0, t, h].item()
            S = [[math.exp(g[c]) * S[c][j] for j in range(2)] for c in range(3)]
            delta = [v[j] - sum(k[c] * S[c][j] for c in range(3)) for j in range(2)]
            S = [[S[c][j] + k[c] * beta * delta[j] for j in range(2)] for c in range(3)]
            want = [0.7 * sum(q[c] * S[c][j] for c in range(3)) for j in range(2)]
            assert o[0, t, h].tolist() == pytest.approx(want, rel=1e-12, abs=1e-12)
        final = [[S[c][j] for c in range(3)] for j in range(2)]
        # The initial state is stored in float32, and so is the final one.
        torch.testing.assert_close(state[0, h], torch.tensor(final, dtype=torch.float32), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_A", [False, True])
@pytest.mark.parametrize("kind", ["lower_bound", "softplus"])
def test_gate_formulas(kind: str, with_A: bool, with_bias: bool, flat: bool) -> None:
    """Each gate against its formula in Python's math, from far below to far above zero."""
    raw = tensor([-700.0, -40.0, -12.0, -1.0, 0.0, 5.0, 12.0, 22.0, 700.0]).repeat(2, 1)[None, None]
    A_log = torch.tensor([-0.5, 0.25]) if with_A else None
    bias = torch.linspace(-1, 2, 18).reshape(2, 9) if with_bias else None
    given = bias.flatten() if bias is not None and flat else bias
    lb = -3.5
    gate = flash_kda.LowerBoundGate(A_log, given, lb) if kind == "lower_bound" else flash_kda.SoftplusGate(A_log, given)
    got = decay(raw, gate)
    for h in range(2):
        A = math.exp(A_log[h].item()) if A_log is not None else 1.0
        for c in range(9):
            x = raw[0, 0, h, c].item() + (bias[h, c].item() if bias is not None else 0.0)
            if kind == "lower_bound":
                want = lb / (1 + math.exp(-A * x)) if A * x > -700 else 0.0
            else:
                want = -A * (max(x, 0.0) + math.log1p(math.exp(-abs(x))))
            assert got[0, 0, h, c].item() == pytest.approx(want, rel=1e-12, abs=1e-300)


def test_slow_decay_keeps_its_digits_in_float32() -> None:
    """softplus(-17) and sigmoid(-17) are near 4e-8: below float32's step at 1, so 1 + e^x would lose them."""
    raw = torch.full((1, 1), -17.0)
    assert decay(raw, flash_kda.SoftplusGate()).item() == pytest.approx(-math.log1p(math.exp(-17.0)), rel=1e-5)
    assert decay(raw, flash_kda.LowerBoundGate()).item() == pytest.approx(-5 / (1 + math.exp(17.0)), rel=1e-5)


def test_log_gate_is_the_identity() -> None:
    g = tensor([[-0.0, -1.0, -1000.0, -math.inf]])
    assert decay(g, LOG) is g


def test_normalisation() -> None:
    x = tensor([[3.0, 4.0], [0.0, 0.0], [3e-3, 4e-3]])
    got = l2norm(x)
    assert got[0].tolist() == pytest.approx([3 / math.sqrt(25 + 1e-6), 4 / math.sqrt(25 + 1e-6)], rel=1e-14)
    assert got[1].tolist() == [0.0, 0.0]
    assert got[2].tolist() == pytest.approx([3e-3 / math.sqrt(26e-6), 4e-3 / math.sqrt(26e-6)], rel=1e-14)


@pytest.mark.parametrize(
    ("logit", "neg", "want"),
    [(False, False, 0.3), (True, False, 1 / (1 + math.exp(-0.3))), (True, True, 2 / (1 + math.exp(-0.3)))],
)
def test_activation(logit: bool, neg: bool, want: float) -> None:
    """beta in its three readings, the scale on q alone, query head i // (HV / H) for value head i."""
    case = Case(T=1, H=2, HV=6, K=2, V=1, gate="log", l2norm=False, logit=logit, neg=neg, scale=3.0, dtype="float64")
    call = case.build()
    call["beta"] = torch.full_like(call["beta"], 0.3)
    q, k, v, g, beta = activate(inputs_of(call), torch.float64)
    assert beta.flatten().tolist() == pytest.approx([want] * 6, rel=1e-14)
    for i in range(6):
        assert torch.equal(q[0, 0, i], 3 * call["q"][0, 0, i // 3])
        assert torch.equal(k[0, 0, i], call["k"][0, 0, i // 3])
    assert torch.equal(v, call["v"])
    assert torch.equal(g, call["g"])


@pytest.mark.parametrize("strength", ["strong", "slow", "hostile"])
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7, 16, 64, 100])
def test_chunk_form_is_the_recurrence(chunk_size: int, strength: str) -> None:
    for case in (
        Case(T=130, H=1, HV=2, K=6, V=5, gate="log", strength=strength, dtype="float64", state_dtype="float64"),
        Case(
            lengths=(0, 7, 0, 65, 16), tail=2, H=1, K=5, V=3, gate="log", strength=strength, dtype="float64", neg=True
        ),
    ):
        inputs = inputs_of(case.build())
        o, state = kda_recurrent(inputs)
        o2, state2, chunks = kda_chunk(inputs, chunk_size)
        torch.testing.assert_close(o2, o, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(state2, state, rtol=1e-10, atol=1e-10 if state.dtype == torch.float64 else 1e-6)
        lengths = case.lengths or (case.T,)
        assert len(chunks) == sum(-(-n // chunk_size) for n in lengths)
        assert [c.G.shape[1] for c in chunks] == [
            min(chunk_size, n - first) for n in lengths for first in range(0, n, chunk_size)
        ]


def test_chunk_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="chunk_size: got 0, expected 1 or more"):
        kda_chunk(inputs_of(Case(T=3).build()), 0)


@pytest.mark.parametrize("gate", ["lower_bound", "softplus"])
def test_chunk_matrices_entry_by_entry(gate: str) -> None:
    """Every named matrix from its definition, with loops; U also as the deltas of the recurrence."""
    C = 5
    case = Case(T=12, H=1, HV=2, K=3, V=2, gate=gate, dtype="float64", state_dtype="float64", neg=True)
    inputs = inputs_of(case.build())
    q, k, v, g, beta = (x[0] for x in activate(inputs, torch.float64))
    _, _, chunks = kda_chunk(inputs, C)
    assert [(c.sequence, c.start) for c in chunks] == [(0, 0), (0, 5), (0, 10)]
    for h in range(2):
        S = inputs.initial_state[0, h].T.clone()
        for c in chunks:
            n = c.G.shape[1]
            t0 = c.start
            torch.testing.assert_close(c.S[h], S, rtol=1e-11, atol=1e-11)
            G = [[math.fsum(g[t0 + m, h, x].item() for m in range(i + 1)) for x in range(3)] for i in range(n)]
            L = torch.zeros(n, n, dtype=torch.float64)
            for i in range(n):
                for x in range(3):
                    ki, qi = k[t0 + i, h, x].item(), q[t0 + i, h, x].item()
                    assert c.G[h, i, x].item() == pytest.approx(G[i][x], rel=1e-12)
                    assert c.K_plus[h, i, x].item() == pytest.approx(ki * math.exp(G[i][x]), rel=1e-12)
                    assert c.Q_plus[h, i, x].item() == pytest.approx(qi * math.exp(G[i][x]), rel=1e-12)
                    assert c.K_end[h, i, x].item() == pytest.approx(ki * math.exp(G[-1][x] - G[i][x]), rel=1e-12)
                for j in range(n):
                    pair = (
                        [k[t0 + j, h, x].item() * math.exp(G[i][x] - G[j][x]) for x in range(3)]
                        if j <= i
                        else [0.0] * 3
                    )
                    kk = math.fsum(k[t0 + i, h, x].item() * pair[x] for x in range(3))
                    qk = math.fsum(q[t0 + i, h, x].item() * pair[x] for x in range(3))
                    L[i, j] = beta[t0 + i, h].item() * kk if j < i else 0.0
                    assert c.L[h, i, j].item() == pytest.approx(L[i, j].item(), rel=1e-11, abs=1e-15)
                    assert c.Mqk[h, i, j].item() == pytest.approx(qk, rel=1e-11, abs=1e-15)
            inverse = torch.linalg.inv(torch.eye(n, dtype=torch.float64) + L)
            torch.testing.assert_close(c.T[h], inverse, rtol=1e-11, atol=1e-12)
            for i in range(n):
                S = g[t0 + i, h].exp()[:, None] * S
                u = beta[t0 + i, h] * (v[t0 + i, h] - k[t0 + i, h] @ S)
                torch.testing.assert_close(c.U[h, i], u, rtol=1e-10, atol=1e-11)
                S = S + k[t0 + i, h][:, None] * u


def test_float32_reference_is_near_the_float64_one() -> None:
    call = Case(T=65, V=9).build()
    o, _ = kda_recurrent(inputs_of(call), torch.float32)
    want, _ = oracle(call)
    assert o.dtype == torch.float32
    assert (o.double() - want).abs().max() < 1e-5 * want.abs().max()
    assert not torch.equal(o, want.float())


def test_gradient_of_the_recurrence_by_differences() -> None:
    """Autograd through the reference, which other gradients are measured by, against finite differences."""
    case = Case(lengths=(3, 0, 2), H=1, HV=2, K=3, V=2, dtype="float64", state_dtype="float64")
    call = case.build()
    gate = call["gate"]

    def outputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, A: Tensor, b: Tensor) -> Any:
        changed = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": S}
        return kda_recurrent(inputs_of(call | changed | {"gate": flash_kda.LowerBoundGate(A, b)}))

    values = [call[name] for name in ("q", "k", "v", "g", "beta", "initial_state")]
    values += [gate.A_log.double(), gate.dt_bias.double()]
    assert torch.autograd.gradcheck(outputs, [x.clone().requires_grad_() for x in values])
