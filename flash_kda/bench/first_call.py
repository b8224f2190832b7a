"""How long the first call takes in a fresh process: once with an empty Triton cache, once with the cache it left.

``python -m flash_kda.bench.first_call`` is that process. The clock runs from the call to its end on the GPU; a call of
training is a forward and a backward. Before it come imports of torch, Triton and peers, inputs, the CUDA context, and
what any first kernel of Triton and any first gradient of torch cost a process: a kernel that does nothing, and a
gradient of two numbers. What this library imports when it is first called does not. Caches other than Triton's are left
as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import flash_kda
from flash_kda.bench import peers, shapes
from flash_kda.bench.report import Row

# FLA tunes its kernels in the first call, which takes minutes.
TIMEOUT_S = 900


def first_call(case: shapes.Case, gates: shapes.Gates, implementation: peers.Implementation) -> tuple[float, float]:
    """Seconds of the first call with an empty Triton cache, and with the one that it left.

    Raises:
        RuntimeError: a process failed or took too long; the message ends with its last words.
    """
    with tempfile.TemporaryDirectory() as cache:
        command = [
            *(sys.executable, "-m", "flash_kda.bench.first_call", "--op", case.op, "--case", case.name),
            *("--gates", gates, "--impl", implementation.impl, "--work", implementation.work),
            *("--backend", implementation.backend),
        ]
        # The same package, wherever the command was given.
        paths = [str(Path(flash_kda.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(paths)}
        return _seconds(command, env), _seconds(command, env)


def _seconds(command: list[str], env: dict[str, str]) -> float:
    """What the process says that its call took, among whatever else it prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=env)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the first call took more than {TIMEOUT_S} s") from error
    for line in done.stdout.splitlines()[::-1]:
        if done.returncode == 0 and line.startswith('{"seconds": '):
            return float(json.loads(line)["seconds"])
    raise RuntimeError(f"the first call failed with status {done.returncode}: {done.stderr.strip()[-500:]}")


def with_first_call(
    row: Row,
    case: shapes.Case,
    gates: shapes.Gates,
    implementation: peers.Implementation,
    say: Callable[[str], None],
) -> Row:
    """The row with its first call's times; ``say`` is told where there are none, and the row stays as it is."""
    try:
        found = first_call(case, gates, implementation)
    except RuntimeError as error:
        say(f"{case.name}, {gates}, {implementation.impl}: {error}")
        return row
    say(f"{case.name}, {gates}, {implementation.impl}: first call {found[0]:.1f} s, again {found[1]:.1f} s")
    return {**row, "first_call_s": found[0], "first_call_cached_s": found[1]}


def _start() -> None:
    """What a process pays once: Triton's driver, launcher and cache key, and torch's machinery of gradients."""
    from triton.experimental import gluon

    @gluon.jit
    def nothing():  # type: ignore[no-untyped-def]
        pass

    nothing[(1,)](num_warps=1)
    x = torch.ones(2, device="cuda", requires_grad=True)
    torch.autograd.grad(x * 2, x, torch.ones_like(x))


def main() -> None:
    """One call, timed; prints ``{"seconds": ...}``."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("op", "case", "gates", "impl", "work", "backend"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    from flash_kda.bench import train

    _start()

    implementation = peers.find(args.impl, args.work, args.backend)
    call = shapes.make(shapes.cases(args.op)[args.case], args.gates, "cuda")
    if (why := implementation.available() or implementation.why_not(call)) is not None:
        sys.exit(why)
    run = train.step(implementation, call) if args.op == "train" else implementation.prepare(call)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.no_grad():
        run()
    torch.cuda.synchronize()
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
