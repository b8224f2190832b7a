"""The Triton kernels in Triton's interpreter, on CPU tensors: ``python interpreted.py [name ...]`` prints JSON.

The interpreter is chosen by TRITON_INTERPRET=1 when triton is first imported, so these cases have a process of their
own. The output maps the name of each case to null, or to what went wrong.

Inputs and states are float32, but for one case: the interpreter multiplies the bit patterns of bfloat16 as integers,
and truncates where it should round to bfloat16, unless it is taught otherwise.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from cases import Call, Case, heads_first, inputs_of, oracle, spans_of
from compare import assert_outputs, assert_same_bits, assert_states
from compiling import H200
from cutting import cuts_of
from interpreting import main
from repeated import repeated_key, state_of_rounded_keys
from rounding import as_on_a_gpu
from torch import Tensor

from flash_kda.backends.triton.config import CHUNK

TOLERANCE = 2e-5


def launch(call: Call, out: Tensor, final: Tensor | None, *, finite: bool = True) -> None:
    """Both kernels. The recurrence must go through the tokens one by one if and only if its state is not ``finite``."""
    from flash_kda.backends.triton import forward, recurrence

    # Only that loop computes gates in the recurrence.
    watched = mock.patch.object(recurrence, "log2_decay", wraps=recurrence.log2_decay)
    with watched as one_by_one, mock.patch.object(forward, "device_facts", return_value=H200):
        forward.launch(inputs_of(call), out, final)
    assert one_by_one.called != finite, "token by token" if finite else "not token by token"


def run(
    call: Call, out: Tensor | None = None, final: Tensor | None = None, *, finite: bool = True
) -> tuple[Tensor, Tensor | None]:
    """:func:`launch` with NaN in everything that the kernels must write first."""
    inputs = inputs_of(call)
    if out is None:
        out = torch.empty(inputs.v.shape)
    if final is None and inputs.output_final_state:
        final = torch.empty(inputs.state_shape, dtype=inputs.state_dtype)
    for x in (out, final):
        if x is not None:
            x.fill_(math.nan)
    launch(call, out, final, finite=finite)
    return out, final


def check(call: Call, out: Tensor | None = None, final: Tensor | None = None, *, tolerance: float = TOLERANCE) -> None:
    """Output and final states against the definition in float64."""
    o, state = run(call, out, final)
    expected, expected_state = oracle(call)
    assert_outputs(o, expected, call, tolerance)
    assert (state is None) == (not call["output_final_state"])
    if state is not None:
        assert_states(state, expected_state, tolerance)


def constant_gate(g: float) -> None:
    """Log gates on both sides of what one anchor can serve: half a chunk decays by 2^-119 or 2^-121.

    Sums of log2 decays then reach 238, where one float32 rounding is 1e-5 and 32 additions cost up to 2e-4.
    """
    call = Case(gate="log", T=64).build()
    check(call | {"g": torch.full_like(call["g"], g)}, tolerance=2e-4)


def slow_and_hostile() -> None:
    """One sequence with chunks of either kind, and a channel that forgets everything at every token."""
    call = Case(gate="log", strength="hostile", T=96, K=20).build()
    g = call["g"].clone()
    g[:, 32:64] = -0.01 * torch.rand_like(g[:, 32:64])
    g[:, 64:, :, 3] = -math.inf
    check(call | {"g": g})


def with_hard(case: Case, hard: str) -> tuple[Call, int]:
    """A call of slow log gates but for all that is ``hard``; and how many chunks of value heads then are.

    Args:
        hard: "none", "all", one "head" or one "time", the last chunk of the first sequence with tokens.
    """
    call = case.build()
    g = -0.01 * torch.rand(call["g"].shape, generator=torch.Generator().manual_seed(5))
    HV = g.shape[2]
    spans = [(b, first, end) for b, first, end in spans_of(call) if end > first]
    chunks = sum(math.ceil((end - first) / 32) for _, first, end in spans)
    b, first, end = spans[0]
    last = first + (end - first - 1) // 32 * 32
    at, count = {
        "none": ((b, slice(0)), 0),
        "all": (..., chunks * HV),
        "head": ((..., HV - 1, slice(None)), chunks),
        "time": ((b, slice(last, end)), HV),
    }[hard]
    # 16 tokens, half a chunk, decay by 2^-138; no last chunk here has fewer.
    g[at] = -6.0
    return call | {"g": g}, count


def some_programs(programs: int | None) -> Any:
    """So many programs over hard chunks, by default one for each block."""
    from flash_kda.backends.triton import config

    return mock.patch.object(config.Config, "hard_programs", lambda self, blocks: programs or blocks)


def hard_chunks(case: Case, hard: str, programs: int) -> None:
    """So many programs for all hard chunks: right, and the bits of a program for each chunk."""
    from flash_kda.backends.triton import forward, prepare

    call, count = with_hard(case, hard)
    results = []
    for some in (None, programs):
        forward.plan.cache_clear()
        with some_programs(some), mock.patch.object(prepare, "_joined", wraps=prepare._joined) as joined:
            results.append(run(call))
        assert joined.call_count == count, f"{joined.call_count} hard chunks, expected {count}"
    forward.plan.cache_clear()
    for x, y, name in zip(*results, ("o", "state"), strict=True):
        assert_same_bits(x, y, name)
    expected, expected_state = oracle(call)
    assert_outputs(results[1][0], expected, call, 2e-4)
    assert_states(results[1][1], expected_state, 2e-4)


def strided() -> None:
    """Inputs, output and final state that are parts of larger tensors, with heads before tokens."""
    case = Case(B=2, T=40, H=2, HV=4, K=20, V=40)
    call = case.build()
    heads_first(call)
    call["initial_state"] = call["initial_state"].transpose(0, 1).contiguous().transpose(0, 1)
    out = torch.empty(2, 4, 40, 43).transpose(1, 2)[..., 2:-1]
    final = torch.empty(4, 2, 40, 22).transpose(0, 1)[..., :20]
    check(call, out, final)


def in_place() -> None:
    """The final state overwrites the initial one."""
    call = Case(T=40, V=40).build()
    given = call["initial_state"].clone()
    o, state = run(call)
    launch(call, out := torch.empty_like(o), call["initial_state"])
    assert_same_bits(out, o, "o")
    assert_same_bits(call["initial_state"], state, "state")
    assert not torch.equal(call["initial_state"], given)


def spoilt(name: str, gate: str, value: float) -> None:
    """One value at token 40 of the first sequence: what comes before and the other sequence do not notice."""
    call = Case(lengths=(50, 20), gate=gate, H=1, HV=2, tail=3).build()
    o, state = run(call)
    x = call[name].clone()
    x[0, 40].view(-1)[0] = value
    bad = call | {name: x}
    # A query enters no state.
    o2, state2 = run(bad, finite=name == "q")
    assert state is not None
    assert state2 is not None
    assert not o2[0, 40].isfinite().all(), "the poison had no effect"
    assert_outputs(o2, oracle(bad)[0], bad, TOLERANCE)
    assert_states(state2, oracle(bad)[1], TOLERANCE)
    _, first, end = spans_of(call)[1]
    assert_same_bits(o2[0, first:end], o[0, first:end], "o of the other sequence")
    assert_same_bits(state2[1], state[1], "the other state")


def one_key_in_half_precision() -> None:
    """What is wrong with the state is the rounding of decayed keys, which nothing takes back, and nothing else."""
    call = repeated_key(512, 128, 128, "cpu")
    with as_on_a_gpu():
        o, state = run(call)
    assert state is not None
    want, want_state = oracle(call)
    assert_outputs(o, want, call, 4e-3)
    rounded = state_of_rounded_keys(call, CHUNK)
    assert_states(state, rounded, 1e-3)
    assert (rounded - want_state).norm() > 0.02 * want_state.norm()


def same_bits() -> None:
    """Two runs agree bit for bit, and a sequence does not depend on its neighbours' lengths."""
    call = Case(lengths=(33, 0, 64, 5), gate="softplus", strength="strong").build()
    o, state = run(call)
    o2, state2 = run(call)
    assert_same_bits(o2, o, "o")
    assert_same_bits(state2, state, "state")
    one = {name: call[name][:, 33:97] for name in ("q", "k", "v", "g", "beta")}
    o3, state3 = run(call | one | {"initial_state": call["initial_state"][2:3], "cu_seqlens": None})
    assert state is not None
    assert_same_bits(o3, o[:, 33:97], "o alone")
    assert_same_bits(state3, state[2:3], "state alone")


