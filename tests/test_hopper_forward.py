"""Forward and prefill on Hopper without a GPU: all launches of a call, emulated one after the other."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from cases import Case, oracle, parameters
from compare import assert_outputs, assert_states
from cutting import cuts_of
from prefilling import PrefillCase, assert_prefilled, on_cpu

from flash_kda.backends.hopper.config import HopperConfig

pytest.importorskip("triton")

ROWS: dict[str, Any] = {"H": 1, "K": 128, "V": 128, "dtype": "bfloat16", "g_dtype": "bfloat16"}
TOLERANCE = 6e-3
# So few programs that each prepares several chunks.
ALONE, SHARED = HopperConfig(5, 1, 4, None), HopperConfig(5, 2, 2, None)
# Segments of one chunk, and of several: first ones of fewer than the others where the sequence allows it.
CUT, CUT_LONG = replace(ALONE, segment=32), replace(ALONE, segment=64)
CONFIGS = [
    pytest.param(x, id=name) for name, x in (("alone", ALONE), ("shared", SHARED), ("cut", CUT), ("long", CUT_LONG))
]


def case(**changes: Any) -> Case:
    return Case(**(ROWS | changes))


CASES = (
    case(T=100),
    case(B=2, T=70, HV=2, layout="kv"),
    case(T=97, initial=False, strength="slow"),
    # No chunk is marked, so that the launch over the marked ones ends at once.
    case(T=100, gate="softplus", strength="slow", neg=True),
    case(lengths=(70, 0, 33, 1), tail=40),
    case(lengths=(31, 260, 96, 97), tail=5),
    case(lengths=(5, 130), cu_dtype="int32", HV=2, state_dtype="bfloat16"),
)
PACKED = case(lengths=(70, 0, 33, 1, 64, 130, 1), tail=5)
POOLED = (
    PrefillCase(PACKED, every=32),
    PrefillCase(PACKED, ragged=True, checkpoints="pool", known=True, pad=0),
    PrefillCase(PACKED.but(layout="kv"), checkpoints="placed", every=48),
    PrefillCase(case(B=2, T=100), index=False, checkpoints="none"),
)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed sequences are cut into segments of a chunk, where there is room for so many."""
    from flash_kda.backends.hopper import forward

    monkeypatch.setattr(forward, "LEAST_SEGMENT", 32)


def check(some: Case, config: HopperConfig, *, last_first: bool = True) -> None:
    """Output and states in place of the initial ones against the definition."""
    import emulated_forward

    call = some.build()
    o, state = emulated_forward.forward(call, config, in_place=True, last_first=last_first)
    expected, expected_state = oracle(call)
    assert_outputs(o, expected, call, TOLERANCE)
    assert_states(state, expected_state, TOLERANCE)


def check_pool(some: PrefillCase, config: HopperConfig, *, last_first: bool = True) -> None:
    import emulated_forward

    call = some.build()
    before = on_cpu(call)
    o = emulated_forward.prefill(call, config, last_first=last_first)
    assert_prefilled(on_cpu(call), before, o, TOLERANCE)


