"""Forward and prefill on Hopper without a GPU: all launches of a call, emulated one after the other."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from cases import Case, oracle, parameters
from compare import assert_outputs, assert_states
from prefilling import PrefillCase, assert_prefilled, on_cpu

from flash_kda.backends.hopper.config import HopperConfig

pytest.importorskip("triton")

ROWS: dict[str, Any] = {"H": 1, "K": 128, "V": 128, "dtype": "bfloat16", "g_dtype": "bfloat16"}
TOLERANCE = 6e-3
# So few programs that each prepares several chunks.
ALONE, SHARED = HopperConfig(5, 1, 4, None), HopperConfig(5, 2, 2, None)
# Segments of one chunk, and of several: first ones of fewer than the others where the sequence allows it.
CUT, CUT_LONG = HopperConfig(5, 1, 4, None, segment=32), HopperConfig(5, 1, 4, None, segment=64)
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


def walked(lengths: tuple[int, ...], T: int, segment: int, *, packed: bool) -> dict[str, list[tuple[Any, ...]]]:
    """By "MAP" and "APPLY", for each of their programs with something to do: sequence, head, whether it is A, its first
    token and count of them, where its map is, and whether it stores a map and a final state.
    """
    import emulated_gluon
    import emulated_hardware

    from flash_kda.backends.hopper import recurrence
    from flash_kda.backends.hopper.config import BV, MAPS, later_segments
    from flash_kda.types import Problem

    N = len(lengths)
    p = Problem(B=1 if packed else N, T=T, H=HEADS, N=N if packed else None, packed=packed)
    later = later_segments(p, segment)
    cu = torch.tensor([0, *itertools.accumulate(lengths)])
    found: dict[str, list[tuple[Any, ...]]] = {"MAP": [], "APPLY": []}
    launches = (("MAP", recurrence.MAP, p.V // BV, N + 2 * later), ("APPLY", recurrence.APPLY, 1, later * p.V // BV))
    with pytest.MonkeyPatch.context() as patch:
        for name, mode, parts, programs in launches:
            emulated_gluon.emulate(patch, recurrence)
            for number in range(programs * HEADS):
                with emulated_hardware.running(number, programs * HEADS, 4, last_first=True):
                    given = [emulated_gluon.value(x, torch.int32) for x in (T, N, HEADS, segment)]
                    p_cu = emulated_gluon.Pointer(cu)
                    i_h, i_v, n, at, batch, slot, start, length, offset, whole, *flags = recurrence.place(
                        p_cu, *given, p.V, packed, mode.value, parts
                    )
                is_first, is_map, is_mapped, is_stored = (bool(x) for x in flags)
                if length == 0 and not is_stored:
                    continue
                n, offset = int(n), int(offset)
                assert is_first == (offset == 0)
                assert int(whole) == lengths[n]
                assert int(start) == (int(cu[n]) if packed else 0) + offset
                assert int(batch) == (0 if packed else n)
                first_slot = int(cu[n]) // 32 + n if packed else n * math.ceil(T / 32)
                assert int(slot) == first_slot + offset // 32
                assert offset % 32 == 0
                if name == "APPLY" or is_mapped:
                    assert 0 <= int(at) < later * HEADS * MAPS
                found[name].append((n, int(i_h), int(i_v), is_map, offset, int(length), int(at), is_mapped, is_stored))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_segments(seed: int) -> None:
    """First segments are walked along once, later ones as B and A but for the last, then again; and maps are apart."""
    from flash_kda.backends.hopper.config import MAPS

    rng = random.Random(seed)
    packed = seed % 4 != 3
    lengths = tuple(rng.choice([0, 1, 31, 32, 33, 64, 65, 127, 128, 129, 500, 1000, 1024]) for _ in range(7))
    if not packed:
        lengths = (rng.choice([33, 100, 1000]),) * 3
    T = sum(lengths) + rng.choice([0, 1, 200]) if packed else lengths[0]
    segment = rng.choice([x for x in (32, 64, 96, 128, 320) if x < T])
    found = walked(lengths, T, segment, packed=packed)
    for n, length in enumerate(lengths):
        for h in range(HEADS):
            mapped = [x[3:] for x in found["MAP"] if x[:2] == (n, h)]
            firsts = [x[1:] for x in mapped if x[1] == 0]
            applied = sorted(x[4:] for x in found["APPLY"] if x[:2] == (n, h) and x[2] == 0)
            assert applied == sorted(x[4:] for x in found["APPLY"] if x[:2] == (n, h) and x[2] == 1)
            (_, size, at, is_mapped, is_stored) = firsts[0]
            assert len(firsts) == 1
            # Tokens are walked along once with outputs, and the last walk stores the final state.
            pieces = [(0, size), *((x[0], x[1]) for x in applied)]
            assert [x[0] for x in pieces] == [sum(y[1] for y in pieces[:i]) for i in range(len(pieces))]
            assert sum(x[1] for x in pieces) == length
            assert len(pieces) == max(1, math.ceil(length / segment))
            assert all(0 < x[1] <= segment for x in pieces[: len(pieces) * (length > 0)])
            assert [is_stored, *(x[4] for x in applied)] == [False] * (len(pieces) - 1) + [True]
            assert is_mapped == (len(pieces) > 1)
            # Each later one starts from its own first map; B and A of all but the last are its second and third.
            for i, x in enumerate(applied):
                assert x[2] == at + i * HEADS * MAPS
            ends = sorted((x[1], x[0], x[2], x[3]) for x in mapped if x[1] > 0)
            want = []
            for x in applied[:-1]:
                want += [(x[0], False, x[1], x[2] + 1), (x[0], True, x[1], x[2] + 2)]
            assert ends == sorted((offset, is_map, size, at) for offset, is_map, size, at in want)
            assert all(x[4] and not x[5] for x in mapped if x[1] > 0)
    maps = [x[6] for x in found["MAP"] if x[7]]
    assert len(set(maps)) == len(maps), "two walks leave what they find in one place"
