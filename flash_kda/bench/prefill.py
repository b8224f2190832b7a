"""The prefill benchmark: every case, every kind of gates, every implementation; agreement first, then time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_kda.bench import harness, peers, shapes
from flash_kda.bench.exact import exact
from flash_kda.bench.first_call import with_first_call
from flash_kda.bench.measuring import measure_all, row_of
from flash_kda.bench.report import Keep, Row

# The exact answer is computed for this many heads; the others hold the same kind of values.
JUDGED_HEADS = 2
# Input sets in turn, as many as fit: at least one.
SETS, SETS_BYTES = 3, 12 * 2**30


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        cases, gates: names. backends: ours, each measured. peers: names of ``peers.PEERS``.
        repeats: timed calls of each kind. first_call: also time the first call, in processes of its own.
    """

    cases: tuple[str, ...]
    gates: tuple[shapes.Gates, ...]
    backends: tuple[str, ...] = ("auto",)
    peers: tuple[str, ...] = tuple(peers.PEERS)
    repeats: int = 30
    first_call: bool = False


def ratio(got: Tensor, right: Tensor) -> float:
    """Root mean square error over the root mean square of the right value."""
    return float((got.double() - right).norm() / right.norm())


def measure_row(
    implementation: peers.Implementation,
    calls: Sequence[shapes.Call],
    right: tuple[Tensor, Tensor],
    flush: Tensor,
    repeats: int,
) -> Row:
    """Errors on the judged heads, then times, of one implementation."""
    (o, state), backend = peers.run_once(implementation, calls[0])
    errors = ratio(o[:, :, :JUDGED_HEADS], right[0]), ratio(state[:, :JUDGED_HEADS], right[1])
    del o, state
    timing = harness.measure([implementation.prepare(call) for call in calls], flush, repeats)
    return row_of(implementation, backend, timing, output_error=errors[0], state_error=errors[1])


def inputs(case: shapes.Case, gates: shapes.Gates) -> list[shapes.Call]:
    """As many input sets as fit into the memory meant for them."""
    count = max(1, min(SETS, SETS_BYTES // case.floor_bytes))
    return [shapes.make(case, gates, "cuda", index) for index in range(count)]


@torch.no_grad()
def run(options: Options, say: Callable[[str], None], keep: Keep) -> list[Row]:
    """Measure everything that ``options`` names, on the current CUDA device; see :func:`measuring.measure_all`.

    Raises:
        KeyError: there is no such case.
    """

    def measure(
        case: shapes.Case,
        gates: shapes.Gates,
        implementation: peers.Implementation,
        calls: list[shapes.Call],
        right: tuple[Tensor, Tensor],
        flush: Tensor,
    ) -> Row | str:
        if (why := implementation.why_not(calls[0])) is not None:
            return why
        row = measure_row(implementation, calls, right, flush, options.repeats)
        return with_first_call(row, case, gates, implementation, say) if options.first_call else row

    found = peers.implementations(options.backends, options.peers, say)
    return measure_all(
        [shapes.cases("prefill")[name] for name in options.cases],
        options.gates,
        lambda case: found,
        inputs,
        lambda call: exact(call.first_heads(JUDGED_HEADS).inputs()),
        measure,
        lambda row, ms: f"{ms:.3f} ms, {ms / row['floor_ms']:.1f} x floor",
        say,
        keep,
    )
