"""The cases of ``kda_decode``: printable values that build a call, and what must come of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cases import Call, Case, Target, changed_fields, oracle, run_on, spans_of
from compare import assert_close, assert_rows, assert_same_bits, bits, unchanged
from torch import Tensor

import flash_kda
from flash_kda.checks_decode import check_decode
from flash_kda.types import DecodeInputs

ROWS = ("q", "k", "v", "g", "beta")
# RMSE ratio per head that is allowed beyond the rounding of results: decoding is float32 arithmetic on every backend.
TOLERANCE = {"reference": 1e-6, "cpu": 1e-5, "triton": 3e-5}
BASE = Case(B=6, T=1, H=2, HV=4, K=20, V=24)


@dataclass(frozen=True)
class DecodeCase:
    """A call to ``kda_decode`` by its description.

    Args:
        rows: tokens, gate and options; its layout and state dtype are the pool's.
        index: ``own`` (no indices), ``one`` slot a row, or ``each`` token its slot.
        extra: of ``each``: slots beyond one per token.
        accepted: of ``each``: random counts; otherwise None.
        known: whether some rows start from zeros by ``has_initial_state``.
        padding: whether some rows are padding: the pad index, negative, beyond the pool.
        pad: the pad index.
    """

    rows: Case = BASE
    index: str = "one"
    extra: int = 0
    accepted: bool = False
    known: bool = False
    padding: bool = True
    pad: int = -1
    write: bool = True
    index_dtype: str = "int32"
    seed: int = 0

    def __str__(self) -> str:
        return changed_fields(self, "rows")

    def build(self, device: str = "cpu") -> Call:
        """Arguments; NaN fills the slots that no row reads, those of rows that start from zeros too."""
        rng = torch.Generator().manual_seed(self.seed)
        call = self.rows.build(device)
        for name in ("initial_state", "output_final_state"):
            del call[name]
        case, N = self.rows, self.rows.sequences
        longest = max(case.lengths or (0,)) if case.lengths is not None else case.T
        width = max(1, longest + self.extra)
        slots = N * width + 5
        dtype = getattr(torch, self.index_dtype)
        columns = width if self.index == "each" else 1
        # Slot 0 may be the pad index, so nobody has it.
        table = (1 + torch.randperm(slots - 1, generator=rng))[: N * columns].reshape(N, columns)
        accepted = torch.randint(0, width + 1, (N,), generator=rng) if self.accepted else torch.ones(N).long()
        if self.accepted and N > 5:
            # Whoever takes a count of row 4 that is one too large reads row 5's first slot: it is a real one.
            accepted[5] = width
        if self.padding and self.index != "own":
            nobody = [self.pad, -1, -7, slots, slots + 9, -slots, 2**31 - 1, -(2**31)]
            for i, n in enumerate(range(1, N, 2)):
                at = max(int(accepted[n]), 1) - 1 if self.index == "each" else 0
                table[n, at] = nobody[i % len(nobody)]
            if self.index == "each" and width > 1:
                table[0, width - 1 if accepted[0] < width else 0] = self.pad
            if self.accepted and N > 4:
                accepted[2], accepted[4] = -1, width + 1
        shape = (case.V, case.K) if case.layout == "vk" else (case.K, case.V)
        pool = torch.full((slots, case.heads, *shape), torch.nan)
        known = torch.rand(N, generator=rng) < 0.5
        read = [n for n in range(N) if known[n] or not self.known]
        if self.index == "own":
            pool[read] = torch.randn(len(read), *pool.shape[1:], generator=rng)
        else:
            for n in read:
                at = max(int(accepted[n]), 1) - 1 if self.index == "each" and 0 <= accepted[n] <= width else 0
                if 0 <= (slot := int(table[n, at])) < slots and slot != self.pad:
                    pool[slot] = torch.randn(pool.shape[1:], generator=rng)
        call["pool"] = pool.to(getattr(torch, case.state_dtype)).to(device)
        call["indices"] = None if self.index == "own" else table.to(dtype).to(device)
        if self.index == "one":
            call["indices"] = call["indices"][:, 0]
        call["num_accepted"] = accepted.to(dtype).to(device) if self.accepted else None
        call["has_initial_state"] = known.to(device) if self.known else None
        return call | {"pad_index": self.pad, "write_states": self.write}


def row_of(call: Call, n: int) -> tuple[int | None, dict[int, int], bool]:
    """Which slot row n reads (None: it is padding), which takes the state after which token, whether it starts fresh.

    This is the documentation again, sharing no line with the package.
    """
    slots, pad = call["pool"].shape[0], call["pad_index"]
    _, first, end = spans_of(call)[n]
    indices = call["indices"]

    def real(slot: int) -> bool:
        return 0 <= slot < slots and slot != pad

    known = call["has_initial_state"]
    fresh = known is not None and not bool(known[n])
    if end == first:
        return None, {}, fresh
    if indices is None:
        return n, {end - first - 1: n}, fresh
    if indices.ndim == 1:
        slot = int(indices[n])
        return (slot, {end - first - 1: slot}, fresh) if real(slot) else (None, {}, fresh)
    accepted = 1 if call["num_accepted"] is None else int(call["num_accepted"][n])
    if accepted < 0 or accepted > indices.shape[1]:
        return None, {}, fresh
    slot = int(indices[n, 0 if accepted == 0 else accepted - 1])
    if not real(slot):
        return None, {}, fresh
    return slot, {t: int(s) for t, s in enumerate(indices[n, : end - first]) if real(int(s))}, fresh


def row_call(call: Call, n: int, tokens: int, state: Tensor) -> Call:
    """The first ``tokens`` tokens of row n as a call of ``kda``."""
    batch, first, _ = spans_of(call)[n]
    cut = {name: call[name][batch : batch + 1, first : first + tokens] for name in ROWS}
    kept = ("gate", "scale", "qk_l2norm", "beta_is_logit", "allow_neg_eigval", "state_layout")
    options = {name: call[name] for name in kept}
    return cut | options | {"initial_state": state, "output_final_state": True, "cu_seqlens": None}


def expected(call: Call) -> tuple[Tensor, dict[int, Tensor]]:
    """Output in float64, and the state ``[HV, ...]`` of every slot that is written."""
    o = torch.zeros(call["v"].shape, dtype=torch.float64)
    written: dict[int, Tensor] = {}
    for n, (batch, first, end) in enumerate(spans_of(call)):
        slot, targets, fresh = row_of(call, n)
        if slot is None:
            continue
        state = call["pool"][slot : slot + 1]
        state = torch.zeros_like(state) if fresh else state
        o[batch, first:end] = oracle(row_call(call, n, end - first, state))[0][0]
        for t, target in targets.items():
            written[target] = oracle(row_call(call, n, t + 1, state))[1][0]
    return o, written if call["write_states"] else {}


def checked(call: Call) -> DecodeInputs:
    """The call as the checks pass it on."""
    public = inspect.signature(flash_kda.kda_decode).parameters
    names = [name for name in inspect.signature(check_decode).parameters if name != "out"]
    return check_decode(**{name: call.get(name, public[name].default) for name in names}, out=call.get("out"))


def run(target: Target, call: Call, **changes: Any) -> Tensor:
    """``kda_decode`` on the target."""
    call = call | changes
    o: Tensor = run_on(target, flash_kda.kda_decode, call, checked(call).problem)
    return o


def assert_decoded(call: Call, before: Tensor, o: Tensor, tolerance: float) -> None:
    """Output and pool against the definition: each row and slot by itself, all other slots bit for bit.

    Args:
        call: with the pool as it is after the call.
        before: the pool before it.
    """
    given = call | {"pool": before}
    want, written = expected(given)
    assert_rows(o, want, call, {n for n in range(len(spans_of(call))) if row_of(given, n)[0] is None}, tolerance)
    pool = call["pool"]
    for slot, state in written.items():
        assert_close(pool[slot].transpose(0, 1), state.transpose(0, 1), tolerance, f"state in slot {slot}")
    others = [slot for slot in range(pool.shape[0]) if slot not in written]
    assert torch.equal(bits(pool[others]), bits(before[others])), "a slot was written that is none's"


def check(target: Target, case: DecodeCase, call: Call | None = None) -> None:
    """A case on a target against the definition; inputs keep their bits."""
    call = case.build(target.device) if call is None else call
    before = call["pool"].clone()
    with unchanged(call, "pool"):
        o = run(target, call)
    assert o.dtype == call["v"].dtype
    assert o.is_contiguous()
    cpu = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in call.items()}
    assert_decoded(cpu, before.cpu(), o.cpu(), TOLERANCE[target.backend])


def check_out(target: Target, run: Callable[..., Tensor], build: Callable[[], Call]) -> None:
    """A call writes ``out``, dense or a part of a wider tensor, with the bits that it returns otherwise."""
    want = run(target, build())
    wide = want.new_full((*want.shape[:-1], want.shape[-1] + 3), torch.nan)
    for out in (torch.full_like(want, torch.nan), wide[..., 2:-1]):
        assert run(target, build(), out=out) is out
        assert_same_bits(out, want, "out")
    assert bool(wide[..., :2].isnan().all())
    assert bool(wide[..., -1:].isnan().all())


def first_rows(call: Call, rows: Any) -> Call:
    """The call with some of its rows, in this order; the pools are the same tensors."""
    names = (*ROWS, "z", "indices", "num_accepted", "has_initial_state")
    return call | {name: call[name][rows] for name in names if call.get(name) is not None}


def in_one_projection(call: Call, names: tuple[str, ...]) -> Tensor:
    """Make rows of the call strided parts of one tensor, with NaN around them, and return it."""
    widths = [call[name][0, 0].numel() for name in names]
    fused = call["q"].new_full((*call["q"].shape[:2], sum(widths) + 9), torch.nan)
    for name, part in zip(names, fused[..., 3:-6].split(widths, -1), strict=True):
        part.copy_(call[name].flatten(2))
        call[name] = part if name == "beta" else part.unflatten(-1, call[name].shape[2:])
    return fused


def spoil(call: Call, name: str, batch: int, token: int) -> Call:
    """NaN in one row's token."""
    x = call[name].clone()
    x[batch, token] = math.nan
    return call | {name: x}


