"""Timing on a CUDA device: cold L2, graph replays, eager calls, host time, memory, and the rate that floors assume."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Run: TypeAlias = Callable[[], tuple[Tensor, Tensor]]

COPY_BYTES = 2**30
# Clock cycles per microsecond that torch.cuda._sleep is asked for: the boost clock, so that no sleep is too short.
CYCLES_PER_US = 2000


class CaptureError(Exception):
    """A call could not be captured into a CUDA graph, or its replay does not write its results."""


@dataclass(frozen=True)
class Timing:
    """What was measured of one call.

    Attributes:
        graph_ms: median GPU time of a CUDA-graph replay with cold L2; None if the call cannot be captured.
        eager_ms: median GPU time of the Python call with cold L2 and the GPU kept busy before it, so that host time
            does not show.
        host_us: wall time of one call's enqueueing, without synchronisation.
        peak_mb: MiB allocated during a call beyond what was there before, results included.
        capture_error: why graph_ms is None.
    """

    graph_ms: float | None
    eager_ms: float
    host_us: float
    peak_mb: float
    capture_error: str | None = None


def floor_ms(moved: int, bytes_per_s: float) -> float:
    """Milliseconds that ``moved`` bytes take at a rate."""
    return 1e3 * moved / bytes_per_s


def _events(work: Callable[[], object]) -> float:
    """Milliseconds between two events around ``work`` on the current stream; waits for it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def copy_bandwidth(repeats: int = 20) -> float:
    """Bytes per second, read and written together, of a device-to-device copy of 1 GiB; the median counts."""
    source = torch.ones(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    ms = statistics.median(_events(lambda: target.copy_(source)) for _ in range(repeats))
    return 2e3 * COPY_BYTES / ms


def flush_buffer() -> Tensor:
    """Four times the L2, at least 256 MiB: writing it leaves nothing else there and keeps the GPU busy for a while."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return torch.empty(max(4 * int(properties.L2_cache_size), 2**28), dtype=torch.int8, device="cuda")


def peak_mb(run: Run) -> float:
    """MiB allocated at the peak of a call, beyond what was allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def host_us(runs: Sequence[Run], rounds: int = 5, calls: int = 20) -> float:
    """Microseconds that the host takes to enqueue a call: few enough calls that it never waits for a full queue."""
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(calls):
            runs[i % len(runs)]()
        found.append(1e6 * (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return statistics.median(found)


def eager_ms(runs: Sequence[Run], flush: Tensor, busy_us: float, repeats: int) -> float:
    """Median GPU milliseconds of Python calls with cold L2.

    Args:
        busy_us: for how long the GPU is kept waiting first, so that everything is enqueued before it starts.
    """
    found = []
    for i in range(repeats):
        torch.cuda._sleep(int(busy_us * CYCLES_PER_US))
        flush.zero_()
        found.append(_events(runs[i % len(runs)]))
    return statistics.median(found)


def capture(run: Run) -> torch.cuda.CUDAGraph:
    """A graph of one call, whose replay was seen to write output and state.

    Raises:
        CaptureError: it cannot be captured, or a replay leaves a poisoned result as it is.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            results = run()
    except Exception as error:  # peers fail in ways of their own
        torch.cuda.synchronize()
        raise CaptureError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    for x in results:
        x.fill_(torch.nan)
    graph.replay()
    if not all(bool(x.isfinite().all()) for x in results):
        raise CaptureError("a replay does not write its results, or they are not finite")
    return graph


def graph_ms(graphs: Sequence[torch.cuda.CUDAGraph], flush: Tensor, repeats: int) -> float:
    """Median GPU milliseconds of replays with cold L2; the flush before each outlasts the launch of the replay."""
    found = []
    for i in range(repeats):
        flush.zero_()
        found.append(_events(graphs[i % len(graphs)].replay))
    return statistics.median(found)


def measure(runs: Sequence[Run], flush: Tensor, repeats: int) -> Timing:
    """Time a call over several input sets in turn, so that none stays warm in any cache.

    Args:
        runs: the same call on different inputs; each returns output and final state.
    """
    for run in runs:
        run()
    torch.cuda.synchronize()
    peak = peak_mb(runs[0])
    host = host_us(runs)
    eager = eager_ms(runs, flush, max(100.0, 3 * host), repeats)
    try:
        graphs = [capture(run) for run in runs]
        return Timing(graph_ms(graphs, flush, repeats), eager, host, peak)
    except CaptureError as error:
        return Timing(None, eager, host, peak, str(error))
