"""The backward of the Hopper backend without a GPU: its kernels' own source in Python, against the definition."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cases import Call, Case, parameters, spans_of
from compare import assert_same_bits
from compiling import H200
from interpreted_backward import (
    BITS_TOLERANCE,
    HALF_TOLERANCE,
    Found,
    assert_beta_has_the_bits,
    error_of_beta,
    errors,
    expected,
    half_errors,
    lone_writes,
    seeds,
)
from torch import Tensor

from flash_kda.backends.triton.config import CHUNK

pytest.importorskip("triton")

if TYPE_CHECKING:
    from emulated_backward import Backward

# So few that a program has several chunks, and that warpgroups share tiles or buffers are few.
FEW = replace(H200, multiprocessors=3)
HOPPER: dict[str, Any] = {"H": 1, "K": 128, "V": 64, "dtype": "bfloat16", "g_dtype": "bfloat16"}


def case(**changes: Any) -> Case:
    return Case(**(HOPPER | changes))


def backward(call: Call, **options: Any) -> Backward:
    """Imported late: it needs Triton."""
    from emulated_backward import Backward

    return Backward(call, **options)


def in_half(call: Call) -> tuple[Tensor, Tensor]:
    """Gradients of the output, in its dtype, and of the final states."""
    do, dS = seeds(call)
    return do.to(call["v"].dtype), 0.1 * dS


def spoil_outside(call: Call) -> Call:
    """NaN in rows of no sequence."""
    if call["cu_seqlens"] is None:
        return call
    end = spans_of(call)[-1][2]
    rows = {name: call[name].clone() for name in ("q", "k", "v", "g", "beta")}
    for x in rows.values():
        x[:, end:] = math.nan
    return call | rows


CASES = (
    *(case(gate=gate, strength="slow", T=100, H=2) for gate in ("lower_bound", "softplus", "log")),
    *(case(gate="lower_bound", strength=s, T=70) for s in ("strong", "saturated")),
    case(lengths=(70, 0, 33, 1, 64), tail=5, H=2),
    case(lengths=(70, 0, 33, 1, 64), tail=40, V=128, gate="softplus", strength="slow", layout="kv", cu_dtype="int32"),
    case(lengths=(0, 0, 31, 65), gate="log", strength="slow", neg=True),
    case(B=2, T=70, V=128, gate="log", strength="slow"),
    case(T=64, neg=True, strength="slow"),
    case(T=97, V=128, A_log=False, dt_bias=None, H=2),
    case(T=65, gate="softplus", strength="slow", A_log=False, dt_bias="flat"),
    case(B=2, T=40, dt_bias=None, initial=False),
    case(T=70, gate="softplus", strength="slow", dt_bias=None, state_dtype="bfloat16"),
    case(T=33, scale=-0.3, lower_bound=-0.01, V=128),
)


@pytest.mark.parametrize("device", [H200, FEW], ids=["alone", "shared"])
@pytest.mark.parametrize("case", parameters(CASES))
def test_gradients(case: Case, device: Any) -> None:
    """Of a whole call; the warp that copies goes as far ahead as it may, and then no farther than it must."""
    call = spoil_outside(case.build())
    found = backward(call, device=device, last_first=device is H200)
    if found.problem.gate != "lower_bound":
        assert found.prepared["hard"] is not None
        assert not (found.prepared["hard"] == 1).any(), "for another test"
    clean = case.build()
    got = half_errors(clean, lambda _, do, dS: found.gradients(do, dS))
    allowed = HALF_TOLERANCE
    if case.strength == "saturated":
        # Almost nothing, and of what cancels: 1.3e-2, and 1.2e-2 by the Triton backend.
        allowed = allowed | {"A_log": 2e-2, "dt_bias": 2e-2}
    assert all(x <= allowed[name] for name, x in got.items()), f"RMSE ratios {got}"


def test_without_a_gradient_of_the_final_states() -> None:
    call = case(lengths=(40, 0, 33), V=128, initial=False).build()
    do, _ = in_half(call)
    got = errors(backward(call).gradients(do, None), expected(call, do.double(), None))
    assert all(x <= HALF_TOLERANCE[name] for name, x in got.items() if name not in ("A_log", "dt_bias")), got


def test_rows_of_zeros() -> None:
    """Keys and queries without a direction, one key again and again, and a chunk whose output nobody used."""
    some = case(T=100, V=128)
    call = some.build()
    q, k = call["q"].clone(), call["k"].clone()
    k[:, 40:60] = k[:, 40:41]
    q[:, 3::7], k[:, ::5] = 0, 0
    call = call | {"q": q, "k": k}
    do, dS = in_half(call)
    do[:, 64:96] = 0
    got, want = backward(call).gradients(do, dS), expected(call, do.double(), dS)
    # Gradients of rows of zeros are a thousand times those of others: each kind by itself.
    for name, x in (("q", q), ("k", k)):
        at = x.count_nonzero(-1) == 0
        for rows in (at, ~at):
            wrong = (got[name][rows].double() - want[name][rows]).norm() / want[name][rows].norm()
            assert wrong <= HALF_TOLERANCE[name], f"d{name}: RMSE ratio {wrong}"
    rest = ("v", "g", "beta", "initial_state")
    wrong_rest = errors({name: got[name] for name in rest}, {name: want[name] for name in rest})
    assert all(x <= HALF_TOLERANCE[name] for name, x in wrong_rest.items()), f"RMSE ratios {wrong_rest}"


def hard_rows(found: Backward) -> Tensor:
    """``[B, T, HV]``: rows in chunks that one anchor does not serve."""
    assert found.prepared["hard"] is not None
    hard = found.prepared["hard"].view(-1, found.heads) == 1
    rows = torch.zeros(*found.call["q"].shape[:2], found.heads, dtype=torch.bool)
    for c in found.chunks:
        b = spans_of(found.call)[c.sequence][0]
        rows[b, c.start : c.start + c.G.shape[1]] = hard[found.slot[id(c)]]
    return rows


@pytest.mark.parametrize("device", [H200, FEW], ids=["alone", "shared"])
@pytest.mark.parametrize(
    "case",
    parameters(
        [
            case(lengths=(70, 0, 33), tail=3, gate="log", strength="hostile", H=2),
            case(B=2, T=150, gate="softplus", H=2, V=128),
            case(T=150, gate="log", H=3),
        ]
    ),
)
def test_hard_chunks_are_another_launch_s(case: Case, device: Any) -> None:
    """Some chunks decay by 2^-120 within half of them: nothing of theirs is written, and all of the others'."""
    call = case.build()
    g = call["g"].clone()
    g[:, 32:64], g[:, 96:128] = (-0.01, -20.0) if case.gate == "log" else (-9.0, 40.0)
    call = call | {"g": g}
    found = backward(call, device=device)
    hard = hard_rows(found)
    assert hard.any(), "for another test"
    assert not hard.all(), "for another test"
    do, dS = in_half(call)
    tensors = found.run(("walks", "gradient"), do, dS)
    want = expected(call, do.double(), dS)
    got: Found = {}
    for name in ("q", "k", "g", "beta"):
        d = tensors[f"d{name}"]
        assert d is not None
        assert bool(d[hard].isnan().all()), f"d{name} of hard chunks was written"
        d[hard | found.outside()[..., None]] = 0
        want[name][hard] = 0
        got[name] = d
    wrong = errors(got, {name: want[name] for name in got})
    assert all(x <= HALF_TOLERANCE[name] for name, x in wrong.items()), f"RMSE ratios {wrong}"
    used = {found.slot[id(c)] for c in found.chunks}
    for name in ("dA_part", "dbias_part"):
        if (x := tensors[name]) is not None:
            assert found.prepared["hard"] is not None
            is_hard = found.prepared["hard"].view(-1, found.heads) == 1
            x = x.view(-1, found.heads, 128)
            assert torch.equal(x.isnan().all(-1), is_hard), f"{name} of hard chunks"
            unused = [slot for slot in range(len(x)) if slot not in used]
            assert_same_bits(x[unused], torch.zeros_like(x[unused]), f"{name} where there is no token")


