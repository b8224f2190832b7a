"""Every shipped configuration under compute-sanitizer, on a GPU: ``python tests/sanitize.py``, or ``make sanitize``.

    python tests/sanitize.py                                            # memcheck and racecheck, every case
    python tests/sanitize.py --tool memcheck --case hopper-whole        # one case
    python tests/sanitize.py --list

A case is one small call in a process of its own, compiled there. It prints a line with its number of errors, and what
the tool said if there are any; the status is then 1. What would hide an access out of bounds is away: torch's cache of
memory is off, the parts of the kernels' scratch memory, otherwise one piece, are allocated one by one, and memcheck
leaves room between allocations.

Racecheck does not follow two things that partitions of warps do, and reports them of a kernel that is right by its
making, too: see ``control.py``. It watches that one first. Reports of the kinds that it then has are counted apart, and
are no errors: between partitions and Triton's sending them their work, and of words that the source marks as
``# handed over``, between their writing and their reading. That those are in order is for ``test_hopper_emulated.py``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cases import Call, Case, leaves
from cutting import short_segments
from decoding import DecodeCase
from prefilling import PrefillCase
from stepping import StepCase
from torch import Tensor

import flash_kda

TOOLS = ("memcheck", "racecheck")
# How the tools end: "ERROR SUMMARY: 2 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)".
SUMMARY = re.compile(r"^=+ (?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", re.MULTILINE)
# Racecheck's report of a place: who wrote or read it, and in which line.
RACE = re.compile(r"^=+ Error: Race reported between .*\n(?:=+     and .*\n)+", re.MULTILINE)
ACCESS = re.compile(r"(Read|Write) access at \S+ in (\S+):(\d+)")
HANDED_OVER = "# handed over"
CONTROL = Path(__file__).with_name("control.py")
TIMEOUT_S = 300
# Lines of a tool's report that are shown of a case with errors.
SHOWN = 30


@dataclass(frozen=True)
class Run:
    """One call under the tools.

    Attributes:
        name: by which it is chosen. case: builds its arguments. backend: that must run it.
        grad: whether the gradients of all inputs are computed too.
        multiprocessors: of the GPU as the configurations see it; None for what it has.
        cut: whether sequences are cut into segments, which only long ones are otherwise.
        keys: a factor of k.
    """

    name: str
    case: Case | DecodeCase | StepCase | PrefillCase
    backend: str = "triton"
    grad: bool = False
    multiprocessors: int | None = None
    cut: bool = False
    keys: float = 1.0

    def build(self, device: str) -> Call:
        """The arguments; gates and beta are bfloat16 where the Hopper kernels want them so."""
        call = self.case.build(device)
        if self.backend == "hopper":
            call |= {name: call[name].bfloat16() for name in ("g", "beta")}
        return call if self.keys == 1 else call | {"k": call["k"] * self.keys}


HALF = Case(T=97, H=1, K=128, V=128, dtype="bfloat16")
SINGLE = HALF.but(dtype="float32")
PACKED = HALF.but(lengths=(70, 0, 1, 33), tail=3)
LONG = HALF.but(T=130)
# Three chunks a sequence on average, or the Hopper kernels leave them to the others.
LONG_PACKED = HALF.but(lengths=(70, 0, 129), tail=5)
ROWS = Case(B=5, T=1, H=1, HV=2, K=128, V=128, dtype="bfloat16")
POOL = HALF.but(lengths=(70, 0, 33, 1), tail=3, HV=2)

FORWARD = (
    Run("forward-lower-bound", HALF),
    Run("forward-softplus", HALF.but(gate="softplus", strength="slow")),
    Run("forward-softplus-saturated", HALF.but(gate="softplus", strength="saturated")),
    Run("forward-log-hostile", HALF.but(gate="log", strength="hostile")),
    Run("forward-float16", HALF.but(dtype="float16", gate="softplus")),
    Run("forward-float32", SINGLE),
    Run("forward-float32-joins", SINGLE.but(gate="log", strength="hostile")),
    Run("forward-one-chunk", HALF.but(T=20)),
    Run("forward-packed", PACKED),
    Run("forward-packed-softplus", PACKED.but(gate="softplus", cu_dtype="int32", initial=False)),
    Run("forward-value-heads", HALF.but(HV=3)),
    Run("forward-kv", HALF.but(layout="kv", state_dtype="bfloat16")),
    Run("forward-64", HALF.but(K=64, V=64, B=2)),
    Run("forward-odd-sizes", HALF.but(K=60, V=100, gate="softplus")),
    Run("forward-256", HALF.but(K=256, V=256)),
    Run("forward-float32-256", SINGLE.but(K=256, V=20)),
    Run("forward-crowded", HALF.but(HV=2), multiprocessors=1),
    Run("forward-options", HALF.but(l2norm=False, logit=False, final=False, scale=0.3)),
)
HOPPER = tuple(
    replace(run, backend="hopper")
    for run in (
        Run("hopper-whole", LONG),
        Run("hopper-whole-softplus", LONG.but(gate="softplus", strength="saturated", HV=2)),
        Run("hopper-whole-log-hostile", LONG.but(gate="log", strength="hostile")),
        Run("hopper-whole-packed", LONG_PACKED),
        Run("hopper-whole-kv", LONG.but(layout="kv", state_dtype="bfloat16", neg=True)),
        Run("hopper-whole-256", LONG.but(V=256)),
        Run("hopper-whole-by-token", LONG.but(strength="saturated", A_log=False, dt_bias=None), keys=1e6),
        Run("hopper-parts", LONG, multiprocessors=1),
        Run("hopper-parts-packed", LONG_PACKED, multiprocessors=1),
        Run("hopper-sharing", LONG.but(V=64, HV=2), multiprocessors=1),
        Run("hopper-cut", LONG.but(T=200), cut=True),
        Run("hopper-cut-softplus", LONG.but(T=200, gate="softplus", initial=False), cut=True),
        Run("hopper-cut-packed", LONG_PACKED, cut=True),
        Run("hopper-backward", LONG, grad=True),
        Run("hopper-backward-joins", LONG.but(gate="softplus", strength="saturated"), grad=True),
        Run("hopper-backward-packed", LONG_PACKED.but(layout="kv"), grad=True),
        Run("hopper-backward-value-heads", LONG_PACKED.but(HV=2), grad=True),
        Run("hopper-backward-parts", LONG, grad=True, multiprocessors=1),
        Run("hopper-backward-sharing", LONG_PACKED.but(V=64), grad=True, multiprocessors=1),
        Run("hopper-backward-softplus", LONG.but(gate="softplus", strength="slow", HV=2), grad=True),
        Run("hopper-backward-256", LONG.but(V=256), grad=True),
    )
)
SERVING = (
    Run("prefill", PrefillCase(POOL, checkpoints="none")),
    Run("prefill-checkpoints", PrefillCase(POOL, ragged=True)),
    Run("prefill-checkpoints-pool", PrefillCase(POOL.but(gate="softplus"), checkpoints="pool", known=True)),
    Run("prefill-checkpoints-kv", PrefillCase(POOL.but(layout="kv", state_dtype="bfloat16"), kept_dtype="bfloat16")),
    Run("prefill-float32", PrefillCase(POOL.but(dtype="float32", K=60, V=100), ragged=True)),
    Run("decode-one", DecodeCase(ROWS)),
    Run("decode-one-4", DecodeCase(ROWS.but(T=4, gate="softplus"))),
    Run("decode-each", DecodeCase(ROWS, index="each", extra=3, accepted=True)),
    Run("decode-each-4", DecodeCase(ROWS.but(T=4), index="each", accepted=True)),
    Run("decode-kv", DecodeCase(ROWS.but(layout="kv", state_dtype="bfloat16"), known=True)),
    Run("decode-packed", DecodeCase(ROWS.but(B=1, lengths=(1, 3, 0, 2), tail=1), index="each")),
    Run("decode-odd-sizes", DecodeCase(ROWS.but(dtype="float32", K=60, V=100, gate="log"))),
    Run("step", StepCase(DecodeCase(ROWS.but(HV=1)))),
    Run("step-value-heads", StepCase(DecodeCase(ROWS), bias=True, conv_dtype="bfloat16", weight_dtype="bfloat16")),
    Run("step-256", StepCase(DecodeCase(ROWS.but(K=256, V=256)))),
    Run("step-kv", StepCase(DecodeCase(ROWS.but(layout="kv", K=60, V=100, dtype="float32")))),
)
BACKWARD = tuple(
    replace(run, name=f"backward-{run.name}", grad=True)
    for run in (
        Run("anchored", HALF),
        Run("joins", HALF.but(gate="softplus", strength="saturated")),
        Run("log-hostile", HALF.but(gate="log", strength="hostile")),
        Run("packed", PACKED.but(layout="kv")),
        Run("value-heads", HALF.but(HV=2, gate="softplus")),
        Run("packed-value-heads", PACKED.but(HV=2)),
        Run("crowded", HALF.but(HV=2), multiprocessors=1),
        Run("float16", HALF.but(dtype="float16")),
        Run("float32", SINGLE),
        Run("float32-joins", SINGLE.but(gate="softplus", strength="saturated", HV=2)),
        Run("64", HALF.but(K=64, V=64)),
        Run("odd-sizes", HALF.but(K=60, V=100)),
        Run("256", HALF.but(K=256, V=256)),
    )
)
RUNS = {run.name: run for run in (*FORWARD, *HOPPER, *SERVING, *BACKWARD)}


def execute(run: Run, device: str, backend: str) -> tuple[list[Tensor], list[str]]:
    """What the call writes, gradients included, and the backends that ran."""
    call = run.build(device)
    functions = {
        Case: flash_kda.kda,
        DecodeCase: flash_kda.kda_decode,
        StepCase: flash_kda.kda_decode_step,
        PrefillCase: flash_kda.kda_prefill,
    }
    function: Any = functions[type(run.case)]
    taped, found = leaves(call) if run.grad else (call, {})
    with torch.set_grad_enabled(run.grad), flash_kda.record_backends() as ran:
        results = function(**taped, backend=backend)
    written = [x for x in (results if isinstance(results, tuple) else (results,)) if x is not None]
    if run.grad:
        written += torch.autograd.grad(sum(x.float().sum() for x in written), list(found.values()))
    return written, ran


@dataclass(frozen=True)
class Apart:
    """Stands for scratch memory of which every part is an allocation of its own."""

    device: torch.device

    def __getitem__(self, part: slice) -> Tensor:
        return torch.empty(part.stop - part.start, dtype=torch.uint8, device=self.device)


@contextmanager
def configured(run: Run) -> Iterator[None]:
    """The run's configuration, and scratch memory in parts of its own."""
    from flash_kda.backends.triton import forward, launch

    original, facts = launch.Plan._launch_by_triton, forward.device_facts

    def in_parts(plan: Any, tensors: Any, memory: Any, aligned: Any) -> None:
        original(plan, tensors, None if memory is None else Apart(memory.device), aligned)  # type: ignore[arg-type]

    def seen(index: int) -> Any:
        return replace(facts(index), multiprocessors=run.multiprocessors)

    with ExitStack() as stack:
        patch = stack.enter_context
        patch(mock.patch.object(launch.Plan, "_launch_by_triton", in_parts))
        # As if somebody watched the launches: no shorter way is taken.
        patch(mock.patch.object(launch, "_hooked", return_value=True))
        if run.multiprocessors is not None:
            # Some modules have it by its name; those that are imported from here on get the new one.
            for module in [x for name, x in sys.modules.items() if name.startswith("flash_kda.backends.")]:
                if hasattr(module, "device_facts"):
                    patch(mock.patch.object(module, "device_facts", seen))
        if run.cut:
            patch(short_segments())
        yield