def known_form(case: Case) -> None:
    """The second call of a form, of other tensors, and a third: the bits of checked ones."""
    import flash_kda
    from flash_kda import api
    from flash_kda.backends import triton as backend
    from flash_kda.backends.triton import forward

    calls = [case.but(seed=seed).build() for seed in (0, 1, 0)]
    expected = [run(call) for call in calls]
    with (
        mock.patch.object(backend, "supports", return_value=None),
        mock.patch.object(forward, "device_facts", return_value=H200),
        mock.patch.object(torch.cuda, "current_device", return_value=None),
        mock.patch.object(api, "check", wraps=api.check) as checked,
    ):
        results = [flash_kda.kda(**call, backend="triton") for call in calls]
    assert checked.call_count == 1, "checked again"
    for (o, state), (o2, state2) in zip(results, expected, strict=True):
        assert_same_bits(o, o2, "o")
        assert (state is None) == (state2 is None)
        if state is not None:
            assert_same_bits(state, state2, "state")


def in_parts(case: Case) -> None:
    """A workspace of 192 rows at most: the same bits as with room for all, in place too."""
    from flash_kda.backends.triton import forward

    call = case.build()
    o, state = run(call)
    inputs = inputs_of(call)
    out, final = torch.full_like(o, math.nan), call["initial_state"]
    launched = mock.patch.object(forward, "launch", wraps=forward.launch)
    with (
        mock.patch.object(forward, "MOST_ROWS", 192),
        mock.patch.object(forward, "device_facts", return_value=H200),
        launched as launches,
    ):
        forward.launch_in_parts(inputs, out, final, None)
    sizes = [x.args[0].v.shape[0] * x.args[0].v.shape[1] * x.args[0].v.shape[2] for x in launches.call_args_list]
    assert len(sizes) > 1, "one launch"
    assert max(sizes) <= 192, sizes
    assert sum(sizes) == call["v"][..., 0].numel(), sizes
    assert_same_bits(out, o, "o")
    assert_same_bits(final, state, "state")


