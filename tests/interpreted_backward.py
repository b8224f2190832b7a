"""The backward's Triton kernels in Triton's interpreter: ``python interpreted_backward.py [name ...]`` prints JSON.

See ``interpreted``, whose rules hold here too: a process of its own, float32 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from cases import TENSORS, Call, Case, heads_first, inputs_of, leaves, oracle, spans_of
from compare import assert_outputs, assert_same_bits, assert_states
from interpreted import H200, some_programs, with_hard
from interpreted import HARD as HARD_CHUNKS
from interpreting import main
from rounding import as_on_a_gpu
from torch import Tensor

from flash_kda import dispatch
from flash_kda.reference import kda_recurrent

# Of every gradient; those of A_log and dt_bias sum over all tokens.
TOLERANCE = 1e-4
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
Found = dict[str, Tensor]


def seeds(call: Call) -> tuple[Tensor, Tensor]:
    """Gradients of the output and of the final states, drawn from a seed, where the call's tensors are."""
    inputs = inputs_of(call)
    rng = torch.Generator().manual_seed(99)
    drawn = [torch.randn(shape, generator=rng) for shape in (inputs.v.shape, inputs.state_shape)]
    do, dS = (x.to(inputs.v.device) for x in drawn)
    return do, dS


def run(call: Call, do: Tensor, dS: Tensor | None) -> Found:
    """All gradients of a call by the kernels."""
    from flash_kda.backends.triton import backward, forward

    facts = {"device_facts": lambda index: H200}
    with mock.patch.multiple(forward, **facts), mock.patch.multiple(backward, **facts):
        backward.plan.cache_clear()
        found = backward.compute_in_parts(inputs_of(call), do, dS)
    return {name: x for name, x in zip(NAMES, found, strict=True) if x is not None}


def expected(call: Call, do: Tensor, dS: Tensor | None) -> Found:
    """Autograd through the recurrence in float64."""
    wide = {name: x.double() if name in TENSORS and isinstance(x, Tensor) else x for name, x in call.items()}
    taped, found = leaves(wide | {"output_final_state": True})
    o, S = kda_recurrent(inputs_of(taped), torch.float64)
    assert S is not None
    loss = (o * do).sum() + (0.0 if dS is None else (S * dS).sum())
    grads = torch.autograd.grad(loss, list(found.values()), allow_unused=True)
    return {name: torch.zeros_like(x) if d is None else d for (name, x), d in zip(found.items(), grads, strict=True)}


def check(call: Call, *, with_dS: bool = True, tolerance: float = TOLERANCE) -> None:
    """Every gradient against float64."""
    do, dS = seeds(call)
    compare(run(call, do, dS if with_dS else None), expected(call, do, dS if with_dS else None), call, tolerance)


def compare(got: Found, want: Found, call: Call, tolerance: float) -> None:
    """Per head, whole and in blocks of 16 rows; those of A_log and dt_bias whole."""
    assert got.keys() == want.keys(), f"got gradients of {list(got)}, expected those of {list(want)}"
    for name, d in got.items():
        w = want[name].double()
        if name == "initial_state":
            assert_states(d, w, tolerance, f"d{name}")
        elif name in TENSORS:
            assert_outputs(d, w, call, tolerance, f"d{name}")
        else:
            d, w = d.detach().cpu().double(), w.cpu().reshape(d.shape)
            error = float((d - w).norm() / w.norm().clamp(min=1e-30))
            assert error <= tolerance, f"d{name}: RMSE ratio {error:.3g}, allowed {tolerance:.3g}"


# Of bfloat16 or float16 inputs, by head and whole.
HALF_TOLERANCE = dict.fromkeys(NAMES, 6e-3) | {"g": 1e-2, "A_log": 2e-3, "dt_bias": 2e-3}