def inside(run: Run) -> None:
    """The call, in the process that a tool watches."""
    with configured(run):
        _, ran = execute(run, "cuda", run.backend)
    torch.cuda.synchronize()
    if ran != [run.backend]:
        raise RuntimeError(f"{run.name}: expected {run.backend} to run, not {', '.join(ran) or 'nothing'}")


def errors(report: str) -> int | None:
    """The number of errors or hazards that a tool reports; None if it did not come to an end."""
    found = [int(a or b) for a, b in SUMMARY.findall(report)]
    return sum(found) if found else None


def kind(race: str, folder: Path) -> str | None:
    """What a report of a race is about, if racecheck does not follow that; ``folder`` has the sources."""
    accesses = []
    for access, name, line in ACCESS.findall(race):
        lines = (folder / name).read_text().splitlines() if (folder / name).exists() else []
        # What stands in a compile-time condition has the line of the condition.
        end = int(line) + (int(line) <= len(lines) and lines[int(line) - 1].lstrip().startswith("if "))
        accesses.append((access, "\n".join(lines[int(line) - 1 : end])))
    if all(text.startswith("def ") or "gl.warp_specialize(" in text for _, text in accesses):
        return "dispatch"
    writes = [text for access, text in accesses if access == "Write"]
    return "handing over" if len(accesses) > len(writes) == sum(HANDED_OVER in text for text in writes) > 0 else None


