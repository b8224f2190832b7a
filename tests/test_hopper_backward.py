"""The backward's kernels of the Hopper backend: which ones run, what the compiler makes of them, and on a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import compiling
import pytest
import torch
from cases import TENSORS, Call, Case, Target, inputs_of, leaves, parameters, run
from compare import assert_same_bits
from compiling import H200, Dtypes, assert_fits, compile_launch
from interpreted_backward import HALF_TOLERANCE, assert_beta_has_the_bits, errors, expected, half_errors, seeds
from jitted import Jitted, launch_on_the_cpu
from test_hopper import Described, gluon_source_of, shifted
from test_triton_backward import HALF, assert_poison_stays, launches_of, on_the_gpu

from flash_kda.backends import hopper
from flash_kda.backends.hopper.config import WalksConfig, configure_walks
from flash_kda.backends.triton.config import configure
from flash_kda.types import Problem

# Launches, without a GPU.


def described(problem: Problem) -> tuple[Dtypes, list[Any]]:
    """The launches of one backward call, and the dtypes of all that they are passed, by name."""
    pytest.importorskip("triton")
    from flash_kda.backends.hopper import backward

    inputs = compiling.meta_inputs(problem)
    inputs = inputs.replace(g=inputs.g.to(inputs.q.dtype))
    return launches_of(inputs, lambda call, of_dS: backward.describe(call, configure(problem, H200), H200, of_dS))


# The kernels in their order, with the bytes that a thread may spill; None: it is a portable one, judged with its own.
BUILDS: dict[str, tuple[Problem, list[tuple[str, int | None]]]] = {
    "plain": (Problem(T=8192, H=32), [("prepare_warp", 0), ("walks", 0), ("gradient", 96)]),
    "many heads": (Problem(T=8192, H=96), [("prepare_warp", 0), ("walks", 0), ("gradient", 96)]),
    "V = 64": (Problem(T=8192, H=96, V=64), [("prepare_warp", 0), ("walks", 16), ("gradient", 96)]),
    "packed": (Problem(T=8192, H=16, N=6, packed=True), [("prepare_warp", 16), ("walks", 0), ("gradient", 96)]),
    "softplus": (
        Problem(T=8192, H=32, gate="softplus"),
        [("prepare_warp", 64), ("prepare", None), ("walks", 0), ("gradient", 160), ("chunk_gradient", None)],
    ),
    "log": (
        Problem(T=8192, H=32, gate="log"),
        [("prepare_warp", 64), ("prepare", None), ("walks", 0), ("gradient", 160), ("chunk_gradient", None)],
    ),
    "grouped": (
        Problem(T=8192, H=16, HV=32),
        [("prepare_warp", 0), ("walks", 0), ("chunk_gradient", None), ("head_gradient", None)],
    ),
    "V = 256": (Problem(T=8192, H=8, V=256), [("prepare_warp", 0), ("walks", 0), ("chunk_gradient", None)]),
}


@pytest.mark.offline
@pytest.mark.parametrize("name", BUILDS)
def test_kernels_compile(name: str) -> None:
    """Every kernel fits into the device and spills no more than its budget; products are Hopper's own."""
    problem, kernels = BUILDS[name]
    dtypes, launches = described(problem)
    assert [x.kernel.__name__ for x in launches] == [kernel for kernel, _ in kernels]
    for launch, (kernel, budget) in zip(launches, kernels, strict=True):
        assert {*launch.tensors, *(x.tensor for x in launch.operands)} <= set(dtypes), "a tensor that is not passed"
        assert launch.arguments
        if budget is None:
            continue
        built = compile_launch(launch, dtypes, 90, gluon_source_of)
        assert_fits(built, 90, budget)
        if kernel != "prepare_warp":
            assert built.wgmma, "no wgmma"


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({"H": 32}, WalksConfig(parts=1, stages=4, buffers=2, registers=None)),
        ({"H": 33}, WalksConfig(parts=1, stages=4, buffers=2, registers=None)),
        ({"H": 34}, WalksConfig(parts=2, stages=3, buffers=2, registers=None)),
        ({"H": 17, "N": 2, "packed": True}, WalksConfig(parts=2, stages=3, buffers=2, registers=None)),
        ({"H": 96, "V": 64}, WalksConfig(parts=1, stages=2, buffers=1, registers=128)),
    ],
)
def test_walks_are_configured(changes: dict[str, Any], config: WalksConfig) -> None:
    """One warpgroup a multiprocessor while that suffices; then two that share tiles, or two programs."""
    assert configure_walks(replace(Problem(T=8192), **changes), H200) == config