def errors(got: Found, want: Found) -> dict[str, float]:
    """The RMSE ratio of every gradient: the worst head's, or the whole for those of A_log."""
    assert got.keys() == want.keys(), f"got gradients of {list(got)}, expected those of {list(want)}"
    found = {}
    for name, w in want.items():
        d = got[name].detach().double().reshape(w.shape)
        # Heads first: they are the third dimension of rows, the second of states, the first of dt_bias.
        dim = {"A_log": None, "dt_bias": 0, "initial_state": 1}.get(name, 2)
        pairs = [(d, w.double())] if dim is None else zip(d.unbind(dim), w.double().unbind(dim), strict=True)
        found[name] = max(float((x - y).norm() / y.norm().clamp(min=1e-30)) for x, y in pairs)
    return found


def seeds_of_squares(call: Call) -> tuple[Tensor, Tensor]:
    """Gradients of ``|o|^2 / 2`` and a tenth of the same of the final states.

    In sums over all tokens the terms of random gradients cancel, and what is left may be less than their rounding.
    """
    o, S = (x.to(call["v"].device) for x in oracle(call))
    return o.to(call["v"].dtype), 0.1 * S.float()


def half_errors(call: Call, gradients: Callable[[Call, Tensor, Tensor], Found]) -> dict[str, float]:
    """:func:`errors` of half-precision inputs: of rows and states by random gradients, of parameters by squares."""
    do, dS = seeds(call)
    do, dS = do.to(call["v"].dtype), 0.1 * dS
    rows = errors(gradients(call, do, dS), expected(call, do.double(), dS))
    do, dS = seeds_of_squares(call)
    summed = errors(gradients(call, do, dS), expected(call, do.double(), dS))
    return rows | {name: x for name, x in summed.items() if name in ("A_log", "dt_bias")}


def half(case: Case) -> None:
    """bfloat16 tiles as a GPU rounds them: pairs for the squares, parts that rounding lost, operands in float16."""
    with as_on_a_gpu():
        found = half_errors(case.build(), run)
    assert all(x <= HALF_TOLERANCE[name] for name, x in found.items()), f"RMSE ratios {found}"


def lone_writes(case: Case, device: str = "cpu", hard: bool = False) -> tuple[Call, Tensor]:
    """A call in which nothing but U and dR is rounded, and a gradient of its output.

    Keys are unit vectors, each token's its own, which do not decay: it reads what it wrote itself. Of values and of
    their gradients each token has one. With ``hard``, a channel without keys decays so fast that no anchor serves.
    """
    call = case.but(gate="log", initial=False).build(device)
    B, T, HV, V = call["v"].shape
    assert T < case.K
    t, rng = torch.arange(T), torch.Generator().manual_seed(7)
    call["g"] = torch.zeros_like(call["g"])
    if hard:
        call["g"][..., -1] = -20.0
    for name in ("q", "k"):
        call[name] = torch.zeros_like(call[name])
        call[name][:, t, :, t] = 1
    do = torch.zeros_like(call["v"])
    call["v"] = torch.zeros_like(do)
    for x in (call["v"], do):
        x[:, t, :, 37 * t % V] = torch.randn(T, B, HV, generator=rng).bfloat16().to(x)
    return call, do


def error_of_beta(call: Call, do: Tensor, dbeta: Tensor) -> float:
    """The largest of a token's gradient of beta, in proportion to it."""
    want = expected(call, do.double(), None)["beta"]
    written = want != 0
    assert int(written.sum()) == sum(end - first for _, first, end in spans_of(call)) * want.shape[2]
    return float((dbeta.double()[written] / want[written] - 1).abs().max())


# U and dR are within a thirtieth of a unit in the last of eight bits, which makes 5.2e-4 of their product; the rest is
# what a product of squares in TF32 or float16 rounds. With eight bits of each it would be 6e-3.
BITS_TOLERANCE = 1e-3


def assert_beta_has_the_bits(
    case: Case, gradients: Callable[[Call, Tensor], Found], device: str = "cpu", hard: bool = False
) -> None:
    """The gradient of beta is that of U and dR before they were rounded: it has the bits that the walks kept."""
    call, do = lone_writes(case, device, hard)
    error = error_of_beta(call, do, gradients(call, do)["beta"])
    assert error <= BITS_TOLERANCE, f"dbeta is off by {error}"