@pytest.mark.parametrize("device", [H200, FEW], ids=["alone", "shared"])
@pytest.mark.parametrize(
    "case",
    parameters(
        [
            case(lengths=(70, 40, 33, 1), tail=5, H=2),
            case(lengths=(33, 70, 0, 5, 64), tail=40, V=128, gate="softplus", strength="slow"),
            case(B=3, T=70, gate="log", strength="slow"),
        ]
    ),
)
def test_a_sequence_does_not_notice_its_neighbours(case: Case, device: Any) -> None:
    """The second is NaN throughout, as are rows of none: the bits of the others are those that they have without."""
    call = case.build()
    do, dS = in_half(call)
    b, first, end = spans_of(call)[1]
    clean = backward(call, device=device).gradients(do, dS, without=1)
    spoilt = spoil_outside(call)
    rows = {name: spoilt[name].clone() for name in ("q", "k", "v", "g", "beta")} | {"do": do.clone()}
    for x in rows.values():
        x[b, first:end] = math.nan
        if case.lengths is not None:
            x[b, sum(case.lengths) :] = math.nan
    S, do, dS = call["initial_state"].clone(), rows.pop("do"), dS.clone()
    S[1], dS[1] = math.nan, math.nan
    got = backward(call | rows | {"initial_state": S}, device=device).gradients(do, dS, without=1)
    for name in ("q", "k", "v", "g", "beta"):
        assert bool(got[name][b, first:end].isnan().all()), f"d{name}: the poison had no effect"
        for n, (row, start, stop) in enumerate(spans_of(call)):
            if n != 1:
                mine = slice(start, stop)
                assert_same_bits(got[name][row, mine], clean[name][row, mine], f"d{name} of sequence {n}")
    others = [n for n in range(case.sequences) if n != 1]
    assert_same_bits(got["initial_state"][others], clean["initial_state"][others], "dinitial_state")
    for name in {"A_log", "dt_bias"} & clean.keys():
        assert_same_bits(got[name], clean[name], f"d{name}")


