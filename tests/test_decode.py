"""``kda_decode`` on every backend, against the definition in numpy float64, and the rules of its pool."""

from __future__ import annotations

from typing import Any

import decoding
import pytest
import torch
from cases import Case, Target, oracle, parameters, targets
from cases import run as run_kda
from compare import assert_close, assert_same_bits, bits
from decoding import BASE, CASES, PACKED, ROWS, SMALL, WIDE, DecodeCase, first_rows, run, spoil
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flash_kda

pytestmark = pytest.mark.parametrize("target", targets())
SETTINGS = settings(derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


def unrounded(target: Target, case: Case) -> Case:
    """The case with a pool that holds a backend's states as they are: the reference computes them in float64."""
    return case.but(dtype="float64", state_dtype="float64") if target.backend == "reference" else case


@pytest.mark.parametrize("case", parameters((*CASES, *WIDE, *SMALL)))
def test_definition(target: Target, case: DecodeCase) -> None:
    decoding.check(target, case)


def test_per_head(target: Target) -> None:
    """One head forgets at once, one keeps all: nothing of a head's gate reaches the others."""
    call = DecodeCase(BASE.but(B=3, T=4, H=1, HV=4, K=16, V=16), index="own").build(target.device)
    A_log, dt_bias = torch.tensor([-3.0, 0.0, 1.0, 2.0]), torch.linspace(-9, 9, 64).reshape(4, 16)
    call["gate"] = flash_kda.LowerBoundGate(A_log.to(target.device), dt_bias.to(target.device), -4.0)
    decoding.check(target, DecodeCase(), call)


def test_the_state_is_not_transposed(target: Target) -> None:
    """K = V and a state far from symmetric, read by a key and query of one channel, untouched by the call."""
    K = 16
    S = torch.arange(K * K, dtype=torch.float32, device=target.device).reshape(1, 1, K, K)
    zeros = torch.zeros(1, 1, 1, K, device=target.device)
    q = zeros.clone()
    q[..., 1] = 1.0
    for layout, row in (("kv", S[0, 0, 1]), ("vk", S[0, 0, :, 1])):
        pool = S.clone()
        arguments = {"gate": flash_kda.LogGate(), "scale": 1.0, "qk_l2norm": False, "state_layout": layout}
        call = {"q": q, "k": zeros, "v": zeros, "g": zeros, "beta": zeros[..., 0], "pool": pool} | arguments
        o = run(target, call)
        assert o[0, 0, 0].tolist() == row.tolist()
        assert_same_bits(pool, S, "pool")


@pytest.mark.parametrize("index", ["own", "one", "each"])
@pytest.mark.parametrize("gate", ["lower_bound", "softplus", "log"])
def test_tokens_at_once_are_tokens_one_by_one(target: Target, gate: str, index: str) -> None:
    """Bit for bit, if the pool holds states as they are."""
    T = 5
    case = DecodeCase(unrounded(target, BASE.but(T=T, gate=gate)), index=index, padding=False)
    call, single = case.build(target.device), case.build(target.device)
    o = run(target, call)
    indices = single["indices"]
    for t in range(T):
        piece: dict[str, Any] = {name: single[name][:, t : t + 1] for name in ROWS}
        if index == "each":
            # The state after token t - 1 moves on into the slot of token t.
            piece["indices"] = indices[:, max(t - 1, 0)]
        o_t = run(target, single | piece)
        assert_same_bits(o_t, o[:, t : t + 1], f"token {t}")
        if index == "each":
            assert_same_bits(single["pool"][piece["indices"].long()], call["pool"][indices[:, t].long()], f"state {t}")
            single["pool"][indices[:, t].long()] = single["pool"][piece["indices"].long()]
    if index != "each":
        assert_same_bits(single["pool"], call["pool"], "pool")


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("gate", ["lower_bound", "softplus", "log"])
def test_prefill_and_decode_are_one_prefill(target: Target, gate: str, layout: str) -> None:
    case = Case(B=2, T=40, H=2, HV=4, K=20, V=24, gate=gate, layout=layout)
    call = case.build(target.device)
    want, want_state = oracle(call)
    cut = 33
    head = {name: call[name][:, :cut] for name in ROWS}
    o, pool = run_kda(target, call | head)
    assert pool is not None
    options = {name: x for name, x in call.items() if name not in ("initial_state", "output_final_state")}
    more = {"indices": None, "num_accepted": None, "has_initial_state": None, "pad_index": -1, "write_states": True}
    rows = [o]
    for a, b in ((33, 34), (34, 38), (38, 40)):
        rows.append(run(target, options | more | {name: call[name][:, a:b] for name in ROWS} | {"pool": pool}))
    for n in range(2):
        assert_close(torch.cat(rows, 1)[n], want[n], target.tolerance, f"o of row {n}")
        assert_close(pool[n].transpose(0, 1), want_state[n].transpose(0, 1), target.tolerance, f"state {n}")


@pytest.mark.parametrize("name", [*ROWS, "pool"])
@pytest.mark.parametrize("case", [DecodeCase(BASE.but(T=3), padding=False), DecodeCase(BASE.but(T=3), index="each")])
def test_a_nan_stays_in_its_row(target: Target, case: DecodeCase, name: str) -> None:
    """And never reaches an earlier token."""
    call, clean = case.build(target.device), case.build(target.device)
    o = run(target, clean)
    spoilt = case.build(target.device)
    if name == "pool":
        slot = decoding.row_of(call, 2)[0]
        assert slot is not None
        spoilt["pool"][slot, 1, 2, 3] = torch.nan
    else:
        spoilt = spoil(spoilt, name, 2, 1)
    o2 = run(target, spoilt)
    others = [n for n in range(6) if n != 2]
    assert_same_bits(o2[others], o[others], "o of the other rows")
    if name != "pool":
        assert_same_bits(o2[2, 0], o[2, 0], "o of the token before")
    assert not bool(o2[2, 1].isfinite().all()), "the poison had no effect"
    mine = {*decoding.row_of(call, 2)[1].values(), decoding.row_of(call, 2)[0]}
    kept = [slot for slot in range(call["pool"].shape[0]) if slot not in mine]
    assert_same_bits(spoilt["pool"][kept], clean["pool"][kept], "slots of the other rows")


@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(BASE, known=True),
        DecodeCase(BASE.but(T=3), index="each", accepted=True, extra=1),
        DecodeCase(BASE.but(K=33, V=17), known=True),
    ],
)
def test_order_and_company_change_no_bit(target: Target, case: DecodeCase) -> None:
    whole = case.build(target.device)
    o = run(target, whole)
    for rows in ([5, 3, 0, 1, 4, 2], [4], [2, 0]):
        call = case.build(target.device)
        o2 = run(target, first_rows(call, rows))
        assert_same_bits(o2, o[rows], f"o of rows {rows}")
        written = [slot for n in rows for slot in decoding.row_of(call, n)[1].values()]
        assert_same_bits(call["pool"][written], whole["pool"][written], f"states of rows {rows}")


