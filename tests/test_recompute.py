"""``recompute=False``: what is kept, by which launches, through torch's tools, and on a GPU the bits that it gives."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import compiling
import pytest
import torch
from cases import Call, Case, Target, inputs_of, leaves, parameters, run, skip_if_declined, targets
from compare import assert_same_bits
from compiling import H200
from interpreted_backward import seeds
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flash_kda
from flash_kda import dispatch
from flash_kda.backends import cpu
from flash_kda.backends.triton.config import MOST_GRADIENT_ROWS, configure, kept_bytes
from flash_kda.nn import KimiDeltaAttention
from flash_kda.types import Inputs, Problem

BFLOAT16 = Problem(T=8192, H=32)

# What is kept, and by which launches.


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (BFLOAT16, 8192 * 32 * 1040),
        (replace(BFLOAT16, gate="softplus"), 8192 * 32 * 1040 + 256 * 32),
        (replace(BFLOAT16, B=64), 64 * 8192 * 32 * 1040),
        (replace(BFLOAT16, H=16, HV=32, V=64), 8192 * 32 * 1040),
        (Problem(T=100, H=1, K=60, N=3, packed=True), 7 * 32 * (3 * 64 * 2 + 2 * 32 * 2 * 2 + 64 * 4 // 32)),
        (Problem(T=32, H=1, K=16, dtype=torch.float32), 32 * (3 * 16 * 4 + 2 * 32 * 4) + 16 * 4),
        (replace(BFLOAT16, T=MOST_GRADIENT_ROWS // 32), MOST_GRADIENT_ROWS * 1040),
        (replace(BFLOAT16, T=MOST_GRADIENT_ROWS // 32 + 1), 0),
        (replace(BFLOAT16, T=0), 0),
        (replace(BFLOAT16, N=0, packed=True), 0),
    ],
)
def test_bytes(problem: Problem, expected: int) -> None:
    """1,040 per token and value head at K = 128; nothing of sequences whose heads take turns in the backward."""
    assert kept_bytes(problem) == expected
    for name in ("cpu", "reference"):
        assert dispatch.load(name).kept_bytes(problem) == 0


PREPARED = (
    BFLOAT16,
    replace(BFLOAT16, gate="softplus"),
    replace(BFLOAT16, B=3, T=1000, H=3, HV=6, V=64, gate="log"),
    replace(BFLOAT16, H=8, N=5, packed=True),
)
PORTABLE = (*PREPARED, Problem(T=300, H=2, K=20, V=40, dtype=torch.float32, gate="log"), Problem(T=64, K=256, V=16))


def assert_prepares_as_the_backward_does(forward: list[Any], backward: list[Any], kernels: tuple[str, ...]) -> None:
    """The same launches of these kernels, in all that they are launched with."""
    found = [[x for x in launches if x.kernel.__name__ in kernels] for launches in (forward, backward)]
    assert found[0]
    for a, b in zip(*found, strict=True):
        assert a.kernel is b.kernel
        assert (a.programs, a.arguments, a.options, a.operands) == (b.programs, b.arguments, b.options, b.operands)


def results(problem: Problem) -> tuple[Inputs, tuple[Any, Any], tuple[Any, Any]]:
    """A call of dense bfloat16 or float32 rows, and what its output and final states go to."""
    inputs = compiling.meta_inputs(problem)
    inputs = inputs.replace(g=inputs.g.to(inputs.q.dtype))
    final = torch.empty(inputs.state_shape, dtype=inputs.state_dtype, device="meta")
    return inputs, (inputs.v.dtype, inputs.v.stride()), (final.dtype, final.stride())


@pytest.mark.parametrize("problem", PORTABLE, ids=range(len(PORTABLE)))
def test_triton_prepares_as_its_backward_does(problem: Problem) -> None:
    pytest.importorskip("triton")
    from flash_kda.backends.triton import backward, forward

    inputs, *written = results(problem)
    call, config = inputs.signature, configure(problem, H200)
    scratch, launches = forward.describe(call, config, *written, keeps=True)
    (tiles, first), _ = backward.describe_backward(call, config, None)
    assert tuple(scratch) == forward.WORKSPACE
    assert {name: scratch[name] for name in tiles} == tiles
    assert_prepares_as_the_backward_does(launches, first, ("prepare",))


@pytest.mark.triton36
@pytest.mark.parametrize("problem", PREPARED, ids=range(len(PREPARED)))
def test_hopper_prepares_as_its_backward_does(problem: Problem) -> None:
    """Also where the forward cuts sequences; its maps are not kept."""
    pytest.importorskip("triton")
    from flash_kda.backends.hopper import backward, forward
    from flash_kda.backends.hopper.config import configure as configure_hopper
    from flash_kda.backends.triton.forward import WORKSPACE, plan_that_keeps

    inputs, *written = results(problem)
    call, config, own = inputs.signature, configure(problem, H200), configure_hopper(problem, H200)
    scratch, launches = forward.describe(call, own, config, *written, keeps=True)
    (tiles, first), _ = backward.describe(call, config, H200, None)
    assert tuple(scratch) == (*WORKSPACE, "maps", "cuts")
    assert {name: scratch[name] for name in tiles} == tiles
    assert_prepares_as_the_backward_does(launches, first, ("prepare_warp", "prepare"))
    of_cuts = 4 * sum(scratch[name][0] for name in ("maps", "cuts"))
    assert of_cuts <= plan_that_keeps(call, scratch, launches).bytes < of_cuts + 256
    assert (of_cuts > 0) == (own.segment is not None)


# Through the operator, by a stand-in.


class Keeping:
    """The CPU's backend, which keeps what a GPU would, but for its values, and wants it back."""

    supports, run, runner = staticmethod(cpu.supports), staticmethod(cpu.run), staticmethod(cpu.runner)

    def __init__(self, *, aligned: bool = True) -> None:
        self.aligned = aligned
        self.seen: list[int | None] = []

    def kept_bytes(self, problem: Problem) -> int:
        return kept_bytes(problem)

    def run_keeping(self, inputs: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
        o, S, _ = cpu.run_keeping(inputs)
        aligned, self.aligned = self.aligned, True
        if inputs.recompute or not aligned:
            return o, S, None
        return o, S, torch.full((kept_bytes(inputs.problem),), 7, dtype=torch.uint8)

    def gradients(self, inputs: Inputs, do: Tensor, dS: Tensor | None, kept: Tensor | None) -> tuple[Any, ...]:
        if kept is not None:
            assert bool((kept == 7).all())
        self.seen.append(None if kept is None else kept.numel())
        return cpu.gradients(inputs, do, dS)


@pytest.fixture(params=[True, False], ids=["aligned", "moved"])
def keeping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Keeping:
    backend = Keeping(aligned=request.param)
    monkeypatch.setattr(dispatch, "load", lambda name: backend)
    torch.compiler.reset()
    return backend


SMALL = Case(T=40, H=1, HV=2)


def gradients(call: Call, function: Any = flash_kda.kda, **options: Any) -> dict[str, Tensor]:
    """Those of the output and the final states, by name, from a seed; and both results."""
    taped, found = leaves(call)
    o, S = function(**taped, **options)
    do, dS = (x.to(y.dtype) for x, y in zip(seeds(call), (o, S), strict=True))
    grads = torch.autograd.grad([o, S], list(found.values()), [do, dS])
    return {"o": o.detach(), "S": S.detach()} | dict(zip(found, grads, strict=True))


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert_same_bits(x, want[name], name)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("recompute", [True, False])
def test_what_a_compiled_call_keeps(compiler: str, recompute: bool, keeping: Keeping) -> None:
    """It comes back to the backward, from a graph without a break; nothing is kept by default."""
    call = SMALL.build()
    compiled = torch.compile(flash_kda.kda, fullgraph=True, backend=compiler)
    got = gradients(call, compiled, recompute=recompute)
    assert keeping.seen == [None if recompute else kept_bytes(Problem.of(inputs_of(call)))]
    assert_same(got, gradients(call))


def test_a_compiled_call_without_gradients_keeps_nothing(keeping: Keeping) -> None:
    call = SMALL.build()
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(flash_kda.kda, fullgraph=True, backend=keep)
    o, _ = compiled(**call, recompute=False)
    with torch.no_grad():
        compiled(**leaves(call)[0], recompute=False)
    assert_same_bits(o, flash_kda.kda(**call)[0], "o")
    calls = [x for graph in graphs for x in graph.graph.nodes if "flash_kda.forward" in str(x.target)]
    assert [x.args[-1] for x in calls] == [True] * len(graphs)


def test_a_compiled_call_of_changing_lengths(keeping: Keeping) -> None:
    """One graph, in which the size of what is kept is a formula."""
    compiled = torch.compile(flash_kda.kda, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for T in (40, 75, 130):
            call = SMALL.but(T=T).build()
            assert_same(gradients(call, compiled, recompute=False), gradients(call))
            assert keeping.seen[-1] == kept_bytes(Problem.of(inputs_of(call)))


def test_the_operator_that_keeps_has_its_contract(keeping: Keeping) -> None:
    """torch's own checks, with sizes that change, too."""
    call, _ = leaves(SMALL.build())
    rows = [*(call[name] for name in ("q", "k", "v", "g", "beta")), call["gate"].A_log, call["gate"].dt_bias]
    options = ("lower_bound", -5.0, None, True, True, True, False, "vk", "cpu", False)
    torch.library.opcheck(torch.ops.flash_kda.forward.default, (*rows, call["initial_state"], None, *options))
    assert None not in keeping.seen


# On every backend: the bits of a call that recomputes.

CASES = (
    Case(T=200, H=2, HV=4, K=128, V=128, dtype="bfloat16", g_dtype="bfloat16"),
    Case(B=3, T=150, H=2, K=128, V=64, dtype="bfloat16", g_dtype="bfloat16", initial=False),
    Case(lengths=(300, 0, 1, 65), tail=50, H=2, K=128, V=128, dtype="bfloat16", g_dtype="bfloat16", layout="kv"),
    Case(T=400, H=2, K=128, V=128, dtype="bfloat16", g_dtype="bfloat16", gate="softplus", strength="slow"),
    Case(T=5000, H=2, K=128, V=128, dtype="bfloat16", g_dtype="bfloat16", gate="log", strength="slow"),
    Case(lengths=(70, 0, 33), tail=3, K=60, V=100, gate="softplus"),
)


def built(case: Case, device: str) -> Call:
    """The call; where its gates are slow some chunks decay fast."""
    call = case.build(device)
    if case.strength == "slow":
        call["g"][:, 96:160] = -8.0 if case.gate == "log" else 30.0
    return call


def of_call(target: Target, call: Call, **options: Any) -> dict[str, Tensor]:
    return gradients(call, lambda **call: run(target, call), **options)


def kept_of(o: Tensor) -> Tensor | None:
    """What the node of a plain call keeps."""
    found: Tensor | None = o.grad_fn.saved_tensors[-1]  # type: ignore[union-attr]
    return found


def case_for(target: Target) -> Case:
    """One that a GPU keeps something of; elsewhere there is nothing to keep, and a small one will do."""
    return CASES[0] if target.device == "cuda" else SMALL


@pytest.mark.parametrize("target", targets())
def test_same_bits(target: Target) -> None:
    """Of output, final states and every gradient."""
    call = case_for(target).build(target.device)
    assert_same(of_call(target, call, recompute=False), of_call(target, call))


@pytest.mark.gpu
@pytest.mark.parametrize("case", parameters(CASES))
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_same_bits_on_a_gpu(backend: str, case: Case) -> None:
    """Of output, final states and every gradient, three times: then the call's form is known."""
    target = Target(backend, "cuda", partial=True)
    call = built(case, "cuda")
    want = of_call(target, call)
    for _ in range(3):
        assert_same(of_call(target, call, recompute=False), want)


@pytest.mark.gpu
@pytest.mark.parametrize("case", parameters(CASES))
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_what_is_kept_on_a_gpu(backend: str, case: Case) -> None:
    """Bytes as stated, from forward to backward; of hard chunks some, where there are to be."""
    from flash_kda.backends.triton.forward import pieces_of

    target = Target(backend, "cuda", partial=True)
    call = built(case, "cuda")
    taken = {}
    for recompute in (True, False):
        taped, found = leaves(call)
        o, S = run(target, taped, recompute=recompute)  # compiled, and the allocator warm
        del o, S
        gc.collect()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        o, S = run(target, taped, recompute=recompute)
        gc.collect()  # what others have left must not go between the two
        taken[recompute] = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    kept = kept_of(o)
    assert kept is not None
    problem = Problem.of(inputs_of(call))
    assert taken[False] - taken[True] == kept.nbytes == kept_bytes(problem)
    hard = pieces_of(kept, problem)[3]
    if hard is not None and case.strength == "slow":
        assert hard.bool().any()
        assert not hard.bool().all()
    do, dS = (x.to(y.dtype) for x, y in zip(seeds(call), (o, S), strict=True))
    bits = kept.clone()
    torch.autograd.grad([o, S], list(found.values()), [do, dS], retain_graph=True)
    assert_same_bits(kept, bits, "what is kept, after a backward")
    del kept, hard
    torch.autograd.grad([o, S], list(found.values()), [do, dS])
    with pytest.raises(RuntimeError, match="freed"):
        kept_of(o)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_turns_of_batch_rows_on_a_gpu(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward go in parts of other sizes; the parts of what is kept are those of batch rows."""
    from flash_kda.backends.triton import backward, forward

    target = Target(backend, "cuda", partial=True)
    call = CASES[1].but(B=5, gate="softplus", strength="saturated").build("cuda")
    monkeypatch.setattr(forward, "MOST_ROWS", 3 * 150 * 2)
    monkeypatch.setattr(backward, "MOST_ROWS", 2 * 150 * 2)
    want = of_call(target, call)
    assert_same(of_call(target, call, recompute=False), want)


# With torch's tools.

ROWS = ("q", "k", "v", "g", "beta")


@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
@pytest.mark.parametrize("target", targets())
def test_activation_checkpointing(target: Target, reentrant: bool) -> None:
    call = case_for(target).build(target.device)

    def function(**call: Any) -> Any:
        rest = {name: x for name, x in call.items() if name not in ROWS}
        rows = [call[name] for name in ROWS]
        given = lambda *rows: run(target, rest | dict(zip(ROWS, rows, strict=True)))  # noqa: E731  # for one use
        return checkpoint(given, *rows, use_reentrant=reentrant)

    def gradients_of(recompute: bool, function: Any) -> list[Tensor]:
        taped, found = leaves(call)
        o, S = function(**taped, recompute=recompute)
        do, dS = (x.to(y.dtype) for x, y in zip(seeds(call), (o, S), strict=True))
        torch.autograd.backward([o, S], [do, dS])
        return [x.grad for x in found.values() if x.grad is not None]

    want = gradients_of(True, lambda **call: run(target, call))
    for i, (x, y) in enumerate(zip(gradients_of(False, function), want, strict=True)):
        assert_same_bits(x, y, f"gradient {i}")


@pytest.mark.parametrize("target", targets())
def test_saved_tensors_that_are_taken_away(target: Target) -> None:
    call = case_for(target).build(target.device)
    want = of_call(target, call)
    with torch.autograd.graph.save_on_cpu():
        assert_same(of_call(target, call, recompute=False), want)


@pytest.mark.parametrize("target", targets())
def test_a_layer(target: Target) -> None:
    """Its argument comes to the call; forwards overlap, each with what it keeps."""
    torch.manual_seed(0)
    made = {"lower_bound": -5.0, "backend": target.backend}
    layer = KimiDeltaAttention(48, 128, 2, **made).to(target.device, torch.bfloat16)
    other = KimiDeltaAttention(48, 128, 2, **made, recompute=False).to(target.device, torch.bfloat16)
    other.load_state_dict(layer.state_dict())
    assert not other.delta_rule.recompute
    skip_if_declined(target, Problem(B=2, T=130, H=2, K=128, V=128, device=target.device, grad=True))
    found = []
    for module in (layer, other):
        x = [torch.randn(2, n, 48, generator=torch.Generator().manual_seed(n)) for n in (130, 200)]
        given = [y.to(target.device, torch.bfloat16).requires_grad_() for y in x]
        losses = [module(y)[0].float().square().sum() for y in given]
        found.append([torch.autograd.grad(a, b)[0] for a, b in zip(losses, given, strict=True)])
    for x, y in zip(*found, strict=True):
        assert_same_bits(y, x, "dx")


def compiled_between(target: Target, compiler: str) -> None:
    """A call between other operations, all in one graph, gives the bits of a plain one that recomputes."""
    torch.compiler.reset()
    call = case_for(target).build(target.device)
    skip_if_declined(target, Problem.of(inputs_of(call)))

    def function(**call: Any) -> Any:
        o, S = flash_kda.kda(**{**call, "v": call["v"] * 2}, backend=target.backend)
        return o * 2, S * 2

    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    assert_same(gradients(call, compiled, recompute=False), gradients(call, function))


@pytest.mark.parametrize("target", targets())
def test_a_compiled_call(target: Target) -> None:
    compiled_between(target, "aot_eager")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_a_call_compiled_by_inductor_on_a_gpu(backend: str) -> None:
    compiled_between(Target(backend, "cuda", partial=True), "inductor")


@pytest.mark.gpu
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
@pytest.mark.parametrize("name", ["q", "v", "do"])
def test_what_is_not_aligned_on_a_gpu(name: str, compiler: str | None) -> None:
    """The kernels of either direction are those of a call that recomputes, whatever the other one's are."""
    from test_hopper import shifted

    torch.compiler.reset()
    call = CASES[0].but(HV=None).build("cuda")
    skip_if_declined(Target("hopper", "cuda", partial=True), Problem.of(inputs_of(call)))
    found = []
    for recompute in (True, False):
        taped, leaf = leaves(call)
        rows = {x: shifted(taped[x]) for x in {name} & taped.keys()}
        function = flash_kda.kda if compiler is None else torch.compile(flash_kda.kda, fullgraph=True, backend=compiler)
        o, _ = function(**taped | rows, recompute=recompute, backend="hopper")
        do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
        found.append((o, *torch.autograd.grad(o, list(leaf.values()), shifted(do) if name == "do" else do)))
    for i, (x, y) in enumerate(zip(*found, strict=True)):
        assert_same_bits(y, x, f"result {i}")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_graph_on_a_gpu(backend: str) -> None:
    """Forward and backward in one CUDA graph, replayed with other values."""
    target = Target(backend, "cuda", partial=True)
    call, other = (built(CASES[3].but(seed=seed), "cuda") for seed in (0, 1))
    other["gate"] = call["gate"]
    want = of_call(target, other)
    do, dS = seeds(other)
    taped, found = leaves(call)
    do = do.bfloat16()

    def step() -> tuple[Tensor, ...]:
        o, S = run(target, taped, recompute=False)
        return o.detach(), S.detach(), *torch.autograd.grad([o, S], list(found.values()), [do, dS])  # type: ignore[union-attr]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    with torch.no_grad():
        for name in (*ROWS, "initial_state"):
            taped[name].copy_(other[name])
    graph.replay()
    assert_same(dict(zip(("o", "S", *found), got, strict=True)), want)