KERNELS = ("prepare_warp", "walks", "gradient")


@pytest.fixture
def jitted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Jitted]:
    """In place of the kernels, by the backend and their names."""
    launch_on_the_cpu(monkeypatch)
    from flash_kda.backends.hopper import backward, forward
    from flash_kda.backends.triton import backward as portable
    from flash_kda.backends.triton import forward as portable_forward
    from flash_kda.backends.triton import launch

    monkeypatch.setattr(portable, "device_facts", lambda index: H200)
    monkeypatch.setattr(backward, "device_facts", lambda index: H200)
    monkeypatch.setattr(torch.cuda, "device", mock.MagicMock())
    found = {}
    for module, *names in (
        (forward, "prepare_warp", "walk"),
        (backward, "walks", "gradient"),
        (portable_forward, "prepare", "recurrence"),
        (portable, "walks", "chunk_gradient"),
    ):
        for name in names:
            key = f"portable {name}" if module is portable else name
            found[key] = Jitted.in_place(monkeypatch, module, name)
            if count := sum(x.startswith("d_") for x in found[key].arg_names):
                found[key].compile = partial(Described, count)
    for module in (portable, forward):
        monkeypatch.setattr(module, "prepare", found["prepare"])
    launch.driver.active.utils = SimpleNamespace(fill_tma_descriptor=lambda *arguments: ("descriptor", arguments[0]))
    monkeypatch.setattr(hopper, "supports", lambda problem: None)
    for module in (forward, backward, portable, portable_forward):
        module.plan.cache_clear()
    return found


def launched_by(jitted: dict[str, Jitted], run: Callable[[], Any]) -> tuple[list[str], Any]:
    """The kernels that something launched, and what it returned."""
    before = {name: len(f.by_triton) + len(f.direct) for name, f in jitted.items()}
    found = run()
    return [name for name, f in jitted.items() if len(f.by_triton) + len(f.direct) > before[name]], found


def launched(jitted: dict[str, Jitted], call: Call) -> list[str]:
    """The kernels that the backward of a call launched."""
    from flash_kda.backends.hopper.backward import backward

    inputs = inputs_of(call)
    return launched_by(jitted, lambda: backward(inputs, torch.ones_like(inputs.v), None))[0]


PLAIN = Case(T=200, H=2, K=128, V=128, dtype="bfloat16", g_dtype="bfloat16")


def test_a_known_form_is_launched_directly(jitted: dict[str, Jitted]) -> None:
    for seed in range(3):
        call = PLAIN.but(seed=seed).build()
        assert launched(jitted, call) == list(KERNELS)
    for name in KERNELS:
        assert len(jitted[name].by_triton) == 1
        assert len(jitted[name].direct) == 2
    passed = [x for x in jitted["gradient"].direct[-1][1] if isinstance(x, tuple) and x[0] == "descriptor"]
    assert {call[name].data_ptr() for name in "qkg"} <= {x[-1] for x in passed}


