"""The decode benchmark: inputs, implementations, rows, with the clock replaced where there is no GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("typer")

from typer.testing import CliRunner

import flash_kda
from flash_kda import cli
from flash_kda.bench import commands, decode, exact, harness, measuring, report, shapes
from flash_kda.bench.prefill import ratio
from flash_kda.types import LowerBoundGate, SoftplusGate

ONE = shapes.Case("one", "decode", (1,) * 5, 3, head_dim=32, seed=5)
DRAFTS = replace(ONE, lengths=(3,) * 5)
OUTPUT = replace(DRAFTS, writes=False)
STEP = replace(ONE, step=True)


@pytest.mark.parametrize("case", [ONE, DRAFTS], ids=["one", "drafts"])
def test_inputs(case: shapes.Case) -> None:
    """Every row has slots of its own, none has slot 0, and the states lie where the accepted counts say."""
    a, b, c = (decode.make(case, "strong", "cpu", index) for index in (0, 0, 1))
    assert torch.equal(a.pool, b.pool)
    assert not torch.equal(a.pool, c.pool)
    T = case.lengths[0]
    assert a.indices.dtype == torch.int32
    assert a.indices.shape == ((5,) if T == 1 else (5, 3))
    assert sorted(a.indices.flatten().tolist()) == list(range(1, 5 * T + 1))
    assert not a.pool[0].any()
    for n in range(5):
        slot = a.indices[n] if a.accepted is None else a.indices[n, a.accepted[n] - 1]
        assert torch.equal(a.pool[slot], a.call.initial_state[n])
    assert int(a.pool.flatten(1).any(1).sum()) == 5
    if a.accepted is not None:
        assert set(a.accepted.tolist()) <= {1, 2, 3}


OURS = decode.Ours.prepare


def fake_fla() -> ModuleType:
    """FLA's functions by means of our reference."""

    def fused_recurrent_kda_fwd(**kwargs: Any) -> Any:
        assert kwargs["inplace_final_state"]
        bound, parameters = kwargs["lower_bound"], (kwargs["A_log"], kwargs["dt_bias"])
        gate = SoftplusGate(*parameters) if bound is None else LowerBoundGate(*parameters, bound)
        pool = kwargs["initial_state"]
        # The reference records itself as this library, which a peer must not be.
        from flash_kda.backends import reference
        from flash_kda.checks_decode import check_decode

        rows = [kwargs[name] for name in ("q", "k", "v", "g", "beta")]
        slots = (kwargs["ssm_state_indices"], kwargs["num_accepted_tokens"], None, kwargs["cu_seqlens"], None)
        call = check_decode(*rows, pool, *slots, gate, None, True, True, False, "vk", 0, True)
        return reference.run_decode(call)[0], pool

    def fused_recurrent_kda(**kwargs: Any) -> Any:
        N = kwargs["q"].shape[0]
        kwargs |= {name: kwargs[name].flatten(0, 1)[None] for name in ("q", "k", "v", "g", "beta")}
        pool = torch.cat([torch.zeros_like(kwargs["initial_state"][:1]), kwargs["initial_state"]])
        where = {"cu_seqlens": torch.arange(N + 1), "ssm_state_indices": torch.arange(1, N + 1)}
        kwargs |= {"inplace_final_state": True, "num_accepted_tokens": None, "initial_state": pool}
        o, pool = fused_recurrent_kda_fwd(**kwargs, **where)
        return o, pool[1:]

    module = ModuleType("fla.ops.kda.fused_recurrent")
    module.fused_recurrent_kda = fused_recurrent_kda  # type: ignore[attr-defined]
    module.fused_recurrent_kda_fwd = fused_recurrent_kda_fwd  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("case", [ONE, DRAFTS], ids=["one", "drafts"])
