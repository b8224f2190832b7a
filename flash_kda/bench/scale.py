"""How time and memory grow with the sequence: eight heads, from 8,192 to 1,048,576 tokens, and a skewed batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flash_kda.bench import peers, shapes
from flash_kda.bench.exact import exact
from flash_kda.bench.measuring import measure_all
from flash_kda.bench.prefill import JUDGED_HEADS, inputs, measure_row
from flash_kda.bench.report import Keep, Row

# Beside a case's inputs and results, and their copies in a graph: workspaces, float64 answers, the flush.
SPARE_BYTES = 8 * 2**30


@dataclass(frozen=True)
class Options:
    """What to measure: names of cases, gates and our backends, timed calls of each kind."""

    cases: tuple[str, ...]
    gates: tuple[shapes.Gates, ...] = ("strong",)
    backends: tuple[str, ...] = ("auto",)
    repeats: int = 20


def result_bytes(case: shapes.Case) -> int:
    """Of the bf16 output and the fp32 final states."""
    return case.heads * case.head_dim * (2 * case.tokens + 4 * len(case.lengths) * case.head_dim)


def growth(case: shapes.Case, row: Row) -> Row:
    """The row with what each token costs: time, and memory beyond inputs and results."""
    ms = row["eager_ms"] if row["ms"] is None else row["ms"]
    workspace = max(0.0, row["peak_mb"] * 2**20 - result_bytes(case))
    return row | {
        "tokens": case.tokens,
        "ns_per_token": 1e6 * ms / case.tokens,
        "workspace_mb": workspace / 2**20,
        "workspace_bytes": workspace / (case.tokens * case.heads),
    }


def fitting(cases: list[shapes.Case], free: float, say: Callable[[str], None]) -> list[shapes.Case]:
    """The cases whose tensors find room in so many bytes; ``say`` is told of the others."""
    found = []
    for case in cases:
        if (needed := 2 * case.floor_bytes + SPARE_BYTES) <= free:
            found.append(case)
        else:
            say(f"{case.name} is left out: it needs {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} are free")
    return found


def free_bytes() -> float:
    """Memory of the current device that is free."""
    return float(torch.cuda.mem_get_info()[0])


@torch.no_grad()
def run(options: Options, say: Callable[[str], None], keep: Keep) -> list[Row]:
    """Rows of ``op`` "scale": everything that ``options`` names, on the current CUDA device; see
    :func:`measuring.measure_all`.

    Raises:
        KeyError: there is no such case.
    """
    found = [peers.Ours(backend) for backend in options.backends]
    return measure_all(
        fitting([shapes.cases("scale")[name] for name in options.cases], free_bytes(), say),
        options.gates,
        lambda case: found,
        inputs,
        lambda call: exact(call.first_heads(JUDGED_HEADS).inputs()),
        lambda case, gates, ours, calls, right, flush: (
            ours.why_not(calls[0]) or growth(case, measure_row(ours, calls, right, flush, options.repeats))
        ),
        lambda row, ms: (
            f"{ms:.3f} ms, {row['ns_per_token']:.2f} ns per token, "
            f"{row['workspace_bytes']:.0f} bytes of workspace per token and head"
        ),
        say,
        keep,
    )