def bits(case: Case, hard: bool = False) -> None:
    with as_on_a_gpu():
        assert_beta_has_the_bits(case, lambda call, do: run(call, do, None), hard=hard)


def collinear() -> None:
    """One key for all tokens, decays near 1 and strong writes: the triangular system is at its worst."""
    call = Case(T=70, H=1, K=20, V=24).build()
    key = call["k"][:, :1].expand_as(call["k"])
    check(call | {"q": key, "k": key, "g": torch.full_like(call["g"], -12.0), "beta": torch.full_like(call["beta"], 8)})


def forgotten() -> None:
    """Decays that add up to thousands of nats in one chunk beside channels that keep everything."""
    call = Case(gate="log", T=70, H=1, K=20, V=24).build()
    g = torch.full_like(call["g"], -1e-4)
    g[..., ::3] = -20.0
    g[..., 1::6] = -math.inf
    check(call | {"g": g})


@contextmanager
def on_an_h200() -> Iterator[None]:
    """The tensors' device, the CPU, is the current one and has the facts of an H200."""
    from flash_kda.backends.triton import backward, forward

    facts = {"device_facts": lambda index: H200}
    here = mock.patch.multiple(torch.cuda, current_device=lambda: None, device=lambda _: nullcontext())
    with here, mock.patch.multiple(forward, **facts), mock.patch.multiple(backward, **facts):
        yield


def kept(case: Case, *, rows: tuple[int, int] | None = None, prepares: bool = False) -> None:
    """What the forward prepared serves two backward calls, which have the bits of one that prepares again.

    Args:
        rows: of a round of the forward and of the backward, at most. prepares: whether the backward does so again.
    """
    from flash_kda.backends.triton import backward, config, forward
    from flash_kda.backends.triton import prepare as module

    call = case.build()
    do, dS = seeds(call)
    want = run(call, do, dS)
    inputs = inputs_of(call | {"recompute": False})
    most = rows or (forward.MOST_ROWS, backward.MOST_ROWS)
    small = {"H200": H200 if rows is None else replace(H200, multiprocessors=2)}
    with (
        mock.patch.dict(globals(), small),
        on_an_h200(),
        mock.patch.object(forward, "MOST_ROWS", most[0]),
        mock.patch.object(backward, "MOST_ROWS", most[1]),
        mock.patch.object(module, "_chunk", wraps=module._chunk) as prepared,
    ):
        o, S, memory = forward.forward_of_gradients(inputs)
        assert memory is not None
        assert memory.nbytes == config.kept_bytes(inputs.signature.problem)
        by_forward = prepared.call_count
        found = [backward.backward(inputs, do, dS, memory) for _ in range(2)]
        assert (prepared.call_count > by_forward) == prepares, "not prepared again" if prepares else "prepared again"
        for name, a, b in zip(("o", "state"), (o, S), forward.forward(inputs, None, None), strict=True):
            if case.logit:  # otherwise beta may be less than the backward allows
                assert_same_bits(a, b, name)
        assert forward.forward_of_gradients(inputs.replace(recompute=True))[2] is None
    for gradients in found:
        for name, x in zip(NAMES, gradients, strict=True):
            if x is not None and rows and case.B > 1 and name in ("A_log", "dt_bias"):
                torch.testing.assert_close(x, want[name].view_as(x), rtol=1e-5, atol=1e-6)
            elif x is not None:
                assert_same_bits(x, want[name].view_as(x), f"d{name}")


def kept_without_write() -> None:
    """Beta of exactly zero counts for what the backward takes it for, in the forward too."""
    from flash_kda.backends.triton import backward, forward

    call = Case(logit=False, T=40, H=1).build()
    call["beta"][:, ::3] = 0.0
    do, dS = seeds(call)
    want = run(call, do, dS)
    with on_an_h200():
        inputs = inputs_of(call | {"recompute": False})
        o, S, memory = forward.forward_of_gradients(inputs)
        found = backward.backward(inputs, do, dS, memory)
        for x, y in zip((o, S), forward.forward(inputs, None, None), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)
    for name, x in zip(NAMES, found, strict=True):
        if x is not None:
            assert_same_bits(x, want[name].view_as(x), f"d{name}")