@pytest.mark.parametrize("gates", shapes.GATES)
@pytest.mark.parametrize("implementation", [decode.Ours(), decode.Fla()], ids=["ours", "fla"])
def test_implementations_compute_the_case(
    implementation: decode.Implementation, gates: shapes.Gates, case: shapes.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever form the arguments take, the results are the exact answer; the case's own pool stays as it is."""
    monkeypatch.setitem(sys.modules, "fla.ops.kda.fused_recurrent", fake_fla())
    call = decode.make(case, gates, "cpu")
    before = call.pool.clone()
    right = exact.exact(call.call.inputs())
    with torch.no_grad():
        o, states = implementation.prepare(call)()
    assert ratio(o.view_as(call.call.v), right[0]) < 3e-3
    assert ratio(implementation.states(states, call), right[1]) < 1e-6
    assert torch.equal(call.pool, before)


def test_the_output_alone() -> None:
    """The same output without a state written."""
    call = decode.make(OUTPUT, "strong", "cpu")
    with torch.no_grad():
        o, pool = decode.Ours().prepare(call)()
        right, _ = decode.Ours().prepare(decode.make(DRAFTS, "strong", "cpu"))()
    assert torch.equal(o, right)
    assert torch.equal(pool, call.pool)


@pytest.mark.parametrize("gates", shapes.GATES)
@pytest.mark.parametrize("implementation", [decode.OurStep(), decode.OurParts()], ids=["step", "parts"])
def test_ways_to_step_compute_the_case(implementation: decode.Implementation, gates: shapes.Gates) -> None:
    """In one call or in parts, again and again; the case's own pools stay as they are."""
    call = decode.make(STEP, gates, "cpu")
    assert isinstance(call, decode.StepCall)
    before = call.pool.clone(), call.conv_pool.clone()
    right = call.exact()
    with torch.no_grad():
        run = implementation.prepare(call)
        o, states = run()
        states = implementation.states(states, call).clone()
        again, _ = run()
    # The parts round q, k, v and o on the way.
    assert ratio(o[:, :, :2], right[0]) < (1e-2 if isinstance(implementation, decode.OurParts) else 3e-3)
    assert ratio(states[:, :2], right[1]) < (1e-2 if isinstance(implementation, decode.OurParts) else 1e-6)
    assert not torch.equal(o, again), "the last inputs are not kept"
    assert torch.equal(call.pool, before[0])
    assert torch.equal(call.conv_pool, before[1])


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`decode.run` on the CPU with small inputs and made-up times."""
    small = {"b1-h12": ONE, "b128-t4-h12": DRAFTS, "b128-t4-out-h12": OUTPUT, "b32-step-h12": STEP}
    monkeypatch.setattr(measuring, "verify", lambda device: 0.0)
    monkeypatch.setattr(
        decode,
        "inputs",
        lambda case, gates: [decode.make(small.get(case.name, ONE), gates, "cpu", i) for i in range(2)],
    )
    monkeypatch.setattr(decode, "refuse_undecodable", lambda options, device: None)
    monkeypatch.setattr(harness, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(harness, "flush_buffer", lambda: torch.empty(0))

    def measure(runs: Any, flush: Any, repeats: int) -> harness.Timing:
        for run in runs:
            o, again = run()
            assert o is again
        return harness.Timing(0.0042, 0.005, 15.0, 0.1)

    monkeypatch.setattr(harness, "measure", measure)
    return []


def test_rows(without_gpu: list[str]) -> None:
    kept: list[int] = []
    options = decode.Options(("b1-h12", "b128-t4-h12"), ("strong", "softplus"))
    rows = decode.run(options, without_gpu.append, lambda rows: kept.append(len(rows)))
    assert kept == [1, 2, 3, 4]
    assert [(row["case"], row["gates"]) for row in rows] == [
        ("b1-h12", "strong"),
        ("b1-h12", "softplus"),
        ("b128-t4-h12", "strong"),
        ("b128-t4-h12", "softplus"),
    ]
    row = rows[0]
    assert (row["op"], row["impl"], row["backend"], row["ms"]) == ("decode", "flash_kda", "cpu", 0.0042)
    assert row["floor_ms"] == pytest.approx(1e3 * 2 * 12 * 65536 / 4e12)
    assert rows[-1]["floor_ms"] == pytest.approx(1e3 * 5 * 128 * 12 * 65536 / 4e12)
    assert all(1e-4 < row["output_error"] < 3e-3 for row in rows)
    assert all(row["state_error"] < 1e-6 for row in rows)
    assert any(line.startswith("fla is left out") for line in without_gpu)
    columns, cells = report.summary(rows)
    assert columns == ("case", "gates", "floor", "flash_kda cpu")
    assert cells[0] == ("b1-h12", "strong", "0.0004", "0.0042 (10.7 x)")
    columns, cells = report.details(rows)
    assert dict(zip(columns, cells[0], strict=True))["eager ms"] == "0.0050"


def test_rows_of_steps(without_gpu: list[str]) -> None:
    """One row of the step, one of its parts, with names of their own."""
    rows = decode.run(decode.Options(("b1-h12", "b32-step-h12")), without_gpu.append, lambda rows: None)
    assert [report.label(row) for row in rows] == ["flash_kda cpu", "flash_kda cpu", "flash_kda cpu, in parts"]
    step, parts = rows[1:]
    assert step["floor_ms"] == parts["floor_ms"] == pytest.approx(1e3 * 2 * 32 * 12 * (65536 + 2304) / 4e12)
    assert step["output_error"] < 3e-3 < parts["output_error"] + 1e-3
    assert step["state_error"] < 1e-6 < parts["state_error"] < 1e-2
    assert len({tuple(row.get(key) for key in report.KEY) for row in rows}) == 3
    columns, cells = report.summary(rows)
    assert columns == ("case", "gates", "floor", "flash_kda cpu", "flash_kda cpu, in parts")
    assert [line[:2] for line in cells] == [("b1-h12", "strong"), ("b32-step-h12", "strong")]


def test_rows_of_the_output_alone(without_gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No error of states that are not written, no peer; whoever writes one is found out."""
    monkeypatch.setitem(sys.modules, "fla.ops.kda.fused_recurrent", fake_fla())
    monkeypatch.setattr(decode.Fla, "available", lambda self: None)
    options = decode.Options(("b128-t4-out-h12", "b128-t4-h12"))
    rows = decode.run(options, without_gpu.append, lambda rows: None)
    assert [(row["case"], row["impl"]) for row in rows] == [
        ("b128-t4-out-h12", "flash_kda"),
        ("b128-t4-h12", "flash_kda"),
        ("b128-t4-h12", "fla"),
    ]
    assert rows[0]["floor_ms"] == pytest.approx(1e3 * 128 * 12 * 65536 / 4e12)
    assert rows[0]["output_error"] == rows[1]["output_error"]
    assert "state_error" not in rows[0]
    assert report.details(rows)[1][0][-1] == ""
    writing = decode.make(DRAFTS, "strong", "cpu")
    monkeypatch.setattr(decode, "inputs", lambda case, gates: [decode.make(OUTPUT, gates, "cpu")])
    monkeypatch.setattr(decode.Ours, "prepare", lambda self, call: OURS(self, writing))
    with pytest.raises(RuntimeError, match="was to leave the states as they are"):
        decode.run(options, without_gpu.append, lambda rows: None)


def test_a_peer_must_not_be_this_library(without_gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("fla.ops.kda.fused_recurrent")
    module.fused_recurrent_kda = lambda **kwargs: decode.Ours().prepare(decode.make(ONE, "strong", "cpu"))()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla.ops.kda.fused_recurrent", module)
    monkeypatch.setattr(decode.Fla, "available", lambda self: None)
    rows = decode.run(decode.Options(("b1-h12",)), without_gpu.append, lambda rows: None)
    assert [row["impl"] for row in rows] == ["flash_kda"]
    assert any("fla was to run, but of flash_kda there ran: cpu" in line for line in without_gpu)


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="not triton"):
        decode.refuse_undecodable(decode.Options(("b1-h12",), backends=("cpu",)), "cuda")
    decode.refuse_undecodable(decode.Options(("b1-h12",), ("strong", "softplus")), "cpu")


def invoke(*args: str) -> Any:
    return CliRunner().invoke(cli.build_app(), ["bench", "decode", *args], env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_command(tmp_path: Path, without_gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "require_gpu", lambda command, otherwise: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.chdir(tmp_path)
    result = invoke("--case", "b1-h12", "--gates", "softplus", "--no-peers")
    assert result.exit_code == 0, result.output
    assert "0.0042" in result.output
    path = tmp_path / "benchmarks" / "results" / "decode-h200.json"
    meta, rows = report.read(path)
    assert meta["command"] == "flash-kda bench decode --case b1-h12 --gates softplus --no-peers"
    assert [(row["case"], row["gates"]) for row in rows] == [("b1-h12", "softplus")]
    assert invoke("--quick", "--no-peers", "--append").exit_code == 0
    assert len(report.read(path)[1]) == 1 + len(shapes.QUICK_DECODE)


def test_command_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in (
        ((), "bench decode needs an NVIDIA GPU"),
        (("--case", "1x512-h64"), "--case: got 1x512-h64, expected some of b1-h12"),
        (("--backend", "metal"), "--backend: got metal, expected some of auto"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())


@pytest.mark.gpu
def test_decode_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (shapes.decode(3, 2), shapes.decode(3, 2, 4), shapes.decode(3, 2, 4, writes=False), shapes.step(3, 2))
    monkeypatch.setattr(shapes, "CASES", cases)
    options = decode.Options(tuple(case.name for case in cases), shapes.GATES, peers=False, repeats=3)
    rows = decode.run(options, print, lambda rows: None)
    assert len(rows) == 15
    for row in rows:
        assert row["backend"] == "triton"
        in_parts = "in parts" in row["work"]
        assert row["output_error"] < (1e-2 if in_parts else 3e-3)
        assert row.get("state_error", 0.0) < (1e-2 if in_parts else 1e-5)
        assert row["ms"] > row["floor_ms"] > 0
    assert flash_kda.explain(flash_kda.Problem(B=3, T=1, H=2, op="decode")).backend == "triton"
