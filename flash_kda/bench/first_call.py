"""How long the first call takes in a fresh process: once with an empty Triton cache, once with the cache it left.

``python -m flash_kda.bench.first_call`` is that process. The clock runs from the call to its end on the GPU; imports,
inputs and the CUDA context come before it. Caches other than Triton's are left as they are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time

import torch

from flash_kda.bench import peers, shapes

# FLA tunes its kernels in the first call, which takes minutes.
TIMEOUT_S = 900


def first_call(case: shapes.Case, gates: shapes.Gates, implementation: peers.Implementation) -> tuple[float, float]:
    """Seconds of the first call with an empty Triton cache, and with the one that it left.

    Raises:
        RuntimeError: the process failed; the message ends with its last words.
    """
    found = []
    with tempfile.TemporaryDirectory() as cache:
        command = [
            *(sys.executable, "-m", "flash_kda.bench.first_call", "--case", case.name, "--gates", gates),
            *("--impl", implementation.impl, "--work", implementation.work, "--backend", implementation.backend),
            *("--cache", cache),
        ]
        for _ in range(2):
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            if done.returncode:
                raise RuntimeError(f"the first call of {implementation.impl} failed: {done.stderr.strip()[-500:]}")
            found.append(float(json.loads(done.stdout.splitlines()[-1])["seconds"]))
    return found[0], found[1]


def main() -> None:
    """One call, timed; prints ``{"seconds": ...}``."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("case", "gates", "impl", "work", "backend", "cache"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    from triton import knobs

    knobs.cache.dir = args.cache
    implementation = peers.find(args.impl, args.work, args.backend)
    call = shapes.make(shapes.cases("prefill")[args.case], args.gates, "cuda")
    if (why := implementation.available()) is not None:
        sys.exit(why)
    run = implementation.prepare(call)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.no_grad():
        run()
    torch.cuda.synchronize()
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
