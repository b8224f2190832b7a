"""``kda_decode_step`` on every backend, against the definition in numpy float64, and the rules of its pools."""

from __future__ import annotations

import pytest
import stepping
import torch
from cases import Target, parameters, skip_if_declined, targets, tensors_of
from compare import assert_close, assert_same_bits, bits
from decoding import BASE, DecodeCase, check_out, first_rows, in_one_projection
from stepping import CASES, CONVOLVED, ROWS, SMALL, WIDE, StepCase, checked, rows_case, run
from torch.nn import functional as F

import flash_kda
from flash_kda.nn import GatedRMSNorm, ShortConvolution

pytestmark = pytest.mark.parametrize("target", targets())
POOLS = ("pool", "conv_pool")


@pytest.mark.parametrize("case", parameters((*CASES, *WIDE, *SMALL)))
def test_definition(target: Target, case: StepCase) -> None:
    stepping.check(target, case)


@pytest.mark.parametrize("bias", [False, True])
def test_it_is_its_parts_one_by_one(target: Target, bias: bool) -> None:
    """The layer's convolutions, ``kda_decode`` and the layer's norm, for six tokens that go on from each other."""
    case = StepCase(DecodeCase(BASE, index="own"), bias=bias)
    call, parts = case.build(target.device), case.build(target.device)
    skip_if_declined(target, checked(call).problem)
    norm = GatedRMSNorm(24, case.eps).to(target.device)
    norm.weight.data = parts["norm_weight"]
    convolutions, states = {}, {}
    for i, (name, state) in enumerate(zip(CONVOLVED, parts["conv_pool"][:6].split((40, 40, 96), -1), strict=True)):
        made = ShortConvolution(state.shape[-1], 4, bias).to(target.device)
        made.weight.data = parts["conv_weights"][i][:, None]
        if bias:
            made.bias.data = parts["conv_biases"][i]
        convolutions[name], states[name] = made, state
    options = {name: x for name, x in parts.items() if "conv" not in name and "norm" not in name and name not in ROWS}
    with torch.no_grad():
        for seed in range(6):
            rows = StepCase(DecodeCase(BASE.but(seed=seed), index="own", seed=seed)).build(target.device)
            rows = {name: rows[name] for name in ROWS}
            mixed = {name: rows[name] for name in ("g", "beta")}
            for name in CONVOLVED:
                y, states[name] = convolutions[name](rows[name].flatten(2), states[name])
                mixed[name] = y.view_as(rows[name])
            o = flash_kda.kda_decode(**options | mixed, backend=target.backend)
            want = norm(o, rows["z"])
            got = run(target, call | rows)
            for n in range(6):
                assert_close(got[n], want[n].double(), 3e-5, f"o of row {n}, token {seed}")
    for n in range(6):
        assert_close(call["pool"][n], parts["pool"][n].double(), 3e-5, f"state {n}")
    assert_same_bits(call["conv_pool"][:6], torch.cat([states[name] for name in CONVOLVED], -1), "last inputs")


def test_same_bits_twice(target: Target) -> None:
    case = StepCase(DecodeCase(BASE.but(B=20, H=3, HV=6, K=64, V=64), known=True), bias=True)
    first, *others = (case.build(target.device) for _ in range(3))
    o = run(target, first)
    for other in others:
        assert_same_bits(run(target, other), o, "o")
        for name in POOLS:
            assert_same_bits(other[name], first[name], name)


@pytest.mark.parametrize("name", [*ROWS, *POOLS])
def test_a_nan_stays_in_its_row(target: Target, name: str) -> None:
    case = StepCase(DecodeCase(BASE, padding=False))
    clean, spoilt = case.build(target.device), case.build(target.device)
    o = run(target, clean)
    if name in POOLS:
        spoilt[name][int(spoilt["indices"][2]), 1, 2] = torch.nan
    else:
        spoilt[name] = spoilt[name].clone()
        spoilt[name][2, 0] = torch.nan
    o2 = run(target, spoilt)
    others = [n for n in range(6) if n != 2]
    assert_same_bits(o2[others], o[others], "o of the other rows")
    assert not bool(o2[2].isfinite().all()), "the poison had no effect"
    kept = [slot for slot in range(len(clean["pool"])) if slot != int(clean["indices"][2])]
    for pool in POOLS:
        assert_same_bits(spoilt[pool][kept], clean[pool][kept], f"{pool} of the other rows")


def test_nan_rows_of_padding_are_not_read(target: Target) -> None:
    """The whole row, its output gate too, is zeros."""
    call = StepCase(DecodeCase(BASE)).build(target.device)
    padded = [n for n in range(6) if n % 2]
    for name in ROWS:
        call[name] = call[name].clone()
        call[name][padded] = torch.nan
    stepping.check(target, StepCase(), call)


