"""Forward and prefill on Hopper launch by launch: what they give without a GPU, and how their launches overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cases import Call, Case, Target, oracle, parameters
from compare import assert_outputs, assert_same_bits, assert_states
from conftest import forget
from emulated_gluon import change
from jitted import Jitted
from prefilling import PrefillCase, assert_prefilled, on_cpu, run
from test_hopper import DEVICE, bfloat16, described, jitted
from torch import Tensor

import flash_kda
from flash_kda.backends.hopper import config as hopper_config
from flash_kda.backends.hopper.config import HopperConfig
from flash_kda.types import Problem

pytest.importorskip("triton")

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["jitted"]

ROWS: dict[str, Any] = {"H": 1, "K": 128, "V": 128, "dtype": "bfloat16", "g_dtype": "bfloat16"}
TOLERANCE = 6e-3
# So few programs that each prepares several chunks.
ALONE, SHARED = HopperConfig(5, 1, 4, None), HopperConfig(5, 2, 2, None)
CUT = HopperConfig(5, 1, 4, None, segment=32)
CONFIGS = [pytest.param(x, id=name) for name, x in (("alone", ALONE), ("shared", SHARED), ("cut", CUT))]


def case(**changes: Any) -> Case:
    return Case(**(ROWS | changes))


# Results without a GPU: kernels in Python, which the emulation watches.

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


# What starts before the launch before it has ended must wait for it.

WAIT = "wait_for_launch_before()\n"
SCANNED = f"        # The state is the scan's.\n        {WAIT}"
FIRST_STORE = f" is read by then.\n    {WAIT}"
WHOLE, CUT_UP = partial(check, case(T=100), ALONE), partial(check, case(T=100), CUT)
POOL, CUT_POOL = partial(check_pool, POOLED[0], ALONE), partial(check_pool, POOLED[0], CUT)
# By what is wrong: who launches it, a kernel, lines of it and what they are changed to, and a call that shows it.
FAULTS: dict[str, tuple[str, str, str, str, Callable[[], None]]] = {
    "chunks are copied": ("forward", "walk", f'is free."""\n    {WAIT}', 'is free."""\n', WHOLE),
    "an output is stored": ("forward", "walk", FIRST_STORE, " is read by then.\n", WHOLE),
    "a segment's state is read": ("forward", "walk", SCANNED, "        pass\n", CUT_UP),
    "an output is stored into a pool": ("prefill_launch", "pooled_walk", FIRST_STORE, " is read by then.\n", POOL),
    "a segment's state is read for a pool": ("prefill_launch", "pooled_walk", SCANNED, "        pass\n", CUT_POOL),
    "padding is cleared": ("prefill_launch", "pooled_walk", f"            {WAIT}", "", POOL),
    "maps are read": ("forward", "scan_segments", f"    {WAIT}", "", CUT_UP),
    "marks are read": ("forward", "prepare", f"            {WAIT}", "", partial(check, CASES[3], ALONE)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_comes_too_early_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_kda.backends.hopper import forward, prefill_launch

    host, name, old, new, judge = FAULTS[fault]
    hosts: dict[str, ModuleType] = {"forward": forward, "prefill_launch": prefill_launch}
    change(monkeypatch, tmp_path, hosts[host], name, old, new)
    with pytest.raises(AssertionError, match="the launch before"):
        judge()


@pytest.mark.parametrize(
    "problem",
    [
        Problem(T=8192, H=64),
        Problem(T=8192, H=96, gate="softplus"),
        Problem(T=8192, H=96, V=64),
        Problem(T=8192, H=12, N=2, packed=True),
    ],
    ids=str,
)
def test_all_launches_but_the_first_overlap(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the launch over marked chunks is told so, since it is another architecture's, too."""
    from flash_kda.backends.hopper import forward

    for is_on in (True, False):
        monkeypatch.setattr(forward, "OVERLAP", is_on)
        launches = described(problem, hopper_config.configure(problem, DEVICE))[1]
        assert [x.options.get("launch_pdl", False) for x in launches] == [False, *[is_on] * (len(launches) - 1)]
        assert all(x.values["OVERLAPS"] for x in launches if x.kernel.__name__ == "prepare")