PACKED = BASE.but(B=1)
CASES: tuple[DecodeCase, ...] = (
    *(
        DecodeCase(BASE.but(gate=gate, strength=s, T=T), index=index)
        for gate, s, T, index in (
            ("lower_bound", "strong", 1, "one"),
            ("lower_bound", "slow", 3, "each"),
            ("lower_bound", "saturated", 2, "own"),
            ("softplus", "strong", 1, "each"),
            ("softplus", "slow", 4, "one"),
            ("softplus", "saturated", 1, "own"),
            ("log", "strong", 2, "one"),
            ("log", "slow", 1, "own"),
            ("log", "hostile", 5, "each"),
        )
    ),
    *(
        DecodeCase(BASE.but(gate=gate, A_log=A_log, dt_bias=dt_bias))
        for gate in ("lower_bound", "softplus")
        for A_log, dt_bias in ((False, None), (False, "full"), (True, None), (True, "flat"))
    ),
    *(
        DecodeCase(BASE.but(layout=layout, state_dtype=state, dtype=dtype, T=T), index=index)
        for layout in ("vk", "kv")
        for state in ("float32", "bfloat16")
        for dtype, T, index in (("bfloat16", 1, "one"), ("float32", 3, "each"), ("float16", 2, "own"))
    ),
    *(
        DecodeCase(Case(B=3, T=2, H=1, K=K, V=V), index=index)
        for (K, V), index in zip(
            ((16, 16), (16, 256), (256, 16), (60, 100), (100, 60), (200, 130), (128, 128), (64, 40)),
            ("one", "each", "own", "one") * 2,
            strict=True,
        )
    ),
    *(DecodeCase(BASE.but(T=T), index=index) for T in (0, 7, 16) for index in ("one", "each")),
    *(DecodeCase(BASE.but(H=H, HV=HV)) for H, HV in ((1, 1), (1, 3), (5, 10))),
    DecodeCase(BASE.but(B=0)),
    DecodeCase(BASE.but(B=0), index="own"),
    DecodeCase(BASE.but(B=1), padding=False),
    DecodeCase(BASE.but(B=40, K=16, V=16), pad=0),
    DecodeCase(BASE.but(B=9, T=4), index="each", extra=1, accepted=True, seed=1),
    DecodeCase(BASE.but(B=9, T=4), index="each", accepted=True, pad=0, seed=2, index_dtype="int64"),
    DecodeCase(BASE.but(B=9, T=1), index="each", extra=3, accepted=True, known=True, seed=3),
    DecodeCase(BASE.but(B=9, T=2), index="each", accepted=True, write=False, seed=4),
    DecodeCase(BASE, write=False),
    DecodeCase(BASE.but(T=3), index="own", write=False, known=True),
    DecodeCase(BASE, known=True),
    DecodeCase(BASE.but(T=2), index="own", known=True, index_dtype="int64"),
    DecodeCase(PACKED.but(lengths=(1, 3, 0, 2, 1, 0, 4, 1), tail=5)),
    DecodeCase(PACKED.but(lengths=(1, 3, 0, 2, 1, 0, 4, 1), cu_dtype="int32"), index="each", accepted=True, seed=5),
    DecodeCase(PACKED.but(lengths=(1, 3, 0, 2), tail=1, layout="kv"), index="own", known=True),
    DecodeCase(PACKED.but(lengths=(1, 1, 1, 1, 0, 0, 0), tail=9), write=False, pad=0),
    DecodeCase(PACKED.but(lengths=(0, 0), tail=3)),
    DecodeCase(PACKED.but(lengths=(), tail=3)),
    DecodeCase(PACKED.but(lengths=(1,), tail=70), padding=False),
    DecodeCase(BASE.but(neg=True, strength="slow", T=3)),
    DecodeCase(BASE.but(l2norm=False)),
    DecodeCase(BASE.but(logit=False, scale=-0.3)),
    DecodeCase(BASE.but(l2norm=False, logit=False, gate="log", scale=1.0, T=2)),
    DecodeCase(BASE.but(lower_bound=-0.01, scale=0.0)),
)
WIDE = (
    DecodeCase(BASE.but(dtype="float64", T=2)),
    DecodeCase(BASE.but(dtype="float64", state_dtype="float64", T=2), index="each"),
)
# For the backends that take any size.
SMALL = tuple(
    DecodeCase(Case(B=3, T=2, H=1, K=K, V=V), index="each") for K, V in ((1, 1), (1, 5), (5, 1), (3, 300), (300, 3))
)