def kept_under_checkpointing(reentrant: bool) -> None:
    """What is made again for the backward prepares, and the backward does not; the bits are those without any of it."""
    from torch.utils.checkpoint import checkpoint

    from flash_kda.backends.triton import autograd
    from flash_kda.backends.triton import prepare as module

    call = Case(lengths=(33, 0, 5), HV=4, tail=2).build()
    do, dS = seeds(call)
    want = run(call, do, dS)
    taped, found = leaves(call | {"recompute": False})

    def forward(*tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        return autograd.run_with_grad(inputs_of(taped | dict(zip(TENSORS, tensors, strict=True))))

    given = [taped[name] for name in TENSORS]
    with on_an_h200(), mock.patch.object(module, "_chunk", wraps=module._chunk) as prepared:
        o, S = checkpoint(forward, *given, use_reentrant=reentrant, preserve_rng_state=False)
        once = prepared.call_count
        torch.autograd.backward([o, S], [do, dS])
    assert prepared.call_count == 2 * once, f"{prepared.call_count} chunks prepared, {once} by the forward"
    for name, x in found.items():
        assert x.grad is not None
        assert_same_bits(x.grad, want[name].view_as(x), f"d{name}")


def kept_elsewhere() -> None:
    """Saved tensors that are taken away and come back as others: what is kept is one of them."""
    from flash_kda.backends.triton import autograd

    call = Case(T=40, gate="softplus").build()
    do, dS = seeds(call)
    want = run(call, do, dS)
    taped, found = leaves(call | {"recompute": False})
    dtypes = []

    def pack(x: Tensor) -> Tensor:
        dtypes.append(x.dtype)
        return x.clone()

    with on_an_h200():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.clone()):
            o, S = autograd.run_with_grad(inputs_of(taped))
        assert dtypes.count(torch.uint8) == 1
        assert S is not None
        for _ in range(2):
            grads = torch.autograd.grad([o, S], list(found.values()), [do, dS], retain_graph=True)
            for name, x in zip(found, grads, strict=True):
                assert_same_bits(x, want[name].view_as(x), f"d{name}")


def on_the_tape(recompute: bool) -> None:
    """The differentiable function: dtypes, what wants no gradient, a second backward, and no second derivative."""
    from flash_kda.backends.triton import autograd

    call = Case(lengths=(33, 0, 5), HV=4, tail=2, dt_bias="flat", layout="kv").build() | {"recompute": recompute}
    do, dS = seeds(call)
    want = expected(call, do, dS)
    with on_an_h200():
        taped, found = leaves(call)
        o, S = autograd.run_with_grad(inputs_of(taped))
        assert S is not None
        loss = (o * do).sum() + (S * dS).sum()
        first = torch.autograd.grad(loss, list(found.values()), retain_graph=True)
        second = torch.autograd.grad(loss, list(found.values()), create_graph=True)
        compare(dict(zip(found, first, strict=True)), want, call, TOLERANCE)
        for name, a, b in zip(found, first, second, strict=True):
            assert_same_bits(b.detach(), a, f"d{name} once more")
        off = dispatch.load("triton").gradients(inputs_of(call), do, dS)
        for (name, a), b in zip(found.items(), (off[i] for i in (0, 1, 2, 3, 4, 7, 5, 6)), strict=True):
            assert b is not None
            assert_same_bits(b.view_as(a), first[list(found).index(name)], f"d{name} off the tape")
        with pytest.raises(NotImplementedError, match="the triton backend has no second derivatives"):
            second[0].square().sum().backward()
        one, alone = leaves(call, ("k",))
        o, _ = autograd.run_with_grad(inputs_of(one | {"output_final_state": False}))
        (got,) = torch.autograd.grad((o * do).sum(), [alone["k"]])
        compare({"k": got}, {"k": expected(call, do, None)["k"]}, call, TOLERANCE)
        nothing, found = leaves(Case(T=0).build())
        _, S = autograd.run_with_grad(inputs_of(nothing))
        (got,) = torch.autograd.grad([S], [found["initial_state"]], [torch.full_like(S, 0.5)])
        assert_same_bits(got, torch.full_like(S, 0.5), "dinitial_state without tokens")


