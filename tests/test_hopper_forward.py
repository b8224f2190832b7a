"""Forward and prefill on Hopper without a GPU: all launches of a call, emulated one after the other."""

from __future__ import annotations

from typing import Any

import pytest
from cases import Case, oracle, parameters
from compare import assert_outputs, assert_states
from prefilling import PrefillCase, assert_prefilled, on_cpu

from flash_kda.backends.hopper.config import HopperConfig

pytest.importorskip("triton")

ROWS: dict[str, Any] = {"H": 1, "K": 128, "V": 128, "dtype": "bfloat16", "g_dtype": "bfloat16"}
TOLERANCE = 6e-3
# So few programs that each prepares several chunks.
ALONE, SHARED = HopperConfig(5, 1, 4, None), HopperConfig(5, 2, 2, None)
CUT = HopperConfig(5, 1, 4, None, segment=32)
CONFIGS = [pytest.param(x, id=name) for name, x in (("alone", ALONE), ("shared", SHARED), ("cut", CUT))]


def case(**changes: Any) -> Case:
    return Case(**(ROWS | changes))


CASES = (
    case(T=100),
    case(B=2, T=70, HV=2, layout="kv"),
    case(T=97, initial=False, strength="slow"),
    # No chunk is marked, so that the launch over the marked ones ends at once.
    case(T=100, gate="softplus", strength="slow", neg=True),
    case(lengths=(70, 0, 33, 1), tail=40),
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
