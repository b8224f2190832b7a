"""The prefill benchmark: every case, every kind of gates, every implementation; agreement first, then time."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from flash_kda.bench import harness, peers, shapes
from flash_kda.bench.exact import exact, verify
from flash_kda.bench.first_call import first_call
from flash_kda.bench.report import Row

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


def implementations(options: Options, say: Callable[[str], None]) -> list[peers.Implementation]:
    """Those asked for that this machine can run; ``say`` is told why another one cannot."""
    found: list[peers.Implementation] = [peers.Ours(backend) for backend in options.backends]
    for name in options.peers:
        for peer in peers.PEERS[name]:
            if (why := peer.available()) is None:
                found.append(peer)
            else:
                say(f"{peer.impl} ({peer.work}) is left out: {why}")
    return found


def ratio(got: Tensor, right: Tensor) -> float:
    """Root mean square error over the root mean square of the right value."""
    return float((got.double() - right).norm() / right.norm())


def measure_row(
    case: shapes.Case,
    gates: shapes.Gates,
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
    row: Row = {
        "op": "prefill",
        "case": case.name,
        "gates": gates,
        "impl": implementation.impl,
        "backend": backend,
        "work": implementation.work,
        "note": implementation.note,
        "ms": timing.graph_ms,
        **{name: value for name, value in asdict(timing).items() if name != "graph_ms" and value is not None},
        "output_error": errors[0],
        "state_error": errors[1],
        "date": datetime.date.today().isoformat(),
    }
    return row


def inputs(case: shapes.Case, gates: shapes.Gates) -> list[shapes.Call]:
    """As many input sets as fit into the memory meant for them."""
    count = max(1, min(SETS, SETS_BYTES // case.floor_bytes))
    return [shapes.make(case, gates, "cuda", index) for index in range(count)]


@torch.no_grad()
def run(options: Options, say: Callable[[str], None], keep: Callable[[list[Row]], None]) -> list[Row]:
    """Measure everything that ``options`` names, on the current CUDA device.

    Args:
        say: told about progress and about what is left out, one line at a time.
        keep: given all rows so far after every case, so that a run that is cut off leaves something.

    Raises:
        KeyError: there is no such case.
    """
    chosen = [shapes.cases("prefill")[name] for name in options.cases]
    say(f"exact answers agree with the recurrence to {verify('cuda'):.1e}")
    bandwidth = harness.copy_bandwidth()
    say(f"a copy moves {bandwidth / 1e12:.2f} TB/s")
    flush = harness.flush_buffer()
    found = implementations(options, say)
    rows: list[Row] = []
    for case in chosen:
        for gates in options.gates:
            calls = inputs(case, gates)
            right = exact(calls[0].first_heads(JUDGED_HEADS).inputs())
            for implementation in found:
                label = f"{case.name}, {gates}, {implementation.impl} {implementation.backend}"
                if (why := implementation.why_not(calls[0])) is not None:
                    say(f"{label}: {why}")
                    continue
                try:
                    row = measure_row(case, gates, implementation, calls, right, flush, options.repeats)
                    if options.first_call:
                        names = ("first_call_s", "first_call_cached_s")
                        row |= zip(names, first_call(case, gates, implementation), strict=True)
                except Exception as error:
                    # A peer's failure is news, not the end; our own is a fault.
                    if implementation.impl == "flash_kda":
                        raise
                    say(f"{label}: {type(error).__name__}: {error}")
                    continue
                row["floor_ms"] = harness.floor_ms(case.floor_bytes, bandwidth)
                rows.append(row)
                ms = row["ms"] if row["ms"] is not None else row["eager_ms"]
                say(f"{label}: {ms:.3f} ms, {ms / row['floor_ms']:.1f} x floor")
            del calls, right
            torch.cuda.empty_cache()
            keep(rows)
    return rows