def cuts(dtype: torch.dtype) -> None:
    """How packed sequences are cut: into segments as short as there is room for."""
    from flash_kda.backends.triton.segments import cut_sequences

    rng = random.Random(0)
    for later, least in itertools.product((1, 3, 8, 33), (32, 96, 512)):
        kinds = ([0, 1, 31, 32, 33, 500], [1000, 1024, 1025, 4000], [0, 1, 100, 5000])
        lengths = [rng.choice(rng.choice(kinds)) for _ in range(rng.choice([1, 2, 7, 8, 9, 30]))]
        T = sum(lengths) + 1
        segment = -(-T // later // 32) * 32
        cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)
        found = torch.full((1 + 2 * later,), -7, dtype=torch.int32)
        numbers = 1 << (later - 1).bit_length()
        constants = {"C": 32, "LEAST_SEGMENT": least, "COUNTED": 16, "NUMBERED": 8, "NUMBERS": numbers}
        cut_sequences[(1,)](cu, found, len(lengths), segment, later, **constants)
        assert found.tolist() == cuts_of(lengths, segment, later, least), (lengths, later, least)


def segments(lengths: tuple[int, ...] | None) -> None:
    """The states before the later segments of cut sequences; where packed the last numbers are nobody's."""
    from flash_kda.backends.triton.segments import scan_segments

    T, N, HV, K, tokens = 500, 3, 2, 16, 64
    rng = torch.Generator().manual_seed(0)
    counts = [max(0, -(-length // tokens) - 1) for length in lengths or (T,) * N]
    later = sum(counts) + (2 if lengths else 0)
    maps = torch.randn(later, HV, 3, K, K, generator=rng) * 0.3
    want = maps.double()
    for end, count in zip(itertools.accumulate(counts), counts, strict=True):
        for number in range(end - count, end - 1):
            S, B, A = want[number].unbind(1)
            want[number + 1, :, 0] = S @ A + B
    cu = torch.tensor([0, *itertools.accumulate(lengths or [])], dtype=torch.int32)
    table = torch.tensor(cuts_of(lengths, tokens, later, tokens) if lengths else [0], dtype=torch.int32)
    constants = {"K": K, "SCAN_BV": 16, "MAPS": 3, "PACKED": lengths is not None}
    scan_segments[((later if lengths else N) * HV,)](maps, cu, table, T, N, HV, tokens, later, **constants)
    assert torch.allclose(maps.double(), want, rtol=1e-5, atol=1e-6), (maps.double() - want).abs().max()


_PLAIN = (
    *(Case(gate="lower_bound", strength=s, K=20, V=40) for s in ("strong", "slow", "saturated")),
    *(Case(gate="softplus", strength=s, T=40) for s in ("strong", "slow", "saturated")),
    *(Case(gate="log", strength=s, T=40, K=20, V=40) for s in ("strong", "slow", "saturated", "hostile")),
    Case(gate="log", strength="hostile", K=64, V=16, T=33, H=1),
    Case(gate="softplus", A_log=False, dt_bias=None, T=33),
    Case(A_log=False, dt_bias=None, T=33),
    Case(lower_bound=-0.01, dt_bias="flat", T=33),
    Case(B=2, T=70, H=1, HV=3, K=20, V=70),
    Case(T=1, initial=False),
    Case(T=32, H=1, K=128, V=128),
    Case(T=33, H=1, K=140, V=20),
    Case(T=33, H=1, K=140, V=20, gate="log", strength="hostile"),
    Case(lengths=(0, 5, 0, 65, 32, 0), tail=40, K=20, V=70, HV=4),
    Case(lengths=(0, 5, 33, 0), tail=3, gate="log", strength="hostile", layout="kv", cu_dtype="int32"),
    Case(lengths=(30, 40), gate="softplus", layout="kv", initial=False),
    Case(lengths=(32, 5)),
    Case(lengths=(0, 0), tail=5),
    Case(lengths=(1,) * 12, T=12, H=1, gate="softplus"),
    Case(T=33, K=20, V=40, layout="kv"),
    Case(T=33, initial=False, final=False),
    Case(neg=True, strength="slow", T=40),
    Case(l2norm=False, T=40),
    Case(l2norm=False, K=140, H=1, T=33),
    Case(logit=False, T=33),
    Case(l2norm=False, logit=False, gate="log", scale=-0.3, T=40),
)
# Sizes, what is hard, and programs over hard chunks: more than there are chunks, or fewer, each of which then looks at
# up to 32 of them, and past the last one. Packed sequences leave slots without tokens.
LONG = Case(gate="log", T=512, H=1, HV=2, K=16, V=16)
SHORT = LONG.but(B=3, T=60)
PACKED = Case(gate="log", lengths=(0, 96, 0, 28, 64, 0), tail=70, H=1, HV=3, K=16, V=16)
HARD = (
    (LONG, "all", 1),
    *((SHORT, hard, programs) for hard, programs in (("none", 1), ("all", 5), ("head", 3))),
    *((PACKED, hard, programs) for hard, programs in (("none", 2), ("all", 5), ("all", 50), ("head", 3), ("time", 7))),
)
CASES: dict[str, Callable[[], None]] = {
    **{str(case): partial(lambda case: check(case.build()), case) for case in _PLAIN},
    **{f"hard {hard} by {n} {case}": partial(hard_chunks, case, hard, n) for case, hard, n in HARD},
    **{f"constant g={g}": partial(constant_gate, g) for g in (-5.15, -5.25)},
    "slow and hostile": slow_and_hostile,
    "strided": strided,
    "in place": in_place,
    "one key in half precision": one_key_in_half_precision,
    "same bits": same_bits,
    **{
        f"known form {case}": partial(known_form, case)
        for case in (
            Case(B=2, T=40, HV=4, V=24, dt_bias="flat"),
            Case(lengths=(5, 0, 33), tail=3, gate="softplus", layout="kv", initial=False),
            Case(T=33, gate="log", final=False),
        )
    },
    "in parts of the tokens": partial(in_parts, Case(T=100, HV=4, gate="softplus")),
    "in parts of the batch": partial(in_parts, Case(B=3, T=40, HV=4, gate="softplus")),
    "in parts of both": partial(in_parts, Case(B=2, T=70, HV=4, gate="softplus")),
    "in parts of the heads": partial(in_parts, Case(lengths=(30, 0, 41), tail=3, H=3, HV=6, dt_bias="flat")),
    "segments": partial(segments, None),
    "segments, packed": partial(segments, (300, 0, 65)),
    "cuts": partial(cuts, torch.int32),
    "cuts, long": partial(cuts, torch.int64),
    **{
        f"spoilt {name} {gate} {value}": partial(spoilt, name, gate, value)
        for name, gate, value in (
            *((name, "lower_bound", math.nan) for name in ("q", "k", "v", "g", "beta")),
            *((name, "softplus", math.nan) for name in ("k", "g")),
            ("g", "log", math.nan),
            ("v", "lower_bound", math.inf),
        )
    },
}


if __name__ == "__main__":
    main(CASES)
