"""torch.compile: a call is one operator and its gradients another, with no break in the graph."""

from __future__ import annotations

from typing import Any

import pytest
import stepping
import torch
from cases import Case, Target, inputs_of, leaves, run, skip_if_declined, targets
from compare import assert_same_bits
from decoding import BASE, PACKED, DecodeCase, checked
from operators import assert_one_operator
from stepping import StepCase

import flash_kda

CASES = (
    Case(T=70, H=2, HV=4, K=16, V=24),
    Case(lengths=(5, 0, 64, 20), tail=3, gate="softplus", layout="kv"),
    Case(T=33, gate="log", initial=False, dtype="bfloat16"),
    Case(T=20, final=False),
)


@pytest.fixture(autouse=True)
def _fresh_graphs() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("target", targets())
def test_one_operator(target: Target, case: Case) -> None:
    """The compiled call gives the bits of the plain one, and is the operator alone."""
    call = case.build(target.device)
    skip_if_declined(target, flash_kda.Problem.of(inputs_of(call)))
    arguments = call | {"backend": target.backend}
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        o, state = torch.compile(flash_kda.kda, fullgraph=True, backend=keep)(**arguments)
        want, want_state = flash_kda.kda(**arguments)
    assert_same_bits(o, want, "o")
    assert_same_bits(state, want_state, "state")
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("flash_kda.forward" in name for name in called) == 1


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("target", targets())
def test_training_is_two_operators(target: Target, case: Case) -> None:
    """Forward and backward of a compiled call, without a break in the graph, give the gradients of the plain one."""
    call = case.build(target.device)
    plain, expected = leaves(call)
    o, S = run(target, plain)
    torch.autograd.backward([x for x in (o, S) if x is not None], [torch.ones_like(x) for x in (o, S) if x is not None])
    taped, found = leaves(call)
    o, S = torch.compile(flash_kda.kda, fullgraph=True, backend="aot_eager")(**taped, backend=target.backend)
    torch.autograd.backward([x for x in (o, S) if x is not None], [torch.ones_like(x) for x in (o, S) if x is not None])
    for name, x in expected.items():
        assert x.grad is not None
        assert_same_bits(found[name].grad, x.grad, f"d{name}")


def test_the_operator_keeps_its_contract() -> None:
    """torch's own checks: schema, fake kernel against the real one, no hidden mutation."""
    call = Case(T=40, H=1, HV=2, K=16, V=8).build("cpu")
    rows = [*(call[name] for name in ("q", "k", "v", "g", "beta")), call["gate"].A_log, call["gate"].dt_bias]
    for layout, final in (("vk", True), ("vk", False)):
        options = ("lower_bound", -5.0, None, final, True, True, False, layout, "cpu")
        torch.library.opcheck(
            torch.ops.flash_kda.forward.default,
            (*rows, call["initial_state"], None, *options),
            test_utils=("test_schema", "test_faketensor"),
        )
        dS = torch.ones_like(call["initial_state"]) if final else torch.empty(0)
        grads = (torch.ones_like(call["v"]), dS, torch.empty(0, dtype=torch.uint8))
        torch.library.opcheck(
            torch.ops.flash_kda.backward.default,
            (*grads, *rows, call["initial_state"], None, *options),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize("target", targets())
def test_the_operator_is_differentiated_as_torch_expects(target: Target) -> None:
    """torch's own checks of autograd, also through the compiler with changing shapes."""
    if (
        flash_kda.explain(flash_kda.Problem(K=16, V=16, device=target.device, grad=True), target.backend).backend
        is None
    ):
        pytest.skip("computes no gradients")
    call, _ = leaves(Case(T=40, H=1, HV=2, K=16, V=16).build(target.device))
    rows = [*(call[name] for name in ("q", "k", "v", "g", "beta")), call["gate"].A_log, call["gate"].dt_bias]
    options = ("lower_bound", -5.0, None, True, True, True, False, "vk", target.backend)
    torch.library.opcheck(
        torch.ops.flash_kda.forward.default,
        (*rows, call["initial_state"], None, *options),
        test_utils=("test_autograd_registration", "test_aot_dispatch_dynamic"),
    )


def test_errors_of_a_compiled_call() -> None:
    """What the checks say of a wrong argument reaches the caller."""
    call = Case(T=20).build("cpu")
    compiled = torch.compile(flash_kda.kda, fullgraph=True, backend="eager")
    with torch.no_grad(), pytest.raises(ValueError, match="beta: got shape"):
        compiled(**call | {"beta": call["beta"][:, :5]})


def test_a_wrong_layout_is_not_taken_for_another() -> None:
    call = Case(T=20).build("cpu")
    compiled = torch.compile(flash_kda.kda, fullgraph=True, backend="eager")
    with torch.no_grad(), pytest.raises(ValueError, match="state_layout: got 'kk'"):
        compiled(**call | {"state_layout": "kk"})


DECODES = (
    DecodeCase(),
    DecodeCase(BASE.but(T=3, layout="kv"), index="each", accepted=True, known=True, pad=0),
    DecodeCase(BASE.but(gate="log"), index="own", write=False),
    DecodeCase(PACKED.but(lengths=(1, 0, 3), tail=1, gate="softplus")),
)


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("case", DECODES, ids=str)
@pytest.mark.parametrize("target", targets())
def test_decoding_is_one_operator(target: Target, case: DecodeCase, with_out: bool) -> None:
    """The compiled call gives the bits of the plain one, and updates the pool."""
    call, plain = case.build(target.device), case.build(target.device)
    skip_if_declined(target, checked(call).problem)
    assert_one_operator(target, flash_kda.kda_decode, call, plain, with_out=with_out)


STEPS = (
    StepCase(),
    StepCase(DecodeCase(BASE.but(layout="kv", gate="softplus"), known=True, pad=0), bias=True),
    StepCase(DecodeCase(BASE.but(gate="log"), index="own"), W=2),
)


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("case", STEPS, ids=str)
@pytest.mark.parametrize("target", targets())
def test_a_decode_step_is_one_operator(target: Target, case: StepCase, with_out: bool) -> None:
    """The compiled call gives the bits of the plain one, and updates both pools."""
    call, plain = case.build(target.device), case.build(target.device)
    skip_if_declined(target, stepping.checked(call).problem)
    assert_one_operator(target, flash_kda.kda_decode_step, call, plain, with_out=with_out)
