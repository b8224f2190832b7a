"""``kda_prefill`` on the Hopper backend: where checkpoints are stored, compilation, launches, and results on a GPU."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from unittest import mock

import compiling
import emulated_walk
import on_a_gpu
import prefilling
import pytest
import torch
from cases import Call, Case, Target, spans_of
from compare import assert_same_bits
from compiling import Dtypes, assert_fits, compile_launch
from conftest import forget
from cutting import short_segments
from decoding import ROWS, row_call
from emulated_walk import COLUMNS, K
from jitted import Jitted
from prefilling import PrefillCase, assert_large_pools_are_reached, check, run
from test_hopper import DEVICE, Described, gluon_source_of, jitted, shifted
from test_triton_prefill import PrefillBuild
from torch import Tensor

import flash_kda
from flash_kda import Checkpoints
from flash_kda.backends.hopper.config import configure
from flash_kda.types import Problem, gate_parameters

if TYPE_CHECKING:
    from flash_kda.backends.triton.launch import Launch

__all__ = ["jitted"]

HOPPER = Target("hopper", "cuda", tolerance=6e-3)
ROWS_128 = {"K": 128, "V": 128, "dtype": "bfloat16", "g_dtype": "bfloat16"}
# A tail, since there must be more than two chunks per sequence.
PACKED = Case(lengths=(70, 0, 33, 1, 64, 130, 1), tail=250, H=2, HV=4, **ROWS_128)

# Where checkpoints are found and stored: the walk's own source in Python.


def by_definition(
    states: dict[int, Tensor], tokens: int, offsets: list[int], ends: list[int], targets: list[int] | None, kept: Tensor
) -> Tensor:
    """What the entries of a sequence's first one store; ``states`` has those of this segment, but for its first."""
    kept, done = kept.clone(), 0
    for i in range(max(ends[0], 0), min(ends[1], len(offsets))):
        if not 1 <= offsets[i] <= tokens or offsets[i] <= done:
            continue
        done = offsets[i]
        place = i if targets is None else targets[i]
        if done in states and 0 <= place < len(kept) and (targets is None or place != 0):
            kept[place] = states[done]
    return kept


def offsets_of(rng: random.Random, tokens: int) -> list[int]:
    """Right ones, at multiples of the chunk or anywhere, with nothing before them; or any numbers."""
    some = rng.choice([0, 1, 3, 8, 20, 300, 700])
    kind = rng.randrange(4)
    if kind == 0:
        return [rng.randint(-5, tokens + 20) for _ in range(some)]
    if kind == 1:
        return [*range(32, tokens, 32), tokens]
    found = sorted(rng.sample(range(1, tokens + 40), min(some, tokens + 39)))
    return [0] * rng.choice([255, 256, 257, 600]) + found if kind == 2 else found


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_checkpoints_are_found(seed: int, poisoned: bool) -> None:
    """In whole sequences and in segments of them, of any entries, once by chunks and once token by token."""
    pytest.importorskip("triton")
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    for tokens in (0, 1, 5, 31, 32, 33, 64, 70, 130, 200, 321):
        decays = torch.rand(tokens, COLUMNS, K, generator=g)
        values = torch.randn(tokens, COLUMNS, K, generator=g)
        S0 = torch.randn(COLUMNS, K, generator=g)
        offsets = offsets_of(rng, tokens)
        M = len(offsets)
        ends = rng.choice([[0, M], [0, M], [0, M + 5], [-3, M], [min(2, M), M]])
        targets = None
        if rng.random() < 0.6:
            targets = [rng.choice([i, M + 3, -1, 0]) if rng.random() < 0.2 else i for i in range(M)]
        first, last = 0, tokens
        if tokens > 64 and rng.random() < 0.5:
            size = rng.choice([32, 64, 96])
            first = rng.randrange(0, tokens, size)
            last = min(tokens, first + size)
        if poisoned and last > first:
            values[rng.randrange(first, last)] = math.nan
        S, states = S0, {}
        for t in range(first, last):
            S = S * decays[t] + values[t]
            states[t + 1] = S
        kept = torch.full((M + 3, COLUMNS, K), math.inf)
        # What a later segment does to any state meets no checkpoint.
        is_mapped = rng.random() < 0.3
        found = {} if is_mapped and first > 0 else states
        want = by_definition(found, tokens, offsets, ends, targets, kept)
        span = {"offset": first, "length": last - first}
        with pytest.MonkeyPatch.context() as patch:
            got, chunks = emulated_walk.walk(
                patch, S0, decays, values, offsets, ends, targets, kept, pad=0, is_mapped=is_mapped, **span
            )
        assert_same_bits(got, S, f"state of {tokens} tokens")
        assert_same_bits(kept, want, f"checkpoints of {tokens} tokens")
        assert chunks == list(range(0, last - first, 32)), "every chunk once, in order"