@pytest.mark.parametrize(("scale", "own"), [(0.0, False), (-1e-35, False), (1e-20, True), (-1.0, True)])
def test_the_scale_chooses_the_kernels(scale: float, own: bool, jitted: dict[str, Jitted]) -> None:
    """What the kernel would divide by is not zero."""
    ran = launched(jitted, PLAIN.but(scale=scale).build())
    assert ran == (list(KERNELS) if own else ["prepare", "portable walks", "portable chunk_gradient"])


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "do"])
def test_alignment_chooses_the_kernels(name: str, jitted: dict[str, Jitted]) -> None:
    """What hardware copies must start at a multiple of 16 bytes; of v and of do the walks alone are told."""
    from flash_kda.backends.hopper.backward import backward

    call = PLAIN.build()
    do = torch.ones_like(call["v"])
    given = call | ({name: shifted(call[name])} if name != "do" else {})
    for _ in range(2):
        ran, _ = launched_by(jitted, lambda: backward(inputs_of(given), shifted(do) if name == "do" else do, None))
        last = "gradient" if name == "v" else "portable chunk_gradient"
        assert ran == sorted(["prepare", "portable walks", last], key=list(jitted).index)


@pytest.mark.parametrize("gate", ["lower_bound", "softplus"])
def test_what_is_kept_is_walked_over(gate: str, jitted: dict[str, Jitted]) -> None:
    """The forward prepares into what it keeps; the backward does not prepare, and walks over that."""
    from flash_kda.backends.hopper.backward import backward
    from flash_kda.backends.hopper.forward import forward_of_gradients

    prepares = ["prepare_warp"] if gate == "lower_bound" else ["prepare_warp", "prepare"]
    finishes = ["gradient"] if gate == "lower_bound" else ["gradient", "portable chunk_gradient"]
    for seed in range(3):
        inputs = inputs_of(PLAIN.but(seed=seed, gate=gate).build() | {"recompute": False})
        ran, (o, _, kept) = launched_by(jitted, lambda inputs=inputs: forward_of_gradients(inputs))
        assert sorted(ran) == sorted([*prepares, "walk"])
        arguments = (inputs, torch.ones_like(o), None, kept)
        for _ in range(2):
            assert sorted(launched_by(jitted, lambda x=arguments: backward(*x))[0]) == sorted(["walks", *finishes])
    for name in ("prepare_warp", "walk", "walks"):
        assert len(jitted[name].by_triton) == 1, "launched past Triton from the second call on"
        passed = {x[-1] for x in jitted[name].direct[-1][1] if isinstance(x, tuple) and x[0] == "descriptor"}
        assert kept.data_ptr() in passed, "the tiles, which come first"


@pytest.mark.parametrize("name", ["q", "k", "v", "g"])
def test_nothing_is_kept_of_what_is_not_aligned(name: str, jitted: dict[str, Jitted]) -> None:
    """Other kernels prepare it, in another order of rows."""
    from flash_kda.backends.hopper.forward import forward_of_gradients

    call = PLAIN.build() | {"recompute": False}
    for _ in range(2):
        ran, (_, _, kept) = launched_by(
            jitted, lambda: forward_of_gradients(inputs_of(call | {name: shifted(call[name])}))
        )
        assert ran == ["prepare", "recurrence"]
        assert kept is None


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "do", "scale"])
def test_what_is_kept_is_for_its_own_kernels(name: str, jitted: dict[str, Jitted]) -> None:
    """Where the backward's tensors are not aligned, or its kernels cannot divide by the scale, it prepares again."""
    from flash_kda.backends.hopper.backward import backward
    from flash_kda.backends.hopper.forward import forward_of_gradients

    call = PLAIN.but(scale=0.0 if name == "scale" else None).build() | {"recompute": False}
    o, _, kept = forward_of_gradients(inputs_of(call))
    assert kept is not None
    do = torch.ones_like(o)
    given = call | ({name: shifted(call[name])} if name in call and name != "scale" else {})
    ran, _ = launched_by(jitted, lambda: backward(inputs_of(given), shifted(do) if name == "do" else do, None, kept))
    assert set(ran) - {"gradient"} >= {"prepare", "portable walks"}
    assert not {"prepare_warp", "walks"} & set(ran)


