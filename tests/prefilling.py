"""The cases of ``kda_prefill``: printable values that build a call, and what must come of it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cases import Call, Case, Target, changed_fields, oracle, run_on, spans_of
from compare import assert_close, assert_rows, assert_same_bits, bits, unchanged
from decoding import ROWS, row_call
from torch import Tensor

import flash_kda
from flash_kda import Checkpoints
from flash_kda.checks_prefill import check_prefill
from flash_kda.types import PrefillInputs

PACKED = Case(lengths=(70, 0, 33, 1, 64, 130, 1), tail=3, H=2, HV=4, K=20, V=24)


@dataclass(frozen=True)
class PrefillCase:
    """A call to ``kda_prefill`` by its description.

    Args:
        rows: tokens, gate and options; its layout and state dtype are the pool's.
        index: whether sequences have indices, some of which are padding if ``padding``.
        known: whether some sequences start from zeros by ``has_initial_state``.
        checkpoints: ``none``; ``own`` (a tensor, entry i at place i), ``placed`` (a tensor, by indices), or ``pool``.
        every: a checkpoint after every so many tokens, counted from the end of the sequence if negative.
        ragged: instead, offsets of any kind: odd ones, neighbours, the length, and offsets that are no checkpoints.
        pad: the pad index. write: as ``write_states``.
        kept_dtype: of the checkpoints' own tensor.
    """

    rows: Case = PACKED
    index: bool = True
    padding: bool = True
    known: bool = False
    checkpoints: str = "own"
    every: int = 16
    ragged: bool = False
    pad: int = -1
    write: bool = True
    index_dtype: str = "int32"
    kept_dtype: str = "float32"
    seed: int = 0

    def __str__(self) -> str:
        return changed_fields(self, "rows")

    def offsets(self, n: int, length: int) -> list[int]:
        """Those of sequence n."""
        if self.ragged:
            kinds: list[list[int]] = [
                [0, 1, 2, 16, -5, 17, 31, 32, 33, length - 1, length, length + 1],
                [],
                [length],
                [48, 10**6, 64, 96, 0],
                [5, length + 16],
            ]
            inside: list[int] = []
            for offset in kinds[n % len(kinds)]:
                if not 0 < offset <= length or offset > max([0, *(x for x in inside if 0 < x <= length)]):
                    inside.append(offset)
            return inside
        if self.every < 0:
            return list(range(length, 0, self.every))[::-1]
        return list(range(self.every, length + 1, self.every))

    def build(self, device: str = "cpu") -> Call:
        """Arguments; NaN fills the slots that no sequence reads, and all places of checkpoints."""
        rng = torch.Generator().manual_seed(self.seed)
        case, N = self.rows, self.rows.sequences
        call = case.build()
        for name in ("initial_state", "output_final_state"):
            del call[name]
        lengths = [end - first for _, first, end in spans_of(call)]
        asked = [self.offsets(n, length) for n, length in enumerate(lengths)]
        M = sum(map(len, asked))
        slots = N + M + 5
        dtype = getattr(torch, self.index_dtype)
        # Slot 0 may be the pad index, so nobody has it.
        chosen = 1 + torch.randperm(slots - 1, generator=rng)
        indices, places = chosen[:N].clone(), chosen[N : N + M].clone()
        if self.checkpoints == "placed":
            places = 1 + torch.randperm(M + 3, generator=rng)[:M]
        there = slots if self.checkpoints == "pool" else M + 4
        nobody = [self.pad, -1, -7, slots + 9, 2**31 - 1, -(2**31)]
        if self.padding:
            for i, n in enumerate(range(2, N, 4)):
                indices[n] = [slots, *nobody][i % 7]
            for i, m in enumerate(range(3, M, 7)):
                places[m] = [there, *nobody][i % 7]
        if not self.index:
            # Checkpoints in the pool: behind the sequences' slots.
            taken = places >= 0
            places[taken] = torch.where(places[taken] < slots, N + torch.arange(int(taken.sum())), places[taken])
        shape = (case.heads, *((case.V, case.K) if case.layout == "vk" else (case.K, case.V)))
        known = torch.rand(N, generator=rng) < 0.5
        pool = torch.full((slots, *shape), torch.nan)
        for n in range(N):
            slot = int(indices[n]) if self.index else n
            if 0 <= slot < slots and slot != self.pad and (known[n] or not self.known):
                pool[slot] = torch.randn(shape, generator=rng)
        call |= {
            "pool": pool.to(getattr(torch, case.state_dtype)).to(device),
            "indices": indices.to(dtype).to(device) if self.index else None,
            "has_initial_state": known.to(device) if self.known else None,
            "checkpoints": None,
            "pad_index": self.pad,
            "write_states": self.write,
        }
        if self.checkpoints != "none":
            # Two entries beyond the last boundary belong to nobody.
            offsets = torch.tensor([*(x for of_one in asked for x in of_one), 1, 2], dtype=dtype)
            ends = torch.tensor([0, *map(len, asked)]).cumsum(0).to(dtype)
            states = None
            if self.checkpoints != "pool":
                states = torch.full((M + 4, *shape), torch.nan, dtype=getattr(torch, self.kept_dtype), device=device)
            where = torch.cat([places, torch.tensor([0, 0])]).to(dtype).to(device)
            call["checkpoints"] = Checkpoints(
                offsets.to(device), ends.to(device), states, None if self.checkpoints == "own" else where
            )
        moved = case.build(device)
        return call | {name: moved[name] for name in (*ROWS, "gate", "cu_seqlens")}


def fitted(target: Target, case: PrefillCase) -> PrefillCase:
    """The case with what the target takes: on Hopper few sizes and dtypes, and more than two chunks per sequence."""
    rows = case.rows
    if target.backend != "hopper" or rows.dtype == "float64":
        return case
    rows = rows.but(K=128, V=-(-rows.V // 64) * 64, dtype="bfloat16", g_dtype="bfloat16")
    if rows.lengths is not None:
        rows = rows.but(tail=max(rows.tail, 2 * 32 * rows.sequences + 1 - sum(rows.lengths)))
    return replace(case, rows=rows)


def slot_of(call: Call, n: int) -> int | None:
    """The slot of sequence n; None: it is padding. The documentation again, sharing no line with the package."""
    _, first, end = spans_of(call)[n]
    if first == end:
        return None
    if call["indices"] is None:
        return n
    slot = int(call["indices"][n])
    return slot if 0 <= slot < call["pool"].shape[0] and slot != call["pad_index"] else None


def kept_by(call: Call) -> Tensor | None:
    """The tensor that checkpoints go to."""
    c = call["checkpoints"]
    return None if c is None else call["pool"] if c.states is None else c.states


def checkpoints_of(call: Call, n: int) -> dict[int, int | None]:
    """The places of sequence n's checkpoints by their offsets; None where the state is dropped."""
    c, kept = call["checkpoints"], kept_by(call)
    _, first, end = spans_of(call)[n]
    found: dict[int, int | None] = {}
    if c is None or kept is None:
        return found
    for i in range(int(c.cu_offsets[n]), int(c.cu_offsets[n + 1])):
        offset = int(c.offsets[i])
        if not 1 <= offset <= end - first or any(offset <= other for other in found):
            continue
        place = i if c.indices is None else int(c.indices[i])
        real = c.indices is None or (0 <= place < kept.shape[0] and place != call["pad_index"])
        found[offset] = place if real else None
    return found


