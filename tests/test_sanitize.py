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
from cutting import SHORT
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
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", "3.6.0")
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
                for name, value in SHORT.items():
                    patch.setattr(config, name, value)
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


def race(*accesses: tuple[str, str, str]) -> str:
    """Racecheck's report of one: what was done, in a file of this folder, in the line with a text."""
    lines = []
    for what, file, text in accesses:
        source = (sanitize.CONTROL.parent / file).read_text().splitlines()
        (number,) = [i + 1 for i, line in enumerate(source) if text in line]
        lines.append(f"{what} access at hand_over+0x2f0 in {file}:{number}")
    return "\n".join(
        [
            f"========= Error: Race reported between {lines[0]}",
            *(f"=========     and {x} [4 hazards]" for x in lines[1:]),
            "",
        ]
    )


GIVEN, TAKEN = ("Write", "control.py", "# handed over"), ("Read", "control.py", "total += s_words.load")
STARTED, SENT = ("Read", "control.py", "def hand_over("), ("Write", "control.py", "gl.warp_specialize(")
SUMS = ("Write", "control.py", "gl.store(p_sums")


@pytest.mark.parametrize(
    ("accesses", "expected"),
    [
        ((GIVEN, TAKEN), ["handing over"]),
        ((TAKEN, GIVEN), ["handing over"]),
        ((GIVEN, TAKEN, TAKEN), ["handing over"]),
        ((STARTED, SENT), ["dispatch"]),
        ((GIVEN, GIVEN), []),
        ((SUMS, TAKEN), []),
        ((GIVEN, SUMS, TAKEN), []),
        ((STARTED, SUMS), []),
        ((TAKEN, TAKEN), []),
    ],
)
def test_kinds_of_races(accesses: tuple[tuple[str, str, str], ...], expected: list[str]) -> None:
    """Words handed over are read by others, never written by two; partitions are started where they are sent to."""
    report = (
        "words\n" + race(*accesses) + "========= \n" + race(SUMS, SUMS) + "========= RACECHECK SUMMARY: 2 hazards\n"
    )
    assert sanitize.kinds(report, sanitize.CONTROL.parent) == expected
    assert sanitize.kinds(report, sanitize.CONTROL.parents[1]) == []


@pytest.mark.parametrize("last_first", [True, False])
def test_the_control_is_right(last_first: bool) -> None:
    """What racecheck does not follow its stand-in does, and finds nothing."""
    pytest.importorskip("triton")
    import control
    import emulated_gluon

    from flash_kda.backends.triton.launch import Launch

    sums = torch.zeros(control.WORDS.value, dtype=torch.int32)
    launch = Launch(control.hand_over, 1, {"count": 6}, {"num_warps": 4})
    emulated_gluon.run(launch, {"sums": sums}, last_first=last_first)
    assert torch.equal(sums, control.expected(6))


TOOL = """#!/bin/sh
for last; do :; done
test "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 || exit 9
case "$2-$last" in
  memcheck-step) echo "========= Invalid write"; echo "========= ERROR SUMMARY: 2 errors";;
  memcheck-*) echo "========= ERROR SUMMARY: 0 errors";;
  racecheck-step) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)";;
  racecheck-prefill) echo "it fell over"; exit 1;;
  racecheck-*control.py) cat "$CONTROL_REPORT"; exit "$CONTROL_STATUS";;
  racecheck-hopper-*) cat "$REPORT";;
esac
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for compute-sanitizer, and for the GPU that it needs; the folder of its reports."""
    path = tmp_path / "compute-sanitizer"
    path.write_text(TOOL)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return tmp_path


@pytest.mark.usefixtures("tool")
def test_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each case, the report of one with errors, and a status that says whether there were any."""
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


@pytest.mark.parametrize(
    ("control", "status", "expected"),
    [
        ([STARTED, SENT], "0", 0),  # the tool says the same of the control
        ([GIVEN, TAKEN], "0", 1),  # it follows this kind
        ([], "0", 1),  # it follows everything
        ([STARTED, SENT], "1", 1),  # the control is wrong
    ],
)
def test_what_is_not_followed_is_no_error(
    control: list[tuple[str, str, str]],
    status: str,
    expected: int,
    tool: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = "========= RACECHECK SUMMARY: {0} hazards displayed ({0} errors, 0 warnings)\n"
    source = (Path(config.__file__).parent / "recurrence.py").read_text().splitlines()
    start = next(i + 1 for i, line in enumerate(source) if line.startswith("def walk("))
    race_of_walk = (
        f"========= Error: Race reported between Read access at walk+0x160 in recurrence.py:{start}\n"
        f"=========     and Write access at walk+0x11c0 in recurrence.py:{start} [1 hazards]\n"
    )
    for name, report in (
        ("CONTROL_REPORT", race(*control) + summary.format(1) if control else summary.format(0)),
        ("REPORT", race_of_walk + summary.format(1)),
    ):
        (tool / name).write_text(report)
        monkeypatch.setenv(name, str(tool / name))
    monkeypatch.setenv("CONTROL_STATUS", status)
    assert sanitize.main(["--case", "hopper-whole", "--tool", "racecheck"]) == expected
    out = capsys.readouterr().out
    assert ("hopper-whole: 0 errors beside 1 that it does not follow" in out) == (expected == 0)
    assert ("hopper-whole: 1 errors, " in out) == (expected == 1)
