"""What the benchmarks share: the loop over cases, gates and implementations, and the row of figures of one of them."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Protocol, TypeVar

import torch
from torch import Tensor

import flash_kda
from flash_kda.bench import harness, shapes
from flash_kda.bench.exact import verify
from flash_kda.bench.report import Keep, Row
from flash_kda.types import Problem


class Named(Protocol):
    """Something that is measured, whatever it computes.

    Attributes:
        impl: for the column of a table. backend: the part of it that runs. work: what is computed inside the clock.
        note: what a reader must know about it, or "".
    """

    @property
    def impl(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def work(self) -> str: ...
    @property
    def note(self) -> str: ...


Result = TypeVar("Result")
Inputs = TypeVar("Inputs")
Measured = TypeVar("Measured", bound=Named)


def run_watched(implementation: Named, run: Callable[[], Result]) -> tuple[Result, str]:
    """Run it once: the results, and the backend that ran.

    Raises:
        RuntimeError: a peer computed it with this library, or the other way round.
    """
    with flash_kda.record_backends() as ran:
        results = run()
    if (implementation.impl == "flash_kda") != bool(ran):
        raise RuntimeError(
            f"{implementation.impl} was to run, but of flash_kda there ran: {', '.join(ran) or 'nothing'}"
        )
    return results, ran[0] if ran else implementation.backend


def row_of(implementation: Named, backend: str, timing: harness.Timing, **errors: float) -> Row:
    """The row of an implementation, but for the case."""
    return {
        "impl": implementation.impl,
        "backend": backend,
        "work": implementation.work,
        "note": implementation.note,
        "ms": timing.graph_ms,
        **{name: value for name, value in asdict(timing).items() if name != "graph_ms" and value is not None},
        **errors,
        "date": datetime.date.today().isoformat(),
    }


def refuse(backends: Sequence[str], problems: Iterable[Problem]) -> None:
    """Refuse what this library cannot run.

    Raises:
        NotImplementedError: with every reason.
    """
    for problem in problems:
        for backend in backends:
            found = flash_kda.explain(problem, backend)
            if found.backend is None:
                raise NotImplementedError(str(found))


def measure_all(
    cases: Sequence[shapes.Case],
    gates: Sequence[shapes.Gates],
    implementations: Callable[[shapes.Case], Sequence[Measured]],
    inputs: Callable[[shapes.Case, shapes.Gates], list[Inputs]],
    exact: Callable[[Inputs], tuple[Tensor, Tensor]],
    measure: Callable[[shapes.Case, shapes.Gates, Measured, list[Inputs], tuple[Tensor, Tensor], Tensor], Row | str],
    line: Callable[[Row, float], str],
    say: Callable[[str], None],
    keep: Keep,
) -> list[Row]:
    """Rows of every case, kind of gates and implementation, on the current CUDA device.

    Args:
        implementations: those that are to compute a case.
        inputs: sets of inputs, in turn. exact: the right answer for a set.
        measure: the row of an implementation, from its case, gates, inputs, the right answer of the first and a buffer
            that clears the L2; or why there is none.
        line: what to say of a row, and its time in milliseconds.
        say: told about progress and about what is left out, one line at a time.
        keep: given all rows so far after every case, so that a run that is cut off leaves something.
    """
    say(f"exact answers agree with the recurrence to {verify('cuda'):.1e}")
    bandwidth = harness.copy_bandwidth()
    say(f"a copy moves {bandwidth / 1e12:.2f} TB/s")
    flush = harness.flush_buffer()
    rows: list[Row] = []
    for case in cases:
        floor = harness.floor_ms(case.floor_bytes, bandwidth)
        for kind in gates:
            calls = inputs(case, kind)
            right = exact(calls[0])
            for implementation in implementations(case):
                label = f"{case.name}, {kind}, {implementation.impl} {implementation.backend}"
                try:
                    row = measure(case, kind, implementation, calls, right, flush)
                except Exception as error:
                    # A peer's failure is news, not the end; our own is a fault.
                    if implementation.impl == "flash_kda":
                        raise
                    row = f"{type(error).__name__}: {error}"
                if isinstance(row, str):
                    say(f"{label}: {row}")
                    continue
                rows.append({"op": case.op, "case": case.name, "gates": kind, **row, "floor_ms": floor})
                say(f"{label}: {line(rows[-1], row['ms'] if row['ms'] is not None else row['eager_ms'])}")
            del calls, right
            torch.cuda.empty_cache()
            keep(rows)
    return rows
