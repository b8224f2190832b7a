"""The benchmarks: shapes and inputs, exact answers, errors, peers, results files, tables and pictures."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from torch.nn import functional as F
from typer.testing import CliRunner, Result

import flash_kda
from flash_kda import cli
from flash_kda.bench import (
    accuracy,
    commands,
    exact,
    first_call,
    harness,
    measuring,
    peers,
    plots,
    prefill,
    published,
    report,
    shapes,
    train,
)
from flash_kda.checks import check
from flash_kda.reference import decay, kda_chunk, kda_recurrent
from flash_kda.types import LogGate, LowerBoundGate, SoftplusGate

PNG = b"\x89PNG\r\n\x1a\n"
DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
SMALL = shapes.Case("small", "prefill", (19, 1, 40), 3, packed=True, head_dim=32, seed=5)
GPU_META = {"command": "c", "date": "d", "gpu": "NVIDIA H200", "driver": "1", "torch": "2", "triton": "3", "cuda": "13"}


# --- shapes and inputs ------------------------------------------------------------------------------------------------


def test_names_say_what_a_case_is() -> None:
    for op in ("prefill", "decode", "train", "scale"):
        assert len(shapes.cases(op)) == sum(case.op == op for case in shapes.CASES) > 0, f"{op}: a name twice"
    for case in shapes.CASES:
        heads = re.search(r"-h(\d+)$", case.name)
        assert heads
        assert int(heads[1]) == case.heads
        if case.op == "decode":
            assert case.name.startswith(f"b{len(case.lengths)}-")
            assert case.step == ("-step-" in case.name)
            drafted = re.search(r"-t(\d+)-", case.name)
            assert case.batch == (len(case.lengths), int(drafted[1]) if drafted else 1)
        elif case.name.startswith("mixed6-8192-"):
            assert case.lengths == (1300, 547, 2048, 963, 271, 3063)
            assert case.batch == (1, 8192)
        elif case.name.startswith("skewed64-73600-"):
            assert sorted(case.lengths) == [128] * 63 + [65536]
            assert case.batch == (1, 73600)
        else:
            count, tokens = map(int, case.name.split("-")[0].split("x"))
            assert case.lengths == (tokens,) * count
            assert case.batch == (1, count * tokens)
            assert case.packed == (count > 1)


def test_the_registry_covers_models_and_published_cases() -> None:
    prefills = shapes.cases("prefill")
    for model in shapes.MODELS:
        assert all(model.heads % n == 0 for n in model.parallel)
        assert all(f"1x8192-h{heads}" in prefills for heads in model.heads_per_gpu), model
    assert {12, 6} <= set(shapes.MODELS[0].heads_per_gpu)
    assert set(published.PREFILL_MS) <= set(prefills)
    assert set(shapes.QUICK) <= set(prefills)
    assert set(shapes.QUICK_DECODE) <= set(shapes.cases("decode"))


def test_the_floor_counts_every_byte_once() -> None:
    """1,282 bytes per token and head, and 64 KiB for each state read and written."""
    case = shapes.cases("prefill")["mixed6-8192-h96"]
    assert case.floor_bytes == 8192 * 96 * 1282 + 2 * 6 * 96 * 65536
    call = shapes.make(SMALL, "strong", "cpu")
    once = [call.q, call.k, call.v, call.g, call.v, call.beta, call.initial_state, call.initial_state]
    assert SMALL.floor_bytes == sum(x.numel() * x.element_size() for x in once)
    assert shapes.cases("decode")["b32-h12"].floor_bytes == 32 * 12 * 65536 * 2
    assert shapes.cases("decode")["b32-t4-h12"].floor_bytes == 32 * 12 * 65536 * 5
    assert shapes.cases("decode")["b128-t4-out-h12"].floor_bytes == 128 * 12 * 65536
    assert shapes.cases("decode")["b32-step-h12"].floor_bytes == 32 * 12 * (65536 + 3 * 3 * 128 * 2) * 2
    assert harness.floor_ms(4300, 4.3e6) == pytest.approx(1.0)


def test_inputs_follow_from_case_and_index() -> None:
    a, b, c = (shapes.make(SMALL, "slow", "cpu", index) for index in (0, 0, 1))
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        x, y, z = (getattr(call, name) for call in (a, b, c))
        assert torch.equal(x, y)
        assert not torch.equal(x, z)
    assert a.cu_seqlens is not None
    assert a.cu_seqlens.tolist() == [0, 19, 20, 60]
    assert (a.q.dtype, a.beta.dtype, a.initial_state.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert a.initial_state.shape == (3, 3, 32, 32)
    assert shapes.make(replace(SMALL, packed=False, lengths=(7, 7)), "slow", "cpu").q.shape == (2, 7, 3, 32)
    assert not torch.equal(a.q, shapes.make(replace(SMALL, seed=6), "slow", "cpu").q)


def mean_decay(gates: shapes.Gates) -> torch.Tensor:
    """Mean log decay of each channel over 400 tokens."""
    call = shapes.make(shapes.Case("c", "prefill", (400,), 4, head_dim=64), gates, "cpu")
    return decay(call.g.double(), call.gate)[0].mean(0)


def test_gates_forget_as_fast_as_they_say() -> None:
    assert float(mean_decay("strong").max()) < -1
    slow = mean_decay("slow")
    assert ((slow > -0.02).sum(-1) == 32).all()
    assert ((slow < -1).sum(-1) == 32).all()
    gate = shapes.make(SMALL, "softplus", "cpu").gate
    assert isinstance(gate, SoftplusGate)
    assert gate.A_log is not None
    assert gate.dt_bias is not None
    assert 0 <= float(gate.A_log.min()) <= float(gate.A_log.max()) <= math.log(16)
    dt = torch.nn.functional.softplus(gate.dt_bias.double())
    assert 0.99e-3 < float(dt.min()) < 0.01 < float(dt.max()) < 0.101


def test_first_heads_are_views_of_the_same_call() -> None:
    call = shapes.make(SMALL, "strong", "cpu")
    o, state = kda_recurrent(call.inputs())
    o2, state2 = kda_recurrent(call.first_heads(2).inputs())
    assert torch.equal(o[:, :, :2], o2)
    assert state is not None
    assert state2 is not None
    assert torch.equal(state[:, :2], state2)
    assert call.first_heads(2).q.data_ptr() == call.q.data_ptr()


# --- exact answers ----------------------------------------------------------------------------------------------------


def hard_call(layout: str, gate: str, boundaries: tuple[int, ...] | None) -> dict[str, Any]:
    """Float64 arguments with K != V, grouped heads and every option away from its default."""
    rng = torch.Generator().manual_seed(3)

    def N(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    B, T, H, HV, K, V = (1, 60, 2, 4, 24, 8) if boundaries else (2, 37, 2, 4, 24, 8)
    states = (len(boundaries) - 1 if boundaries else B, HV, *((V, K) if layout == "vk" else (K, V)))
    A_log, dt_bias = N(HV), 4 * N(HV, K)
    gates = {"lower_bound": LowerBoundGate(A_log, dt_bias, -5.0), "softplus": SoftplusGate(A_log + 2, dt_bias)}
    g = N(B, T, HV, K)
    return {
        "q": N(B, T, H, K),
        "k": N(B, T, H, K),
        "v": N(B, T, HV, V),
        "g": -20 * g.abs() if gate == "log" else g,
        "beta": N(B, T, HV),
        "gate": gates.get(gate, LogGate()),
        "scale": 0.7,
        "initial_state": N(*states),
        "output_final_state": True,
        "cu_seqlens": torch.tensor(boundaries) if boundaries else None,
        "qk_l2norm": True,
        "beta_is_logit": True,
        "allow_neg_eigval": True,
        "state_layout": layout,
    }


@pytest.mark.parametrize("at_once", [1, 1024])
@pytest.mark.parametrize("gate", ["lower_bound", "softplus", "log"])
@pytest.mark.parametrize("boundaries", [None, (0, 0, 17, 17, 33, 34, 52)])
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_exact_answers_are_the_recurrence(
    layout: str, gate: str, boundaries: tuple[int, ...] | None, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty sequences, rows past the last one, several slabs: equal to the recurrence and to the chunk form."""
    monkeypatch.setattr(exact, "AT_ONCE", at_once)
    inputs = check(**hard_call(layout, gate, boundaries))
    got = exact.exact(inputs)
    for right in (kda_recurrent(inputs), kda_chunk(inputs)[:2]):
        for x, y in zip(got, right, strict=True):
            assert y is not None
            assert x.dtype == torch.float64
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12 * float(y.abs().max()))