def kinds(report: str, folder: Path) -> list[str]:
    """The kinds of all reports that have one."""
    return [found for race in RACE.findall(report) if (found := kind(race, folder)) is not None]


def watch(sanitizer: str, tool: str, command: Sequence[str], padding: int) -> tuple[int | None, int, str, float]:
    """Errors, exit status, report and seconds of a Python command under a tool."""
    paths = [str(Path(flash_kda.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    # Torch asks the driver for things that it may not have: errors of its functions say nothing about kernels.
    options = ["--tool", tool, "--target-processes", "application-only"]
    options += ["--report-api-errors", "no", "--padding", str(padding)] if tool == "memcheck" else []
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sanitizer, *options, sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env=env,
        )
    except subprocess.TimeoutExpired:
        return None, 1, f"took more than {TIMEOUT_S} s", time.perf_counter() - start
    return errors(done.stdout), done.returncode, done.stdout, time.perf_counter() - start


def not_followed(sanitizer: str, padding: int) -> set[str]:
    """The kinds of races that racecheck reports of the control, and prints them; none if that did not end well."""
    count, status, report, seconds = watch(sanitizer, "racecheck", [str(CONTROL)], padding)
    found = kinds(report, CONTROL.parent)
    if status or count != len(found):
        print("racecheck  control: " + ("no result" if status else f"{count} errors, {len(found)} of a known kind"))
        return set()
    print(
        f"racecheck  control: does not follow {', '.join(sorted(set(found))) or 'nothing'}, {seconds:.0f} s", flush=True
    )
    return set(found)


def watch_all(sanitizer: str, tools: Sequence[str], runs: Sequence[Run], jobs: int, padding: int) -> int:
    """Every run under every tool, a line for each; 1 if one has errors or did not come to its end, otherwise 0."""
    todo = [(tool, run) for tool in tools for run in runs]
    wrong = 0
    is_hopper = any(tool == "racecheck" and run.backend == "hopper" for tool, run in todo)
    known = not_followed(sanitizer, padding) if is_hopper else set()
    folder = Path(flash_kda.__file__).parent / "backends" / "hopper"
    with ThreadPoolExecutor(jobs) as pool:
        found = pool.map(lambda x: watch(sanitizer, x[0], [__file__, "--inside", x[1].name], padding), todo)
        for (tool, run), (count, status, report, seconds) in zip(todo, found, strict=True):
            apart = [x for x in kinds(report, folder) if x in known] if run.backend == "hopper" else []
            if count is not None:
                count -= len(apart)
            text = "no summary" if count is None else f"{count} errors"
            text += f" beside {len(apart)} that it does not follow" if apart else ""
            print(f"{tool}  {run.name}: {text}, {seconds:.0f} s", flush=True)
            if count or count is None or status:
                wrong += 1
                lines = report.splitlines()
                told = [line for line in lines if line.startswith("=====")] if count else lines[-SHOWN:]
                print("\n".join(f"    {line}" for line in told[:SHOWN]), flush=True)
    print(f"{len(todo)} runs, {wrong} with errors")
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="may be repeated; both if none")
    parser.add_argument(
        "--case", action="append", choices=list(RUNS), metavar="NAME", help="may be repeated; all if none"
    )
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes at a time")
    parser.add_argument("--padding", type=int, default=4096, help="bytes between allocations, for memcheck")
    parser.add_argument("--list", action="store_true", help="print the cases and leave")
    parser.add_argument("--inside", choices=list(RUNS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        inside(RUNS[options.inside])
        return 0
    runs = [RUNS[name] for name in options.case or RUNS]
    if options.list:
        print("\n".join(f"{run.name}: {run.case}" for run in runs))
        return 0
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None or not torch.cuda.is_available():
        print("sanitize: needs an NVIDIA GPU that torch can use, and compute-sanitizer of the CUDA toolkit")
        return 2
    return watch_all(sanitizer, options.tool or TOOLS, runs, options.jobs, options.padding)


if __name__ == "__main__":
    sys.exit(main())