@pytest.mark.parametrize("device", [H200, FEW], ids=["alone", "shared"])
@pytest.mark.parametrize(
    "case",
    parameters(
        [
            case(lengths=(70, 0, 33), tail=3, HV=2, V=192),
            case(B=2, T=97, HV=3, V=128, gate="log", strength="hostile"),
            case(lengths=(0, 64, 1, 2), H=2, V=64, gate="softplus", initial=False, layout="kv"),
        ]
    ),
)
def test_what_the_walks_leave(case: Case, device: Any) -> None:
    """States, what tokens write, and gradients of v and of initial states; value heads may share q and k."""
    call = spoil_outside(case.build())
    do, dS = in_half(call)
    found = backward(call, device=device)
    tensors = found.run(("walks",), do, dS)
    HV, V, K = case.heads, case.V, case.K
    states, U, dv = (tensors[name] for name in ("states", "U", "dv"))
    assert states is not None
    assert U is not None
    assert dv is not None
    states, U = states.view(-1, HV, V, K).double(), U.view(-1, HV, CHUNK, V).double()
    used = torch.zeros(len(states), dtype=torch.bool)
    for c in found.chunks:
        slot, n = found.slot[id(c)], c.U.shape[1]
        used[slot] = True
        for h in range(HV):
            wrong = (states[slot, h] - c.S[h].T).norm() / c.S[h].norm().clamp(min=1e-30)
            assert wrong <= 4e-3, f"state before token {c.start} of head {h}: {wrong}"
            wrong = (U[slot, h, :n] - c.U[h]).norm() / c.U[h].norm()
            assert wrong <= 6e-3, f"U from token {c.start} of head {h}: {wrong}"
        assert not U[slot, :, n:].count_nonzero(), "a token that is not there writes"
    assert bool(states[~used].isnan().all()), "a slot without a chunk has a state"
    assert bool(dv[found.outside()].isnan().all()), "dv of rows of no sequence was written"
    dv[found.outside()] = 0
    want = expected(case.build(), do.double(), dS)
    got = {"v": dv} if (dS0 := tensors["dS0"]) is None else {"v": dv, "initial_state": dS0}
    wrong = errors(got, {name: want[name] for name in got})
    assert all(x <= HALF_TOLERANCE[name] for name, x in wrong.items()), f"RMSE ratios {wrong}"