def expected(call: Call) -> tuple[Tensor, dict[int, Tensor], dict[int, Tensor]]:
    """Output in float64, and the states ``[HV, ...]`` that are written, by slot of the pool and by place."""
    o = torch.zeros(call["v"].shape, dtype=torch.float64)
    final: dict[int, Tensor] = {}
    kept: dict[int, Tensor] = {}
    known = call["has_initial_state"]
    for n, (batch, first, end) in enumerate(spans_of(call)):
        slot = slot_of(call, n)
        if slot is None:
            continue
        state = call["pool"][slot : slot + 1].double()
        if known is not None and not bool(known[n]):
            state = torch.zeros_like(state)
        done = 0
        stops = dict.fromkeys((*checkpoints_of(call, n), end - first))
        for stop in stops:
            cut = row_call(call, n, end - first, state)
            cut |= {name: cut[name][:, done:stop] for name in ROWS}
            rows, state = oracle(cut)
            o[batch, first + done : first + stop] = rows[0]
            place = checkpoints_of(call, n).get(stop)
            if place is not None:
                kept[place] = state[0]
            done = stop
        if call["write_states"]:
            final[slot] = state[0]
    return o, final, kept


def checked(call: Call) -> PrefillInputs:
    """The call as the checks pass it on."""
    names = [name for name in inspect.signature(check_prefill).parameters if name != "out"]
    return check_prefill(**{name: call[name] for name in names}, out=call.get("out"))