def test_exact_answers_are_not_rounded() -> None:
    call = shapes.make(SMALL, "slow", "cpu")
    o, state = exact.exact(call.inputs())
    rounded, _ = kda_recurrent(call.inputs())
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(o.bfloat16(), rounded)
    assert not torch.equal(o, rounded.double())
    assert state.dtype == torch.float64


def test_verify_notices_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exact.verify("cpu") < 1e-13
    right = exact.exact
    monkeypatch.setattr(exact, "exact", lambda inputs: (right(inputs)[0] * (1 + 1e-9), right(inputs)[1]))
    with pytest.raises(RuntimeError, match="differs from the recurrence by"):
        exact.verify("cpu")


# --- accuracy ---------------------------------------------------------------------------------------------------------


def test_errors_of_known_values() -> None:
    right = torch.full((1, 2, 1024, 4), 2.0, dtype=torch.float64)
    got = right.clone()
    got[0, 1, 256:512] += 0.5
    found = accuracy.errors(got, right)
    assert found.max == 0.5
    assert found.mae == pytest.approx(0.5 / 8)
    assert found.rmse == pytest.approx(0.5 / 8**0.5)
    assert found.ratio == pytest.approx(0.25 / 8**0.5)
    assert found.worst_block == pytest.approx(0.25)
    bin_of_half = int(8 * (math.log10(0.5) - accuracy.EDGES[0]))
    assert found.histogram[bin_of_half] == sum(found.histogram) == 1024
    got[0, 0, 0, 0] = torch.nan
    assert math.isnan(accuracy.errors(got, right).ratio)
    assert accuracy.errors(right, right).max == 0


def test_settings_are_the_ten() -> None:
    assert {(s.name, layout) for s in accuracy.SETTINGS for layout in accuracy.LAYOUTS} == set(published.ACCURACY)
    assert accuracy.lengths("six", 8192) == shapes.MIXED6
    assert accuracy.lengths("one", 8192) == (8192,)
    assert sum(accuracy.lengths("six", 100)) == 100
    options = accuracy.Options(device="cpu", tokens=4000)
    calls = {s.name: accuracy.make(s, "one", options) for s in accuracy.SETTINGS}
    for name, call in calls.items():
        gate = call.gate
        assert isinstance(gate, LowerBoundGate)
        assert gate.dt_bias is not None
        assert gate.A_log is not None
        assert torch.equal(call.q, calls["gate 0"].q)
        assert not gate.A_log.any()
        assert gate.lower_bound == -5
        moving = gate.dt_bias if name.startswith("bias") else call.g.float()
        still = call.g if name.startswith("bias") else gate.dt_bias
        assert not still.any()
        kind = name.split(" ")[1]
        if kind.startswith("U"):
            assert -8 <= float(moving.min()) < -7 < 7 < float(moving.max()) <= 8
        elif kind.startswith("N"):
            assert 6 < float(moving.std()) < 10
        else:
            assert set(moving.flatten().tolist()) == (
                {-float(kind[2:]), float(kind[2:])} if "+-" in kind else {float(kind)}
            )
    call = calls["gate 0"]
    assert 0 <= float(call.q.min()) < 0.01 < 0.99 < float(call.v.max()) <= 1
    assert call.initial_state.dtype == torch.float32
    assert 0.9 < float(call.initial_state.std()) < 1.1


