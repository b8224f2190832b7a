"""The cases of ``kda_decode_step``: printable values that build a call, and what must come of it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import decoding
import numpy as np
import torch
from cases import Call, Case, Target, changed_fields, run_on
from compare import assert_close, assert_rows, assert_same_bits, unchanged
from decoding import BASE, TOLERANCE, DecodeCase
from torch import Tensor

import flash_kda
from flash_kda.checks_step import check_step
from flash_kda.types import StepInputs

CONVOLVED = ("q", "k", "v")
ROWS = (*decoding.ROWS, "z")
OPTIONS = ("gate", "scale", "qk_l2norm", "beta_is_logit", "allow_neg_eigval", "state_layout", "pad_index")


@dataclass(frozen=True)
class StepCase:
    """A call to ``kda_decode_step`` by its description.

    Args:
        decode: rows of one token, slots and padding: ``own`` slots or ``one``.
        W: of the convolutions. bias: whether they have one.
        conv_dtype, weight_dtype: of their pool, and of all weights and biases, that of the norm too.
        z_dtype: of the output gate.
    """

    decode: DecodeCase = field(default_factory=DecodeCase)
    W: int = 4
    bias: bool = False
    conv_dtype: str = "float32"
    weight_dtype: str = "float32"
    z_dtype: str = "float32"
    eps: float = 1e-5

    def __str__(self) -> str:
        return changed_fields(self, "decode")

    def build(self, device: str = "cpu") -> Call:
        """Arguments; NaN fills the slots of both pools that no row reads."""
        rng = torch.Generator().manual_seed(self.decode.seed + 1000)

        def normal(*shape: int, dtype: str) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64).to(getattr(torch, dtype))

        call = self.decode.build()
        assert self.decode.index in ("own", "one")
        assert call["q"].shape[1] == 1
        channels = [call[name].shape[2] * call[name].shape[3] for name in CONVOLVED]
        conv_pool = normal(call["pool"].shape[0], self.W - 1, sum(channels), dtype=self.conv_dtype)
        found = [decoding.row_of(call, n) for n in range(call["q"].shape[0])]
        read = [slot for slot, _, fresh in found if slot is not None and not fresh]
        conv_pool[[slot for slot in range(len(conv_pool)) if slot not in read]] = torch.nan
        rows = {name: call[name] for name in (*decoding.ROWS, "pool", "indices", "has_initial_state", *OPTIONS)}
        weights = [normal(n, self.W, dtype=self.weight_dtype) for n in channels]
        biases = [normal(n, dtype=self.weight_dtype) for n in channels]
        built: Call = rows | {
            "z": normal(*call["v"].shape, dtype=self.z_dtype),
            "conv_pool": conv_pool,
            "conv_weights": weights,
            "conv_biases": biases if self.bias else None,
            "norm_weight": normal(call["v"].shape[3], dtype=self.weight_dtype),
            "norm_eps": self.eps,
        }
        return on_device(built, device)


def on_device(call: Call, device: str) -> Call:
    from cases import on_device as gate_on_device

    def move(x: Any) -> Any:
        if isinstance(x, list):
            return [move(y) for y in x]
        return x.to(device) if isinstance(x, Tensor) else x

    return {name: move(x) for name, x in call.items()} | {"gate": gate_on_device(call["gate"], device)}


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def expected(call: Call) -> tuple[Tensor, dict[int, Tensor], dict[int, Tensor]]:
    """Output in float64, and of every slot that is written the state and the last inputs.

    From the definition of each part, in numpy float64, sharing no line with the package.
    """
    plain = call | {"num_accepted": None, "write_states": True, "cu_seqlens": None}
    rows = {name: call[name].double().numpy() for name in (*CONVOLVED, "z")}
    mixed = {name: np.zeros(rows[name].shape) for name in CONVOLVED}
    kept: dict[int, Tensor] = {}
    for n in range(call["q"].shape[0]):
        slot, _, fresh = decoding.row_of(plain, n)
        if slot is None:
            continue
        before = torch.zeros_like(call["conv_pool"][slot]) if fresh else call["conv_pool"][slot]
        x = torch.cat([call[name][n].flatten() for name in CONVOLVED])
        kept[slot] = torch.cat([before, x[None].to(before.dtype)])[1:]
        window, start = np.concatenate([before.double().numpy(), x[None].double().numpy()]), 0
        for i, name in enumerate(CONVOLVED):
            shape = rows[name].shape[2:]
            part = window[:, start : start + np.prod(shape)]
            start += part.shape[1]
            y = np.einsum("wc,cw->c", part, call["conv_weights"][i].double().numpy().reshape(part.shape[1], -1))
            if call["conv_biases"] is not None:
                y = y + call["conv_biases"][i].double().numpy()
            mixed[name][n, 0] = (y * sigmoid(y)).reshape(shape)
    o, written = decoding.expected(plain | {name: torch.from_numpy(x) for name, x in mixed.items()})
    size = np.sqrt((o.numpy() ** 2).mean(-1, keepdims=True) + call["norm_eps"])
    out = o.numpy() / size * call["norm_weight"].double().numpy() * sigmoid(rows["z"])
    return torch.from_numpy(out), written, kept


def checked(call: Call) -> StepInputs:
    """The call as the checks pass it on."""
    biases = call["conv_biases"] or (None, None, None)
    names = [f"{row}_{part}" for part in ("weight", "bias") for row in CONVOLVED]
    parts = dict(zip(names, (*call["conv_weights"], *biases), strict=True)) | {"out": call.get("out")}
    return check_step(**{name: (call | parts)[name] for name in inspect.signature(check_step).parameters})


def run(target: Target, call: Call, **changes: Any) -> Tensor:
    """``kda_decode_step`` on the target."""
    call = call | changes
    o: Tensor = run_on(target, flash_kda.kda_decode_step, call, checked(call).problem)
    return o


def assert_stepped(call: Call, pools: tuple[Tensor, Tensor], o: Tensor, tolerance: float) -> None:
    """Output and both pools against the definition: each row and slot by itself, all other slots bit for bit.

    Args:
        call: with the pools as they are after the call. pools: before it.
    """
    before = call | dict(zip(("pool", "conv_pool"), pools, strict=True))
    out, states, inputs = expected(before)
    padding = {n for n in range(len(o)) if decoding.row_of(before, n)[0] is None}
    assert_rows(o, out, before, padding, tolerance)
    for slot in range(len(pools[0])):
        if slot not in states:
            assert_same_bits(call["pool"][slot], pools[0][slot], f"state in slot {slot}, which is none's")
            assert_same_bits(call["conv_pool"][slot], pools[1][slot], f"inputs in slot {slot}, which is none's")
            continue
        state = call["pool"][slot].transpose(0, 1)
        assert_close(state, states[slot].transpose(0, 1), tolerance, f"state in slot {slot}")
        assert_same_bits(call["conv_pool"][slot], inputs[slot], f"inputs in slot {slot}")


def check(target: Target, case: StepCase, call: Call | None = None) -> None:
    """A case on a target against the definition; inputs keep their bits."""
    call = case.build(target.device) if call is None else call
    pools = call["pool"].cpu().clone(), call["conv_pool"].cpu().clone()
    with unchanged(call, "pool", "conv_pool"):
        o = run(target, call)
    assert o.dtype == call["v"].dtype
    assert o.is_contiguous()
    assert_stepped(on_device(call, "cpu"), pools, o.cpu(), TOLERANCE[target.backend])


def rows_case(**changes: Any) -> StepCase:
    """The base case with other rows."""
    return StepCase(DecodeCase(BASE.but(**changes)))


CASES: tuple[StepCase, ...] = (
    *(
        StepCase(DecodeCase(BASE.but(gate=gate, strength=s), index=index), bias=bias)
        for gate, s, index, bias in (
            ("lower_bound", "strong", "one", False),
            ("lower_bound", "slow", "one", True),
            ("lower_bound", "saturated", "own", False),
            ("softplus", "strong", "one", True),
            ("softplus", "slow", "own", False),
            ("softplus", "saturated", "one", False),
            ("log", "strong", "one", False),
            ("log", "hostile", "own", True),
        )
    ),
    *(
        rows_case(gate=gate, A_log=A_log, dt_bias=dt_bias)
        for gate in ("lower_bound", "softplus")
        for A_log, dt_bias in ((False, None), (False, "full"), (True, None), (True, "flat"))
    ),
    *(
        StepCase(DecodeCase(BASE.but(layout=layout, state_dtype=state, dtype=dtype), index=index), conv_dtype=conv)
        for layout in ("vk", "kv")
        for state in ("float32", "bfloat16")
        for dtype, conv, index in (
            ("bfloat16", "bfloat16", "one"),
            ("float32", "bfloat16", "own"),
            ("float16", "float32", "own"),
            ("bfloat16", "float16", "one"),
        )
    ),
    *(
        StepCase(DecodeCase(Case(B=3, T=1, H=1, HV=HV, K=K, V=V), index=index), bias=True)
        for (K, V, HV), index in zip(
            (
                *((16, 16, 1), (16, 256, 2), (256, 16, 1), (60, 100, 3), (100, 60, 1), (200, 130, 1)),
                *((128, 128, 1), (64, 40, 2), (128, 136, 2), (256, 160, 1)),
            ),
            ("one", "own") * 5,
            strict=True,
        )
    ),
    *(rows_case(H=H, HV=HV) for H, HV in ((1, 1), (1, 3), (5, 10), (3, 3))),
    *(StepCase(W=W, bias=bias) for W, bias in ((1, False), (1, True), (2, False), (3, True), (5, False), (8, True))),
    StepCase(weight_dtype="bfloat16", z_dtype="bfloat16", bias=True),
    StepCase(weight_dtype="float16", conv_dtype="float16", z_dtype="float16"),
    StepCase(eps=0.5),
    rows_case(B=0),
    StepCase(DecodeCase(BASE.but(B=0), index="own")),
    StepCase(DecodeCase(BASE.but(B=1), padding=False)),
    StepCase(DecodeCase(BASE.but(B=20, K=16, V=16), pad=0)),
    StepCase(DecodeCase(BASE, known=True), bias=True),
    StepCase(DecodeCase(BASE, index="own", known=True, index_dtype="int64")),
    StepCase(DecodeCase(BASE, index_dtype="int64")),
    rows_case(neg=True, strength="slow"),
    rows_case(l2norm=False),
    rows_case(logit=False, scale=-0.3),
    rows_case(l2norm=False, logit=False, gate="log", scale=1.0),
    rows_case(lower_bound=-0.01, scale=0.0),
)
WIDE = (
    rows_case(dtype="float64"),
    StepCase(
        DecodeCase(BASE.but(dtype="float64", state_dtype="float64")), conv_dtype="float64", weight_dtype="float64"
    ),
)
# For the backends that take any size.
SMALL = tuple(
    StepCase(DecodeCase(Case(B=3, T=1, H=1, K=K, V=V))) for K, V in ((1, 1), (1, 5), (5, 1), (3, 300), (300, 3))
)