@pytest.mark.parametrize("last_first", [True, False], ids=["copies first", "copies last"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("case", parameters(CASES))
def test_results(case: Case, config: HopperConfig, last_first: bool) -> None:
    check(case, config, last_first=last_first)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("case", [pytest.param(x, id=str(x)) for x in POOLED])
def test_results_in_a_pool(case: PrefillCase, config: HopperConfig) -> None:
    check_pool(case, config)


# Where walks lie.

HEADS = 3


class Walk(NamedTuple):
    n: int
    head: int
    part: int
    is_a: int
    offset: int
    length: int
    at: int
    is_mapped: bool
    is_stored: bool
    program: int


def walked(lengths: tuple[int, ...], T: int, segment: int, *, packed: bool) -> dict[str, list[Walk]]:
    """By "WHOLE", "MAP" and "APPLY", the walks of all programs that have something to do."""
    import emulated_gluon
    import emulated_hardware

    from flash_kda.backends.hopper import recurrence
    from flash_kda.backends.hopper.config import BV, MAPS, later_segments
    from flash_kda.types import Problem

    N = len(lengths)
    p = Problem(B=1 if packed else N, T=T, H=HEADS, N=N if packed else None, packed=packed)
    later, splits = later_segments(p, segment), p.V // BV
    cu = torch.tensor([0, *itertools.accumulate(lengths)])
    cuts = torch.tensor(cuts_of(lengths, segment, later, 32), dtype=torch.int32)
    found: dict[str, list[Walk]] = {}
    launches = (
        ("WHOLE", recurrence.WHOLE, 1, N * splits),
        ("MAP", recurrence.MAP, splits, 3 * later + N if packed else 2 * later - N),
        ("APPLY", recurrence.APPLY, 1, later * splits),
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, mode, parts, programs in launches:
            found[name] = []
            emulated_gluon.emulate(patch, recurrence)
            for number in range(programs * HEADS):
                with emulated_hardware.running(number, programs * HEADS, 4, last_first=True):
                    given = [emulated_gluon.value(x, torch.int32) for x in (T, N, HEADS, segment, later)]
                    tables = emulated_gluon.Pointer(cu), emulated_gluon.Pointer(cuts)
                    i_h, i_v, n, at, batch, slot, start, length, offset, whole, *flags = recurrence.place(
                        *tables, *given, p.V, packed, mode.value, parts
                    )
                    is_first, is_map, is_mapped, is_stored = (bool(x) for x in flags)
                    if not length and not is_stored:
                        continue
                    x = Walk(*(int(x) for x in (n, i_h, i_v, is_map, offset, length, at)), is_mapped, is_stored, number)
                    found[name].append(x)
                    assert is_first == (x.offset == 0)
                    assert int(whole) == lengths[x.n]
                    assert int(start) == (int(cu[x.n]) if packed else 0) + x.offset
                    assert int(batch) == (0 if packed else x.n)
                    first_slot = int(cu[x.n]) // 32 + x.n if packed else x.n * math.ceil(T / 32)
                    assert int(slot) == first_slot + x.offset // 32
                    assert x.offset % 32 == 0
                    assert 0 <= x.at < later * HEADS * MAPS or not (name == "APPLY" or is_mapped)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_every_token_is_walked_along_once(seed: int) -> None:
    """First segments too, and later ones twice but the last; the programs that take longest come first."""
    from flash_kda.backends.hopper.config import MAPS

    rng = random.Random(seed)
    packed = seed % 4 != 3
    lengths = tuple(rng.choice([0, 1, 31, 32, 33, 64, 65, 127, 128, 129, 500, 1000, 1024]) for _ in range(7))
    if not packed:
        lengths = (rng.choice([33, 100, 1000]),) * 3
    T = sum(lengths) + rng.choice([0, 1, 200]) if packed else lengths[0]
    segment = rng.choice([x for x in (32, 64, 96, 128, 320) if x < T])
    found = walked(lengths, T, segment, packed=packed)
    if packed:
        # Where sequences leave room, into shorter ones.
        segment = cuts_of(lengths, segment, math.ceil(T / segment) - 1, 32)[0]
    for n, length in enumerate(lengths):
        for h in range(HEADS):
            for part in (0, 1):
                (whole,) = (x for x in found["WHOLE"] if (x.n, x.head, x.part) == (n, h, part))
                assert (whole.length, whole.is_stored, whole.is_mapped) == (length, True, False)
                assert whole.program == (n * HEADS + h) * 2 + part
            mapped = [x for x in found["MAP"] if (x.n, x.head) == (n, h)]
            (first,) = (x for x in mapped if x.offset == 0)
            # The last walk stores the final state, each before it a map.
            applied, other = ([x for x in found["APPLY"] if (x.n, x.head, x.part) == (n, h, part)] for part in (0, 1))
            assert [x.offset for x in applied] == [x.offset for x in other]
            walks = [first, *applied]
            assert [x.offset for x in walks] == [0, *itertools.accumulate(x.length for x in walks[:-1])]
            assert sum(x.length for x in walks) == length
            assert len(walks) == max(1, math.ceil(length / segment))
            assert all(0 < x.length <= segment for x in walks) or length == 0
            assert [x.is_stored for x in walks] == [False] * (len(walks) - 1) + [True]
            assert first.is_mapped == (len(walks) > 1)
            # A later walk starts from the first of its own maps; B and A of all but the last are the others.
            assert [x.at for x in applied] == [first.at + i * HEADS * MAPS for i in range(len(applied))]
            wanted = [(x.offset, A, x.length, x.at + 1 + A, True, False) for x in applied[:-1] for A in (False, True)]
            maps = [(x.offset, x.is_a, x.length, x.at, x.is_mapped, x.is_stored) for x in mapped if x.offset]
            assert sorted(maps) == wanted
    cut, whole = ([x.program for x in found["MAP"] if x.is_mapped == is_cut] for is_cut in (True, False))
    assert max(cut, default=-1) < min(whole, default=math.inf)
    places = [x.at for x in found["MAP"] if x.is_mapped]
    assert len(set(places)) == len(places), "two walks leave what they find in one place"
