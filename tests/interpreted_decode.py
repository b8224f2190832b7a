"""The decode kernel in Triton's interpreter, on CPU tensors: ``python interpreted_decode.py [name ...]`` prints JSON.

A process of its own for the reason given in ``interpreted``, and float32 throughout for the same one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from cases import Call, Case, heads_first, spans_of
from compare import assert_same_bits
from decoding import BASE, PACKED, ROWS, DecodeCase, assert_decoded, checked
from interpreting import main
from torch import Tensor

from flash_kda.backends.triton.config import DecodeConfig, Device, configure_decode
from flash_kda.types import DecodeInputs, gate_parameters

TOLERANCE = 1e-5
# Few multiprocessors ask for few programs, which the interpreter runs one after the other.
DEVICE = Device(90, 1, 232448, 233472)


def launch(call: Call, config: DecodeConfig | None = None, out: Tensor | None = None) -> Tensor:
    """One launch, with NaN in the output before it."""
    return launch_checked(checked(call), config, torch.empty(call["v"].shape) if out is None else out)


def launch_checked(call: DecodeInputs, config: DecodeConfig | None, out: Tensor) -> Tensor:
    from flash_kda.backends.triton import decode_launch

    out.fill_(torch.nan)
    if config is None:
        config = configure_decode(call.problem, DEVICE, call.inputs.state_layout)
    tensors = (*call.tensors[:-1], out, *gate_parameters(call.inputs.gate))
    decode_launch.plan(call, config, out)(tensors)
    return out


def check(case: DecodeCase, config: DecodeConfig | None = None) -> None:
    """Output and pool against the definition."""
    call = case.build()
    before = call["pool"].clone()
    o = launch(call, config)
    assert_decoded(call, before, o, TOLERANCE)


def strided() -> None:
    """Everything a part of something larger, with heads before tokens, slots and rows."""
    case = DecodeCase(BASE.but(T=2), index="each", accepted=True, known=True)
    call = case.build()
    heads_first(call)
    for name in ("indices", "num_accepted", "has_initial_state"):
        call[name] = call[name].repeat_interleave(2, dim=-1)[..., ::2]
    pool = torch.full((4, call["pool"].shape[0], 24, 26), torch.nan).transpose(0, 1)
    call["pool"] = pool[..., 3:23].copy_(call["pool"])
    before = call["pool"].clone()
    out = torch.empty(6, 4, 2, 29).transpose(1, 2)[..., 2:26]
    assert_decoded(call, before, launch(call, out=out), TOLERANCE)


def far_slots() -> None:
    """Offsets beyond 2^31 elements: 64-bit arithmetic, on a pool in a file of which only two pages exist."""
    case = DecodeCase(Case(B=2, T=1, H=1, K=16, V=16), padding=False)
    call = case.build()
    states = call["pool"][call["indices"].long()].clone()
    slots = 2**23 + 2
    with tempfile.NamedTemporaryFile() as file:
        pool = torch.from_file(file.name, shared=True, size=slots * 256).view(slots, 1, 16, 16)
        call |= {"pool": pool, "indices": torch.tensor([slots - 1, 3], dtype=torch.int32)}
        pool[call["indices"].long()] = states
        o = launch(call)
        small = case.build()
        assert_same_bits(o, launch(small), "o")
        assert_same_bits(pool[call["indices"].long()], small["pool"][small["indices"].long()], "states")


def same_bits(index: str) -> None:
    """Tokens at once are tokens one by one, in any order of the rows, and packed."""
    case = DecodeCase(BASE.but(T=3), index=index, padding=False)
    call, single = case.build(), case.build()
    o = launch(call)
    for t in range(3):
        piece: Call = {name: single[name][:, t : t + 1] for name in ROWS}
        if index == "each":
            piece["indices"] = single["indices"][:, max(t - 1, 0)]
        assert_same_bits(launch(single | piece), o[:, t : t + 1], f"token {t}")
        if index == "each":
            single["pool"][single["indices"][:, t].long()] = single["pool"][piece["indices"].long()]
    for n in range(6):
        (slot, last) = (n, 2) if index == "own" else (call["indices"][n, 2], 2)
        assert_same_bits(single["pool"][slot], call["pool"][slot], f"state {n} after token {last}")
    packed = case.build()
    ends = torch.arange(0, 19, 3)
    rows = {name: packed[name].flatten(0, 1)[None] for name in ROWS}
    assert_same_bits(launch(packed | rows | {"cu_seqlens": ends}).view_as(o), o, "packed")
    order = [4, 0, 5, 1, 3, 2]
    again = case.build()
    rows = {name: again[name][order] for name in ROWS}
    if index == "own":
        again["pool"][:6] = again["pool"][order]
    else:
        rows["indices"] = again["indices"][order]
    assert_same_bits(launch(again | rows), o[order], "another order")


def spoilt(name: str, case: DecodeCase) -> None:
    """A NaN in one row: the others and its own earlier token keep their bits."""
    call, clean = case.build(), case.build()
    o = launch(clean)
    x = call[name].clone()
    x[2, 1] = torch.nan
    o2 = launch(call | {name: x})
    others = [n for n in range(6) if n != 2]
    assert_same_bits(o2[others], o[others], "o of the other rows")
    assert_same_bits(o2[2, 0], o[2, 0], "o of the token before")
    assert not bool(o2[2, 1].isfinite().all()), "the poison had no effect"


def beyond_the_width() -> None:
    """A packed row longer than its slots, which no check can see on a GPU: all outputs, and as many states."""
    case = DecodeCase(PACKED.but(lengths=(2, 2)), index="each", padding=False)
    call = case.build()
    before = call["pool"].clone()
    longer = {name: torch.cat([call[name], call[name][:, :1]], 1) for name in ROWS}
    meant = call | longer | {"cu_seqlens": torch.tensor([0, 2, 5]), "indices": call["indices"]}
    wide = torch.cat([call["indices"], torch.full((2, 1), -1, dtype=torch.int32)], 1)
    expected = launch(meant | {"indices": wide})
    after, call["pool"][:] = call["pool"].clone(), before
    narrow = replace(checked(meant | {"indices": wide}), indices=call["indices"])
    out = launch_checked(narrow, None, torch.empty_like(expected))
    assert_same_bits(out, expected, "o")
    assert_same_bits(call["pool"], after, "pool")
    assert spans_of(meant)[1] == (0, 2, 5)


_PLAIN = (
    *(
        DecodeCase(BASE.but(gate=gate, strength=s, T=T), index=index)
        for gate, s, T, index in (
            ("lower_bound", "strong", 1, "one"),
            ("lower_bound", "slow", 2, "each"),
            ("lower_bound", "saturated", 1, "own"),
            ("softplus", "strong", 1, "each"),
            ("softplus", "slow", 2, "one"),
            ("softplus", "saturated", 2, "own"),
            ("log", "hostile", 3, "each"),
            ("log", "strong", 1, "own"),
        )
    ),
    DecodeCase(BASE.but(A_log=False, dt_bias=None)),
    DecodeCase(BASE.but(A_log=False, dt_bias=None, gate="softplus")),
    DecodeCase(BASE.but(dt_bias="flat", lower_bound=-0.01)),
    DecodeCase(BASE.but(layout="kv", T=2), index="each"),
    DecodeCase(BASE.but(layout="kv"), known=True),
    *(
        DecodeCase(Case(B=2, T=1, H=1, K=K, V=V), padding=False)
        for K, V in ((16, 256), (256, 16), (60, 100), (130, 70))
    ),
    DecodeCase(BASE.but(H=1, HV=3)),
    DecodeCase(BASE.but(B=9), pad=0),
    DecodeCase(BASE.but(B=9, T=3), index="each", extra=1, accepted=True, seed=1),
    DecodeCase(BASE.but(B=9, T=3), index="each", accepted=True, pad=0, seed=2, index_dtype="int64"),
    DecodeCase(BASE.but(B=9), index="each", extra=3, accepted=True, known=True, seed=3),
    DecodeCase(BASE.but(T=2), index="each", accepted=True, write=False, seed=4),
    DecodeCase(BASE, write=False),
    DecodeCase(BASE.but(T=2), index="own", known=True, index_dtype="int64"),
    DecodeCase(PACKED.but(lengths=(1, 3, 0, 2, 1, 0), tail=5)),
    DecodeCase(PACKED.but(lengths=(1, 3, 0, 2), cu_dtype="int32"), index="each", accepted=True, seed=5),
    DecodeCase(PACKED.but(lengths=(1, 3, 0, 2), tail=1, layout="kv"), index="own", known=True),
    DecodeCase(PACKED.but(lengths=(0, 0), tail=3)),
    DecodeCase(PACKED.but(lengths=(1,), tail=9), padding=False),
    DecodeCase(BASE.but(neg=True, strength="slow", T=2)),
    DecodeCase(BASE.but(l2norm=False)),
    DecodeCase(BASE.but(logit=False, scale=-0.3)),
    DecodeCase(BASE.but(T=16, B=2, H=1, HV=1), index="each"),
)
CASES: dict[str, Callable[[], None]] = {
    **{str(case): partial(check, case) for case in _PLAIN},
    **{f"BV={BV}": partial(check, DecodeCase(BASE.but(B=2)), DecodeConfig(32, BV, 1)) for BV in (1, 8, 64)},
    "strided": strided,
    "far slots": far_slots,
    **{f"same bits, {index}": partial(same_bits, index) for index in ("own", "each")},
    **{f"spoilt {name}": partial(spoilt, name, DecodeCase(BASE.but(T=3), index="each")) for name in ROWS},
    "beyond the width": beyond_the_width,
}


if __name__ == "__main__":
    main(CASES)
