"""What runs under compute-sanitizer: the cases by what they cover, and how errors become a status."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import decoding
import prefilling
import pytest
import sanitize
import stepping
import torch
from cases import Case, inputs_of
from compiling import H200
from decoding import DecodeCase
from prefilling import PrefillCase
from stepping import StepCase

from flash_kda.backends import hopper, triton
from flash_kda.backends.hopper import config
from flash_kda.types import Problem

RUNS = list(sanitize.RUNS.values())
HOPPER = [run for run in RUNS if run.backend == "hopper"]


def problem_of(run: sanitize.Run) -> Problem:
    """On a GPU."""
    checked = {DecodeCase: decoding.checked, StepCase: stepping.checked, PrefillCase: prefilling.checked}
    call = run.build("cpu")
    problem = checked.get(type(run.case), inputs_of)(call).problem  # type: ignore[arg-type]
    return replace(problem, device="cuda", grad=run.grad)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_cases_are_calls(run: sanitize.Run) -> None:
    """Small ones, which run, here on the CPU, and for the backend that is to run them."""
    written, ran = sanitize.execute(run, "cpu", "cpu")
    assert ran == ["cpu"]
    assert all(bool(x.isfinite().all()) for x in written)
    if run.grad:
        assert len(written) >= 8
    p = problem_of(run)
    assert p.B * p.T <= 240


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_backend_takes_them(run: sanitize.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert {"triton": triton, "hopper": hopper}[run.backend].supports(problem_of(run)) is None


def test_cases_cover_what_ships() -> None:
    """All gates, dtypes, layouts and ways of each function, and every way that the Hopper kernels are launched."""
    assert len(RUNS) == len({run.name for run in (*sanitize.FORWARD, *HOPPER, *sanitize.SERVING, *sanitize.BACKWARD)})
    for runs in (sanitize.FORWARD, sanitize.BACKWARD):
        cases = [run.case for run in runs if isinstance(run.case, Case)]
        assert len(cases) == len(runs)
        assert {case.gate for case in cases} == {"lower_bound", "softplus", "log"}
        assert {case.dtype for case in cases} == {"bfloat16", "float16", "float32"}
        assert {case.layout for case in cases} == {"vk", "kv"}
        assert {bool(case.lengths) for case in cases} == {case.heads > case.H for case in cases} == {False, True}
        assert {(case.K, case.V) for case in cases} >= {(128, 128), (64, 64), (60, 100), (256, 256)}
    decodes = [run.case for run in RUNS if isinstance(run.case, DecodeCase)]
    assert {(case.index, case.rows.T) for case in decodes} >= {(i, T) for i in ("one", "each") for T in (1, 4)}
    prefills = [run.case for run in RUNS if isinstance(run.case, PrefillCase)]
    assert {case.checkpoints for case in prefills} >= {"none", "own", "pool"}
    assert any(isinstance(run.case, StepCase) for run in RUNS)


def test_cases_cover_the_configurations_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for run in HOPPER:
        with monkeypatch.context() as patch:
            if run.cut:
                patch.setattr(config, "LEAST_TOKENS", 96)
                patch.setattr(config, "LEAST_AVERAGE", 0)
            device = replace(H200, multiprocessors=run.multiprocessors or H200.multiprocessors)
            config.configure.cache_clear()
            found[run.name] = config.configure(problem_of(run), device)
    config.configure.cache_clear()
    for name, c in found.items():
        assert (c.segment is not None) == ("-cut" in name)
        assert (c.parts == 2) == ("-parts" in name)
        assert (c.walk_registers is not None) == ("-sharing" in name)


def test_reports() -> None:
    assert sanitize.errors("Python's words\n========= ERROR SUMMARY: 0 errors\n") == 0
    assert sanitize.errors("========= Invalid __global__ read\n========= ERROR SUMMARY: 1 error\n") == 1
    assert sanitize.errors("========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n") == 3
    assert sanitize.errors("Segmentation fault\n") is None


TOOL = """#!/bin/sh
for last; do :; done
test "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 || exit 9
case "$2-$last" in
  memcheck-step) echo "========= Invalid write"; echo "========= ERROR SUMMARY: 2 errors";;
  memcheck-*) echo "========= ERROR SUMMARY: 0 errors";;
  racecheck-step) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)";;
  racecheck-prefill) echo "it fell over"; exit 1;;
esac
"""


def test_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each case, the report of one with errors, and a status that says whether there were any."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sanitize.main(["--case", "step", "--tool", "racecheck"]) == 0
    assert "racecheck  step: 0 errors" in capsys.readouterr().out
    assert sanitize.main(["--case", "step", "--case", "prefill"]) == 1
    out = capsys.readouterr().out
    assert "memcheck  step: 2 errors" in out
    assert "    ========= Invalid write\n" in out
    assert "memcheck  prefill: 0 errors" in out
    assert "racecheck  prefill: no summary" in out
    assert "    it fell over\n" in out
    assert "4 runs, 2 with errors" in out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sanitize.main([]) == 2
    assert sanitize.main(["--list"]) == 0