@pytest.mark.parametrize("device", [H200, FEW], ids=["alone", "shared"])
@pytest.mark.parametrize(
    "case",
    parameters(
        [
            case(lengths=(70, 0, 33, 1), tail=40, H=2),
            case(B=2, T=97, HV=2, gate="log", neg=True),
            case(lengths=(64, 0, 40), gate="softplus", A_log=False, dt_bias="flat", scale=-0.3),
        ]
    ),
)
def test_preparation(case: Case, device: Any) -> None:
    """The first kernel's tiles, squares and decays, and which chunks it leaves to another launch."""
    call = case.build()
    found = backward(spoil_outside(call), device=device)
    want = found.prepared
    scratch = found.launches(None)[0]
    found.prepared = {name: found.new(*scratch[name]) for name in want}
    o = torch.full_like(call["v"], math.nan)
    found.prepared["o"] = o
    got = found.run(("prepare_warp",), *in_half(call))
    if (hard := want["hard"]) is not None:
        assert_same_bits(got["hard"], hard, "hard")
    assert bool(o[~found.outside()].isnan().all()), "rows of a sequence were cleared"
    assert not o[found.outside()].count_nonzero(), "rows of no sequence were not cleared"
    easy = torch.zeros(found.slots, dtype=torch.bool)
    for c in found.chunks:
        easy.view(-1, found.heads)[found.slot[id(c)]] = True
    if hard is not None:
        easy &= hard == 0
    for name, parts, allowed in (("tiles", 3, 2e-3), ("squares", 2, 4e-3), ("decay", 1, 1e-4)):
        x, y = (z.view(found.slots, parts, -1)[easy].double() for z in (got[name], want[name]) if z is not None)
        if name == "squares":
            x, y = (z.view(-1, 2, CHUNK, 2, CHUNK).sum(3).flatten(2) for z in (x, y))
        wrong = (x - y).norm(dim=(0, 2)) / y.norm(dim=(0, 2))
        assert bool((wrong <= allowed).all()), f"{name}: {wrong}"


# What rounding lost of U and dR.


def test_lost_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a thirtieth of a unit in the last place, on either side of it; what is no number stays none."""
    import emulated_gluon
    from emulated_hardware import value

    from flash_kda.backends.triton import common

    emulated_gluon.emulate(monkeypatch, common)

    def kept(x: Tensor) -> tuple[Tensor, Tensor]:
        rounded = value(x.bfloat16())
        lost = common.lost_bits(value(x), rounded)
        assert lost.dtype == torch.int32
        return lost, torch.as_tensor(common.with_lost_bits(rounded, (lost & 15) << 28 >> 28)).as_subclass(Tensor)

    rng = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**20,), generator=rng).to(torch.int32)
    # On, beside and between numbers of eight bits, ties of either parity among them: from zero to infinity.
    upper = torch.arange(0, 0x7F80, 0x35, dtype=torch.int32) << 16
    near = torch.tensor([0, 1, 2184, 2185, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    edges = (upper[:, None] + near).flatten()
    largest = torch.tensor([0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF], dtype=torch.int32)
    bits = torch.cat((bits, edges, edges | -(2**31), largest, largest | -(2**31)))
    x = bits.view(torch.float32)
    lost, found = kept(x)
    number = x.isfinite()
    assert bool(((lost >= -8) & (lost <= 7))[number].all())
    away = (found.view(torch.int32).long() - bits.long())[number].abs()
    assert int(away.max()) <= 2185
    for special in (0.0, -0.0, math.inf, -math.inf):
        one = torch.tensor([special])
        assert_same_bits(kept(one)[1], one, str(special))
    none = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -(2**22)], dtype=torch.int32).view(torch.float32)
    assert bool(none.isnan().all())
    assert bool(kept(none)[1].isnan().all())
    # As hardware rounds it.
    rounded = value(torch.tensor([0x7FFF] * 16, dtype=torch.int16).view(torch.bfloat16))
    assert bool(common.with_lost_bits(rounded, torch.arange(-8, 8, dtype=torch.int32)).isnan().all())


LONE_WRITES = (
    case(T=100, V=128, H=2),
    case(lengths=(33, 0, 60, 1), tail=3, V=64, H=2, layout="kv"),
    case(B=2, T=64, V=64, neg=True),
)


@pytest.mark.parametrize("device", [H200, FEW], ids=["alone", "shared"])
@pytest.mark.parametrize("case", parameters(LONE_WRITES))
def test_beta_has_the_bits(case: Case, device: Any) -> None:
    assert_beta_has_the_bits(case, lambda call, do: backward(call, device=device).gradients(do, None))


def test_beta_without_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would find: tokens in another order, columns that were mixed up, and none of the bits."""
    from flash_kda.backends.hopper import common, gradient

    call, do = lone_writes(LONE_WRITES[0])
    of_words = common.lost_bits_of_words.fn
    spoils: list[Callable[[Tensor], Tensor]] = [torch.zeros_like, lambda x: x.roll(1, 0), lambda x: x.roll(1, 1)]
    for spoil in spoils:
        with monkeypatch.context() as patch:
            patch.setattr(gradient, "lost_bits_of_words", lambda *x, spoil=spoil: spoil(of_words(*x)))
            found = backward(call).gradients(do, None)
        assert not error_of_beta(call, do, found["beta"]) <= 4 * BITS_TOLERANCE  # it may be NaN


