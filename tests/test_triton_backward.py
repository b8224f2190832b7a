"""The backward of the Triton backend: in the interpreter, compiled for four architectures, and on a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import compiling
import interpreted_backward
import pytest
import torch
from cases import TENSORS, Call, Case, Target, leaves, parameters, run
from compare import assert_same_bits
from compiling import DEVICES, H200, Build, Built, Dtypes, every
from interpreted_backward import (
    HALF_TOLERANCE,
    assert_beta_has_the_bits,
    compare,
    errors,
    expected,
    half_errors,
    seeds,
)
from interpreting import interpreted_cases
from test_triton import problems
from torch import Tensor

from flash_kda.backends.triton.config import Config, configure
from flash_kda.types import GateKind, Inputs, Problem, Signature

if TYPE_CHECKING:
    from flash_kda.backends.triton.launch import Launch

# The interpreter.


@interpreted_cases(interpreted_backward)
def test_interpreter(went_wrong: str | None) -> None:
    """The kernels' gradients against autograd through the definition in float64."""
    assert went_wrong is None, went_wrong


# Compilation for each architecture.

# ``hard_chunk_gradient`` is the launch over chunks that one anchor does not serve.
KERNELS = ("walks", "chunk_gradient", "hard_chunk_gradient", "head_gradient")


@dataclass(frozen=True)
class BackwardBuild(Build):
    """One kernel of the backward."""

    kernel: str

    @property
    def config(self) -> Config:
        return configure(self.problem, self.device)

    def __str__(self) -> str:
        p = self.problem
        name = f"sm_{self.capability}-{self.kernel}-{'bf16' if self.config.split else 'fp32'}-K{p.K}-V{p.V}-{p.gate}"
        return f"{name}{'-grouped' if p.HV else ''}{'-packed' if p.packed else ''}"

    def launch(self) -> tuple[Dtypes, Launch]:
        dtypes, launches = described(self.problem, self.config)
        kinds = [x for x in launches if x.kernel.__name__ == self.kernel.removeprefix("hard_")]
        return dtypes, kinds[-1] if self.kernel.startswith("hard_") else kinds[0]


# Bytes that a thread may spill, by kernel, whether tiles are bfloat16, and BK. What is absent may spill nothing.
BUDGETS = {
    ("walks", True): {64: 64, 128: 320, 256: 320},
    ("walks", False): {16: 32, 128: 384, 256: 640},
    ("chunk_gradient", True): {16: 16, 64: 32, 128: 576, 256: 192},
    ("chunk_gradient", False): {16: 160, 64: 256, 128: 320, 256: 320},
    ("hard_chunk_gradient", True): {16: 16, 64: 64, 128: 320, 256: 256},
    ("hard_chunk_gradient", False): {16: 64, 64: 320, 128: 320, 256: 320},
    ("head_gradient", True): {},
    ("head_gradient", False): {128: 32},
}


def builds() -> list[BackwardBuild]:
    """Every kernel over K, V and dtypes, and the gates, packed sequences of the most common size."""
    found = []
    sizes = ((16, 16), (64, 64), (128, 128), (256, 256), (128, 16), (16, 128))
    for capability, dtype, (K, V) in itertools.product(DEVICES, (torch.bfloat16, torch.float32), sizes):
        if capability != 90 and K < 128:
            continue
        plain = Problem(B=1, T=8192, H=32, K=K, V=V, dtype=dtype)
        is_common = (capability, K, V) == (90, 128, 128)
        for problem in (plain, replace(plain, packed=True, N=4)) if is_common else (plain,):
            # One anchor serves every chunk of a bounded gate, and the rows of one value head are whole at once.
            changes = {"hard_chunk_gradient": {"gate": "log"}, "head_gradient": {"HV": 64}}
            found += [BackwardBuild(capability, replace(problem, **changes.get(x, {})), x) for x in KERNELS]
        if is_common:
            others = ({"gate": "softplus"}, {"gate": "log"}, {"HV": 64})
            found += [BackwardBuild(capability, replace(plain, **change), "chunk_gradient") for change in others]
    return found


