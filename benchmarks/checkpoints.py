"""What prefill into a pool costs, with and without checkpoints, beside ``kda`` on the same inputs.

    python benchmarks/checkpoints.py                                  # 1 x 8192 tokens, 64 heads
    python benchmarks/checkpoints.py --case mixed6-8192-h96 --every 64 --every 16

Times are those of CUDA-graph replays with cold L2. The last column compares with prefill into a pool without
checkpoints; ``moved`` is what the checkpoints write.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import flash_kda
from flash_kda.bench import harness, shapes

SETS = 3


def checkpoints(case: shapes.Case, every: int, dtype: torch.dtype) -> flash_kda.Checkpoints:
    """A state after every so many tokens of each sequence, in a tensor of their own."""
    offsets = [list(range(every, length + 1, every)) for length in case.lengths]
    ends = [0, *itertools.accumulate(map(len, offsets))]
    states = torch.empty(ends[-1], case.heads, case.head_dim, case.head_dim, dtype=dtype, device="cuda")
    flat = [offset for of_one in offsets for offset in of_one]
    of_ints = {"dtype": torch.int32, "device": "cuda"}
    return flash_kda.Checkpoints(torch.tensor(flat, **of_ints), torch.tensor(ends, **of_ints), states)  # type: ignore[arg-type]


def runs(
    case: shapes.Case, gates: shapes.Gates, backend: str, every: int | None, dtype: torch.dtype | None
) -> list[Callable[[], tuple[Tensor, Tensor]]]:
    """The call on each input set: ``kda`` if ``dtype`` is None, otherwise prefill into a pool."""

    def prepare(call: shapes.Call) -> Callable[[], tuple[Tensor, Tensor]]:
        arguments: dict[str, Any] = call.arguments()
        if dtype is None:

            def plain() -> tuple[Tensor, Tensor]:
                o, state = flash_kda.kda(**arguments, backend=backend)
                return o, o if state is None else state

            return plain
        states, N = arguments.pop("initial_state"), len(case.lengths)
        del arguments["output_final_state"]
        arguments["pool"] = torch.cat([states, states])
        arguments["indices"] = torch.arange(2 * N, 0, -2, dtype=torch.int32, device="cuda") - 1
        arguments["checkpoints"] = None if every is None else checkpoints(case, every, dtype)

        def pooled() -> tuple[Tensor, Tensor]:
            # The pool is no result to be poisoned before a replay: it is read too.
            o = flash_kda.kda_prefill(**arguments, backend=backend)
            return o, o

        return pooled

    return [prepare(shapes.make(case, gates, "cuda", index)) for index in range(SETS)]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="1x8192-h64", choices=list(shapes.cases("prefill")))
    parser.add_argument("--gates", default="strong", choices=shapes.GATES)
    parser.add_argument("--every", type=int, action="append", help="tokens between checkpoints (64, 1024)")
    parser.add_argument("--backend", default="auto", help="of all calls")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    case = shapes.cases("prefill")[options.case]
    flush = harness.flush_buffer()
    table = Table("call", "ms", "host us", "moved MB", "against no checkpoints", title=f"{case.name}, {options.gates}")
    base: float | None = None
    variants: list[tuple[str, int | None, torch.dtype | None]] = [(f"kda, {options.backend}", None, None)]
    variants.append(("kda_prefill", None, torch.float32))
    for every, dtype in itertools.product(options.every or (64, 1024), (torch.float32, torch.bfloat16)):
        variants.append((f"a state every {every}, {str(dtype).removeprefix('torch.')}", every, dtype))
    for name, every, dtype in variants:
        timing = harness.measure(runs(case, options.gates, options.backend, every, dtype), flush, options.repeats)
        ms = timing.graph_ms if timing.graph_ms is not None else timing.eager_ms
        kept = 0 if every is None else sum(length // every for length in case.lengths)
        moved = kept * case.heads * case.head_dim**2 * (dtype.itemsize if dtype is not None else 0)
        if every is None and dtype is not None:
            base = ms
        against = "" if base is None else f"{100 * (ms / base - 1):+.1f}%"
        table.add_row(name, f"{ms:.4f}", f"{timing.host_us:.1f}", f"{moved / 1e6:.0f}", against)
        torch.cuda.empty_cache()
    Console().print(table)


if __name__ == "__main__":
    main()