# What the warp that copies announces.


def announced(found: Backward, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Program, first row, last token, chunk and head of all chunks that are computed, in order."""
    import emulated_gluon
    import emulated_hardware

    from flash_kda.backends.hopper import gradient

    seen = []

    def chunk(*given: Any) -> None:
        row, last, chunk, i_h = (int(x) for x in given[6:10])
        (_, free, S_ready, S_free), stage, phase_S = given[17:20]
        seen.append((emulated_hardware.program().number, row, last, chunk, i_h))
        wait, arrive = gradient.mbarrier.wait, gradient.mbarrier.arrive
        wait(S_ready.index(0), phase_S)
        gradient.gl.thread_barrier()
        arrive(S_free.index(0), count=1)
        arrive(free.index(stage), count=1)

    monkeypatch.setattr(gradient, "_chunk", chunk)
    do = torch.zeros_like(found.call["v"])
    tensors = found.tensors(do, None)
    for name in ("q", "k", "g", "do", "dR", "states", "dstates", "U"):
        tensors[name] = torch.zeros_like(tensors[name])
    emulated_gluon.run(found.launches(None)[1]["gradient"], tensors, last_first=found.last_first)
    found.prepared |= {name: tensors[name] for name in ("dA_part", "dbias_part")}
    return seen


@pytest.mark.parametrize("seed", range(6))
def test_every_chunk_is_announced(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, by its own program, in order; not a hard one. Sums have zeros where there is no token."""
    rng = random.Random(seed)
    lengths = tuple(rng.choice([0, 0, 1, 5, 31, 32, 33, 64, 70]) for _ in range(rng.randrange(1, 9)))
    some = case(lengths=(*lengths, 2), tail=rng.choice([0, 1, 40, 200]), H=rng.choice([1, 2, 3]), gate="softplus")
    if seed % 3 == 2:
        some = some.but(lengths=None, tail=0, B=rng.choice([1, 3]), T=rng.choice([1, 32, 45]))
    device = replace(H200, multiprocessors=rng.choice([1, 2, 5, 132]))
    found = backward(some.but(strength="slow").build(), device=device, last_first=seed % 2 == 0)
    hard = found.prepared["hard"]
    assert hard is not None
    hard.copy_(torch.tensor([rng.random() < 0.3 for _ in hard]))
    want, T = [], found.problem.T
    programs = min(len(hard), device.multiprocessors)
    with_tokens = torch.zeros(len(hard), dtype=torch.bool)
    for c in found.chunks:
        b = spans_of(found.call)[c.sequence][0]
        for h in range(found.heads):
            chunk = found.slot[id(c)] * found.heads + h
            with_tokens[chunk] = True
            if not hard[chunk]:
                want.append((chunk % programs, b * T + c.start, c.G.shape[1] - 1, chunk, h))
    assert announced(found, monkeypatch) == sorted(want, key=lambda x: (x[0], x[3]))
    for name in ("dA_part", "dbias_part"):
        x = found.prepared[name]
        assert x is not None
        x = x.view(-1, 128)
        assert bool(x[with_tokens].isnan().all()), f"{name} of a chunk with tokens was written"
        assert not x[~with_tokens].count_nonzero(), f"{name} where there is no token"


# What these tests would find.

# By what is wrong: a kernel, a line of it and what that is changed to.
FAULTS = {
    "a stage is filled before it is free": ("walks", "mbarrier.wait(bar_free.index(stage), phase ^ 1)", "pass"),
    "a stage is read before it is filled": ("walks", "mbarrier.wait(bar_ready.index(stage), phase)", "pass"),
    "a stage is free before it was read": (
        "walks",
        "        S = warpgroup_mma_wait(0, deps=(S,))\n        if BUFFERS == 2:",
        "        mbarrier.arrive(bar_free.index(stage), count=1)\n"
        "        S = warpgroup_mma_wait(0, deps=(S,))\n        if BUFFERS == 2:",
    ),
    "no fence": ("walks", "fence_async_shared()\n        gl.thread_barrier()", "gl.thread_barrier()"),
    "no barrier": ("walks", "fence_async_shared()\n        gl.thread_barrier()", "fence_async_shared()"),
    "a buffer is filled before it is out": ("walks", "tma.store_wait(2)", "pass"),
    "a stage is free when one thread has read it": (
        "walks",
        "        gl.thread_barrier()\n        mbarrier.arrive",
        "        mbarrier.arrive",
    ),
    "bytes": ("walks", "mbarrier.expect(bar, ALWAYS + d_tile", "mbarrier.expect(bar, ALWAYS + 0 * d_tile"),
    "a product is used too early": ("walks", "X = warpgroup_mma_wait(1, deps=(X,))", "X = warpgroup_mma_wait(2, (X,))"),
    "no mask of v": ("walks", "v = gl.where(first + o_token < length, v, 0.0)", "pass"),
    "no mask of do": ("walks", "do = gl.where(first + o_left < length, do, gl.zeros_like(do))", "pass"),
    "no mask of dv": ("walks", "mask=first + o_row < length", "mask=first + o_row < C + length"),
    "a stage of the gradient is filled before it is free": (
        "gradient",
        "            mbarrier.wait(bar_free.index(stage), phase ^ 1)\n            _load",
        "            _load",
    ),
    "states are read before they are there": ("gradient", "mbarrier.wait(bar_S_ready.index(0), phase_S)", "pass"),
    "states are copied before there is room": ("gradient", "mbarrier.wait(bar_S_free.index(0), phase_S ^ 1)", "pass"),
    "no mask of gates": ("gradient", "raw = gl.where(valid, raw, 0.0)", "pass"),
    "no mask of q and k": ("gradient", "<= last, x, 0.0)", ">= 0, x, 0.0)"),
    "no mask of pairs": ("gradient", "is_pair & (row_of <= last)", "is_pair"),
    "no mask of states": ("gradient", "minus_dK_plus = gl.where(valid, minus_dK_plus, 0.0)", "pass"),
    "no mask of raw gates": ("gradient", "draw = gl.where(valid, draw, 0.0)", "pass"),
    "no mask of sums": ("gradient", "gl.sum(gl.where(valid, dA, 0.0), 1)", "gl.sum(dA, 1)"),
    "no mask of rows": ("gradient", "m_out = (o_row <= last)", "m_out = (o_row <= C)"),
    "no mask of beta": ("gradient", "mask=o_lane <= last", "mask=o_lane <= C"),
    "bytes of bits": ("gradient", "mbarrier.expect(bar, BYTES + 2 * d_U_bits", "mbarrier.expect(bar, BYTES + d_U_bits"),
    "a sign": ("gradient", "dG -= of_end", "dG += of_end"),
    "the other half": ("gradient", "exp2(late + ROOM)", "exp2(early + ROOM)"),
}
# With as many multiprocessors as there are walks: programs of the gradient then have three chunks.
TRIED, SOME = case(lengths=(300, 40, 33), tail=5), replace(H200, multiprocessors=6)


def changed(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, old: str, new: str) -> None:
    """Give the backend another version of one of its kernels."""
    from flash_kda.backends.hopper import backward as host

    original = sys.modules[getattr(host, name).fn.__module__]
    assert original.__file__
    source = Path(original.__file__).read_text()
    assert old in source, "the line is no more"
    path = folder / "changed.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"changed_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    kernel = getattr(module, name)
    monkeypatch.setattr(host, name, kernel)


def judge() -> None:
    """One call, whose second sequence is NaN, as the tests above judge theirs."""
    call = TRIED.build()
    do, dS = in_half(call)
    b, first, end = spans_of(call)[1]
    do[b, first:end], dS[1] = 0, 0
    want = expected(call, do.double(), dS)
    rows = {name: spoil_outside(call)[name].clone() for name in ("q", "k", "v", "g", "beta")}
    for x in (*rows.values(), do):
        x[b, first:end] = math.nan
    # Those of parameters add up what random gradients of outputs make of either sign.
    allowed = HALF_TOLERANCE | {"A_log": 0.05, "dt_bias": 0.05}
    for last_first in (True, False):
        got = backward(call | rows, device=SOME, last_first=last_first).gradients(do, dS, without=1)
        for name in rows:
            got[name][b, first:end] = 0
        got["initial_state"][1] = 0
        wrong = errors(got, want)
        assert all(x <= allowed[name] for name, x in wrong.items()), f"RMSE ratios {wrong}"


def test_no_fault_is_found() -> None:
    judge()


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In kernels with one line changed."""
    changed(monkeypatch, tmp_path, *FAULTS[fault])
    with pytest.raises(AssertionError):
        judge()