def test_portable_kernels_do_not_overlap() -> None:
    """Compute capability 8.0 has no such instruction."""
    from compiling import H200, meta_inputs

    from flash_kda.backends.triton import forward
    from flash_kda.backends.triton.config import configure

    problem = Problem(T=8192, H=64, gate="softplus")
    launches = forward.describe(
        meta_inputs(problem).signature, configure(problem, H200), (problem.dtype, (0, 0, 0, 1)), None
    )[1]
    assert not any("launch_pdl" in x.options for x in launches)
    assert not any(x.values["OVERLAPS"] for x in launches)


def test_a_direct_launch_overlaps_as_tritons_does(jitted: dict[str, Jitted]) -> None:
    for seed in range(3):
        flash_kda.kda(**bfloat16(case(T=200, H=2).but(seed=seed)))
    for name, overlaps in (("prepare_warp", False), ("walk", True)):
        f = jitted[name]
        ((_, _, options),) = f.by_triton
        assert options.get("launch_pdl", False) == overlaps
        assert len(f.direct) == 2
        # After the grid, the stream, the function and whether its programs cooperate.
        assert [given[6] for _, given in f.direct] == [overlaps] * 2


# On a GPU.

HOPPER = Target("hopper", "cuda", tolerance=TOLERANCE)
OVERLAPPING = (
    case(T=512, H=64),
    case(T=4500, H=2),
    case(T=600, H=4, gate="softplus"),
    case(lengths=(700, 0, 1348), tail=9, H=16),
    case(lengths=(4400, 40), H=2, layout="kv"),
)


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Says whether launches overlap from now on."""
    from flash_kda.backends.hopper import forward

    def choose(is_on: bool) -> None:
        monkeypatch.setattr(forward, "OVERLAP", is_on)
        forward.plan.cache_clear()
        forget()

    yield choose
    forward.plan.cache_clear()


def results_of(calls: list[Call]) -> list[Tensor]:
    """Outputs and states of several calls, one after the other: the next one's tiles lie where the last one's did."""
    found: list[Tensor] = []
    for call in calls:
        if "pool" in call:
            found += [flash_kda.kda_prefill(**call, backend="hopper"), call["pool"]]
            continue
        o, state = flash_kda.kda(**call, backend="hopper")
        assert state is not None
        found += [o, state]
    return found


def assert_overlap_changes_nothing(build: Callable[[], list[Call]], overlap: Callable[[bool], None]) -> None:
    """The bits of launches that do not overlap, twenty times, eager and replayed."""
    overlap(False)
    want = [x.clone() for x in results_of(build())]
    overlap(True)
    for _ in range(20):
        for got, x in zip(results_of(build()), want, strict=True):
            assert_same_bits(got, x, "eager")
    calls = build()
    firsts = [x["pool"].clone() for x in calls if "pool" in x]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results_of(calls)
    for _ in range(20):
        for x, first in zip([x["pool"] for x in calls if "pool" in x], firsts, strict=True):
            x.copy_(first)
        graph.replay()
        for got, x in zip(found, want, strict=True):
            assert_same_bits(got, x, "replayed")


@pytest.mark.gpu
@pytest.mark.parametrize("case", parameters(OVERLAPPING))
@torch.no_grad()
def test_overlap_changes_no_bit(case: Case, overlap: Callable[[bool], None]) -> None:
    """Calls of other values in between, so that tiles that are read too early are another call's."""
    calls = [bfloat16(case.but(seed=seed), "cuda") for seed in range(3)]
    assert_overlap_changes_nothing(lambda: calls, overlap)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [PACKED.but(tail=250, H=4), case(lengths=(4400,), H=2)], ids=str)
@torch.no_grad()
def test_overlap_changes_no_bit_in_a_pool(rows: Case, overlap: Callable[[bool], None]) -> None:
    """States and checkpoints in place."""
    cases = [PrefillCase(rows.but(seed=seed), checkpoints="pool", every=48, seed=seed) for seed in range(3)]
    run(HOPPER, cases[0].build("cuda"))
    assert_overlap_changes_nothing(lambda: [x.build("cuda") for x in cases], overlap)