def test_the_drift_case_forgets_slowly() -> None:
    call = accuracy.make_drift(accuracy.Options(device="cpu", drift=9))
    g = decay(call.g.double(), call.gate)
    torch.testing.assert_close(g.exp(), torch.full_like(g, 0.99992), rtol=0, atol=1e-9)
    assert call.q.shape == (1, 9, 1, 128)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_accuracy_runs_on_the_cpu(dtype: str) -> None:
    lines: list[str] = []
    options = accuracy.Options(dtype, "cpu", tokens=150, settings=("gate -8", "bias N(0,8)"), drift=80)
    rows = accuracy.run(options, lines.append)
    assert [(row["setting"], row["layout"], row["tokens"]) for row in rows] == [
        ("gate -8", "one", 150),
        ("bias N(0,8)", "one", 150),
        ("gate -8", "six", 150),
        ("bias N(0,8)", "six", 150),
        ("decay 0.99992", "one", 80),
    ]
    assert any("fla is left out: needs --device cuda" in line for line in lines)
    assert {(row["impl"], row["backend"]) for row in rows} == {("flash_kda", "cpu")}
    # Parts of ten tokens differ by chance.
    assert not accuracy.judge(rows[:-1], accuracy.LIMITS[dtype], against_peers=True)
    rounding = 1e-3 if dtype == "bfloat16" else 1e-9
    assert all(rounding < row["output"]["ratio"] <= row["output"]["worst_block"] * 1.01 for row in rows)
    assert len(rows[-1]["spans"]) == 8
    assert json.loads(json.dumps(rows)) == rows


def judged(ours: float, fla: float | None, tokens: int = 8192) -> list[report.Row]:
    row = {"setting": "gate 0", "layout": "one", "dtype": "bfloat16", "tokens": tokens}
    figures = {"flash_kda": ours} | ({} if fla is None else {"fla": fla})
    return [{**row, "impl": impl, "output": {"ratio": x}, "state": {"ratio": x}} for impl, x in figures.items()]


def test_judging() -> None:
    """FlashKDA has 0.00430 and 0.00363 in this setting."""
    assert accuracy.judge(judged(0.0035, 0.0030), 0.004, against_peers=False) == []
    assert accuracy.judge(judged(0.0035, 0.0030), 0.004, against_peers=True) == [
        "gate 0, one: output 3.50e-03, FLA 3.00e-03",
        "gate 0, one: state 3.50e-03, FLA 3.00e-03",
    ]
    assert accuracy.judge(judged(0.0039, None), 0.004, against_peers=True) == [
        "gate 0, one: state 3.90e-03, FlashKDA 3.63e-03"
    ]
    assert accuracy.judge(judged(0.0039, None, tokens=100), 0.004, against_peers=True) == []
    assert len(accuracy.judge(judged(0.0041, 0.1), 0.004, against_peers=False)) == 2
    assert len(accuracy.judge(judged(math.nan, None), 0.004, against_peers=False)) == 2


def test_what_drifts_is_judged_by_its_growth() -> None:
    def found(*spans: float) -> list[str]:
        rows = [{**row, "setting": "decay 0.99992", "spans": list(spans)} for row in accuracy_rows(tokens=2**20)]
        return accuracy.judge(rows, 1e-9, against_peers=True)

    assert found(0.0043, 0.0044, 0.0042) == []
    assert found(0.0043, 0.0048, 0.0043) == ["decay 0.99992, six: output from 4.30e-03 to 4.80e-03, 1.1 times at most"]
    assert len(found(0.0043, math.nan, 0.0043)) == len(found(math.nan, 0.0043)) == 1


# --- peers ------------------------------------------------------------------------------------------------------------


def recurrent(q: Any, k: Any, v: Any, g: Any, beta: Any, gate: Any, S0: Any, cu: Any, raw: bool) -> Any:
    """A stand-in for a peer's kernel: the recurrence in float64, from raw or from ready-made inputs, state [K, V]."""
    inputs = check(
        q, k, v, g, beta, gate=gate, scale=None, initial_state=S0, output_final_state=True, cu_seqlens=cu,
        qk_l2norm=raw, beta_is_logit=raw, allow_neg_eigval=False, state_layout="kv",
    )  # fmt: skip
    return kda_recurrent(inputs)


def fake_fla(seen: dict[str, Any]) -> ModuleType:
    def chunk_kda(**kwargs: Any) -> Any:
        seen.update(kwargs)
        assert kwargs["use_qk_l2norm_in_kernel"]
        assert kwargs["use_gate_in_kernel"]
        assert kwargs["use_beta_sigmoid_in_kernel"]
        A_log, dt_bias = kwargs["A_log"], kwargs["dt_bias"]
        bound = kwargs["lower_bound"]
        gate = SoftplusGate(A_log, dt_bias) if bound is None else LowerBoundGate(A_log, dt_bias, bound)
        rows = (kwargs[name] for name in ("q", "k", "v", "g", "beta"))
        return recurrent(*rows, gate, kwargs["initial_state"], kwargs["cu_seqlens"], True)

    module = ModuleType("fla.ops.kda")
    module.chunk_kda = chunk_kda  # type: ignore[attr-defined]
    return module