@pytest.mark.parametrize(
    "case",
    [
        StepCase(DecodeCase(BASE, known=True), bias=True),
        StepCase(DecodeCase(BASE.but(K=33, V=17, H=1, HV=3), known=True)),
        StepCase(DecodeCase(BASE.but(dtype="bfloat16", K=64, V=64, state_dtype="bfloat16")), conv_dtype="bfloat16"),
    ],
    ids=str,
)
def test_order_and_company_change_no_bit(target: Target, case: StepCase) -> None:
    whole = case.build(target.device)
    o = run(target, whole)
    slots = len(whole["pool"])
    for rows in ([5, 3, 0, 1, 4, 2], [4], [2, 0]):
        call = case.build(target.device)
        assert_same_bits(run(target, first_rows(call, rows)), o[rows], f"o of rows {rows}")
        written = [int(s) for s in call["indices"][rows] if 0 <= int(s) < slots and int(s) != call["pad_index"]]
        for name in POOLS:
            assert_same_bits(call[name][written], whole[name][written], f"{name} of rows {rows}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parts_of_one_projection(target: Target, dtype: str) -> None:
    """q, k, v, g, beta and z as strided parts of one tensor; nothing is copied and nothing beside them is read."""
    case = StepCase(DecodeCase(BASE.but(dtype=dtype)), z_dtype=dtype)
    call = case.build(target.device)
    fused = in_one_projection(call, ROWS)
    kept = bits(fused).clone()
    stepping.check(target, case, call)
    assert torch.equal(bits(fused), kept)


def test_strides(target: Target) -> None:
    """A column of a table of indices, every second flag, pools with gaps, filters as engines keep them."""
    case = StepCase(DecodeCase(BASE, known=True), bias=True)
    call = case.build(target.device)
    call["indices"] = torch.stack([call["indices"]] * 3, 1)[:, 1]
    call["has_initial_state"] = call["has_initial_state"].repeat_interleave(2)[::2]
    pool, conv = call["pool"], call["conv_pool"]
    wide = torch.full((4, len(pool), 24, 29), torch.nan, device=target.device)
    call["pool"] = wide.transpose(0, 1)[..., 4:24].copy_(pool)
    # As an engine lays it out whose channels come first, in a pool of all layers.
    layers = torch.full((len(conv), 2, conv.shape[2], 3), torch.nan, device=target.device)
    call["conv_pool"] = layers[:, 1].mT.copy_(conv)
    beside = bits(wide[..., 24:]).clone(), bits(layers[:, 0]).clone()
    taps = [x.T.contiguous().T for x in call["conv_weights"]]
    call["conv_weights"] = [taps[0], torch.stack([taps[1]] * 2, 1)[:, :1], taps[2]]
    call["conv_biases"] = list(torch.cat(call["conv_biases"]).split((40, 40, 96)))
    stepping.check(target, case, call)
    assert torch.equal(bits(wide[..., 24:]), beside[0])
    assert torch.equal(bits(layers[:, 0]), beside[1])


def test_out(target: Target) -> None:
    check_out(target, run, lambda: StepCase().build(target.device))


def test_uninitialised_memory_is_not_read(target: Target) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        stepping.check(target, StepCase(DecodeCase(BASE, known=True)))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", [rows_case(dtype="bfloat16"), rows_case(dtype="float16")], ids=str)
def test_nothing_is_rounded_on_the_way(target: Target, case: StepCase) -> None:
    """The output of half-precision rows is that of the same rows in float32, rounded once."""
    half, full = case.build(target.device), case.build(target.device)
    for name in CONVOLVED:
        full[name] = full[name].float()
    o, want = run(target, half), run(target, full)
    assert o.dtype != want.dtype
    # A GPU compiles one kernel for either, and may round a last bit in one of them only.
    difference = (o != want.to(o.dtype)).double().mean()
    assert difference <= (0.02 if target.device == "cuda" else 0), difference


def test_gradients_are_refused(target: Target) -> None:
    call = StepCase(bias=True).build(target.device)
    for name in tensors_of(call):
        if name in ("indices", "has_initial_state"):
            continue
        wanted = call | {kind: list(call[kind]) for kind in ("conv_weights", "conv_biases")}
        kind, _, i = name.partition(" ")
        x = tensors_of(call)[name].clone().requires_grad_()
        if i:
            wanted[kind][int(i)] = x
        else:
            wanted[name] = x
        with pytest.raises(NotImplementedError, match="no gradient"):
            flash_kda.kda_decode_step(**wanted, backend=target.backend)
        with torch.no_grad():
            run(target, wanted)


def test_under_inference_mode(target: Target) -> None:
    with torch.inference_mode():
        stepping.check(target, StepCase())


def test_the_definition_is_torchs_own(target: Target) -> None:
    """One channel of each kind by torch's convolution and norm, in a row without a state: v alone comes through."""
    call = StepCase(DecodeCase(BASE.but(l2norm=False, logit=False, gate="log", scale=1.0), padding=False)).build()
    call["pool"].zero_()
    call = stepping.on_device(call, target.device)
    before = call["conv_pool"][call["indices"].long()]
    inputs = torch.cat([before, torch.cat([call[name].flatten(2) for name in CONVOLVED], -1)], 1).mT
    weight = torch.cat(call["conv_weights"])[:, None]
    mixed = F.silu(F.conv1d(inputs, weight, groups=len(weight)))[..., 0]
    q, k = (x.view(6, 2, 20).repeat_interleave(2, 1) for x in mixed[:, :80].split(40, -1))
    v = mixed[:, 80:].view(6, 4, 24)
    o = (q * k).sum(-1, keepdim=True) * call["beta"][:, 0, :, None] * v
    want = F.rms_norm(o, (24,), call["norm_weight"], 1e-5) * torch.sigmoid(call["z"][:, 0])
    got = run(target, call)
    for n in range(6):
        assert_close(got[n], want[n : n + 1].double(), 3e-5, f"o of row {n}")