def run(target: Target, call: Call, **changes: Any) -> Tensor:
    """``kda_prefill`` on the target."""
    call = call | changes
    o: Tensor = run_on(target, flash_kda.kda_prefill, call, checked(call).problem)
    return o


def on_cpu(call: Call) -> Call:
    """Copies of everything on the CPU, as the definition reads it."""
    moved = {name: x.cpu().clone() if isinstance(x, Tensor) else x for name, x in call.items()}
    if (c := call["checkpoints"]) is not None:
        moved["checkpoints"] = Checkpoints(*(None if x is None else x.cpu().clone() for x in c.tensors))
    return moved


def assert_prefilled(after: Call, before: Call, o: Tensor, tolerance: float) -> None:
    """Output and states against the definition: each sequence and place by itself, all others bit for bit.

    Args:
        after, before: the call after and before it ran, by :func:`on_cpu`.
    """
    want, final, kept = expected(before)
    padding = {n for n in range(len(spans_of(before))) if slot_of(before, n) is None}
    assert_rows(o, want, before, padding, tolerance, "sequence")
    c = before["checkpoints"]
    written = {"pool": final}
    if kept and c.states is None:
        written = {"pool": final | kept}
    elif c is not None and c.states is not None:
        written["checkpoints"] = kept
    for name, states in written.items():
        got, old = (x["pool"] if name == "pool" else x["checkpoints"].states for x in (after, before))
        for slot, state in states.items():
            assert_close(got[slot].transpose(0, 1), state.transpose(0, 1), tolerance, f"state {slot} of {name}")
        others = [slot for slot in range(got.shape[0]) if slot not in states]
        assert torch.equal(bits(got[others]), bits(old[others])), f"a state of {name} was written that is none's"


def check(target: Target, case: PrefillCase, call: Call | None = None) -> None:
    """A case on a target against the definition; inputs keep their bits."""
    call = case.build(target.device) if call is None else call
    before = on_cpu(call)
    with unchanged(call, "pool", "checkpoints.states"):
        o = run(target, call)
    assert o.dtype == call["v"].dtype
    assert o.is_contiguous()
    assert_prefilled(on_cpu(call), before, o.cpu(), target.tolerance)


