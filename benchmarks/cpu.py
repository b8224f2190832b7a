"""KDA on the CPU beside the plain torch versions of fla-core, in one process, on equal work.

    python benchmarks/cpu.py                 # T = 4096, 8 heads of 128, 2 threads
    python benchmarks/cpu.py --tokens 256 --repeats 1 --out /tmp/try.json

The peers, ``naive_recurrent_kda`` and ``naive_chunk_kda``, take log decays, plain beta and q, k as they are, so
ours is called the same way (``LogGate()``, no normalisation, beta not a logit). One more row of ours does everything
inside, and one adds the backward. Outputs and final states are compared with a float64 run before anything is timed.

Only the file ``fla/ops/kda/naive.py`` of fla-core is loaded, by its path: it needs torch and einops, whereas importing
the package would pull in Triton kernels (``pip install --no-deps fla-core einops`` is enough).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

import flash_kda
import flash_kda.reference

OUT = Path(__file__).parent / "results" / "prefill-cpu.json"
H, K, V = 8, 128, 128
# Float32 against float64 over a few thousand tokens, relative to the root mean square of the value.
ROUNDS = 5
AGREEMENT = 1e-4
Call = Callable[[], tuple[Tensor, Tensor | None]]


def load_naive() -> ModuleType:
    """The module ``fla.ops.kda.naive``, without importing the package around it."""
    spec = importlib.util.find_spec("fla")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("fla-core is not installed: pip install --no-deps fla-core einops")
    path = Path(spec.submodule_search_locations[0]) / "ops" / "kda" / "naive.py"
    file_spec = importlib.util.spec_from_file_location("fla_ops_kda_naive", path)
    if file_spec is None or file_spec.loader is None:
        sys.exit(f"cannot load {path}")
    module = importlib.util.module_from_spec(file_spec)
    file_spec.loader.exec_module(module)
    return module


def raw_inputs(T: int) -> tuple[list[Tensor], flash_kda.LowerBoundGate]:
    """Random q, k, v, raw gate and beta logits ``[1, T, H, ...]`` in float32, and the gate with its parameters."""
    rng = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, T, H, n, generator=rng) for n in (K, K, V, K))
    beta = torch.randn(1, T, H, generator=rng)
    gate = flash_kda.LowerBoundGate(torch.randn(H, generator=rng), torch.randn(H, K, generator=rng), -5.0)
    return [q, k, v, g, beta], gate


def activated(raw: list[Tensor], gate: flash_kda.LowerBoundGate) -> list[Tensor]:
    """What the peers take: normalised q and k, v, log decays and beta."""
    q, k, v, g, beta = raw
    log_decay = flash_kda.reference.decay(g, gate)
    return [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, log_decay, beta.sigmoid()]


def ours(x: list[Tensor], backend: str = "cpu") -> tuple[Tensor, Tensor | None]:
    return flash_kda.kda(
        *x,
        gate=flash_kda.LogGate(),
        output_final_state=True,
        qk_l2norm=False,
        beta_is_logit=False,
        state_layout="kv",
        backend=backend,
    )


def ours_whole(raw: list[Tensor], gate: flash_kda.LowerBoundGate) -> tuple[Tensor, Tensor | None]:
    return flash_kda.kda(*raw, gate=gate, output_final_state=True, state_layout="kv", backend="cpu")


def error(got: Tensor | None, right: Tensor | None) -> float:
    """Root mean square error over the root mean square of the right value."""
    if got is None or right is None:
        raise ValueError("a final state is missing")
    return float((got.double() - right.double()).norm() / right.double().norm())


def milliseconds(calls: list[Callable[[], object]], repeats: int) -> list[float]:
    """Median wall time of each call, after a warm-up call of its own in each of ROUNDS rounds.

    The calls take turns, so that a machine that is slower for some seconds is slower for all of them. A call of more
    than a second is made once a round.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, taken in zip(calls, times, strict=True):
            call()
            for _ in range(repeats):
                start = time.perf_counter()
                call()
                taken.append(1e3 * (time.perf_counter() - start))
                if taken[-1] > 1e3:
                    break
    return [statistics.median(taken) for taken in times]


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def measure(T: int, repeats: int) -> list[dict[str, object]]:
    """Check the agreement of all, then time them; one row each."""
    naive = load_naive()
    raw, gate = raw_inputs(T)
    x = activated(raw, gate)
    calls: list[tuple[str, str, str, Call]] = [
        ("flash_kda", "cpu", "log decays given", lambda: ours(x)),
        ("flash_kda", "cpu", "gate, norm and sigmoid inside", lambda: ours_whole(raw, gate)),
        ("fla", "naive_chunk_kda", "log decays given", lambda: naive.naive_chunk_kda(*x, output_final_state=True)),
        (
            "fla",
            "naive_recurrent_kda",
            "log decays given",
            lambda: naive.naive_recurrent_kda(*x, output_final_state=True),
        ),
    ]
    case = {"op": "prefill", "case": f"1x{T}-h{H}", "gates": "strong"}
    rows: list[dict[str, object]] = []
    with torch.no_grad():
        right = ours([y.double() for y in x])
        errors = [tuple(error(a, b) for a, b in zip(call(), right, strict=True)) for *_, call in calls]
        for (impl, backend, *_), found in zip(calls, errors, strict=True):
            if not max(found) < AGREEMENT:
                sys.exit(f"{impl} {backend} disagrees: output and state errors {found}, at most {AGREEMENT} expected")
    leaves = [y.clone().requires_grad_() for y in x]
    do = torch.randn(1, T, H, V, generator=torch.Generator().manual_seed(1))

    def train() -> None:
        o, _ = ours(leaves)
        torch.autograd.grad(o, leaves, do)

    forwards = [torch.no_grad()(call) for *_, call in calls]
    *forward_ms, train_ms = milliseconds([*forwards, train], repeats)
    for (impl, backend, work, _), ms, (o_error, S_error) in zip(calls, forward_ms, errors, strict=True):
        rows.append(
            {**case, "impl": impl, "backend": backend, "work": work, "ms": ms}
            | {"output_error": o_error, "state_error": S_error}
        )
    rows.append(
        {**case, "op": "train", "impl": "flash_kda", "backend": "cpu", "work": "log decays given, forward + backward"}
        | {"ms": train_ms, "over_forward": train_ms / forward_ms[0]}
    )
    return rows


def show(rows: list[dict[str, object]], meta: dict[str, object]) -> None:
    table = Table(title=f"{rows[0]['case']}, K = V = {K}, float32, {meta['threads']} threads, {meta['cpu']}")
    for name in ("implementation", "work", "ms", "x ours", "output error"):
        table.add_column(name, justify="left" if name in ("implementation", "work") else "right")
    base = rows[0]["ms"]
    for r in rows:
        ms, found = r["ms"], r.get("output_error")
        assert isinstance(ms, float)
        assert isinstance(base, float)
        shown = f"{found:.1e}" if isinstance(found, float) else ""
        table.add_row(f"{r['impl']} {r['backend']}", str(r["work"]), f"{ms:.1f}", f"{ms / base:.2f}", shown)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="sequence length, a multiple of 64 (default 4096)")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls per row; the median counts (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    parser.add_argument("--out", type=Path, default=OUT, help=f"where to write the rows (default {OUT.name})")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = measure(args.tokens, args.repeats)
    meta: dict[str, object] = {
        "command": f"python benchmarks/cpu.py --tokens {args.tokens} --repeats {args.repeats} --threads {args.threads}",
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "threads": args.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    show(rows, meta)


if __name__ == "__main__":
    main()
