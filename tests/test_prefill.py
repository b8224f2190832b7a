"""``kda_prefill`` on every backend, against the definition in numpy float64, and the rules of its pool."""

from __future__ import annotations

import math
from dataclasses import replace

import prefilling
import pytest
import torch
from cases import Case, Target, parameters, targets
from cases import run as run_kda
from compare import assert_close, assert_same_bits, bits
from decoding import ROWS, row_call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prefilling import BATCH, CASES, PACKED, WIDE, PrefillCase, fitted, run

import flash_kda
from flash_kda import Checkpoints

pytestmark = pytest.mark.parametrize("target", targets())
SETTINGS = settings(derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


def states_of(call: dict[str, object]) -> torch.Tensor:
    kept = prefilling.kept_by(call)
    assert kept is not None
    return kept


@pytest.mark.parametrize("case", parameters((*CASES, *WIDE)))
def test_definition(target: Target, case: PrefillCase) -> None:
    prefilling.check(target, fitted(target, case))


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("gate", ["lower_bound", "softplus", "log"])
def test_130_tokens_with_blocks_of_64(target: Target, gate: str, layout: str) -> None:
    """The states after 64 and 128 tokens, which a prefix cache wants, are those of the shorter prefills."""
    case = PrefillCase(Case(lengths=(130,), K=20, V=24, gate=gate, layout=layout), every=64, padding=False)
    call = fitted(target, case).build(target.device)
    slot = int(call["indices"][0])
    state = call["pool"][slot : slot + 1].clone()
    run(target, call)
    kept = states_of(call)
    for i, tokens in enumerate((64, 128)):
        _, want = run_kda(target, row_call(call, 0, tokens, state))
        assert want is not None
        if target.backend == "triton":
            assert_same_bits(kept[i], want[0], f"state after {tokens}")
        assert_close(
            kept[i].cpu().transpose(0, 1), want[0].cpu().double().transpose(0, 1), target.tolerance, f"state {tokens}"
        )
    assert bool(kept[2:].isnan().all()), "more than two states were written"


@pytest.mark.parametrize("case", parameters(CASES[:6]))
def test_it_is_kda_with_states_moved(target: Target, case: PrefillCase) -> None:
    """Output and final states have the bits of ``kda`` from the gathered states, if nothing is cut into pieces."""
    case = fitted(target, case)
    call = replace(case, padding=False).build(target.device)
    whole = target.device == "cuda" or call["checkpoints"] is None
    first = call["pool"][call["indices"].long()].clone()
    if call["has_initial_state"] is not None:
        first[~call["has_initial_state"]] = 0.0
    names = ("gate", "scale", "qk_l2norm", "beta_is_logit", "allow_neg_eigval", "state_layout", "cu_seqlens", *ROWS)
    plain = {name: call[name] for name in names} | {"initial_state": first, "output_final_state": True}
    if target.backend == "reference":
        # Its states between pieces are float64.
        whole = False
    o = run(target, call)
    want, state = run_kda(target, plain)
    assert state is not None
    lengths = torch.tensor(case.rows.lengths or (case.rows.T,) * case.rows.B)
    live = (lengths > 0).nonzero()[:, 0].to(target.device)
    got = call["pool"][call["indices"].long()]
    if whole:
        assert_same_bits(o, want, "o")
        assert_same_bits(got[live], state[live], "states")
    else:
        torch.testing.assert_close(o, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got[live], state[live], rtol=1e-4, atol=1e-5)


def test_checkpoints_change_no_bit_of_the_rest(target: Target) -> None:
    """Where chunks are cut at checkpoints anyway: on the CPU those that are multiples of its chunk."""
    case = PrefillCase(PACKED.but(lengths=(128, 64, 0, 192)), every=16 if target.device == "cuda" else 64)
    with_them, without = (fitted(target, case).build(target.device) for _ in range(2))
    without["checkpoints"] = None
    assert_same_bits(run(target, with_them), run(target, without), "o")
    assert_same_bits(with_them["pool"], without["pool"], "pool")


def test_the_state_after_all_tokens_is_the_final_state(target: Target) -> None:
    """Bit for bit, so a sequence can start from one slot and end in another."""
    case = fitted(target, PrefillCase(PACKED.but(lengths=(33, 1, 64, 130)), padding=False))
    calls = [case.build(target.device) for _ in range(2)]
    N = 4
    device = target.device
    ends = torch.arange(N + 1, dtype=torch.int32, device=device)
    offsets = torch.tensor((33, 1, 64, 130), dtype=torch.int32, device=device)
    used = {int(slot) for slot in calls[0]["indices"]}
    free = torch.tensor([slot for slot in range(calls[0]["pool"].shape[0]) if slot not in used][:N], device=device)
    before = calls[0]["pool"].clone()
    o = run(target, calls[0], checkpoints=Checkpoints(offsets, ends, indices=free), write_states=False)
    assert_same_bits(run(target, calls[1], checkpoints=None), o, "o")
    assert_same_bits(calls[0]["pool"][free], calls[1]["pool"][calls[1]["indices"].long()], "states")
    others = [slot for slot in range(before.shape[0]) if slot not in free.tolist()]
    assert_same_bits(calls[0]["pool"][others], before[others], "other slots")


# An infinite gate or logit of beta is no poison: it saturates.
POISONS = [*((name, math.nan) for name in (*ROWS, "pool")), *((name, math.inf) for name in ("q", "k", "v", "pool"))]


@pytest.mark.parametrize(("name", "value"), POISONS)
def test_poison_stays_in_its_sequence(target: Target, name: str, value: float) -> None:
    """One value at token 40 of sequence 0: other sequences, earlier rows and earlier checkpoints do not notice."""
    case = fitted(target, PrefillCase(PACKED.but(lengths=(70, 33, 64)), padding=False))
    clean, bad = case.build(target.device), case.build(target.device)
    if name == "pool":
        bad["pool"][int(bad["indices"][0]), 1, 2, 3] = value
    else:
        bad[name][0, 40].view(-1)[0] = value
    before = prefilling.on_cpu(bad)
    o, o2 = run(target, clean), run(target, bad)
    assert_same_bits(o2[:, 70:], o[:, 70:], "o of the other sequences")
    mine = int(clean["indices"][0])
    others = [slot for slot in range(clean["pool"].shape[0]) if slot != mine]
    assert_same_bits(bad["pool"][others], clean["pool"][others], "other slots")
    first_of_next = int(clean["checkpoints"].cu_offsets[1])
    kept, kept2 = states_of(clean), states_of(bad)
    assert_same_bits(kept2[first_of_next:], kept[first_of_next:], "checkpoints of the other sequences")
    if name == "pool":
        assert not bool(kept2[0].isfinite().all()), "the poison had no effect"
        return
    assert bool(o2[:, :40].isfinite().all())
    assert not bool(o2[:, 40].isfinite().all()), "the poison had no effect"
    assert bool(kept2[:2].isfinite().all()), "a checkpoint before the poison noticed it"
    if name != "q":
        assert not bool(kept2[2].isfinite().all()), "a checkpoint after the poison has missed it"
    if math.isnan(value):
        prefilling.assert_prefilled(prefilling.on_cpu(bad), before, o2.cpu(), target.tolerance)


@pytest.mark.parametrize("index", ["indices", "places"])
def test_all_padding_at_once(target: Target, index: str) -> None:
    """Everybody names one and the same slot of padding: nothing is written."""
    case = fitted(target, PrefillCase(checkpoints="pool", pad=0))
    call = case.build(target.device)
    if index == "indices":
        call["indices"] = torch.zeros_like(call["indices"])
    else:
        call["checkpoints"] = replace(call["checkpoints"], indices=torch.zeros_like(call["checkpoints"].indices))
        call["write_states"] = False
    before = bits(call["pool"]).clone()
    o = run(target, call)
    assert torch.equal(bits(call["pool"]), before)
    assert bool(o.count_nonzero()) == (index == "places")


def test_strided(target: Target) -> None:
    """Columns of wider tables, a pool of all layers, checkpoints and output that are parts of larger tensors."""
    case = fitted(target, PrefillCase(known=True, checkpoints="placed", ragged=True))
    call = case.build(target.device)
    c = call["checkpoints"]

    def column(x: torch.Tensor) -> torch.Tensor:
        wide = torch.stack([x, torch.full_like(x, 1), torch.full_like(x, 1)], 1)
        return wide[:, 0]

    def layer(x: torch.Tensor) -> torch.Tensor:
        wide = torch.full((x.shape[0], 3, *x.shape[1:-1], x.shape[-1] + 4), math.nan, dtype=x.dtype, device=x.device)
        wide[:, 1, ..., 2:-2] = x
        return wide[:, 1, ..., 2:-2]

    for name in ("indices", "has_initial_state", "cu_seqlens"):
        call[name] = column(call[name])
    call["pool"] = layer(call["pool"])
    call["checkpoints"] = Checkpoints(column(c.offsets), column(c.cu_offsets), layer(c.states), column(c.indices))
    before = prefilling.on_cpu(call)
    v = call["v"]
    out = torch.full((*v.shape[:-1], v.shape[-1] + 5), math.nan, dtype=v.dtype, device=v.device)[..., 2:-3]
    o = run(target, call, out=out)
    assert o is out
    prefilling.assert_prefilled(prefilling.on_cpu(call), before, o.cpu(), target.tolerance)


@pytest.mark.parametrize("case", parameters(CASES[:18:3]))
def test_same_bits_twice(target: Target, case: PrefillCase) -> None:
    case = fitted(target, case)
    first, second = case.build(target.device), case.build(target.device)
    assert_same_bits(run(target, first), run(target, second), "o")
    assert_same_bits(first["pool"], second["pool"], "pool")
    if case.checkpoints not in ("none", "pool"):
        assert_same_bits(states_of(first), states_of(second), "checkpoints")


def test_sequences_do_not_depend_on_each_other(target: Target) -> None:
    """A sequence alone has the bits that it has among others, checkpoints included."""
    case = fitted(target, PrefillCase(padding=False, ragged=True))
    call, single = case.build(target.device), case.build(target.device)
    o = run(target, call)
    kept = states_of(call)
    ends = single["checkpoints"].cu_offsets.tolist()
    for n, (_, first, end) in enumerate(prefilling.spans_of(single)):
        c = single["checkpoints"]
        mine = slice(ends[n], ends[n + 1])
        states = torch.full_like(c.states[mine], math.nan)
        boundaries = torch.tensor([0, ends[n + 1] - ends[n]], device=target.device)
        cut = {name: single[name][:, first:end] for name in ROWS}
        cut |= {"indices": single["indices"][n : n + 1], "cu_seqlens": None}
        alone = single | cut | {"checkpoints": Checkpoints(c.offsets[mine], boundaries, states)}
        assert_same_bits(run(target, alone), o[:, first:end], f"o of sequence {n}")
        assert_same_bits(states, kept[mine], f"checkpoints of sequence {n}")
    assert_same_bits(single["pool"], call["pool"], "pool")


def test_uninitialised_memory_is_not_read(target: Target) -> None:
    """With every fresh ``torch.empty`` filled with NaN, results are as before."""
    calls = [fitted(target, PrefillCase(ragged=True)).build(target.device) for _ in range(2)]
    outs = []
    for poison, call in zip((False, True), calls, strict=True):
        torch.use_deterministic_algorithms(poison)
        try:
            outs.append(run(target, call))
        finally:
            torch.use_deterministic_algorithms(False)
    assert_same_bits(outs[1], outs[0], "o")
    assert_same_bits(calls[1]["pool"], calls[0]["pool"], "pool")
    assert_same_bits(states_of(calls[1]), states_of(calls[0]), "checkpoints")


def test_prefill_in_parts_from_checkpoints(target: Target) -> None:
    """What starts from a checkpoint's slot goes on as if it had not been interrupted."""
    case = PrefillCase(Case(lengths=(130,), H=1, HV=2, K=20, V=24), every=48, checkpoints="pool", padding=False)
    case = fitted(target, case)
    call, again = case.build(target.device), case.build(target.device)
    before = prefilling.on_cpu(call)
    run(target, call)
    run(target, again)
    want, _, _ = prefilling.expected(before)
    slot = again["checkpoints"].indices[1:2]
    rest = again | {name: again[name][:, 96:] for name in ROWS}
    rest |= {"cu_seqlens": None, "indices": slot, "checkpoints": None}
    o = run(target, rest)
    assert_close(o[0].cpu(), want[0, 96:], target.tolerance, "o of the rest")
    final, other = again["pool"][int(slot)], call["pool"][int(call["indices"][0])]
    assert_close(final.cpu().transpose(0, 1), other.cpu().double().transpose(0, 1), 2 * target.tolerance, "state")


# Few forms, since each is compiled on a GPU; what varies freely is what a compiled kernel reads.
FORMS = (
    {"checkpoints": "own", "known": True},
    {"checkpoints": "pool", "write": False, "gate": "softplus"},
    {"checkpoints": "placed", "layout": "kv", "gate": "log"},
    {"checkpoints": "pool", "index": False, "layout": "kv"},
    {"checkpoints": "none", "index": False, "known": True},
)


@st.composite
def ragged(draw: st.DrawFn) -> PrefillCase:
    form = dict(draw(st.sampled_from(FORMS)))
    rows = Case(
        lengths=tuple(draw(st.lists(st.integers(0, 100), min_size=0, max_size=5))),
        tail=draw(st.integers(0, 40)),
        H=1,
        HV=2,
        K=16,
        V=20,
        gate=str(form.pop("gate", "lower_bound")),
        layout=str(form.pop("layout", "vk")),
    )
    return PrefillCase(
        rows,
        every=draw(st.integers(1, 80)) * draw(st.sampled_from((1, -1))),
        ragged=draw(st.booleans()),
        pad=draw(st.sampled_from((-1, 0))),
        seed=draw(st.integers(0, 5)),
        **form,  # type: ignore[arg-type]
    )


@settings(SETTINGS, max_examples=30)
@given(case=ragged())
def test_ragged(target: Target, case: PrefillCase) -> None:
    prefilling.check(target, fitted(target, case))


def test_offsets_that_do_not_increase_on_a_gpu(target: Target) -> None:
    """Are no checkpoints there; on the CPU they are refused, which test_prefill_checks tests."""
    case = fitted(target, PrefillCase(BATCH, padding=False))
    call = case.build(target.device)
    c = call["checkpoints"]
    offsets = c.offsets.clone()
    offsets[:4] = torch.tensor([32, 16, 32, 48])
    wrong = call | {"checkpoints": replace(c, offsets=offsets)}
    if target.device == "cpu":
        with pytest.raises(ValueError, match=r"checkpoints\.offsets: got 16 after 32 in sequence 0"):
            flash_kda.kda_prefill(**wrong, backend=target.backend)
        return
    before = prefilling.on_cpu(wrong)
    o = run(target, wrong)
    prefilling.assert_prefilled(prefilling.on_cpu(wrong), before, o.cpu(), target.tolerance)