# On a GPU.

GPU = Target("hopper", "cuda", partial=True)


def fitted(case: Case) -> Case:
    """The case with what the backend takes."""
    V = next(v for v in (64, 128, 256) if v >= case.V)
    return case.but(K=128, V=V, dtype="bfloat16", g_dtype="bfloat16", logit=True, l2norm=True)


GPU_CASES = tuple(
    dict.fromkeys(
        (
            *map(fitted, HALF),
            Case(T=2048, H=3, K=128, V=128, dtype="bfloat16", g_dtype="bfloat16", A_log=False, dt_bias=None),
            Case(B=3, T=97, H=2, K=128, V=64, dtype="bfloat16", g_dtype="bfloat16", gate="softplus", initial=False),
            Case(T=300, H=70, K=128, V=128, dtype="bfloat16", g_dtype="bfloat16"),
            Case(T=300, H=140, K=128, V=64, dtype="bfloat16", g_dtype="bfloat16", strength="slow"),
            Case(lengths=(5000, 1, 96, 31), H=2, K=128, V=128, dtype="bfloat16", g_dtype="bfloat16", gate="log"),
        )
    )
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", parameters(GPU_CASES))
def test_gradients_on_a_gpu(case: Case) -> None:
    """Every gradient of every head against float64."""
    found = half_errors(case.build("cuda"), partial(on_the_gpu, target=GPU))
    assert all(x <= HALF_TOLERANCE[name] for name, x in found.items()), f"RMSE ratios {found}"


LONE_WRITES = (
    PLAIN.but(T=120, H=3),
    PLAIN.but(B=2, T=97, V=64, neg=True),
    PLAIN.but(lengths=(33, 0, 60, 1), tail=3, H=70),
    PLAIN.but(T=97, HV=4, V=256),
)


@pytest.mark.gpu
@pytest.mark.parametrize("hard", [False, True], ids=["easy", "hard"])
@pytest.mark.parametrize("case", parameters(LONE_WRITES))
def test_beta_has_the_bits_on_a_gpu(case: Case, hard: bool) -> None:
    """Whichever kernel makes it."""
    assert_beta_has_the_bits(case, lambda call, do: on_the_gpu(call, do, None, GPU), "cuda", hard)


@pytest.mark.gpu
def test_collinear_keys_on_a_gpu() -> None:
    """One key for thousands of tokens, decays near 1 and strong writes: finite, and right within bfloat16."""
    call = PLAIN.but(T=4096, H=1, A_log=False, dt_bias=None).build("cuda")
    key = call["k"][:, :1].expand_as(call["k"]).contiguous()
    call |= {"q": key, "k": key, "g": torch.full_like(call["g"], -12.0), "beta": torch.full_like(call["beta"], 8.0)}
    do, dS = seeds(call)
    got = on_the_gpu(call, do.bfloat16(), dS, GPU)
    assert all(bool(x.isfinite().all()) for x in got.values())
    found = errors(got, expected(call, do.bfloat16().double(), dS))
    assert max(found["v"], found["q"], found["initial_state"]) <= 2e-2, f"RMSE ratios {found}"


@pytest.mark.gpu
def test_large_and_small_gradients_on_a_gpu() -> None:
    """Gradients scale with that of the output, bit for bit, over what loss scaling may ask for."""
    call = PLAIN.but(T=600, initial=False).build("cuda")
    do = seeds(call)[0].bfloat16()
    one = on_the_gpu(call, do, None, GPU)
    for exponent in (-40, 40):
        factor = 2.0**exponent
        other = on_the_gpu(call, do * factor, None, GPU)
        for name in TENSORS[:5]:
            assert_same_bits(other[name], one[name] * factor, f"d{name} of an output gradient times 2^{exponent}")


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["lower_bound", "softplus"])
def test_same_bits_on_a_gpu(gate: str) -> None:
    """Twenty backward calls agree bit for bit, and a sequence does not depend on what else is packed."""
    call = PLAIN.but(lengths=(700, 33, 0, 1500, 64), H=8, gate=gate).build("cuda")
    rng = torch.Generator("cuda").manual_seed(3)
    do = torch.randn(call["v"].shape, generator=rng, device="cuda", dtype=torch.bfloat16)
    dS = torch.randn(call["initial_state"].shape, generator=rng, device="cuda")
    first = on_the_gpu(call, do, dS, GPU)
    for _ in range(20):
        for name, x in on_the_gpu(call, do, dS, GPU).items():
            assert_same_bits(x, first[name], f"d{name}")
    rows = slice(733, 2233)
    alone = {name: call[name][:, rows] for name in TENSORS[:-1]}
    alone |= {"initial_state": call["initial_state"][3:4], "cu_seqlens": torch.tensor([0, 1500], device="cuda")}
    one = on_the_gpu(call | alone, do[:, rows], dS[3:4], GPU)
    for name in TENSORS[:-1]:
        assert_same_bits(one[name], first[name][:, rows], f"d{name} alone")
    assert_same_bits(one["initial_state"], first["initial_state"][3:4], "dinitial_state alone")


