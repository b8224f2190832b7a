"""Gradients: finite differences in float64, the reference's autograd in float32, and the rules around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import TENSORS, Call, Case, Target, inputs_of, leaves, on_device, parameters, run, targets
from compare import assert_outputs, assert_same_bits, assert_states, rms
from torch import Tensor

import flash_kda
from flash_kda.backends.cpu import plan
from flash_kda.reference import kda_recurrent

every_target = pytest.mark.parametrize("target", targets())
not_the_reference = pytest.mark.parametrize("target", targets(gradients_of_its_own=True))
# Elements of a group of the CPU backend: the smallest makes every chunk a group of its own.
GROUPS = (1, 4096, plan.GROUP_ELEMENTS)

EXACT = (
    *(Case(T=7, H=1, HV=2, K=3, V=2, gate=gate) for gate in ("lower_bound", "softplus", "log")),
    Case(T=5, H=2, K=2, V=3, A_log=False, dt_bias=None),
    Case(T=5, H=2, K=2, V=3, A_log=False, dt_bias="full"),
    Case(T=5, H=2, K=2, V=3, gate="softplus", A_log=False, dt_bias="flat"),
    Case(lengths=(3, 0, 5, 1), tail=2, H=1, HV=2, K=2, V=3),
    Case(lengths=(0, 9, 4), H=1, K=2, V=3, layout="kv", initial=False),
    Case(T=6, H=1, K=3, V=2, layout="kv"),
    Case(T=6, H=1, K=3, V=2, l2norm=False, logit=False),
    Case(T=6, H=1, K=3, V=2, neg=True, scale=-0.7),
    Case(B=2, T=3, H=1, HV=3, K=2, V=1),
    Case(T=17, H=1, K=1, V=1, strength="slow"),
)


@not_the_reference
@pytest.mark.parametrize("case", parameters(EXACT))
def test_finite_differences(target: Target, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "GROUP_ELEMENTS", 1)
    monkeypatch.setattr(plan, "CHUNK", 4)
    call = case.but(dtype="float64", state_dtype="float64").build(target.device)
    names = [name for name in TENSORS if call[name] is not None]
    values = [call[name].clone().requires_grad_() for name in names]
    gate = call["gate"]
    parameters = [name for name in ("A_log", "dt_bias") if getattr(gate, name, None) is not None]
    values += [getattr(gate, name).double().requires_grad_() for name in parameters]

    def outputs(*tensors: Tensor) -> Any:
        changed = dict(zip(names, tensors, strict=False))
        given = dict(zip(parameters, tensors[len(names) :], strict=True))
        new_gate = type(gate)(**given, **_bound(gate)) if parameters else gate
        return run(target, call | changed | {"gate": new_gate})

    assert torch.autograd.gradcheck(outputs, values)


def _bound(gate: flash_kda.Gate) -> dict[str, float]:
    return {"lower_bound": gate.lower_bound} if isinstance(gate, flash_kda.LowerBoundGate) else {}


MEDIUM = (
    *(
        Case(T=200, H=1, HV=2, K=16, V=24, gate=gate, strength=strength)
        for gate in ("lower_bound", "softplus", "log")
        for strength in ("strong", "slow", "saturated")
    ),
    Case(T=140, H=2, K=16, V=16, gate="log", strength="hostile"),
    Case(lengths=(0, 130, 64, 1, 0, 65, 17, 2), tail=7, H=1, HV=3, K=12, V=20),
    Case(B=3, T=70, K=20, V=8, layout="kv"),
    Case(T=70, H=1, K=100, V=60, l2norm=False, logit=False),
    Case(T=70, neg=True, strength="slow"),
    Case(T=70, A_log=False, dt_bias=None),
    Case(T=70, gate="softplus", A_log=True, dt_bias="flat"),
    Case(T=70, initial=False, final=False),
    Case(T=100, dtype="bfloat16", state_dtype="bfloat16"),
    Case(T=100, dtype="float16"),
)


def reference_gradients(call: Call, seeds: list[Tensor | None], dtype: torch.dtype) -> dict[str, Tensor]:
    """Autograd through the recurrence; ``dtype`` is that of its arithmetic and of its leaves."""
    taped, found = leaves({name: x.to(dtype) if name in TENSORS and x is not None else x for name, x in call.items()})
    outputs = kda_recurrent(inputs_of(taped), dtype)
    return _grads(outputs, seeds, found)


def _grads(outputs: Any, seeds: list[Tensor | None], found: dict[str, Tensor]) -> dict[str, Tensor]:
    pairs = [(x, s.to(x.dtype)) for x, s in zip(outputs, seeds, strict=True) if s is not None and x.requires_grad]
    grads = torch.autograd.grad([x for x, _ in pairs], list(found.values()), [s for _, s in pairs], allow_unused=True)
    return {name: torch.zeros_like(found[name]) if d is None else d for name, d in zip(found, grads, strict=True)}


def seeds_for(o: Tensor, state: Tensor | None) -> list[Tensor | None]:
    rng = torch.Generator().manual_seed(99)
    return [
        None if x is None else torch.randn(x.shape, generator=rng).to(device=x.device, dtype=x.dtype)
        for x in (o, state)
    ]


def compare(got: dict[str, Tensor], call: Call, seeds: list[Tensor | None], tolerance: float) -> None:
    """Against float64; what float32 autograd through the recurrence loses is allowed twice."""
    want, single = (reference_gradients(call, seeds, dtype) for dtype in (torch.float64, torch.float32))
    assert got.keys() == want.keys()
    for name, d in got.items():
        w = want[name].double()
        given = call[name] if name in TENSORS else getattr(call["gate"], name)
        assert d.dtype == given.dtype, f"d{name}: got {d.dtype}, expected {given.dtype}"
        if name == "initial_state":
            assert_states(d, w, tolerance, "dinitial_state", baseline=single[name])
        elif name in TENSORS:
            assert_outputs(d, w, call, tolerance, f"d{name}", baseline=single[name])
        else:
            assert d.shape == w.shape
            dims = tuple(range(d.ndim))
            size = rms(w, dims).clamp(min=1e-30)
            error, same = (float(rms(x.double() - w, dims) / size) for x in (d, single[name]))
            allowed = max(tolerance, 2 * same)
            assert error <= allowed, f"d{name}: RMSE ratio {error:.3g}, allowed {allowed:.3g}"


@not_the_reference
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("case", parameters(MEDIUM))
def test_gradients_of_the_recurrence(target: Target, case: Case, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "GROUP_ELEMENTS", group)
    call = case.build(target.device)
    taped, found = leaves(call)
    o, state = run(target, taped)
    seeds = seeds_for(o, state)
    is_half = case.dtype in ("bfloat16", "float16") and target.half_grad_tolerance is not None
    tolerance = target.half_grad_tolerance if is_half else target.grad_tolerance
    compare(_grads((o, state), seeds, found), call, seeds, tolerance)


@not_the_reference
@pytest.mark.parametrize("only", [0, 1], ids=["output", "state"])
def test_gradient_of_one_result_alone(target: Target, only: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "GROUP_ELEMENTS", 1)
    call = Case(lengths=(70, 0, 5), K=16, V=20, strength="slow").build(target.device)
    taped, found = leaves(call)
    o, state = run(target, taped)
    seeds = [s if i == only else None for i, s in enumerate(seeds_for(o, state))]
    got = _grads((o, state), seeds, found)
    compare(got, call, seeds, target.grad_tolerance)
    if only == 1:
        assert not got["q"].count_nonzero()


@every_target
@pytest.mark.parametrize("name", [*TENSORS, "A_log", "dt_bias"])
def test_only_one_input_wants_a_gradient(target: Target, name: str) -> None:
    """The gradient of one input is what it is among all, and the others get none."""
    call = Case(T=20).build(target.device)
    every, found = leaves(call)
    full = _grads(run(target, every), seeds_for(*run(target, call)), found)
    one, alone = leaves(call, (name,))
    outputs = run(target, one)
    assert outputs[0].requires_grad
    got = _grads(outputs, seeds_for(*outputs), alone)
    assert list(got) == [name]
    torch.testing.assert_close(got[name], full[name])
    for other in TENSORS:
        assert other == name or one[other].grad is None


@every_target
def test_no_gradient_wanted_no_tape(target: Target) -> None:
    call = Case(T=5).build(target.device)
    assert all(x is not None and not x.requires_grad for x in run(target, call))
    taped, _ = leaves(call)
    with torch.no_grad():
        assert all(x is not None and not x.requires_grad for x in run(target, taped))


@every_target
def test_absent_parameters_have_no_gradient(target: Target) -> None:
    """A gate without A_log still gives dt_bias its gradient."""
    call = Case(T=20, A_log=False).build(target.device)
    taped, found = leaves(call)
    assert "A_log" not in found
    run(target, taped)[0].sum().backward()
    assert found["dt_bias"].grad is not None
    assert bool(found["dt_bias"].grad.count_nonzero())


@every_target
def test_gradients_reach_through_other_operations(target: Target) -> None:
    """Leaves behind a slice of one projection, a bfloat16 cast and an exponential get dense gradients."""
    base = torch.randn(1, 20, 128, generator=torch.Generator().manual_seed(1)).to(target.device).requires_grad_()
    log_A = torch.zeros(2, device=target.device, requires_grad=True)
    q, k, v, g = (x.unflatten(-1, (2, 16)) for x in base.split(32, -1))
    call = Case(T=20, gate="softplus", dt_bias=None, initial=False).build(target.device)
    rows = {"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16(), "g": g, "beta": g.sum(-1)}
    o, _ = run(target, call | rows | {"gate": flash_kda.SoftplusGate(log_A * 2, None)})
    o.float().square().sum().backward()
    for x in (base, log_A):
        assert x.grad is not None
        assert bool(x.grad.isfinite().all())
        assert bool(x.grad.count_nonzero())


@every_target
def test_backward_twice_gives_the_same_bits(target: Target) -> None:
    call = Case(lengths=(3, 0, 70)).build(target.device)
    taped, found = leaves(call)
    o, state = run(target, taped)
    assert state is not None
    loss = o.square().sum() + state.square().sum()
    first = torch.autograd.grad(loss, list(found.values()), retain_graph=True)
    second = torch.autograd.grad(loss, list(found.values()))
    taped, found = leaves(call)
    o, state = run(target, taped)
    assert state is not None
    third = torch.autograd.grad(o.square().sum() + state.square().sum(), list(found.values()))
    for name, a, b, c in zip(found, first, second, third, strict=True):
        assert_same_bits(b, a, f"d{name}")
        assert_same_bits(c, a, f"d{name} of a second call")


@not_the_reference
def test_double_backward_is_refused(target: Target) -> None:
    """A gradient penalty beside a loss fails aloud: its second-order part must not be left out in silence."""
    taped, found = leaves(Case(T=5).build(target.device))
    o, _ = run(target, taped)
    (d,) = torch.autograd.grad(o.sum(), [found["q"]], create_graph=True)
    with pytest.raises(RuntimeError, match=r"twice|second|once_differentiable"):
        (o.square().sum() + d.square().sum()).backward()
    # Asking for the graph alone is harmless, and the gradient is what it is without.
    o, _ = run(target, taped)
    assert_same_bits(d.detach(), torch.autograd.grad(o.sum(), [found["q"]])[0], "dq")


@not_the_reference
def test_input_changed_before_backward_is_noticed(target: Target) -> None:
    """An in-place change between forward and backward is an error, not a wrong gradient."""
    taped, found = leaves(Case(T=5).build(target.device))
    v = taped["v"] * 1.0
    o, _ = run(target, taped | {"v": v})
    with torch.no_grad():
        v.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(o.sum(), [found["q"]])


@every_target
@pytest.mark.parametrize("case", parameters((Case(T=0), Case(B=2, T=0), Case(lengths=(0, 0)))))
def test_nothing_to_do_backward(target: Target, case: Case) -> None:
    """With no token at all the gradient of the initial state is that of the final state."""
    call = case.build(target.device)
    taped, found = leaves(call)
    _, state = run(target, taped)
    assert state is not None
    d = torch.full_like(state, 0.5)
    (got,) = torch.autograd.grad([state], [found["initial_state"]], [d])
    assert_same_bits(got, d, "dinitial_state")


@every_target
def test_tokens_split_in_two_calls(target: Target) -> None:
    """The gradient through a state handed on is that of the whole."""
    call = Case(T=90, V=20).build(target.device)
    call["gate"] = on_device(call["gate"], target.device)
    taped, found = leaves(call)
    whole = torch.autograd.grad(run(target, taped)[0].square().sum(), list(found.values()))
    taped, found = leaves(call)
    first, second = ({name: taped[name][:, rows] for name in TENSORS[:5]} for rows in (slice(37), slice(37, None)))
    o1, state = run(target, taped | first)
    o2, _ = run(target, taped | second, initial_state=state)
    parts = torch.autograd.grad(o1.square().sum() + o2.square().sum(), list(found.values()))
    for name, a, b in zip(found, parts, whole, strict=True):
        dims = tuple(range(a.ndim))
        assert rms(a - b, dims) <= max(1e-5, target.grad_tolerance) * rms(b, dims), f"d{name}"
