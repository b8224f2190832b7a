"""The training benchmark: rows and the command, with the clock replaced where there is no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("typer")

from typer.testing import CliRunner

import flash_kda
from flash_kda import cli
from flash_kda.bench import commands, harness, measuring, peers, report, shapes, train

SMALL = shapes.Case("small", "train", (40,), 3, head_dim=32, seed=5)


def test_a_step_computes_every_gradient() -> None:
    """The gradient of k that a step returns is that of the reference, and the call's own tensors stay off the tape."""
    call = shapes.make(SMALL, "strong", "cpu")
    taped, wanted = peers.leaves(call)
    assert len(wanted) == 7
    o, dk = train.step(peers.Ours("cpu"), call)()
    expected, exact_dk = train.step(peers.Ours("reference"), call)()
    assert not o.requires_grad
    assert not call.q.requires_grad
    assert taped.q.data_ptr() == call.q.data_ptr()
    assert (o - expected).float().norm() < 1e-2 * expected.float().norm()
    assert (dk - exact_dk).float().norm() < 1e-2 * exact_dk.float().norm()
    assert dk.shape == call.k.shape


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`train.run` on the CPU with small inputs and made-up times."""
    monkeypatch.setattr(measuring, "verify", lambda device: 0.0)
    monkeypatch.setattr(train, "inputs", lambda case, gates: [shapes.make(SMALL, gates, "cpu", i) for i in range(2)])
    monkeypatch.setattr(train, "refuse_untrainable", lambda options, device: None)
    monkeypatch.setattr(harness, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(harness, "flush_buffer", lambda: torch.empty(0))

    def measure(runs: Any, flush: Any, repeats: int) -> harness.Timing:
        for run in runs:
            o, dk = run()
            assert o.isfinite().all()
            assert dk.count_nonzero()
        return harness.Timing(2.5, 2.6, 150.0, 1000.0)

    monkeypatch.setattr(harness, "measure", measure)
    return []


def test_rows(without_gpu: list[str]) -> None:
    kept: list[int] = []
    options = train.Options(("1x8192-h32", "1x8192-h64"), ("strong", "softplus"))
    rows = train.run(options, without_gpu.append, lambda rows: kept.append(len(rows)))
    assert kept == [1, 2, 3, 4]
    assert [row["case"] for row in rows] == ["1x8192-h32", "1x8192-h32", "1x8192-h64", "1x8192-h64"]
    row = rows[0]
    assert (row["op"], row["impl"], row["backend"], row["ms"]) == ("train", "flash_kda", "cpu", 2.5)
    moved = 32 * (8192 * 2 * (14 * 128 + 3) + 2 * 4 * 128**2)
    assert row["floor_ms"] == pytest.approx(1e3 * moved / 4e12)
    assert row["peak_mb"] == 1000.0
    assert all(1e-4 < row["output_error"] < 4e-3 for row in rows)
    columns, cells = report.summary(rows)
    assert columns == ("case", "gates", "floor", "flash_kda cpu")
    assert cells[0][3].startswith("2.500 (")


def test_rows_without_recomputation(without_gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside those with it, told apart by their work; the calls are told."""
    asked: list[bool] = []
    kda = flash_kda.kda

    def watched(*, recompute: bool, **arguments: Any) -> Any:
        asked.append(recompute)
        return kda(**arguments, recompute=recompute)

    monkeypatch.setattr(flash_kda, "kda", watched)
    options = train.Options(("1x8192-h32",), backends=("cpu",), peers=(), no_recompute=True)
    rows = train.run(options, without_gpu.append, lambda rows: None)
    assert [row["work"] for row in rows] == [peers.ALL_INSIDE, peers.NO_RECOMPUTE]
    assert [report.label(row) for row in rows] == ["flash_kda cpu", "flash_kda cpu, kept"]
    assert len({tuple(row.get(name) for name in report.KEY) for row in rows}) == 2
    assert asked == [True] * (len(asked) // 2) + [False] * (len(asked) // 2)
    assert asked
    columns, cells = report.summary(rows)
    assert columns == ("case", "gates", "floor", "flash_kda cpu", "flash_kda cpu, kept")
    assert all(cell.startswith("2.500 (") for cell in cells[0][3:])


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="not triton"):
        train.refuse_untrainable(train.Options(("1x8192-h32",), backends=("cpu",)), "cuda")
    train.refuse_untrainable(train.Options(("1x8192-h32",)), "cpu")


def invoke(*args: str) -> Any:
    return CliRunner().invoke(cli.build_app(), ["bench", "train", *args], env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_command(tmp_path: Path, without_gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "require_gpu", lambda command, otherwise: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.chdir(tmp_path)
    result = invoke("--case", "1x8192-h32", "--gates", "softplus", "--backend", "auto", "--no-peers")
    assert result.exit_code == 0, result.output
    assert "2.500" in result.output
    path = tmp_path / "benchmarks" / "results" / "train-h200.json"
    meta, rows = report.read(path)
    assert meta["command"] == "flash-kda bench train --case 1x8192-h32 --gates softplus --backend auto --no-peers"
    assert [(row["case"], row["gates"]) for row in rows] == [("1x8192-h32", "softplus")]
    assert invoke("--no-peers", "--append").exit_code == 0
    assert len(report.read(path)[1]) == 1 + len(shapes.cases("train"))
    assert invoke("--case", "1x8192-h32", "--no-peers", "--no-recompute", "--append").exit_code == 0
    meta, rows = report.read(path)
    assert meta["command"].endswith(" && flash-kda bench train --case 1x8192-h32 --no-peers --no-recompute --append")
    assert [row["gates"] for row in rows if row["work"] == peers.NO_RECOMPUTE] == ["strong"]
    assert len(rows) == 2 + len(shapes.cases("train"))


def test_command_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in (
        ((), "bench train needs an NVIDIA GPU"),
        (("--case", "1x512-h64"), "--case: got 1x512-h64, expected some of 1x8192-h32"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())


@pytest.mark.gpu
def test_training_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    case = shapes.Case("1x512-h2", "train", (512,), 2)
    monkeypatch.setattr(shapes, "CASES", (case,))
    options = train.Options((case.name,), shapes.GATES, ("triton",), peers=(), repeats=3, no_recompute=True)
    rows = train.run(options, print, lambda rows: None)
    assert [row["work"] for row in rows] == [peers.ALL_INSIDE, peers.NO_RECOMPUTE] * 3
    for row in rows:
        assert row["backend"] == "triton"
        assert row["output_error"] < 6e-3
        assert row["eager_ms"] > row["floor_ms"] > 0
        assert row["peak_mb"] > 0
