"""The kernel of the decode step in Triton's interpreter: ``python interpreted_step.py [name ...]`` prints JSON.

A process of its own for the reason given in ``interpreted``. bfloat16 rounds as on a GPU by ``rounding``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from unittest import mock

import torch
from cases import Call, Case
from compare import assert_same_bits
from decoding import BASE, DecodeCase, in_one_projection
from interpreting import main
from rounding import as_on_a_gpu
from stepping import CONVOLVED, ROWS, StepCase, assert_stepped, checked, rows_case
from torch import Tensor

from flash_kda.backends.triton.config import StepConfig, configure_step
from flash_kda.types import gate_parameters

TOLERANCE = 1e-5


def launch(call: Call, config: StepConfig | None = None, out: Tensor | None = None) -> Tensor:
    """One launch, with NaN in the output before it."""
    from flash_kda.backends.triton import step_launch

    step = checked(call)
    out = torch.empty(call["v"].shape, dtype=call["v"].dtype) if out is None else out
    out.fill_(torch.nan)
    if config is None:
        config = configure_step(step.problem, call["state_layout"])
    tensors = (*step.tensors[:-1], out, *gate_parameters(call["gate"]))
    step_launch.plan(step, config, out)(tensors)
    return out


def check(case: StepCase, config: StepConfig | None = None, call: Call | None = None) -> None:
    """Output and pools against the definition."""
    call = case.build() if call is None else call
    pools = call["pool"].clone(), call["conv_pool"].clone()
    rounds = "bfloat16" in str(case)
    with as_on_a_gpu() if rounds else nullcontext():
        o = launch(call, config)
    assert_stepped(call, pools, o, TOLERANCE)


def strided() -> None:
    """Everything a part of something larger, with heads before rows and slots, channels before taps."""
    case = StepCase(DecodeCase(BASE, known=True), bias=True)
    call = case.build()
    for name in ("q", "k", "v", "g", "z"):
        x = call[name]
        wide = torch.full((x.shape[2], x.shape[0], 1, x.shape[3] + 3), torch.nan)
        call[name] = wide.permute(1, 2, 0, 3)[..., 1:-2].copy_(x)
    call["beta"] = torch.full((6, 1, 4, 2), torch.nan)[..., 1].copy_(call["beta"])
    for name in ("indices", "has_initial_state"):
        call[name] = call[name].repeat_interleave(2)[::2]
    slots = len(call["pool"])
    call["pool"] = torch.full((4, slots, 24, 26), torch.nan).transpose(0, 1)[..., 3:23].copy_(call["pool"])
    call["conv_pool"] = torch.full((slots, 2, 176, 3), torch.nan)[:, 1].mT.copy_(call["conv_pool"])
    taps = [x.T.contiguous().T for x in call["conv_weights"]]
    call["conv_weights"] = [taps[0], torch.stack([taps[1]] * 2, 1)[:, :1], call["conv_weights"][2]]
    pools = call["pool"].clone(), call["conv_pool"].clone()
    out = torch.empty(4, 6, 1, 29).permute(1, 2, 0, 3)[..., 2:26]
    assert_stepped(call, pools, launch(call, out=out), TOLERANCE)


def one_projection() -> None:
    """q, k, v, g, beta and z as parts of one tensor with NaN around them."""
    case = StepCase()
    call = case.build()
    in_one_projection(call, ROWS)
    check(case, call=call)


def filters_of_their_own_dtypes() -> None:
    """Each of the three filters and biases has one, whatever the others have."""
    case = StepCase(DecodeCase(BASE, known=True), bias=True)
    for dtypes in ((torch.bfloat16, torch.float32, torch.float16), (torch.float32, torch.float16, torch.bfloat16)):
        call = case.build()
        for name in ("conv_weights", "conv_biases"):
            call[name] = [x.to(dtype) for x, dtype in zip(call[name], dtypes, strict=True)]
        check(case, call=call)


def far_slots() -> None:
    """Offsets beyond 2^31 elements in both pools, which lie in files of which only a few pages exist."""
    case = StepCase(DecodeCase(Case(B=2, T=1, H=1, K=16, V=16), padding=False))
    call, small = case.build(), case.build()
    at, slots = call["indices"].long(), 2**24
    with tempfile.NamedTemporaryFile() as states, tempfile.NamedTemporaryFile() as inputs:
        far = {
            "pool": torch.from_file(states.name, shared=True, size=slots * 256).view(slots, 1, 16, 16),
            "conv_pool": torch.from_file(inputs.name, shared=True, size=slots * 144).view(slots, 3, 48),
        }
        where = torch.tensor([slots - 1, 3])
        for name, pool in far.items():
            assert pool.numel() > 2**31
            pool[where] = call[name][at]
        o = launch(call | far | {"indices": where.int()})
        assert_same_bits(o, launch(small), "o")
        for name, pool in far.items():
            assert_same_bits(pool[where], small[name][at], name)


def far_inputs() -> None:
    """The last inputs of a row more than 2^31 elements apart."""
    case = StepCase(DecodeCase(Case(B=2, T=1, H=1, K=16, V=16), padding=False))
    call, small = case.build(), case.build()
    slots, apart = len(call["pool"]), 2**30 + 2**10
    with tempfile.NamedTemporaryFile() as inputs:
        file = torch.from_file(inputs.name, shared=True, size=3 * apart)
        call["conv_pool"] = file.as_strided((slots, 3, 48), (48, apart, 1)).copy_(call["conv_pool"])
        assert_same_bits(launch(call), launch(small), "o")
        assert_same_bits(call["conv_pool"], small["conv_pool"], "conv_pool")


def same_bits() -> None:
    """In another order, and alone."""
    case = StepCase(DecodeCase(BASE, padding=False), bias=True)
    call = case.build()
    o = launch(call)
    for order in ([4, 0, 5, 1, 3, 2], [3]):
        again = case.build()
        rows = {name: again[name][order] for name in (*ROWS, "indices")}
        assert_same_bits(launch(again | rows), o[order], f"o of rows {order}")
        at = call["indices"][order].long()
        for name in ("pool", "conv_pool"):
            assert_same_bits(again[name][at], call[name][at], f"{name} of rows {order}")


def spoilt(name: str) -> None:
    """A NaN in one row: the others keep their bits."""
    case = StepCase(DecodeCase(BASE, padding=False))
    call, clean = case.build(), case.build()
    o = launch(clean)
    call[name][2, 0] = torch.nan
    o2 = launch(call)
    others = [n for n in range(6) if n != 2]
    assert_same_bits(o2[others], o[others], "o of the other rows")
    assert not bool(o2[2].isfinite().all()), "the poison had no effect"


def opposite_order() -> None:
    """The interpreter runs one program after the other: what one writes, none before or after it reads."""
    from triton.runtime import interpreter

    case = StepCase(DecodeCase(BASE.but(H=2, HV=6), padding=False))
    first, last = case.build(), case.build()
    o = launch(first)
    programs, set_index = 6 * 2, interpreter.InterpreterBuilder.set_grid_idx

    def mirrored(self: interpreter.InterpreterBuilder, x: int, y: int, z: int) -> None:
        set_index(self, programs - 1 - x, y, z)

    with mock.patch.object(interpreter.InterpreterBuilder, "set_grid_idx", mirrored):
        assert_same_bits(launch(last), o, "o")
    for name in ("pool", "conv_pool"):
        assert_same_bits(last[name], first[name], name)


_PLAIN = (
    *(
        StepCase(DecodeCase(BASE.but(gate=gate, strength=s), index=index), bias=bias)
        for gate, s, index, bias in (
            ("lower_bound", "strong", "one", False),
            ("lower_bound", "saturated", "own", True),
            ("softplus", "strong", "one", True),
            ("softplus", "slow", "own", False),
            ("log", "hostile", "one", False),
        )
    ),
    rows_case(A_log=False, dt_bias=None),
    rows_case(dt_bias="flat", lower_bound=-0.01),
    rows_case(layout="kv"),
    StepCase(DecodeCase(BASE.but(layout="kv", state_dtype="bfloat16"), known=True), conv_dtype="bfloat16"),
    StepCase(DecodeCase(BASE.but(dtype="bfloat16", state_dtype="bfloat16")), conv_dtype="bfloat16", z_dtype="bfloat16"),
    rows_case(dtype="bfloat16"),
    StepCase(weight_dtype="bfloat16", bias=True),
    *(
        StepCase(DecodeCase(Case(B=2, T=1, H=1, HV=HV, K=K, V=V), padding=False), bias=True)
        for K, V, HV in ((16, 256, 1), (256, 16, 1), (60, 100, 2), (130, 70, 1), (256, 160, 1), (16, 16, 3))
    ),
    rows_case(H=1, HV=3),
    StepCase(DecodeCase(BASE.but(B=9), pad=0)),
    StepCase(DecodeCase(BASE.but(B=9), known=True, pad=0), bias=True),
    StepCase(DecodeCase(BASE, index="own", known=True, index_dtype="int64")),
    *(StepCase(W=W, bias=W % 2 == 1) for W in (1, 2, 3, 5)),
    rows_case(neg=True, strength="slow"),
    rows_case(l2norm=False),
    rows_case(logit=False, scale=-0.3),
    StepCase(eps=0.5),
)
CASES: dict[str, Callable[[], None]] = {
    **{str(case): partial(check, case) for case in _PLAIN},
    **{
        f"BV={BV}": partial(check, StepCase(DecodeCase(BASE.but(B=2)), bias=True), StepConfig(32, BV, 1, *tile, None))
        for BV, tile in ((1, (1, 32)), (8, (2, 16)), (32, (8, 4)), (64, (64, 32)))
    },
    "strided": strided,
    "one projection": one_projection,
    "filters of their own dtypes": filters_of_their_own_dtypes,
    "far slots": far_slots,
    "far inputs": far_inputs,
    "same bits": same_bits,
    "opposite order": opposite_order,
    **{f"spoilt {name}": partial(spoilt, name) for name in (*CONVOLVED, "g", "beta", "z")},
}


if __name__ == "__main__":
    main(CASES)