def fake_cudnn() -> ModuleType:
    def kimi_delta_attention(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, **kwargs: Any) -> Any:
        assert kwargs["plan_name"] == "kda_hopper_cuda"
        assert q.ndim == 3
        assert cu_seqlens.dtype == torch.int32
        inside = kwargs.get("safe_gate", False)
        if not inside:
            assert g.dtype == beta.dtype == torch.float32
        gate = LowerBoundGate(kwargs["a_log"], kwargs["dt_bias"], kwargs["gate_lower_bound"]) if inside else LogGate()
        rows = (x[None] for x in (q, k, v, g, beta))
        o, S = recurrent(*rows, gate, kwargs["initial_state"].transpose(-1, -2).contiguous(), cu_seqlens, inside)
        return o[0], S.transpose(-1, -2)

    module = ModuleType("cudnn.linear_attention.ops")
    module.kimi_delta_attention = kimi_delta_attention  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("gates", shapes.GATES)
@pytest.mark.parametrize(
    "peer", [peer for found in peers.PEERS.values() for peer in found], ids=lambda p: f"{p.impl}-{p.work}"
)
def test_peers_are_given_the_same_call(
    peer: peers.Implementation, gates: shapes.Gates, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever form a peer takes its arguments in, the recurrence over them is the exact answer of our call."""
    seen: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "fla.ops.kda", fake_fla(seen))
    monkeypatch.setitem(sys.modules, "cudnn.linear_attention.ops", fake_cudnn())
    call = shapes.make(replace(SMALL, packed=packed, lengths=SMALL.lengths if packed else (21, 21)), gates, "cpu")
    if (why := peer.why_not(call)) is not None:
        assert (gates, why) == ("softplus", "has no softplus gate inside")
        return
    right = exact.exact(call.inputs())
    # Two roundings to bf16 of normalised q and k, where those are handed over, and that of the output.
    limits = (6e-3, 3e-3) if "given" in peer.work else (3e-3, 1e-6)
    run = peer.prepare(call)
    for got, expected, limit in zip(peer.canonical(run(), call), right, limits, strict=True):
        assert got.shape == expected.shape
        assert prefill.ratio(got, expected) < limit
    if peer.impl == "fla":
        # FLA would hand a call with state_v_first=True to a package of this name.
        assert seen["state_v_first"] is False
        assert seen["safe_gate"] == (gates != "softplus")
        assert (seen["cu_seqlens"] is not None) == packed


@pytest.mark.parametrize(
    "peer", [peer for found in peers.PEERS.values() for peer in found], ids=lambda p: f"{p.impl}-{p.work}"
)
def test_peers_train_on_the_same_call(peer: peers.Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's gradient is that of our call, or of the normalised k where that is handed over; in every run of it."""
    monkeypatch.setitem(sys.modules, "fla.ops.kda", fake_fla({}))
    monkeypatch.setitem(sys.modules, "cudnn.linear_attention.ops", fake_cudnn())
    call = shapes.make(replace(SMALL, packed=False, lengths=(21, 21)), "strong", "cpu")
    right = train.step(peers.Ours("reference"), call)()
    _, wanted = peer.trainable(call)
    inside = peer.work == peers.ALL_INSIDE
    assert len(wanted) == (7 if inside else 5)
    assert not any(x.requires_grad for x in (call.q, call.g, call.gate.dt_bias))  # type: ignore[union-attr]
    run = train.step(peer, call)
    for o, dk in (run(), run()):
        assert prefill.ratio(o, right[0].double()) < (1e-2 if inside else 2e-2)
        dk = dk.double().view_as(right[1])
        if not inside:
            # Through the normalisation, and with its rounding to bfloat16.
            k = call.k.double().requires_grad_()
            (dk,) = torch.autograd.grad(F.normalize(k, dim=-1), k, dk)
        assert prefill.ratio(dk, right[1].double()) < 2e-2


def test_a_peer_must_not_run_this_library(monkeypatch: pytest.MonkeyPatch) -> None:
    call = shapes.make(SMALL, "strong", "cpu")

    def chunk_kda(**kwargs: Any) -> Any:
        return flash_kda.kda(**call.arguments())

    module = ModuleType("fla.ops.kda")
    module.chunk_kda = chunk_kda  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla.ops.kda", module)
    with pytest.raises(RuntimeError, match="fla was to run, but of flash_kda there ran: cpu"):
        peers.run_once(peers.Fla(), call)


def test_ours() -> None:
    call = shapes.make(SMALL, "strong", "cpu")
    (o, state), backend = peers.run_once(peers.Ours(), call)
    assert backend == "cpu"
    for got, right in zip((o, state), exact.exact(call.inputs()), strict=True):
        assert prefill.ratio(got, right) < 3e-3
    assert peers.Ours().available() is None
    assert peers.Ours().why_not(call) is None
    assert "runs on CUDA devices" in str(peers.Ours("triton").why_not(call))


def test_peers_are_found_by_their_rows() -> None:
    for found in peers.PEERS.values():
        for peer in found:
            assert peers.find(peer.impl, peer.work, peer.backend) == peer
    for ours in (peers.Ours("cpu"), peers.Ours("cpu", recompute=False)):
        assert peers.find(ours.impl, ours.work, ours.backend) == ours
    with pytest.raises(ValueError, match="expected 'flash_kda' or one of fla, cudnn"):
        peers.find("other", "", "")
    with pytest.raises(ValueError, match="got 'fla', 'nothing'"):
        peers.find("fla", "nothing", "")


def test_peers_say_why_they_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert peers.Fla().available() == "needs an NVIDIA GPU; torch sees none"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert "needs compute capability 9.0" in str(peers.Cudnn(inside=True).available())
    for name in ("fla", "fla.ops", "fla.ops.kda"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "fla.ops.kda cannot be imported" in str(peers.Fla().available())


# --- the prefill run, with the clock replaced -------------------------------------------------------------------------


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`prefill.run` on the CPU with small inputs and made-up times."""
    monkeypatch.setattr(measuring, "verify", lambda device: 0.0)
    monkeypatch.setattr(prefill, "inputs", lambda case, gates: [shapes.make(SMALL, gates, "cpu", i) for i in range(2)])
    monkeypatch.setattr(harness, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(harness, "flush_buffer", lambda: torch.empty(0))
    monkeypatch.setattr(harness, "measure", lambda runs, flush, repeats: harness.Timing(0.5, 0.6, 20.0, 3.0))
    return []


def test_prefill_rows(without_gpu: list[str]) -> None:
    kept: list[int] = []
    options = prefill.Options(("1x8192-h64", "512x16-h12"), ("strong", "softplus"), peers=("fla",))
    rows = prefill.run(options, without_gpu.append, lambda rows: kept.append(len(rows)))
    assert kept == [1, 2, 3, 4]
    assert [(row["case"], row["gates"]) for row in rows] == [
        ("1x8192-h64", "strong"),
        ("1x8192-h64", "softplus"),
        ("512x16-h12", "strong"),
        ("512x16-h12", "softplus"),
    ]
    row = rows[0]
    assert (row["impl"], row["backend"], row["ms"], row["eager_ms"]) == ("flash_kda", "cpu", 0.5, 0.6)
    assert row["floor_ms"] == pytest.approx(1e3 * (8192 * 64 * 1282 + 2 * 64 * 65536) / 4e12)
    assert 1e-3 < row["output_error"] < 3e-3
    assert row["state_error"] < 1e-6
    assert any(line.startswith("fla") and "left out" in line for line in without_gpu)


def test_a_peers_failure_is_news_and_ours_is_a_fault(without_gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    broken = peers.Fla()
    monkeypatch.setattr(peers.Fla, "available", lambda self: None)
    monkeypatch.setitem(sys.modules, "fla.ops.kda", ModuleType("empty"))
    options = prefill.Options(("1x512-h64",), ("slow",), peers=(broken.impl,))
    rows = prefill.run(options, without_gpu.append, lambda rows: None)
    assert [row["impl"] for row in rows] == ["flash_kda"]
    assert any("fla chunk_kda: AttributeError" in line for line in without_gpu)
    monkeypatch.setattr(harness, "measure", lambda runs, flush, repeats: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prefill.run(options, without_gpu.append, lambda rows: None)


class FirstCalls:
    """Stands for the processes of first calls: 9 seconds with an empty cache, 2 with what the first left there."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], *, env: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        left = Path(env["TRITON_CACHE_DIR"], "kernel")
        seconds = 2.0 if left.exists() else 9.0
        left.touch()
        assert str(Path(flash_kda.__file__).parents[1]) in env["PYTHONPATH"].split(os.pathsep)
        assert options["timeout"] == first_call.TIMEOUT_S
        text = f'a warning\n{{"seconds": {seconds}}}\nlast words\n'
        return subprocess.CompletedProcess(command, self.status, text if not self.status else "", "no such kernel")


@pytest.mark.parametrize(("op", "case"), [("prefill", "1x512-h64"), ("train", "1x8192-h64")])
def test_first_calls(
    op: str, case: str, tmp_path: Path, without_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their times join the rows of the file that they are appended to; without them the row is there all the same."""
    monkeypatch.setattr(train, "inputs", lambda case, gates: [shapes.make(SMALL, gates, "cpu")])
    monkeypatch.setattr(train, "refuse_untrainable", lambda options, device: None)
    monkeypatch.setattr(commands, "require_gpu", lambda command, otherwise: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    out = tmp_path / "x.json"
    other = {"op": op, "case": "another", "gates": "strong", "impl": "flash_kda", "backend": "hopper", "work": ""}
    report.write(out, report.describe("before"), [other])
    common = ("bench", op, "--case", case, "--gates", "strong", "--no-peers", "--append", "--out", str(out))
    calls = FirstCalls()
    processes = SimpleNamespace(run=calls, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(first_call, "subprocess", processes)
    result = invoke(*common, "--first-call")
    assert result.exit_code == 0, result.output
    meta, rows = report.read(out)
    assert meta["command"].endswith("--no-peers --first-call --append")
    assert rows[0] == other
    assert (rows[1]["first_call_s"], rows[1]["first_call_cached_s"]) == (9.0, 2.0)
    assert "first call 9.0 s, again 2.0 s" in result.output
    command = calls.commands[0]
    assert calls.commands == [command] * 2
    assert command[1:7] == ["-m", "flash_kda.bench.first_call", "--op", op, "--case", case]
    processes.run = FirstCalls(status=1)
    result = invoke(*common, "--first-call")
    assert result.exit_code == 0, result.output
    assert "the first call failed with status 1: no such kernel" in result.output
    assert "first_call_s" not in report.read(out)[1][1]


def test_a_first_call_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_call, "TIMEOUT_S", 0.01)
    with pytest.raises(RuntimeError, match=r"took more than 0\.01 s"):
        first_call.first_call(shapes.cases("prefill")["1x512-h64"], "strong", peers.Ours())


# --- results, tables, pictures ----------------------------------------------------------------------------------------


def prefill_row(**changes: Any) -> report.Row:
    row = {"op": "prefill", "case": "1x8192-h64", "gates": "strong", "impl": "flash_kda", "backend": "triton"}
    row |= {"work": peers.ALL_INSIDE, "note": "", "ms": 0.5, "eager_ms": 0.6, "host_us": 20.0, "floor_ms": 0.156}
    return {**row, "peak_mb": 100.0, "output_error": 3.1e-3, "state_error": 2.2e-3, **changes}


ROWS = [
    prefill_row(),
    prefill_row(gates="softplus", ms=0.7),
    prefill_row(impl="fla", backend="chunk_kda", ms=None, eager_ms=1.7, note="its own layout"),
    prefill_row(impl="cudnn", backend="kda_hopper_cuda", work="log gates given", ms=0.402),
]


def test_results_files(tmp_path: Path) -> None:
    path = tmp_path / "new" / "prefill-h200.json"
    report.write(path, GPU_META, ROWS)
    assert report.read(path) == (GPU_META, ROWS)
    for text in ("", "[1]", '{"meta": {}}', '{"meta": 3, "rows": []}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r'expected \{"meta"'):
            report.read(path)


def test_merging_replaces_what_was_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    assert report.merge(path, GPU_META, ROWS) == ROWS
    report.write(path, GPU_META, ROWS)
    new = prefill_row(ms=0.4)
    merged = report.merge(path, {**GPU_META, "date": "later", "command": "other"}, [new])
    assert merged == [new, *ROWS[1:]]
    with pytest.raises(ValueError, match="driver 1 there, 2 now"):
        report.merge(path, {**GPU_META, "driver": "2"}, [new])


def test_a_file_tells_every_command_that_made_it(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    meta = {**GPU_META, "command": "b"}
    assert report.continued(path, meta) == meta
    report.write(path, {**GPU_META, "command": "a"}, ROWS)
    for _ in range(2):
        after = report.continued(path, meta)
        assert after == {**GPU_META, "command": "a && b --append"}
        report.write(path, after, ROWS)


def test_slugs() -> None:
    assert report.gpu_slug("NVIDIA H200") == "h200"
    assert report.gpu_slug("NVIDIA A100-SXM4-80GB") == "a100-sxm4-80gb"


def test_summary_of_prefill() -> None:
    columns, cells = report.summary(ROWS)
    given = "cudnn kda_hopper_cuda, gates given"
    assert columns == ("case", "gates", "floor", "flash_kda triton", "fla chunk_kda", given, "FlashKDA*")
    assert cells == [
        ("1x8192-h64", "strong", "0.156", "0.500 (3.2 x)", "1.700 (10.9 x)", "0.402 (2.6 x)", "1.198"),
        ("1x8192-h64", "softplus", "0.156", "0.700 (4.5 x)", "", "", ""),
    ]


def test_details_of_prefill() -> None:
    columns, cells = report.details(ROWS)
    assert "first call s" not in columns
    line = dict(zip(columns, cells[2], strict=True))
    assert line["ms"] == "1.700 (no graph)"
    assert line["x floor"] == "10.90"
    assert (line["host µs"], line["peak MiB"], line["output error"]) == ("20", "100", "3.1e-03")
    columns, cells = report.details([prefill_row(first_call_s=12.34)])
    assert dict(zip(columns, cells[0], strict=True))["first call s"] == "12.3"


def test_only_one_operation_makes_a_table() -> None:
    for rows in ([], [prefill_row(), {"op": "accuracy"}], [{"op": "other"}]):
        with pytest.raises(ValueError, match="expected rows of prefill, of decode, of train, of scale or of accuracy"):
            report.summary(rows)


def accuracy_rows(tokens: int = 8192) -> list[report.Row]:
    right = torch.linspace(1, 2, 2 * 300 * 4, dtype=torch.float64).view(1, 2, 300, 4)
    figures = report.Row(accuracy.asdict(accuracy.errors(right * 1.003, right)))
    row = {"op": "accuracy", "setting": "gate -8", "layout": "six", "dtype": "bfloat16", "tokens": tokens}
    row |= {"impl": "flash_kda", "backend": "triton", "work": peers.ALL_INSIDE, "note": ""}
    both = {"output": figures, "state": figures}
    return [{**row, **both}, {**row, **both, "impl": "fla", "backend": "chunk_kda"}]


def test_summary_of_accuracy() -> None:
    columns, cells = report.summary(accuracy_rows())
    assert columns == ("setting", "layout", "flash_kda triton", "fla chunk_kda", "FlashKDA*")
    assert cells == [("gate -8", "six", "0.003 / 0.003", "0.003 / 0.003", "0.00517 / 0.00887")]
    assert "FlashKDA*" not in report.summary(accuracy_rows(tokens=100))[0]
    assert report.remarks(accuracy_rows()) == []
    drift = [{**row, "setting": "decay 0.99992", "spans": [1e-3, 2.5e-3]} for row in accuracy_rows(tokens=2**20)]
    line = "RMSE ratio of the output in 2 equal parts of 1048576 tokens: 0.001, 0.0025"
    assert report.remarks(drift)[0] == f"decay 0.99992, six, flash_kda triton: {line}"
    assert f"- decay 0.99992, six, fla chunk_kda: {line}.\n" in report.markdown(GPU_META, drift, "x.png")
    columns, cells = report.details(accuracy_rows())
    assert len(columns) == len(cells[0]) == 12
    assert dict(zip(columns, cells[0], strict=True))["output max"] == "6.00e-03"


def test_published_figures_say_that_they_are_not_of_this_run() -> None:
    text = report.markdown(GPU_META, ROWS, "images/x.png")
    assert "not of this run" in text
    assert "| FlashKDA\\* |" in text
    assert "- fla chunk_kda (normalisation, gate and sigmoid inside): its own layout." in text
    assert "NVIDIA H200, d, driver 1, torch 2, triton 3, cuda 13. Made with `c`." in text
    assert "FlashKDA" not in report.markdown(GPU_META, [prefill_row(gates="softplus")], "x.png")
    assert published.prefill_ms("1x8192-h64", "softplus") is None


def test_insertion_between_markers() -> None:
    document = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n<!-- begin y -->\n<!-- end y -->\n"
    once = report.insert(document, "x", "new")
    assert once == "a\n<!-- begin x -->\nnew\n<!-- end x -->\nb\n<!-- begin y -->\n<!-- end y -->\n"
    assert report.insert(once, "x", "new") == once
    for wrong in ("", document + document, "<!-- end x --><!-- begin x -->"):
        with pytest.raises(ValueError, match="expected one <!-- begin x -->"):
            report.insert(wrong, "x", "new")


@pytest.mark.parametrize(
    "rows",
    [ROWS, [*accuracy_rows(), *({**row, "setting": "d", "spans": [1e-3, 2e-3]} for row in accuracy_rows())]],
    ids=["prefill", "accuracy"],
)
def test_pictures(rows: list[report.Row]) -> None:
    data = plots.picture(GPU_META, rows)
    assert data.startswith(PNG)
    assert data == plots.picture(GPU_META, rows)
    assert data != plots.picture(GPU_META, rows[:1])


@pytest.mark.parametrize(
    ("op", "title"), [("prefill", "Prefill"), ("train", "Forward and backward"), ("decode", "Decode")]
)
def test_a_picture_says_what_was_timed(op: str, title: str) -> None:
    """FlashKDA's figures are of its forward: beside nothing else, though cases have the same names."""
    figure = plots.times_figure(GPU_META, [prefill_row(op=op, case="1x8192-h64")])
    heading = figure.get_suptitle()
    assert heading.startswith(title)
    labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert any("FlashKDA" in text for text in labels) == (op == "prefill")


def test_colours_tell_implementations_apart() -> None:
    rows = [*ROWS, prefill_row(backend="hopper"), prefill_row(impl="cudnn", backend="kda_hopper_cuda")]
    found = plots.colours(rows)
    assert len(found) == len(set(found.values())) == 5
    assert {name for name, colour in found.items() if colour in plots.OURS} == {"flash_kda triton", "flash_kda hopper"}


# --- the command line -------------------------------------------------------------------------------------------------


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli.build_app(), list(args), env={"COLUMNS": "200", "NO_COLOR": "1"})


def refused(*args: str) -> str:
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    return " ".join(result.stderr.split())


def test_the_document_has_a_place_for_every_table(tmp_path: Path) -> None:
    """`bench report` fills the document of this repository, and only between the markers."""
    (tmp_path / "performance.md").write_text(DOCUMENT.read_text())
    for name, rows in (
        ("prefill-h200", ROWS),
        ("decode-h200", [prefill_row(op="decode", case="b1-h12", ms=0.0042)]),
        ("accuracy-bfloat16-h200", accuracy_rows()),
        ("accuracy-float32-h200", accuracy_rows()),
    ):
        report.write(tmp_path / f"{name}.json", GPU_META, rows)
        result = invoke(
            "bench", "report", str(tmp_path / f"{name}.json"), "--document", str(tmp_path / "performance.md")
        )
        assert result.exit_code == 0, result.output
        assert (tmp_path / "images" / f"{name}.png").read_bytes().startswith(PNG)
        assert f"(images/{name}.png)" in (tmp_path / "performance.md").read_text()
    assert "| 1x8192-h64 | strong | 0.156 |" in (tmp_path / "performance.md").read_text()
    outside = re.compile(r"(?<=<!-- begin (\S)).*?(?=<!-- end)", re.DOTALL)
    assert outside.sub("", (tmp_path / "performance.md").read_text()) == outside.sub("", DOCUMENT.read_text())


def test_report_names_what_is_wrong(tmp_path: Path) -> None:
    good = tmp_path / "unknown-name.json"
    report.write(good, GPU_META, ROWS)
    document = tmp_path / "d.md"
    document.write_text("no markers")
    assert "expected one <!-- begin unknown-name -->" in refused(
        "bench", "report", str(good), "--document", str(document)
    )
    assert "No such file" in refused("bench", "report", str(tmp_path / "none.json"), "--document", str(document))
    assert document.read_text() == "no markers"


def test_commands_say_that_they_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "bench prefill needs an NVIDIA GPU and a CUDA build of torch" in refused("bench", "prefill", "--quick")
    assert "accuracy needs an NVIDIA GPU" in refused("accuracy")


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    assert "--case: got 1x1-h1, expected some of 1x8192-h96" in refused("bench", "prefill", "--case", "1x1-h1")
    assert "--backend: got metal, expected some of auto" in refused("bench", "prefill", "--backend", "metal")
    assert "--setting: got gate 9, expected some of gate -8" in refused("accuracy", "--setting", "gate 9")
    refused("bench", "prefill", "--gates", "wide")
    refused("accuracy", "--dtype", "float64")


def test_accuracy_on_the_cpu(tmp_path: Path) -> None:
    out, picture = tmp_path / "a.json", tmp_path / "a.png"
    common = ("accuracy", "--device", "cpu", "--tokens", "70", "--setting", "gate -8", "--out", str(out))
    result = invoke(*common, "--picture", str(picture))
    assert result.exit_code == 0, result.output
    meta, rows = report.read(out)
    assert len(rows) == 2
    assert meta["command"].endswith("--tokens 70 --drift 0 --setting 'gate -8'")
    assert str(tmp_path) not in out.read_text()
    assert picture.read_bytes().startswith(PNG)
    assert f"{rows[0]['output']['ratio']:.3g}" in result.output
    result = invoke(*common, "--drift", "80", "--append")
    assert result.exit_code == 0, result.output
    assert "decay 0.99992, one, flash_kda cpu: RMSE ratio of the output in 8 equal parts of 80 tokens" in result.output
    settings = [row["setting"] for row in report.read(out)[1]]
    assert settings == ["gate -8", "gate -8", "decay 0.99992"]
    meta, rows = report.read(out)
    report.write(out, {**meta, "gpu": "another"}, rows)
    assert "gpu another there, no GPU now" in refused(*common, "--append")
    result = invoke(*common, "--limit", "1e-9")
    assert result.exit_code == 1
    assert "beyond what is allowed: gate -8, one: output" in result.output
    assert "runs on CUDA devices" in refused(*common, "--backend", "triton")
    assert "x.json: [Errno 17] File exists" in refused(*common[:-1], str(picture / "x.json"))
    assert "x.png: Not a directory" in refused(*common, "--picture", str(out / "x.png"))


def test_prefill_command(tmp_path: Path, without_gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "require_gpu", lambda command, otherwise: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.chdir(tmp_path)
    assert invoke("bench", "prefill", "--case", "1x512-h64", "--gates", "slow", "--no-peers").exit_code == 0
    path = tmp_path / "benchmarks" / "results" / "prefill-h200.json"
    meta, rows = report.read(path)
    assert meta["command"] == "flash-kda bench prefill --case 1x512-h64 --gates slow --no-peers"
    assert [(row["case"], row["gates"]) for row in rows] == [("1x512-h64", "slow")]
    result = invoke("bench", "prefill", "--quick", "--gates", "strong", "--no-peers", "--append")
    assert result.exit_code == 0, result.output
    assert len(report.read(path)[1]) == 1 + len(shapes.QUICK)
    assert "0.500" in result.output
    report.write(path, {**meta, "gpu": "another"}, rows)
    assert "gpu another there, NVIDIA H200 now" in refused("bench", "prefill", "--no-peers", "--append")
    (tmp_path / "in-the-way").write_text("")
    assert "--out" in refused("bench", "prefill", "--no-peers", "--out", str(tmp_path / "in-the-way" / "x.json"))


# --- on a GPU ---------------------------------------------------------------------------------------------------------

gpu = pytest.mark.gpu


@gpu
@pytest.mark.alone
def test_timing_of_a_copy() -> None:
    """A copy of 1 GiB takes what the copy rate says, from a graph and eagerly, and its memory is seen."""
    source = torch.ones(2**28, device="cuda")

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return source.clone(), source[:1].clone()

    bandwidth = harness.copy_bandwidth()
    timing = harness.measure([run, run], harness.flush_buffer(), 10)
    expected = harness.floor_ms(2 * 2**30, bandwidth)
    assert timing.graph_ms == pytest.approx(expected, rel=0.2)
    assert timing.eager_ms == pytest.approx(expected, rel=0.2)
    assert timing.peak_mb == pytest.approx(1024, rel=0.01)
    assert 1 < timing.host_us < 1000


@gpu
def test_what_cannot_be_captured_is_said() -> None:
    x = torch.ones(4, device="cuda")

    def waits() -> tuple[torch.Tensor, torch.Tensor]:
        return x * x.sum().item(), x

    with pytest.raises(harness.CaptureError):
        harness.capture(waits)
    kept = (torch.ones(4, device="cuda"), torch.ones(4, device="cuda"))
    with pytest.raises(harness.CaptureError, match="does not write its results"):
        harness.capture(lambda: kept)
    timing = harness.measure([waits], harness.flush_buffer(), 3)
    assert timing.graph_ms is None
    assert timing.capture_error
    assert timing.eager_ms > 0


@gpu
def test_cold_caches() -> None:
    """Reading 16 MiB takes longer after a flush than from a warm L2."""
    x = torch.ones(2**22, device="cuda")

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return x.sum()[None], x[:1].clone()

    run()
    cold = harness.eager_ms([run], harness.flush_buffer(), 200.0, 20)
    warm = harness.eager_ms([run], torch.empty(1, device="cuda"), 200.0, 20)
    assert cold > warm


@gpu
def test_exact_answers_on_the_gpu() -> None:
    assert exact.verify("cuda") < 1e-12


@gpu
def test_prefill_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    case = shapes.uniform("prefill", 2, 100, 2)
    monkeypatch.setattr(shapes, "CASES", (case,))
    options = prefill.Options((case.name,), shapes.GATES, peers=(), repeats=3)
    rows = prefill.run(options, print, lambda rows: None)
    assert [row["gates"] for row in rows] == list(shapes.GATES)
    for row in rows:
        assert row["backend"] != "cpu"
        assert row["output_error"] < 5e-3
        assert row["state_error"] < 5e-3
        assert row["ms"] > row["floor_ms"] > 0


@gpu
@pytest.mark.parametrize(("op", "case"), [("prefill", "1x512-h64"), ("train", "1x8192-h32")])
def test_first_call(op: shapes.Op, case: str) -> None:
    """The second process finds compiled kernels in the cache that the first left."""
    cold, warm = first_call.first_call(shapes.cases(op)[case], "strong", peers.Ours())
    assert cold > warm > 0