def test_packed_rows_are_batch_rows(target: Target) -> None:
    case = DecodeCase(BASE.but(T=3), index="each", accepted=True, known=True)
    call, packed = case.build(target.device), case.build(target.device)
    o = run(target, call)
    ends = torch.arange(0, 19, 3, dtype=torch.int32, device=target.device)
    o2 = run(target, packed | {name: packed[name].flatten(0, 1)[None] for name in ROWS} | {"cu_seqlens": ends})
    assert_same_bits(o2.view_as(o), o, "o")
    assert_same_bits(packed["pool"], call["pool"], "pool")


def test_a_wider_batch_row_is_not_read(target: Target) -> None:
    """Packed rows of one token beside rows that drafted more: the same path, the same bits as alone."""
    case = DecodeCase(PACKED.but(lengths=(1, 4, 1, 2)), index="each", accepted=True, padding=False, seed=9)
    call = case.build(target.device)
    o = run(target, call)
    alone = case.build(target.device)
    for n, (start, end) in enumerate(((0, 1), (1, 5), (5, 6), (6, 8))):
        row: dict[str, Any] = {name: alone[name][:, start:end] for name in ROWS}
        row |= {name: alone[name][n : n + 1] for name in ("indices", "num_accepted")}
        assert_same_bits(run(target, alone | row | {"cu_seqlens": None}), o[:, start:end], f"row {n}")
    assert_same_bits(alone["pool"], call["pool"], "pool")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parts_of_one_projection(target: Target, dtype: str) -> None:
    """q, k, v, g and beta as strided parts of one tensor; nothing is copied and nothing beside them is read."""
    case = DecodeCase(BASE.but(dtype=dtype, T=2), index="each")
    call = case.build(target.device)
    fused = decoding.in_one_projection(call, ROWS)
    kept = bits(fused).clone()
    decoding.check(target, case, call)
    assert torch.equal(bits(fused), kept)


def test_strided_indices_and_pools(target: Target) -> None:
    """A column of a wider table, every second count, a pool with gaps and with heads before slots."""
    case = DecodeCase(BASE.but(T=2), index="each", accepted=True, known=True)
    call = case.build(target.device)
    table = torch.full((6, 9), 3, dtype=torch.int32, device=target.device)
    table[:, 1:8:4] = call["indices"]
    call["indices"] = table[:, 1:8:4]
    for name in ("num_accepted", "has_initial_state"):
        call[name] = call[name].repeat_interleave(2)[::2]
    pool = call["pool"]
    wide = torch.full((4, pool.shape[0], 24, 29), torch.nan, dtype=pool.dtype, device=target.device)
    call["pool"] = wide.transpose(0, 1)[..., 4:24].copy_(pool)
    beside = bits(wide[..., 24:]).clone()
    decoding.check(target, case, call)
    assert torch.equal(bits(wide[..., 24:]), beside)
    column = DecodeCase(BASE).build(target.device)
    column["indices"] = torch.stack([column["indices"]] * 3, 1)[:, 1]
    decoding.check(target, DecodeCase(), column)


