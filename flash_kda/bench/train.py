"""The training benchmark: forward and backward of one layer; agreement of the output first, then time and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_kda.bench import harness, peers, shapes
from flash_kda.bench.exact import exact
from flash_kda.bench.first_call import with_first_call
from flash_kda.bench.measuring import measure_all, refuse, row_of, run_watched
from flash_kda.bench.prefill import JUDGED_HEADS, inputs, ratio
from flash_kda.bench.report import Keep, Row
from flash_kda.types import Problem


@dataclass(frozen=True)
class Options:
    """What to measure: names of cases, gates, our backends and peers, timed calls of each kind, whether first calls
    are timed too, in processes of their own, and whether ours runs without recomputation too.
    """

    cases: tuple[str, ...]
    gates: tuple[shapes.Gates, ...] = ("strong",)
    backends: tuple[str, ...] = ("auto",)
    peers: tuple[str, ...] = tuple(peers.PEERS)
    repeats: int = 30
    first_call: bool = False
    no_recompute: bool = False


def step(implementation: peers.Implementation, call: shapes.Call) -> harness.Run:
    """One forward and backward; returns the output and the gradient of k. All gradients are computed."""
    with torch.enable_grad():
        forward, wanted = implementation.trainable(call)
    do = torch.randn(call.v.shape, generator=torch.Generator(call.v.device).manual_seed(5), device=call.v.device)
    do = do.to(call.v.dtype)

    def run() -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            o, _ = forward()
            grads = torch.autograd.grad(o, wanted, do.view_as(o))
        return o.detach().view_as(call.v), grads[1]

    return run


def measure_row(
    implementation: peers.Implementation, calls: Sequence[shapes.Call], right: Tensor, flush: Tensor, repeats: int
) -> Row:
    """The output's error on the judged heads, then times and memory of forward and backward, of one implementation."""
    runs = [step(implementation, call) for call in calls]
    (o, dk), backend = run_watched(implementation, runs[0])
    if not bool(dk.isfinite().all()):
        raise RuntimeError(f"{implementation.impl}: the gradient of k is not finite")
    error = ratio(o[:, :, :JUDGED_HEADS], right)
    del o, dk
    return row_of(implementation, backend, harness.measure(runs, flush, repeats), output_error=error)


def refuse_untrainable(options: Options, device: str) -> None:
    """Refuse what this library cannot run; see :func:`measuring.refuse`."""
    refuse(options.backends, [Problem(device=device, grad=True)])


@torch.no_grad()
def run(options: Options, say: Callable[[str], None], keep: Keep) -> list[Row]:
    """Rows of ``op`` "train": everything that ``options`` names, on the current CUDA device; see
    :func:`measuring.measure_all`.

    Raises:
        KeyError: there is no such case. NotImplementedError: this library cannot run one.
    """
    chosen = [shapes.cases("train")[name] for name in options.cases]
    refuse_untrainable(options, "cuda")
    ways = (True, False) if options.no_recompute else (True,)
    found = peers.implementations(options.backends, options.peers, say, ways)

    def measure(
        case: shapes.Case,
        gates: shapes.Gates,
        way: peers.Implementation,
        calls: list[shapes.Call],
        right: tuple[Tensor, Tensor],
        flush: Tensor,
    ) -> Row | str:
        if (why := way.why_not(calls[0])) is not None:
            return why
        row = measure_row(way, calls, right[0], flush, options.repeats)
        return with_first_call(row, case, gates, way, say) if options.first_call else row

    return measure_all(
        chosen,
        options.gates,
        lambda case: found,
        inputs,
        lambda call: exact(call.first_heads(JUDGED_HEADS).inputs()),
        measure,
        lambda row, ms: f"{ms:.3f} ms, {ms / row['floor_ms']:.1f} x floor, {row['peak_mb']:.0f} MiB",
        say,
        keep,
    )