# Compilation without a GPU.

POOLED = Problem(T=8192, H=64, op="prefill")
KEPT = replace(POOLED, checkpoints=True)
# The problem, layout and dtype of checkpoints, and bytes that a thread may spill in the launches of the walk: in its
# loop over single tokens and, in the "kv" layout, of addresses of states.
BUILDS: dict[str, tuple[Problem, dict[str, Any], list[int]]] = {
    "whole": (POOLED, {}, [0]),
    "checkpoints": (KEPT, {}, [0]),
    "bfloat16": (replace(KEPT, state_dtype=torch.bfloat16), {"kept": torch.bfloat16}, [0]),
    "kv": (KEPT, {"layout": "kv"}, [384]),
    "softplus": (replace(KEPT, gate="softplus"), {}, [0]),
    "shared": (replace(POOLED, H=96), {}, [0]),
    "shared-checkpoints": (replace(KEPT, H=96), {}, [288]),
    "shared-packed": (replace(KEPT, H=96, N=6, packed=True), {}, [144]),
    "shared-kv": (replace(KEPT, H=96), {"layout": "kv"}, [704]),
    "two": (replace(KEPT, H=96, V=192), {}, [160]),
    "cut": (replace(KEPT, H=8), {}, [432, 32]),
    "cut-packed": (replace(KEPT, H=8, N=2, packed=True), {}, [384, 32]),
}


def described(problem: Problem, **options: Any) -> tuple[Dtypes, list[Launch]]:
    """The launches of a call, and the dtypes of all that they are passed, by name."""
    from flash_kda.backends.hopper import prefill_launch
    from flash_kda.backends.triton import prefill_launch as portable

    build = PrefillBuild(90, problem, **options)
    call = build.call()
    inputs = call.inputs.replace(g=call.inputs.g.to(call.inputs.q.dtype))
    call, out = replace(call, inputs=inputs), torch.empty_like(inputs.v)
    scratch, launches = prefill_launch.describe(call, configure(problem, DEVICE), build.config, out)
    tensors = [*call.tensors[:-1], out, *gate_parameters(inputs.gate), call.pool]
    tensors[portable.TENSORS.index("kept")] = call.kept
    dtypes = compiling.dtypes_of(portable.TENSORS, tensors, torch.bfloat16)
    return dtypes | {name: dtype for name, (_, dtype) in scratch.items()}, launches


@pytest.mark.offline
@pytest.mark.parametrize("name", BUILDS)
def test_kernels_compile(name: str) -> None:
    """Every walk fits into the device and spills no more than its budget; the other launches are those of ``kda``."""
    pytest.importorskip("triton")
    problem, options, budgets = BUILDS[name]
    dtypes, launches = described(problem, **options)
    names = [x.kernel.__name__ for x in launches]
    assert [x for x in names if x != "pooled_walk"] == [
        "prepare_warp", *["prepare"] * (problem.gate == "softplus"), *["cut_sequences"] * (name == "cut-packed"),
        *["scan_segments"] * name.startswith("cut"),
    ]  # fmt: skip
    walks = [x for x in launches if x.kernel.__name__ == "pooled_walk"]
    for launch, budget in zip(walks, budgets, strict=True):
        built = compile_launch(launch, dtypes, 90, gluon_source_of)
        assert_fits(built, 90, budget)
        assert built.wgmma, "no wgmma"