def test_one_pool_of_all_layers(target: Target) -> None:
    """A layer's pool as a slice of a pool of all layers: slots far apart."""
    case = DecodeCase(BASE)
    call = case.build(target.device)
    layers = torch.full((call["pool"].shape[0], 3, *call["pool"].shape[1:]), torch.nan, device=target.device)
    layers[:, 1] = call["pool"]
    call["pool"] = layers[:, 1]
    decoding.check(target, case, call)
    assert bool(layers[:, 0].isnan().all())
    assert bool(layers[:, 2].isnan().all())


def test_out(target: Target) -> None:
    case = DecodeCase(BASE.but(T=2), index="each")
    decoding.check_out(target, run, lambda: case.build(target.device))


def test_uninitialised_memory_is_not_read(target: Target) -> None:
    case = DecodeCase(PACKED.but(lengths=(1, 0, 3), tail=4), known=True)
    torch.use_deterministic_algorithms(True)
    try:
        decoding.check(target, case)
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradients_are_refused(target: Target) -> None:
    call = DecodeCase(BASE).build(target.device)
    for name in ("q", "beta", "pool"):
        wanted = call | {name: call[name].clone().requires_grad_()}
        with pytest.raises(NotImplementedError, match="no gradient"):
            flash_kda.kda_decode(**wanted, backend=target.backend)
        with torch.no_grad():
            run(target, wanted)


def test_a_layer_under_inference_mode(target: Target) -> None:
    with torch.inference_mode():
        decoding.check(target, DecodeCase(BASE))


@st.composite
def verifications(draw: st.DrawFn) -> DecodeCase:
    """Drafts of any lengths with any accepted counts."""
    packed = draw(st.booleans())
    lengths = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=6)))
    layout = draw(st.sampled_from(["vk", "kv"]))
    rows = Case(
        B=1 if packed else draw(st.integers(1, 6)), T=draw(st.integers(1, 6)), lengths=lengths if packed else None, H=1,
        HV=draw(st.integers(1, 2)), K=16, V=draw(st.sampled_from([16, 24])), layout=layout,
        tail=draw(st.integers(0, 2)) if packed else 0, gate=draw(st.sampled_from(["lower_bound", "softplus"])),
        state_dtype=draw(st.sampled_from(["float32", "bfloat16"])), seed=draw(st.integers(0, 100)),
    )  # fmt: skip
    return DecodeCase(
        rows, index="each", extra=draw(st.integers(0, 2)), accepted=True, known=draw(st.booleans()),
        padding=draw(st.booleans()), pad=draw(st.sampled_from([-1, 0])), write=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )  # fmt: skip


@settings(SETTINGS, max_examples=60)
@given(case=verifications())
def test_drawn_verifications(target: Target, case: DecodeCase) -> None:
    decoding.check(target, case)


@settings(SETTINGS, max_examples=10)
@given(accepted=st.lists(st.integers(1, 4), min_size=3, max_size=6), seed=st.integers(0, 100))
def test_a_speculative_run_is_a_plain_run(target: Target, accepted: list[int], seed: int) -> None:
    """Drafts of four tokens, of which the first few count: the kept tokens' outputs are those of plain decoding.

    The drafts that were not accepted hold other values, and leave no trace.
    """
    T, W = sum(accepted), 4
    case = unrounded(target, Case(B=1, T=T, H=1, HV=2, K=16, V=24, seed=seed))
    plain = case.build(target.device)
    options = {name: x for name, x in plain.items() if name not in ("initial_state", "output_final_state", *ROWS)}
    options |= {"has_initial_state": None, "pad_index": -1, "write_states": True}
    one = torch.zeros(1, dtype=torch.int32, device=target.device)
    pool, outputs = plain["initial_state"].clone(), []
    for t in range(T):
        token = {name: plain[name][:, t : t + 1] for name in ROWS}
        outputs.append(run(target, options | token | {"pool": pool, "indices": one, "num_accepted": None}))
    slots = torch.full((6, *pool.shape[1:]), torch.nan, dtype=pool.dtype, device=target.device)
    slots[2] = plain["initial_state"][0]
    indices = torch.tensor([[2, 5, 0, 3]], dtype=torch.int32, device=target.device)
    count, at = 0, 0
    for kept in accepted:
        draft = {}
        for name in ROWS:
            x = plain[name][:, at : at + W]
            noise = torch.full((1, W, *x.shape[2:]), 7.0, dtype=x.dtype, device=x.device)
            noise[:, :kept] = x[:, :kept]
            draft[name] = noise
        counts = torch.tensor([count], device=target.device)
        o = run(target, options | draft | {"pool": slots, "indices": indices, "num_accepted": counts})
        for i in range(kept):
            assert_same_bits(o[:, i : i + 1], outputs[at + i], f"token {at + i}")
        at, count = at + kept, kept
    assert_same_bits(slots[indices[0, count - 1].long()], pool[0], "state")
    assert bool(slots[[1, 4]].isnan().all())