def known_form(case: Case, recompute: bool = True) -> None:
    """The second call of a form, of other tensors, and a third: not checked again, the bits of checked ones."""
    import flash_kda
    from flash_kda import api
    from flash_kda.backends import triton as backend
    from flash_kda.backends.triton import autograd

    with (
        on_an_h200(),
        mock.patch.object(backend, "supports", return_value=None),
        mock.patch.object(api, "check", wraps=api.check) as checked,
    ):
        for seed in (0, 1, 0):
            call = case.but(seed=seed).build() | {"recompute": recompute}
            do, dS = seeds(call)
            taped, found = leaves(call)
            seen = []
            for o, S in (flash_kda.kda(**taped, backend="triton"), autograd.run_with_grad(inputs_of(taped))):
                assert S is not None
                grads = torch.autograd.grad([o, S], list(found.values()), [do, dS.to(S.dtype)])
                seen.append((o.detach(), S.detach(), *grads))
            for name, a, b in zip(("o", "S", *found), *seen, strict=True):
                assert a.shape == b.shape
                assert_same_bits(a, b, name)
    assert checked.call_count == 1, "checked again"


def hard_chunks(case: Case, hard: str, programs: int) -> None:
    """So many programs for all hard chunks: right, and the bits of a program for each block of a chunk."""
    from flash_kda.backends.triton import chunk_gradient

    call, count = with_hard(case, hard)
    do, dS = seeds(call)
    found = []
    for some in (None, programs):
        watched = mock.patch.object(chunk_gradient, "_joined_gradient", wraps=chunk_gradient._joined_gradient)
        with some_programs(some), watched as joined:
            found.append(run(call, do, dS))
        blocks = 2 if case.K > 64 else 1
        assert joined.call_count == count * blocks, f"{joined.call_count} hard blocks, expected {count * blocks}"
    for name, x in found[0].items():
        assert_same_bits(found[1][name], x, f"d{name}")
    compare(found[1], expected(call, do, dS), call, 2e-4)


def no_write() -> None:
    """Beta of exactly zero still has a gradient."""
    call = Case(logit=False, T=40, H=1).build()
    beta = call["beta"].clone()
    beta[:, ::3] = 0.0
    check(call | {"beta": beta})


def strided() -> None:
    """Inputs that are parts of larger tensors, and gradients of results that are no dense tensors."""
    call = Case(B=2, T=40, H=2, HV=4, K=20, V=40, layout="kv").build()
    want = expected(call, *seeds(call))
    heads_first(call)
    call["initial_state"] = call["initial_state"].transpose(0, 1).contiguous().transpose(0, 1)
    do, dS = seeds(call)
    far = torch.empty(2, 4, 40, 43).transpose(1, 2)[..., 2:-1].copy_(do)
    compare(run(call, far, dS.transpose(-1, -2).contiguous().transpose(-1, -2)), want, call, TOLERANCE)
    one = torch.ones((), dtype=do.dtype).expand_as(do)
    compare(run(call, one, None), expected(call, one, None), call, TOLERANCE)


def output_alone() -> None:
    """Without a gradient of the final state, and without one of the output."""
    call = Case(lengths=(40, 0, 5), T=45).build()
    check(call, with_dS=False)
    do, dS = seeds(call)
    got = run(call, torch.zeros_like(do), dS)
    compare(got, expected(call, torch.zeros_like(do), dS), call, TOLERANCE)
    assert not got["q"].count_nonzero(), "no output was used, so no query"