BATCH = Case(B=3, T=66, H=1, HV=2, K=16, V=24)
CASES: tuple[PrefillCase, ...] = (
    PrefillCase(),
    PrefillCase(checkpoints="none"),
    PrefillCase(checkpoints="none", known=True, index_dtype="int64"),
    PrefillCase(checkpoints="placed", known=True),
    PrefillCase(checkpoints="pool", every=64, index_dtype="int64"),
    PrefillCase(checkpoints="pool", every=32, pad=0, known=True),
    PrefillCase(checkpoints="pool", every=64, index=False),
    PrefillCase(index=False, known=True, every=-16),
    PrefillCase(ragged=True),
    PrefillCase(ragged=True, checkpoints="pool", write=False),
    PrefillCase(write=False, every=64),
    PrefillCase(checkpoints="none", write=False),
    PrefillCase(PACKED.but(layout="kv"), ragged=True, checkpoints="placed"),
    PrefillCase(PACKED.but(layout="kv", state_dtype="bfloat16"), checkpoints="pool"),
    PrefillCase(PACKED.but(state_dtype="bfloat16"), every=48),
    PrefillCase(every=64, kept_dtype="bfloat16"),
    PrefillCase(PACKED.but(dtype="bfloat16", state_dtype="bfloat16"), ragged=True, kept_dtype="bfloat16"),
    PrefillCase(PACKED.but(dtype="float16", cu_dtype="int32"), known=True),
    *(
        PrefillCase(PACKED.but(gate=gate, strength=strength), ragged=ragged)
        for gate, strength, ragged in (
            ("lower_bound", "slow", True),
            ("lower_bound", "saturated", False),
            ("softplus", "strong", True),
            ("softplus", "slow", False),
            ("log", "strong", False),
            ("log", "hostile", True),
        )
    ),
    PrefillCase(PACKED.but(A_log=False, dt_bias=None), ragged=True),
    PrefillCase(PACKED.but(gate="softplus", dt_bias="flat"), ragged=True),
    PrefillCase(PACKED.but(neg=True, strength="slow"), ragged=True),
    PrefillCase(PACKED.but(l2norm=False, logit=False, gate="log", scale=-0.3), ragged=True),
    PrefillCase(BATCH),
    PrefillCase(BATCH, index=False, ragged=True, known=True),
    PrefillCase(BATCH.but(layout="kv", gate="softplus"), checkpoints="pool"),
    PrefillCase(BATCH.but(T=0)),
    PrefillCase(BATCH.but(B=0)),
    PrefillCase(BATCH.but(T=1), every=1),
    PrefillCase(Case(lengths=(0, 0), tail=5)),
    PrefillCase(Case(lengths=(), tail=4)),
    PrefillCase(Case(lengths=(130,), K=60, V=100), every=64, padding=False),
    PrefillCase(Case(lengths=(130, 40), K=100, V=60), ragged=True),
    PrefillCase(Case(lengths=(65, 3), H=1, K=128, V=128), every=64),
    PrefillCase(Case(lengths=(33, 64), H=1, K=200, V=40), ragged=True),
    PrefillCase(Case(lengths=(1,) * 20, H=1), every=1),
    PrefillCase(Case(lengths=(40,) * 9, H=1, V=32), ragged=True, seed=1),
)
WIDE = (PrefillCase(PACKED.but(dtype="float64", state_dtype="float64"), ragged=True, kept_dtype="float64"),)


def assert_large_pools_are_reached(target: Target, rows: Case) -> None:
    """The last slots of a pool of more than 2^31 elements, for one sequence of 70 tokens and two heads of 128."""
    case = PrefillCase(rows, padding=False, checkpoints="pool", every=35)
    call, small = case.build("cuda"), case.build("cuda")
    slots = 2**31 // (2 * 128 * 128) + 9
    if torch.cuda.mem_get_info()[0] < 3 * slots * 2 * 128 * 128 * 4 // 2:
        pytest.skip("the GPU has not enough memory")
    places = torch.tensor([slots - 3, slots - 2, 0, 0], dtype=torch.int32, device="cuda")
    call["pool"] = torch.zeros(slots, 2, 128, 128, device="cuda")
    call["indices"] = torch.tensor([slots - 1], dtype=torch.int32, device="cuda")
    call["checkpoints"] = replace(call["checkpoints"], indices=places)
    call["pool"][slots - 1] = small["pool"][int(small["indices"][0])]
    assert_same_bits(run(target, call), run(target, small), "o")
    for i, place in enumerate((slots - 3, slots - 2)):
        state = small["pool"][int(small["checkpoints"].indices[i])]
        assert_same_bits(call["pool"][place], state, f"checkpoint {i}")
        call["pool"][place] = 0
    assert_same_bits(call["pool"][slots - 1], small["pool"][int(small["indices"][0])], "state")
    call["pool"][slots - 1] = 0
    # In parts: a count of the whole takes as much memory again.
    assert not any(bool(part.any()) for part in call["pool"].split(1024))