def launches_of(inputs: Inputs, describe: Callable[[Signature, Any], tuple[Any, Any]]) -> tuple[Dtypes, list[Launch]]:
    """The launches of one backward call, and the dtypes of all that they are passed, by name.

    Args:
        describe: both halves, from the call's signature and what the gradient of the final state is.
    """
    from flash_kda.backends.triton import backward

    dS = torch.empty(inputs.state_shape, dtype=inputs.state_dtype, device="meta")
    planner = mock.Mock(return_value=backward.Plans(mock.Mock(), mock.Mock(), mock.Mock()))
    with mock.patch.object(backward, "device_facts", return_value=H200):
        backward.compute(inputs, torch.empty_like(inputs.v), dS, planner=planner)
    (call, of_dS), plans = planner.call_args.args, planner.return_value
    halves = (plans.walk, plans.finish)
    dtypes: Dtypes = {}
    found: list[Launch] = []
    both = describe(call, of_dS)
    for names, half, (scratch, launches) in zip((backward.WALKS, backward.CHUNKS), halves, both, strict=True):
        (tensors,) = half.call_args.args
        dtypes |= compiling.dtypes_of(names, tensors, inputs.q.dtype)
        dtypes |= {name: dtype for name, (_, dtype) in scratch.items()}
        found += launches
    return dtypes, found


def described(problem: Problem, config: Config) -> tuple[Dtypes, list[Launch]]:
    """Those of this backend."""
    from flash_kda.backends.triton import backward

    return launches_of(
        compiling.meta_inputs(problem), lambda call, of_dS: backward.describe_backward(call, config, of_dS)
    )


@every(builds())
def test_compiles(build: BackwardBuild, built: Built) -> None:
    """It compiles, fits into the device, and spills no more than its budget."""
    c = build.config
    compiling.assert_fits(built, build.capability, BUDGETS[build.kernel, c.split].get(c.BK, 0))
    if build.kernel.endswith("chunk_gradient"):
        assert not built.wgmma, "Triton 3.6 makes wrong asynchronous products of some operands; see CONTRIBUTING.md"
        assert not built.tensor_memory, "nobody has seen whether those of compute capability 10.0 are right"


# Configurations and launches.