def spoilt(name: str, gate: str, value: float) -> None:
    """One value at token 40 of the first sequence and rows past the end: the other sequence does not notice."""
    call = Case(lengths=(50, 20), gate=gate, H=1, HV=2, tail=3).build()
    do, dS = seeds(call)
    clean = run(call, do, dS)
    x = call[name].clone()
    x[0, 40].view(-1)[0] = value
    x[0, 70:] = value
    got = run(call | {name: x}, do, dS)
    assert not all(bool(got[n].isfinite().all()) for n in TENSORS), "the poison had no effect"
    for n in TENSORS[:-1]:
        assert_same_bits(got[n][:, 50:70], clean[n][:, 50:70], f"d{n} of the other sequence")
        assert not got[n][:, 70:].count_nonzero(), f"d{n} of rows past the end"
    assert_same_bits(got["initial_state"][1], clean["initial_state"][1], "dinitial_state of the other sequence")


def in_parts(case: Case, rounds: int) -> None:
    """Batch rows or heads in rounds, as where memory would not hold all: the bits of one round."""
    from flash_kda.backends.triton import backward

    call = case.build()
    do, dS = seeds(call)
    whole = run(call, do, dS)
    small = {"H200": replace(H200, multiprocessors=2)}
    counted = mock.patch.object(backward, "compute", side_effect=backward.compute)
    with mock.patch.dict(globals(), small), mock.patch.object(backward, "MOST_ROWS", 40), counted as compute:
        got = run(call, do, dS)
    assert compute.call_count == rounds, f"{compute.call_count} rounds"
    for name, x in whole.items():
        if name in ("A_log", "dt_bias") and case.B > 1:
            torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-6)
        else:
            assert_same_bits(got[name], x, f"d{name}")


def same_bits() -> None:
    """Two runs agree bit for bit, and a sequence does not depend on its neighbours."""
    call = Case(lengths=(33, 0, 64, 5), gate="softplus", HV=4).build()
    do, dS = seeds(call)
    first, second = run(call, do, dS), run(call, do, dS)
    for name, x in first.items():
        assert_same_bits(second[name], x, f"d{name}")
    rows = {name: call[name][:, 33:97] for name in TENSORS[:-1]}
    alone = call | rows | {"initial_state": call["initial_state"][2:3], "cu_seqlens": None}
    third = run(alone, do[:, 33:97], dS[2:3])
    for name in TENSORS[:-1]:
        assert_same_bits(third[name], first[name][:, 33:97], f"d{name} alone")
    assert_same_bits(third["initial_state"], first["initial_state"][2:3], "dinitial_state alone")