@pytest.mark.gpu
@pytest.mark.parametrize("name", TENSORS[:-1])
def test_poison_stays_in_its_sequence_on_a_gpu(name: str) -> None:
    """NaN in one sequence and past the end reaches no gradient of the other sequences, and rows past the end none."""
    call = PLAIN.but(lengths=(200, 90), tail=50).build("cuda")
    x, bad_do = call[name].clone(), torch.ones_like(call["v"])
    for poisoned in (x, bad_do):
        poisoned[0, 100] = math.nan
        poisoned[0, 290:] = math.nan
    assert_poison_stays(GPU, call, call | {name: x})
    assert_poison_stays(GPU, call, call, bad_do)


@pytest.mark.gpu
def test_what_is_not_aligned_or_part_of_a_projection_on_a_gpu() -> None:
    """Rows of one wide projection as they are; addresses that hardware does not copy, by the portable kernels."""
    call = PLAIN.build("cuda")
    do, dS = seeds(call)
    do = do.bfloat16()
    whole = on_the_gpu(call, do, dS, GPU)
    wide = torch.full((1, 200, 3 * 256 + 8), math.nan, device="cuda", dtype=torch.bfloat16)
    parts = {}
    for i, name in enumerate(("q", "k", "v")):
        parts[name] = wide[..., 8 + i * 256 : 8 + (i + 1) * 256].unflatten(2, (2, 128)).copy_(call[name])
    inputs = inputs_of(call | parts)
    found = hopper.gradients(inputs, do, dS)
    for name, x in zip(TENSORS[:5], found, strict=False):
        assert_same_bits(x, whole[name], f"d{name} of parts of a projection")
    for names in itertools.chain(("q", "v"), (("do"),)):
        moved = {names: shifted(call[names])} if names != "do" else {}
        found = hopper.gradients(inputs_of(call | moved), shifted(do) if names == "do" else do, dS)
        for name, x in zip(TENSORS[:5], found, strict=False):
            error = (x.float() - whole[name].float()).norm() / whole[name].float().norm()
            assert error <= 6e-3, f"d{name} with {names} not aligned: {error}"


@pytest.mark.gpu
def test_memory_on_a_gpu() -> None:
    """At most 1 GiB over the inputs at 1 x 8192 tokens and 32 heads."""
    call = PLAIN.but(T=8192, H=32, initial=False).build("cuda")
    taped, found = leaves(call)
    do = torch.ones_like(call["v"])

    def step() -> None:
        o, _ = run(GPU, taped)
        torch.autograd.grad(o, list(found.values()), do)

    step()  # compiled, and the allocator warm
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    assert torch.cuda.max_memory_allocated() - before <= 2**30