@pytest.mark.parametrize("device", compiling.devices())
def test_configurations_are_sound(device) -> None:
    """Blocks divide what they walk over, and are what a product of matrices takes at least."""
    pytest.importorskip("triton")
    from flash_kda.backends.triton.backward import configure_gradient

    for problem in problems():
        c = configure(problem, device)
        own = configure_gradient(problem, c)
        assert c.BK % own.BC == 0
        assert min(own.BC, own.BV) >= 16
        assert own.walk_stages <= c.stages
        assert own.warps in (4, 8)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_backward_launches(packed: bool) -> None:
    """The preparation as in the forward, both walks, chunks, heads; every parameter of a kernel has what it needs."""
    pytest.importorskip("triton")
    gates: dict[GateKind, int] = {"lower_bound": 1, "softplus": 2, "log": 2}
    for gate, count in gates.items():
        problem = Problem(B=1, T=140, H=2, HV=4, K=128, V=100, gate=gate, packed=packed, N=3 if packed else None)
        dtypes, launches = described(problem, configure(problem, H200))
        N = 3 if packed else 1
        chunks = (140 // 32 + 1 + (3 if packed else 0)) * 4
        names = ["prepare"] * count + ["walks"] + ["chunk_gradient"] * count + ["head_gradient"]
        assert [x.kernel.__name__ for x in launches] == names
        of_chunks = [chunks, chunks + 1][:count]
        assert [x.programs for x in launches] == [*of_chunks, 2 * N * 4 * 2, *of_chunks, 9 * 2]
        chosen = [x.values["CHUNKS"] for x in launches if x.kernel.__name__ in ("prepare", "chunk_gradient")]
        assert chosen == [x for x in range(3) if (x == 0) == (count == 1)] * 2
        alone = Problem(B=1, T=140, H=4, K=128, V=100, gate=gate, packed=packed, N=problem.N)
        whole = described(alone, configure(alone, H200))[1]
        assert [x.kernel.__name__ for x in whole] == names[:-1], "all channels of the only value head are whole rows"
        for launch in launches:
            compiling.assert_nothing_is_missing(launch, dtypes)


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", 2048 + 256 + 128), ("float32", 4096 + 512)])
def test_bytes_of_what_the_walks_leave(dtype: str, expected: int) -> None:
    """Per token and value head at K = V = 128: two states, U, and with bfloat16 tiles the bits of U and dR."""
    pytest.importorskip("triton")
    from flash_kda.backends.triton.backward import left_for_chunks

    problem = Problem(T=8192, H=16, HV=32, dtype=getattr(torch, dtype))
    left = left_for_chunks(problem, configure(problem, H200))
    assert sum(elements * x.itemsize for elements, x in left.values()) == expected * 8192 * 32


# On a GPU.

GPU = Target("triton", "cuda", partial=True)
# Sizes of models, the sizes of every configuration, and what a kernel could mix up.
HALF = (
    *(Case(T=2048, H=2, K=128, V=128, dtype="bfloat16", strength=s) for s in ("strong", "slow")),
    *(Case(T=1000, H=2, K=128, V=128, dtype="bfloat16", gate="softplus", strength=s) for s in ("strong", "slow")),
    Case(T=500, H=1, HV=2, K=128, V=128, dtype="bfloat16", gate="log", strength="hostile", layout="kv"),
    Case(lengths=(0, 300, 1, 65, 0, 500), tail=30, H=2, HV=4, K=128, V=128, dtype="bfloat16", cu_dtype="int32"),
    Case(B=2, T=200, H=2, K=64, V=128, dtype="bfloat16", state_dtype="bfloat16"),
    Case(T=300, H=2, K=60, V=100, dtype="bfloat16"),
    Case(T=300, H=2, K=16, V=16, dtype="bfloat16"),
    Case(T=300, H=2, K=256, V=256, dtype="bfloat16"),
    Case(T=300, H=2, K=256, V=100, dtype="float16"),
    Case(T=300, H=2, K=128, V=128, dtype="float16", neg=True, layout="kv"),
    Case(T=300, H=2, K=128, V=128, dtype="bfloat16", logit=False),
)
SINGLE = (
    *(Case(T=300, H=1, HV=2, K=128, V=128, gate=g, strength="strong") for g in ("lower_bound", "softplus")),
    Case(T=200, H=2, K=128, V=128, gate="log", strength="hostile"),
    Case(T=200, H=2, K=128, V=128, strength="saturated"),
    Case(lengths=(0, 100, 1, 65), tail=7, H=1, HV=2, K=256, V=256, layout="kv"),
    Case(T=150, H=2, K=64, V=20, l2norm=False),
    Case(T=150, H=2, K=20, V=64, neg=True, strength="slow"),
    Case(B=2, T=70, H=1, HV=3, K=16, V=16, logit=False),
)


def on_the_gpu(call: Call, do: Tensor, dS: Tensor | None, target: Target = GPU) -> dict[str, Tensor]:
    """Gradients of the public function."""
    taped, found = leaves(call | {"output_final_state": True})
    o, S = run(target, taped)
    assert S is not None
    pairs = [(o, do)] if dS is None else [(o, do), (S, dS.to(S.dtype))]
    grads = torch.autograd.grad([x for x, _ in pairs], list(found.values()), [d for _, d in pairs])
    return dict(zip(found, grads, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("case", parameters(HALF))
def test_half_precision_on_a_gpu(case: Case) -> None:
    """Every gradient of every head against float64."""
    found = half_errors(case.build("cuda"), on_the_gpu)
    assert all(x <= HALF_TOLERANCE[name] for name, x in found.items()), f"RMSE ratios {found}"


@pytest.mark.gpu
@pytest.mark.parametrize("case", parameters(SINGLE))
def test_single_precision_on_a_gpu(case: Case) -> None:
    """Every gradient of every head, and of every block of 16 rows, against float64."""
    call = case.build("cuda")
    do, dS = seeds(call)
    compare(on_the_gpu(call, do, dS), expected(call, do, dS), call, 1e-4)


LONE_WRITES = (
    Case(T=120, H=2, K=128, V=128, dtype="bfloat16"),
    Case(T=60, H=1, HV=3, K=64, V=100, dtype="float16", neg=True),
    Case(lengths=(33, 0, 60, 1), tail=3, H=2, K=256, V=256, dtype="bfloat16"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("hard", [False, True], ids=["easy", "hard"])
@pytest.mark.parametrize("case", parameters(LONE_WRITES))
def test_beta_has_the_bits_on_a_gpu(case: Case, hard: bool) -> None:
    assert_beta_has_the_bits(case, lambda call, do: on_the_gpu(call, do, None), "cuda", hard)


@pytest.mark.gpu
def test_collinear_keys_on_a_gpu() -> None:
    """One key for thousands of tokens, decays near 1 and strong writes: finite, and right within bfloat16."""
    call = Case(T=4096, H=1, K=128, V=128, dtype="bfloat16", A_log=False, dt_bias=None).build("cuda")
    key = call["k"][:, :1].expand_as(call["k"])
    call |= {"q": key, "k": key, "g": torch.full_like(call["g"], -12.0), "beta": torch.full_like(call["beta"], 8.0)}
    do, dS = seeds(call)
    do = do.bfloat16()
    got = on_the_gpu(call, do, dS)
    assert all(bool(x.isfinite().all()) for x in got.values())
    found = errors(got, expected(call, do.double(), dS))
    assert max(found["v"], found["q"], found["initial_state"]) <= 2e-2, f"RMSE ratios {found}"


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["lower_bound", "softplus"])
def test_same_bits_on_a_gpu(gate: str) -> None:
    """Five backward calls agree bit for bit, and a sequence does not depend on what else is packed."""
    call = Case(lengths=(700, 33, 0, 1500, 64), H=4, HV=8, K=128, V=128, dtype="bfloat16", gate=gate).build("cuda")
    rng = torch.Generator("cuda").manual_seed(3)
    do = torch.randn(call["v"].shape, generator=rng, device="cuda", dtype=torch.bfloat16)
    dS = torch.randn(call["initial_state"].shape, generator=rng, device="cuda")

    def gradients(call: Call, do: Tensor, dS: Tensor) -> dict[str, Tensor]:
        taped, found = leaves(call)
        outputs = run(GPU, taped)
        return dict(zip(found, torch.autograd.grad(outputs, list(found.values()), (do, dS)), strict=True))

    first = gradients(call, do, dS)
    for _ in range(4):
        for name, x in gradients(call, do, dS).items():
            assert_same_bits(x, first[name], f"d{name}")
    rows = slice(733, 2233)
    alone = {name: call[name][:, rows] for name in TENSORS[:-1]}
    alone |= {"initial_state": call["initial_state"][3:4], "cu_seqlens": torch.tensor([0, 1500], device="cuda")}
    one = gradients(call | alone, do[:, rows], dS[3:4])
    for name in TENSORS[:-1]:
        assert_same_bits(one[name], first[name][:, rows], f"d{name} alone")
    assert_same_bits(one["initial_state"], first["initial_state"][3:4], "dinitial_state alone")


def assert_poison_stays(target: Target, call: Call, poisoned: Call, bad_do: Tensor | None = None) -> None:
    """NaN in the first of two sequences, of 200 and 90 tokens, and past the end: in the call, or in ``bad_do``."""
    do = torch.ones_like(call["v"])

    def gradients(call: Call, do: Tensor) -> dict[str, Tensor]:
        taped, found = leaves(call, TENSORS)
        o, _ = run(target, taped)
        return dict(zip(found, torch.autograd.grad(o, list(found.values()), do), strict=True))

    clean, bad = gradients(call, do), gradients(poisoned, do if bad_do is None else bad_do)
    assert not all(bool(d.isfinite().all()) for d in bad.values()), "the poison had no effect"
    for n in TENSORS[:-1]:
        assert_same_bits(bad[n][:, 200:290], clean[n][:, 200:290], f"d{n} of the other sequence")
        assert not bad[n][:, 290:].count_nonzero(), f"d{n} of rows past the end"
    assert_same_bits(bad["initial_state"][1], clean["initial_state"][1], "dinitial_state of the other sequence")


@pytest.mark.gpu
@pytest.mark.parametrize("name", TENSORS[:-1])
def test_poison_stays_in_its_sequence_on_a_gpu(name: str) -> None:
    """NaN in one sequence and past the end reaches no gradient of the other sequences, and rows past the end none."""
    call = Case(lengths=(200, 90), tail=50, H=2, K=128, V=128, dtype="bfloat16").build("cuda")
    x = call[name].clone()
    x[0, 100] = math.nan
    x[0, 290:] = math.nan
    assert_poison_stays(GPU, call, call | {name: x})


@pytest.mark.gpu
def test_memory_on_a_gpu() -> None:
    """Saved are the inputs alone; the backward's own memory is a few times that of the inputs."""
    call = Case(T=8192, H=8, K=128, V=128, dtype="bfloat16", initial=False).build("cuda")
    given = 2 * 8192 * 8 * 128
    taped, found = leaves(call)
    do = torch.ones_like(call["v"])
    o, S = run(GPU, taped)
    torch.autograd.grad(o, list(found.values()), do)  # compiled, and the allocator warm
    del o, S
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    o, _ = run(GPU, taped)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    assert kept <= 2 * given, f"{kept} bytes are kept for the backward, an output has {given}"
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(o, list(found.values()), do)
    peak = torch.cuda.max_memory_allocated() - before - kept
    assert len(grads) == len(found)
    # Gradients 5, since g is float32, states of both walks 8, U and dR 2, parts of dq and dk in float32 4, tiles and
    # squares 4, all in units of one bfloat16 tensor of rows.
    assert peak <= 25 * given, f"{peak / given:.1f} times an output"