_PLAIN = (
    *(Case(gate="lower_bound", strength=s, K=20, V=40) for s in ("strong", "slow", "saturated")),
    *(Case(gate="softplus", strength=s, T=40) for s in ("strong", "slow", "saturated")),
    *(Case(gate="log", strength=s, T=40, K=20, V=40) for s in ("strong", "slow", "saturated", "hostile")),
    Case(gate="softplus", A_log=False, dt_bias=None, T=33),
    Case(A_log=False, T=33),
    Case(lower_bound=-0.01, dt_bias="flat", T=33),
    Case(B=2, T=70, H=1, HV=3, K=20, V=70),
    Case(T=1, initial=False),
    Case(T=32, H=1, K=128, V=128),
    Case(T=33, H=1, K=140, V=20, gate="log", strength="hostile"),
    Case(lengths=(0, 5, 0, 65, 32, 0), tail=40, K=20, V=70, HV=4),
    Case(lengths=(0, 5, 33, 0), tail=3, gate="log", strength="hostile", layout="kv", cu_dtype="int32"),
    Case(lengths=(0, 0), tail=5),
    Case(lengths=(1,) * 12, T=12, H=1, gate="softplus"),
    Case(neg=True, strength="slow", T=40),
    Case(logit=False, T=33),
    Case(l2norm=False, K=140, H=1, T=33),
    Case(l2norm=False, logit=False, gate="log", scale=-0.3, T=40),
)
_HALF = (
    Case(T=128, H=1, HV=2, K=64, V=40, dtype="bfloat16", state_dtype="bfloat16"),
    Case(T=100, H=1, K=128, V=128, dtype="bfloat16", strength="slow"),
    Case(T=128, H=1, K=64, V=64, dtype="bfloat16", gate="softplus", strength="slow", layout="kv"),
    Case(lengths=(70, 0, 33), tail=3, K=64, V=64, dtype="bfloat16", gate="log", strength="hostile"),
    Case(T=128, H=1, K=60, V=64, dtype="float16"),
    Case(T=128, H=1, K=64, V=64, dtype="bfloat16", logit=False),
)
_BITS = (
    Case(T=60, H=1, HV=2, K=64, V=40, dtype="bfloat16"),
    Case(T=40, H=1, K=64, V=64, dtype="float16", neg=True),
    Case(lengths=(33, 0, 60, 1), tail=3, H=2, K=128, V=128, dtype="bfloat16"),
    Case(B=2, T=33, H=1, K=256, V=96, dtype="bfloat16", logit=False),
)
_KEPT = (
    Case(B=2, T=40, H=1, HV=2, K=20, V=40, dt_bias="flat"),
    Case(lengths=(33, 0, 5), tail=40, gate="softplus", layout="kv"),
    Case(T=70, gate="log", strength="hostile", initial=False, neg=True),
)
# Two blocks of channels, too.
HARD = (*HARD_CHUNKS[1:], (Case(gate="log", T=128, H=1, HV=2, K=70, V=16), "all", 3))
CASES: dict[str, Callable[[], None]] = {
    **{str(case): partial(lambda case: check(case.build()), case) for case in _PLAIN},
    **{f"hard {hard} by {n} {case}": partial(hard_chunks, case, hard, n) for case, hard, n in HARD},
    "collinear": collinear,
    "forgotten": forgotten,
    "no write": no_write,
    "on the tape": partial(on_the_tape, True),
    "on the tape, kept": partial(on_the_tape, False),
    **{f"half {case}": partial(half, case) for case in _HALF},
    **{f"bits {case}": partial(bits, case) for case in _BITS},
    "bits of hard chunks": partial(bits, _BITS[0], hard=True),
    "strided": strided,
    "output alone": output_alone,
    "known form": partial(known_form, Case(T=40, HV=4, dt_bias="flat")),
    "known form, packed": partial(known_form, Case(lengths=(33, 0, 5), tail=2, gate="log", layout="kv")),
    "known form, kept": partial(known_form, Case(lengths=(33, 0, 5), tail=2, HV=4, gate="log"), False),
    **{f"kept {case}": partial(kept, case) for case in _KEPT},
    "kept without write": kept_without_write,
    "kept elsewhere": kept_elsewhere,
    **{f"kept, checkpointing {x}": partial(kept_under_checkpointing, x == "reentrant") for x in ("hooks", "reentrant")},
    "kept in parts, batch": partial(kept, Case(B=3, T=20, H=1, HV=2, gate="log", strength="hostile"), rows=(80, 40)),
    "kept in parts, heads": partial(
        kept, Case(lengths=(30, 0, 17), tail=3, H=5, gate="log"), rows=(250, 40), prepares=True
    ),
    "in parts, batch": partial(in_parts, Case(B=3, T=20, H=1, HV=2, gate="softplus"), 3),
    "in parts, batch and heads": partial(in_parts, Case(B=2, T=40, H=2, HV=4, dt_bias="flat", layout="kv"), 4),
    "in parts, heads": partial(in_parts, Case(lengths=(30, 0, 17), tail=3, H=5, gate="log"), 5),
    "same bits": same_bits,
    **{
        f"spoilt {name} {gate} {value}": partial(spoilt, name, gate, value)
        for name, gate, value in (
            *((name, "lower_bound", math.nan) for name in ("q", "k", "v", "g", "beta")),
            ("g", "log", math.nan),
            ("v", "softplus", math.inf),
        )
    },
}

if __name__ == "__main__":
    main(CASES)