@pytest.mark.parametrize("name", ["checkpoints", "cut-packed"])
def test_every_parameter_has_what_it_needs(name: str) -> None:
    pytest.importorskip("triton")
    problem, options, _ = BUILDS[name]
    dtypes, launches = described(problem, **options)
    for launch in launches:
        values = {**launch.values, **{f"d_{x}": 0 for x in launch.matrices}}
        names = [x for x in launch.kernel.arg_names if not x.startswith("d_")]
        assert set(launch.tensors) <= set(dtypes)
        assert set(names[len(launch.tensors) :]) <= set(values)
        for parameter in launch.kernel.params:
            # Strides are integers that Triton may specialise on; of other numbers it must not.
            if not parameter.is_constexpr and parameter.name in names[len(launch.tensors) :]:
                is_stride = re.fullmatch(r"\w+_[bchkntvw]", parameter.name) is not None
                assert is_stride != parameter.do_not_specialize, parameter.name


# Launches.


@pytest.fixture
def pooled(jitted: dict[str, Jitted], monkeypatch: pytest.MonkeyPatch) -> dict[str, Jitted]:
    """The same with the kernels that keep states in a pool."""
    from flash_kda.backends.hopper import prefill_launch
    from flash_kda.backends.triton import prefill_launch as portable

    found = jitted | {
        "pooled_walk": Jitted.in_place(monkeypatch, prefill_launch, "pooled_walk"),
        "pooled_recurrence": Jitted.in_place(monkeypatch, portable, "pooled_recurrence"),
    }
    found["pooled_walk"].compile = partial(Described, 4)
    return found


@torch.no_grad()
@pytest.mark.parametrize("checkpoints", ["own", "pool"])
def test_a_known_form_is_launched_directly(checkpoints: str, pooled: dict[str, Jitted]) -> None:
    """With its own tensors; output and scratch memory are all that is allocated."""
    case = PrefillCase(PACKED, known=True, checkpoints=checkpoints)
    for seed in range(3):
        call = replace(case, seed=seed).build()
        with (
            mock.patch.object(torch, "empty", wraps=torch.empty) as scratch,
            mock.patch.object(torch, "empty_like", wraps=torch.empty_like) as output,
            flash_kda.record_backends() as ran,
        ):
            o = flash_kda.kda_prefill(**call)
        assert ran == ["hopper"]
    assert (scratch.call_count, output.call_count) == (1, 1)
    walk = pooled["pooled_walk"]
    assert len(walk.by_triton) == 1
    assert len(walk.direct) == 2
    assert not pooled["walk"].by_triton
    assert not pooled["pooled_recurrence"].by_triton
    c = call["checkpoints"]
    given = {x for x in walk.direct[-1][1] if type(x) is int}
    tensors = [call["pool"], call["indices"], call["has_initial_state"], call["cu_seqlens"], o, c.offsets, c.cu_offsets]
    tensors += [x for x in (c.states, c.indices) if x is not None]
    assert {x.data_ptr() for x in tensors} <= given


@torch.no_grad()
@pytest.mark.parametrize("name", ["q", "k", "v", "g"])
def test_alignment_chooses_the_kernels(name: str, pooled: dict[str, Jitted]) -> None:
    """What hardware copies must be aligned to 16 bytes in this very call."""
    case = PrefillCase(PACKED, known=True)
    for _ in range(2):
        for is_shifted, kernel in ((False, "pooled_walk"), (True, "pooled_recurrence")):
            call = case.build()
            if is_shifted:
                call[name] = shifted(call[name])
            before = {x: len(f.by_triton) + len(f.direct) for x, f in pooled.items()}
            flash_kda.kda_prefill(**call)
            ran = {x for x, f in pooled.items() if len(f.by_triton) + len(f.direct) > before[x]}
            assert ran & {"walk", "recurrence", "pooled_walk", "pooled_recurrence"} == {kernel}


# On a GPU. The tests of every backend are in test_prefill.

gpu = pytest.mark.gpu


