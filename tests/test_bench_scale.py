"""The benchmark of long sequences and a skewed batch, with the clock replaced where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from typer.testing import CliRunner

from flash_kda import cli
from flash_kda.bench import commands, harness, measuring, plots, report, scale, shapes

PNG = b"\x89PNG\r\n\x1a\n"
DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
META = {"command": "c", "date": "d", "gpu": "NVIDIA H200", "driver": "1", "torch": "2", "triton": "3", "cuda": "13"}
SMALL = shapes.Case("small", "scale", (19, 1, 40), 3, packed=True, head_dim=32, seed=5)
# Made-up: ten nanoseconds a token and a call's twenty microseconds, 1,040 bytes of workspace up to 2^20 rows.
MOST_ROWS = 2**20


def timing(case: shapes.Case) -> harness.Timing:
    workspace = 1040 * min(MOST_ROWS, case.tokens * case.heads)
    return harness.Timing(1e-5 * case.tokens + 0.02, 1.0, 20.0, (workspace + scale.result_bytes(case)) / 2**20)


def row(name: str, **changes: Any) -> report.Row:
    case = shapes.cases("scale")[name]
    found = timing(case)
    plain = {"op": "scale", "case": name, "gates": "strong", "impl": "flash_kda", "backend": "hopper", "work": ""}
    plain |= {"ms": found.graph_ms, "eager_ms": found.eager_ms, "peak_mb": found.peak_mb, "floor_ms": 0.01}
    return scale.growth(case, plain | changes)


ROWS = [row(name) for name in shapes.cases("scale")]


def test_cases() -> None:
    """Eight heads, every power of two, and what the skewed batch is made of."""
    cases = shapes.cases("scale")
    assert {case.heads for case in cases.values()} == {8}
    assert {case.head_dim for case in cases.values()} == {128}
    assert [case.tokens for name, case in cases.items() if name.startswith("1x")] == [2**n for n in range(13, 21)]
    skewed, *parts = (cases[name] for name in (shapes.SKEWED_CASE, *shapes.SKEWED_PARTS))
    assert sorted(skewed.lengths) == sorted(n for part in parts for n in part.lengths)
    assert skewed.packed


def test_results_are_no_workspace() -> None:
    call = shapes.make(SMALL, "strong", "cpu")
    assert scale.result_bytes(SMALL) == sum(x.numel() * x.element_size() for x in (call.v, call.initial_state))
    found = row("1x8192-h8")
    assert found["workspace_bytes"] == pytest.approx(1040)
    assert found["workspace_mb"] == pytest.approx(1040 * 8192 * 8 / 2**20)
    assert found["ns_per_token"] == pytest.approx(10 + 2e4 / 8192)
    assert row("1x8192-h8", ms=None)["ns_per_token"] == pytest.approx(1e6 / 8192)
    assert row("1x8192-h8", peak_mb=0.0)["workspace_bytes"] == 0


def test_what_does_not_fit_is_left_out() -> None:
    cases = list(shapes.cases("scale").values())
    lines: list[str] = []
    found = scale.fitting(cases, 24e9, lines.append)
    assert [case.name for case in cases if case not in found] == ["1x1048576-h8"]
    assert lines == ["1x1048576-h8 is left out: it needs 28 GiB, and 22 are free"]
    assert scale.fitting(cases, 140e9, lines.append) == cases


def test_how_rows_stand_to_the_aims() -> None:
    lines = report.remarks(ROWS)
    assert [line.partition(": ")[0] for line in lines] == ["flash_kda hopper, strong gates"] * 3
    assert "10.02 to 12.44 ns from 8192 to 1048576 tokens, at most 1.00 times what it takes at 8192" in lines[0]
    assert "130 to 1040 bytes per token and head, at most 1040 MiB" in lines[1]
    assert "skewed64-73600-h8 takes 1.12 times the longer of 1x65536-h8 and 63x128-h8" in lines[2]
    assert report.skew(ROWS[:-1]) is None
    assert report.skew([x for x in ROWS if x["case"] != "63x128-h8"]) is None
    assert report.remarks(ROWS[:1]) == []
    other = [replaced | {"backend": "triton"} for replaced in ROWS]
    assert len(report.remarks([*ROWS, *other])) == 6


def test_tables_and_picture() -> None:
    columns, cells = report.summary(ROWS)
    assert columns == ("case", "gates", "flash_kda hopper")
    assert cells[0] == ("1x8192-h8", "strong", "12.44 / 1040")
    columns, cells = report.details(ROWS)
    line = dict(zip(columns, cells[7], strict=True))
    assert (line["ns/token"], line["workspace MiB"], line["bytes/token/head"]) == ("10.02", "1040", "130")
    data = plots.picture(META, ROWS)
    assert data.startswith(PNG)
    assert data != plots.picture(META, ROWS[:1])
    assert "- flash_kda hopper, strong gates: a token takes" in report.markdown(META, ROWS, "x.png")


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`scale.run` on the CPU with small inputs and made-up times."""
    monkeypatch.setattr(measuring, "verify", lambda device: 0.0)
    monkeypatch.setattr(scale, "inputs", lambda case, gates: [shapes.make(SMALL, gates, "cpu", i) for i in range(2)])
    monkeypatch.setattr(scale, "free_bytes", lambda: 140e9)
    monkeypatch.setattr(harness, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(harness, "flush_buffer", lambda: torch.empty(0))
    monkeypatch.setattr(harness, "measure", lambda runs, flush, repeats: harness.Timing(0.5, 0.6, 20.0, 300.0))
    return []


def test_rows(without_gpu: list[str]) -> None:
    kept: list[int] = []
    rows = scale.run(
        scale.Options(("1x8192-h8", "63x128-h8"), ("strong", "slow")),
        without_gpu.append,
        lambda rows: kept.append(len(rows)),
    )
    assert kept == [1, 2, 3, 4]
    found = rows[0]
    assert (found["op"], found["impl"], found["backend"], found["tokens"]) == ("scale", "flash_kda", "cpu", 8192)
    assert found["ns_per_token"] == pytest.approx(5e5 / 8192)
    assert 1e-4 < found["output_error"] < 4e-3
    assert found["state_error"] < 1e-5
    assert any("61.04 ns per token" in line for line in without_gpu)


def test_a_backend_that_cannot_run_says_why(without_gpu: list[str]) -> None:
    assert scale.run(scale.Options(("1x8192-h8",), backends=("triton",)), without_gpu.append, lambda rows: None) == []
    assert any("runs on CUDA devices" in line for line in without_gpu)


def invoke(*args: str) -> Any:
    return CliRunner().invoke(cli.build_app(), ["bench", *args], env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_command(tmp_path: Path, without_gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The file, what is shown, rows kept by --append, and the document's table and picture."""
    monkeypatch.setattr(commands, "require_gpu", lambda command, otherwise: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.chdir(tmp_path)
    result = invoke("scale", "--case", "1x8192-h8", "--gates", "slow", "--backend", "auto")
    assert result.exit_code == 0, result.output
    path = tmp_path / "benchmarks" / "results" / "scale-h200.json"
    meta, rows = report.read(path)
    assert meta["command"] == "flash-kda bench scale --case 1x8192-h8 --gates slow --backend auto"
    assert [(found["case"], found["gates"]) for found in rows] == [("1x8192-h8", "slow")]
    result = invoke("scale", "--append")
    assert result.exit_code == 0, result.output
    assert "ns per token / bytes of workspace per token and head" in " ".join(result.output.split())
    assert "(aim: at most 1.15)" in result.output
    assert len(report.read(path)[1]) == 1 + len(shapes.cases("scale"))
    (tmp_path / "p.md").write_text(DOCUMENT.read_text())
    assert invoke("report", str(path), "--document", str(tmp_path / "p.md")).exit_code == 0
    assert "| 1x8192-h8 | strong |" in (tmp_path / "p.md").read_text()
    assert (tmp_path / "images" / "scale-h200.png").read_bytes().startswith(PNG)


def test_command_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in (
        ((), "bench scale needs an NVIDIA GPU"),
        (("--case", "1x512-h64"), "--case: got 1x512-h64, expected some of 1x8192-h8"),
        (("--backend", "metal"), "--backend: got metal, expected some of auto"),
    ):
        result = invoke("scale", *arguments)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())


@pytest.mark.gpu
def test_scale_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lengths of which the longer goes in parts, and a small skewed batch."""
    from flash_kda.backends.triton import forward

    monkeypatch.setattr(forward, "MOST_ROWS", 2**13)
    cases = shapes.uniform("scale", 1, 4096, 2), shapes.uniform("scale", 1, 16384, 2)
    skewed = replace(shapes.skewed(2), lengths=(64, 4096, 64))
    monkeypatch.setattr(shapes, "CASES", (*cases, skewed))
    options = scale.Options((*(case.name for case in cases), skewed.name), backends=("triton",), repeats=3)
    rows = scale.run(options, print, lambda rows: None)
    assert len(rows) == 3
    for found in rows:
        assert found["backend"] == "triton"
        assert found["output_error"] < 6e-3
        assert found["ms"] > found["floor_ms"] > 0
    first, second, _ = rows
    assert second["workspace_mb"] < 1.2 * first["workspace_mb"]
    assert first["workspace_bytes"] > 100
