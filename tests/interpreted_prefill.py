"""The kernels of ``kda_prefill`` in Triton's interpreter: ``python interpreted_prefill.py [name ...]`` prints JSON.

A process of its own for the reason given in ``interpreted``, and float32 throughout for the same one.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from cases import Call, Case, heads_first
from compare import assert_same_bits
from compiling import H200
from decoding import ROWS
from interpreting import main
from prefilling import BATCH, PACKED, PrefillCase, assert_prefilled, checked, kept_by, on_cpu
from torch import Tensor

from flash_kda import Checkpoints
from flash_kda.backends.triton.config import configure
from flash_kda.types import PrefillInputs, gate_parameters

TOLERANCE = 2e-5


def launch(call: Call, out: Tensor | None = None) -> Tensor:
    """All launches, with NaN in the output before them."""
    return launch_checked(checked(call), torch.empty(call["v"].shape) if out is None else out)


def launch_checked(call: PrefillInputs, out: Tensor) -> Tensor:
    from flash_kda.backends.triton import prefill_launch

    out.fill_(math.nan)
    tensors: list[Any] = [*call.tensors[:-1], out, *gate_parameters(call.inputs.gate), call.pool]
    tensors[prefill_launch.TENSORS.index("kept")] = call.kept
    prefill_launch.plan(call, configure(call.problem, H200), out)(tensors)
    return out


def check(case: PrefillCase, call: Call | None = None, out: Tensor | None = None) -> None:
    """Output and states against the definition."""
    call = case.build() if call is None else call
    before = on_cpu(call)
    o = launch(call, out)
    # Sums of log2 decays reach 238 where they are saturated: see ``constant_gate`` of ``interpreted``.
    tolerance = 1e-4 if case.rows.strength == "saturated" else TOLERANCE
    assert_prefilled(on_cpu(call), before, o, tolerance)


def strided() -> None:
    """Everything a part of something larger, with heads before tokens, slots and places."""
    case = PrefillCase(Case(B=2, T=40, H=1, HV=2, K=20, V=24), known=True, checkpoints="placed", every=8)
    call = case.build()
    heads_first(call)
    for name in ("indices", "has_initial_state"):
        call[name] = call[name].repeat_interleave(2, dim=-1)[..., ::2]
    c = call["checkpoints"]
    offsets, ends, places = (x.repeat_interleave(3, dim=-1)[..., ::3] for x in (c.offsets, c.cu_offsets, c.indices))

    def heads_before_slots(x: Tensor) -> Tensor:
        wide = torch.full((2, x.shape[0], 24, 26), math.nan).transpose(0, 1)
        return wide[..., 3:23].copy_(x)

    call["pool"] = heads_before_slots(call["pool"])
    call["checkpoints"] = Checkpoints(offsets, ends, heads_before_slots(c.states), places)
    check(case, call, torch.empty(2, 2, 40, 29).transpose(1, 2)[..., 2:26])


def far_slots() -> None:
    """Offsets beyond 2^31 elements: 64-bit arithmetic, on a pool in a file of which only a few pages exist."""
    case = PrefillCase(Case(B=1, T=40, H=1, K=16, V=16), padding=False, checkpoints="pool", every=20)
    call, small = case.build(), case.build()
    states = call["pool"][call["indices"].long()].clone()
    slots = 2**23 + 4
    with tempfile.NamedTemporaryFile() as file:
        pool = torch.from_file(file.name, shared=True, size=slots * 256).view(slots, 1, 16, 16)
        places = torch.tensor([slots - 3, slots - 2, 0, 0], dtype=torch.int32)
        c = replace(call["checkpoints"], indices=places)
        call |= {"pool": pool, "indices": torch.tensor([slots - 1], dtype=torch.int32), "checkpoints": c}
        pool[slots - 1] = states[0]
        o = launch(call)
        assert_same_bits(o, launch(small), "o")
        assert_same_bits(pool[slots - 1], small["pool"][int(small["indices"][0])], "state")
        for i in range(2):
            assert_same_bits(pool[places[i]], small["pool"][int(small["checkpoints"].indices[i])], f"checkpoint {i}")


def same_bits() -> None:
    """A multiple of the chunk, or all tokens: the state has the bits of the shorter sequence's final state."""
    case = PrefillCase(Case(lengths=(100, 33), H=1, HV=2, K=16, V=24, gate="softplus"), padding=False, every=32)
    call = case.build()
    c = call["checkpoints"]
    offsets = torch.tensor([10, 32, 96, 100, 32, 33], dtype=torch.int32)
    states = torch.full((6, *c.states.shape[1:]), math.nan)
    call["checkpoints"] = Checkpoints(offsets, torch.tensor([0, 4, 6]), states)
    o = launch(call)
    for i, (first, tokens, n) in enumerate(
        ((0, 10, 0), (0, 32, 0), (0, 96, 0), (0, 100, 0), (100, 32, 1), (100, 33, 1))
    ):
        short = case.build()
        cut = {name: short[name][:, first : first + tokens] for name in ROWS}
        cut |= {"cu_seqlens": None, "indices": short["indices"][n : n + 1], "checkpoints": None}
        o_short = launch(short | cut)
        if i:
            assert_same_bits(o_short, o[:, first : first + tokens], f"o of {tokens} tokens")
            assert_same_bits(short["pool"][int(cut["indices"][0])], states[i], f"state after {tokens} tokens")
        else:
            torch.testing.assert_close(states[0], short["pool"][int(cut["indices"][0])], rtol=1e-4, atol=1e-5)