@pytest.fixture(params=[False, True], ids=["whole", "cut"])
def cut(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether sequences are cut into the shortest segments that fill the device."""
    with short_segments(request.param):
        forget()
        yield request.param


BATCH = Case(B=3, T=130, H=1, HV=2, **ROWS_128)
CASES = (
    PrefillCase(PACKED),
    PrefillCase(PACKED.but(cu_dtype="int32"), checkpoints="none", known=True, index_dtype="int64"),
    PrefillCase(PACKED, checkpoints="pool", every=32, pad=0, known=True),
    PrefillCase(PACKED, ragged=True, checkpoints="pool", write=False),
    PrefillCase(PACKED, index=False, known=True, every=-16),
    PrefillCase(PACKED.but(layout="kv", gate="softplus"), ragged=True, checkpoints="placed"),
    PrefillCase(PACKED.but(state_dtype="bfloat16", gate="log", strength="hostile"), ragged=True, kept_dtype="bfloat16"),
    PrefillCase(PACKED.but(H=8, HV=16), ragged=True, checkpoints="pool", known=True),
    PrefillCase(PACKED.but(H=16, HV=16, layout="kv"), checkpoints="placed"),
    PrefillCase(PACKED.but(H=16, HV=16, V=192), ragged=True),
    PrefillCase(BATCH, known=True),
    PrefillCase(BATCH.but(layout="kv"), index=False, ragged=True, checkpoints="pool"),
    PrefillCase(PACKED.but(lengths=(1, 900, 300, 0, 600, 77)), every=64, checkpoints="pool"),
)


@gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results(case: PrefillCase, cut: bool) -> None:
    """Against the definition, sequence by sequence and place by place; the same bits twice and without checkpoints."""
    first, second, without = (case.build("cuda") for _ in range(3))
    check(HOPPER, case, first)
    o = run(HOPPER, second)
    if case.checkpoints in ("own", "placed"):
        assert_same_bits(second["checkpoints"].states, first["checkpoints"].states, "checkpoints")
        assert_same_bits(run(HOPPER, without, checkpoints=None), o, "o without checkpoints")
        assert_same_bits(without["pool"], second["pool"], "pool without checkpoints")
    assert_same_bits(second["pool"], first["pool"], "pool")


@gpu
@pytest.mark.parametrize("H", [2, 16])
def test_it_is_kda_with_states_moved(H: int, cut: bool) -> None:
    """Bits of ``kda`` from the gathered states; in whole sequences those of checkpoints are a shorter call's."""
    case = PrefillCase(PACKED.but(lengths=(300, 0, 130, 1, 97), H=H, HV=16), every=32, padding=False)
    call = case.build("cuda")
    first = call["pool"][call["indices"].long()].clone()
    names = ("gate", "scale", "qk_l2norm", "beta_is_logit", "allow_neg_eigval", "state_layout", "cu_seqlens", *ROWS)
    plain: Call = {name: call[name] for name in names} | {"initial_state": first, "output_final_state": True}
    o = run(HOPPER, call)
    # Its plans are remembered beyond a change of the configuration.
    from flash_kda.backends.hopper import forward

    forward.plan.cache_clear()
    want, state = flash_kda.kda(**plain, backend="hopper")
    forward.plan.cache_clear()
    assert state is not None
    assert_same_bits(o, want, "o")
    live = [n for n, (_, a, b) in enumerate(spans_of(call)) if b > a]
    assert_same_bits(call["pool"][call["indices"].long()][live], state[live], "states")
    if cut:
        return
    kept, ends = call["checkpoints"].states, call["checkpoints"].cu_offsets.tolist()
    for n, (start, end) in enumerate(pairwise(ends)):
        for i in range(start, end):
            offset = int(call["checkpoints"].offsets[i])
            if offset > 64:
                _, state = flash_kda.kda(**row_call(call, n, offset, first[n : n + 1]), backend="hopper")
                assert state is not None
                assert_same_bits(kept[i], state[0], f"state of sequence {n} after {offset}")


@gpu
def test_a_sequence_alone_has_the_bits_that_it_has_among_others() -> None:
    case = PrefillCase(PACKED.but(lengths=(70, 129, 300)), padding=False, ragged=True)
    call, single = case.build("cuda"), case.build("cuda")
    o, c = run(HOPPER, call), single["checkpoints"]
    kept, ends = call["checkpoints"].states, c.cu_offsets.tolist()
    for n, (_, first, end) in enumerate(spans_of(single)):
        mine = slice(ends[n], ends[n + 1])
        states = torch.full_like(c.states[mine], math.nan)
        boundaries = torch.tensor([0, ends[n + 1] - ends[n]], device="cuda")
        rows = {name: single[name][:, first:end] for name in ROWS}
        rows |= {"indices": single["indices"][n : n + 1], "cu_seqlens": None}
        alone = single | rows | {"checkpoints": Checkpoints(c.offsets[mine], boundaries, states)}
        assert_same_bits(run(HOPPER, alone), o[:, first:end], f"o of sequence {n}")
        assert_same_bits(states, kept[mine], f"checkpoints of sequence {n}")
    assert_same_bits(single["pool"], call["pool"], "pool")


@gpu
@pytest.mark.parametrize(("name", "value"), [("k", math.nan), ("v", math.inf), ("q", math.nan), ("pool", math.nan)])
def test_poison_stays_where_it_belongs(name: str, value: float, cut: bool) -> None:
    """Other sequences and earlier checkpoints do not notice; later ones do."""
    case = PrefillCase(PACKED.but(lengths=(300, 33, 164), HV=32), padding=False)
    clean, bad = case.build("cuda"), case.build("cuda")
    if name == "pool":
        bad["pool"][int(bad["indices"][0]), 1, 2, 3] = value
    else:
        bad[name][0, 40].view(-1)[0] = value
    o, o2 = run(HOPPER, clean), run(HOPPER, bad)
    assert_same_bits(o2[:, 300:], o[:, 300:], "o of the other sequences")
    mine = int(clean["indices"][0])
    others = [slot for slot in range(clean["pool"].shape[0]) if slot != mine]
    assert_same_bits(bad["pool"][others], clean["pool"][others], "other slots")
    kept, kept2 = clean["checkpoints"].states, bad["checkpoints"].states
    next_one = int(clean["checkpoints"].cu_offsets[1])
    assert_same_bits(kept2[next_one:], kept[next_one:], "checkpoints of the other sequences")
    if name != "pool":
        assert bool(kept2[:2].isfinite().all()), "a checkpoint before the poison noticed it"
        assert bool(kept2[2:next_one].isfinite().all()) == (name == "q")


@gpu
def test_replay_is_eager(cut: bool) -> None:
    """A captured call, replayed with other rows, states, boundaries, indices and offsets, gives a plain one's bits."""
    for checkpoints in ("own", "pool"):
        case = PrefillCase(PACKED, known=True, checkpoints=checkpoints, every=48)
        others = [on_a_gpu.turned(case, seed).build("cuda") for seed in range(1, 4)]
        on_a_gpu.assert_replays_are_eager(HOPPER, run, flash_kda.kda_prefill, case.build("cuda"), others)


@gpu
@pytest.mark.parametrize("checkpoints", ["none", "own", "pool"])
def test_no_wait_no_compilation(checkpoints: str, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first call: other lengths, values, offsets and pad indices; output and scratch are allocated alone."""
    case = PrefillCase(PACKED, known=True, checkpoints=checkpoints, every=48)
    calls = [
        replace(on_a_gpu.turned(case, seed), pad=pad).build("cuda") for seed, pad in ((0, -1), (1, -1), (2, 0), (3, 0))
    ]
    outs = [torch.empty_like(call["v"]) for call in calls]
    run(HOPPER, calls[0], out=outs[0])
    compiled = on_a_gpu.compilations(monkeypatch)
    with on_a_gpu.no_wait(allocations=8):
        for call, out in zip(calls * 2, outs * 2, strict=True):
            flash_kda.kda_prefill(**call, out=out, backend="hopper")
    assert not compiled


@gpu
def test_pools_of_more_than_two_to_the_31_elements() -> None:
    assert_large_pools_are_reached(HOPPER, Case(lengths=(70,), tail=9, H=2, **ROWS_128))


@gpu
def test_it_is_chosen_with_reasons_for_the_others() -> None:
    for case in (PrefillCase(PACKED), PrefillCase(PACKED, checkpoints="none")):
        call = case.build("cuda")
        answer = flash_kda.explain(prefilling.checked(call).problem)
        assert answer.backend == "hopper"
        with flash_kda.record_backends() as ran:
            flash_kda.kda_prefill(**call)
            flash_kda.kda_prefill(**call | {"g": call["g"].float()})
        assert ran == ["hopper", "triton"]
