"""The training benchmark: forward and backward of one layer; agreement of the output first, then time and memory."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

import flash_kda
from flash_kda.bench import harness, peers, shapes
from flash_kda.bench.exact import exact, verify
from flash_kda.bench.prefill import JUDGED_HEADS, inputs, ratio
from flash_kda.bench.report import Keep, Row
from flash_kda.types import LogGate


@dataclass(frozen=True)
class Options:
    """What to measure: names of cases, gates and our backends, whether FLA too, timed calls of each kind."""

    cases: tuple[str, ...]
    gates: tuple[shapes.Gates, ...] = ("strong",)
    backends: tuple[str, ...] = ("auto",)
    peers: bool = True
    repeats: int = 30


def leaves(call: shapes.Call) -> tuple[shapes.Call, list[Tensor]]:
    """The call with tensors that want gradients: rows and the gate's parameters, not the initial state."""
    rows = {name: getattr(call, name).detach().requires_grad_() for name in ("q", "k", "v", "g", "beta")}
    found, gate = list(rows.values()), call.gate
    if not isinstance(gate, LogGate):
        given = {name: x for name in ("A_log", "dt_bias") if (x := getattr(gate, name)) is not None}
        parameters = {name: x.detach().requires_grad_() for name, x in given.items()}
        found += parameters.values()
        gate = replace(gate, **parameters)
    return replace(call, gate=gate, **rows), found


def step(implementation: peers.Implementation, call: shapes.Call) -> harness.Run:
    """One forward and backward; returns the output and the gradient of k. All gradients are computed."""
    call, wanted = leaves(call)
    with torch.enable_grad():
        forward = implementation.prepare(call)
    do = torch.randn(call.v.shape, generator=torch.Generator(call.v.device).manual_seed(5), device=call.v.device)
    do = do.to(call.v.dtype)

    def run() -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            o, _ = forward()
            grads = torch.autograd.grad(o, wanted, do)
        return o.detach(), grads[1]

    return run


def measure_row(
    implementation: peers.Implementation, calls: Sequence[shapes.Call], right: Tensor, flush: Tensor, repeats: int
) -> Row:
    """The output's error on the judged heads, then times and memory of forward and backward, of one implementation."""
    runs = [step(implementation, call) for call in calls]
    with flash_kda.record_backends() as ran:
        o, dk = runs[0]()
    if (implementation.impl == "flash_kda") != bool(ran):
        raise RuntimeError(
            f"{implementation.impl} was to run, but of flash_kda there ran: {', '.join(ran) or 'nothing'}"
        )
    if not bool(dk.isfinite().all()):
        raise RuntimeError(f"{implementation.impl}: the gradient of k is not finite")
    error = ratio(o[:, :, :JUDGED_HEADS], right)
    del o, dk
    timing = harness.measure(runs, flush, repeats)
    return {
        "impl": implementation.impl,
        "backend": ran[0] if ran else implementation.backend,
        "work": implementation.work,
        "note": implementation.note,
        "ms": timing.graph_ms,
        **{name: value for name, value in asdict(timing).items() if name != "graph_ms" and value is not None},
        "output_error": error,
        "date": datetime.date.today().isoformat(),
    }


def refuse_untrainable(options: Options, device: str) -> None:
    """Refuse what this library cannot run.

    Raises:
        NotImplementedError: with every reason.
    """
    for backend in options.backends:
        found = flash_kda.explain(flash_kda.Problem(device=device, grad=True), backend)
        if found.backend is None:
            raise NotImplementedError(str(found))


@torch.no_grad()
def run(options: Options, say: Callable[[str], None], keep: Keep) -> list[Row]:
    """Rows of ``op`` "train": everything that ``options`` names, on the current CUDA device.

    Args:
        say: told about progress and about what is left out, one line at a time. keep: given all rows so far.

    Raises:
        KeyError: there is no such case. NotImplementedError: this library cannot run one.
    """
    chosen = [shapes.cases("train")[name] for name in options.cases]
    refuse_untrainable(options, "cuda")
    say(f"exact answers agree with the recurrence to {verify('cuda'):.1e}")
    bandwidth = harness.copy_bandwidth()
    say(f"a copy moves {bandwidth / 1e12:.2f} TB/s")
    flush = harness.flush_buffer()
    found: list[peers.Implementation] = [peers.Ours(backend) for backend in options.backends]
    if options.peers:
        if (why := peers.Fla().available()) is None:
            found.append(peers.Fla())
        else:
            say(f"fla is left out: {why}")
    rows: list[Row] = []
    for case in chosen:
        for gates in options.gates:
            calls = inputs(case, gates)
            right = exact(calls[0].first_heads(JUDGED_HEADS).inputs())[0]
            for implementation in found:
                label = f"{case.name}, {gates}, {implementation.impl} {implementation.backend}"
                try:
                    row = measure_row(implementation, calls, right, flush, options.repeats)
                except Exception as error:
                    # A peer's failure is news, not the end; our own is a fault.
                    if implementation.impl == "flash_kda":
                        raise
                    say(f"{label}: {type(error).__name__}: {error}")
                    continue
                floor = harness.floor_ms(case.floor_bytes, bandwidth)
                rows.append({"op": "train", "case": case.name, "gates": gates, **row, "floor_ms": floor})
                ms = row["ms"] if row["ms"] is not None else row["eager_ms"]
                say(f"{label}: {ms:.3f} ms, {ms / floor:.1f} x floor, {row['peak_mb']:.0f} MiB")
            del calls, right
            torch.cuda.empty_cache()
            keep(rows)
    return rows