def spoilt(name: str, value: float) -> None:
    """One value at token 40 of a sequence of 70: earlier checkpoints, and the other sequence, do not notice."""
    case = PrefillCase(Case(lengths=(70, 33), H=1, HV=2, K=16, V=24), padding=False, every=8)
    clean, bad = case.build(), case.build()
    bad[name][0, 40].view(-1)[0] = value
    before = on_cpu(bad)
    o, o2 = launch(clean), launch(bad)
    kept, kept2 = kept_by(clean), kept_by(bad)
    assert kept is not None
    assert kept2 is not None
    assert bool(kept2[:5].isfinite().all()), "a checkpoint before the poison noticed it"
    assert bool(kept2[5:8].isfinite().all()) == (name == "q"), "the poison had no effect"
    assert_same_bits(o2[:, 70:], o[:, 70:], "o of the other sequence")
    assert_same_bits(kept2[8:12], kept[8:12], "checkpoints of the other sequence")
    assert_prefilled(on_cpu(bad), before, o2, TOLERANCE)


def garbage(offsets: list[int], ends: list[int], kept: dict[int, int]) -> None:
    """What no check can see on a GPU: ``kept`` are the offsets by their places, and nothing else is written."""
    case = PrefillCase(Case(lengths=(40, 20), H=1, K=16, V=16), padding=False, every=10)
    call, right = case.build(), case.build()
    M = len(offsets)
    states = torch.full((M + 2, 1, 16, 16), math.nan)
    wrong = Checkpoints(torch.tensor(offsets, dtype=torch.int64), torch.tensor(ends, dtype=torch.int32), states)
    o = launch_checked(replace(checked(call), checkpoints=wrong), torch.empty(call["v"].shape))
    # The right call has one after every ten tokens: of the sequences, entries 0..3 and 4..5.
    assert_same_bits(o, launch(right), "o")
    assert_same_bits(call["pool"], right["pool"], "pool")
    of_right = kept_by(right)
    assert of_right is not None
    for place in range(M + 2):
        if place in kept:
            assert_same_bits(states[place], of_right[kept[place]], f"place {place}")
        else:
            assert bool(states[place].isnan().all()), f"place {place} was written"


SMALL = PACKED.but(lengths=(70, 0, 33, 1, 64), H=1, HV=2, K=16)
_PLAIN = (
    PrefillCase(SMALL),
    PrefillCase(SMALL, checkpoints="none"),
    PrefillCase(SMALL, checkpoints="none", known=True, index_dtype="int64", write=False),
    PrefillCase(SMALL, checkpoints="placed", known=True),
    PrefillCase(SMALL, checkpoints="pool", every=32, pad=0, index_dtype="int64"),
    PrefillCase(SMALL, checkpoints="pool", every=32, index=False),
    PrefillCase(SMALL, index=False, known=True, every=-16),
    PrefillCase(SMALL, ragged=True),
    PrefillCase(SMALL, ragged=True, checkpoints="pool", write=False),
    PrefillCase(SMALL.but(layout="kv"), ragged=True, checkpoints="placed"),
    PrefillCase(Case(lengths=(130,), H=1, K=20, V=40), every=64, padding=False),
    PrefillCase(Case(lengths=(130,), H=1, K=20, V=40, layout="kv"), every=64, padding=False),
    *(
        PrefillCase(SMALL.but(gate=gate, strength=strength, lengths=(40, 33)), ragged=True)
        for gate, strength in (
            ("lower_bound", "slow"),
            ("lower_bound", "saturated"),
            ("softplus", "strong"),
            ("softplus", "slow"),
            ("log", "strong"),
            ("log", "hostile"),
        )
    ),
    PrefillCase(SMALL.but(A_log=False, dt_bias=None, lengths=(40,)), ragged=True),
    PrefillCase(SMALL.but(neg=True, strength="slow", lengths=(40,)), ragged=True),
    PrefillCase(SMALL.but(l2norm=False, logit=False, gate="log", scale=-0.3, lengths=(40,)), ragged=True),
    PrefillCase(BATCH.but(T=40)),
    PrefillCase(BATCH.but(T=40), index=False, ragged=True, known=True),
    PrefillCase(BATCH.but(T=1), every=1),
    PrefillCase(Case(lengths=(0, 0), tail=5)),
    PrefillCase(Case(lengths=(1,) * 12, H=1, T=12), every=1),
    PrefillCase(Case(lengths=(33,), H=1, K=140, V=70), ragged=True),
)
CASES: dict[str, Callable[[], None]] = {
    **{str(case): partial(check, case) for case in _PLAIN},
    "strided": strided,
    "far slots": far_slots,
    "same bits": same_bits,
    **{f"spoilt {name}": partial(spoilt, name, math.nan) for name in ROWS},
    "spoilt v inf": partial(spoilt, "v", math.inf),
    "decreasing": partial(garbage, [20, 10, 20, 30, 10, 20], [0, 4, 6], {0: 1, 3: 2, 4: 4, 5: 5}),
    "not in the sequence": partial(garbage, [2**40, 10, -(2**40), 30, 0, 21], [0, 4, 6], {1: 0, 3: 2}),
    "boundaries beyond the entries": partial(garbage, [10, 20, 10], [-3, 2, 99], {0: 0, 1: 1, 2: 4}),
    "decreasing boundaries": partial(garbage, [10, 20, 10], [2, 1, -9], {}),
    "no entries": partial(garbage, [], [0, 0, 7], {}),
}


if __name__ == "__main__":
    main(CASES)
