"""The cases of the tests: printable values that build a call, and the targets (backend and device) that run it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flash_kda

Call = dict[str, Any]
TENSORS = ("q", "k", "v", "g", "beta", "initial_state")


@dataclass(frozen=True)
class Target:
    """A backend on a device, and what is expected of it.

    Args:
        tolerance, grad_tolerance: RMSE ratio per head and block that is allowed beyond the rounding of the output.
        half_grad_tolerance: that of gradients of half-precision inputs, if these are computed in half precision.
        exact_batching: whether a sequence's bits must not depend on what else is in the batch.
        partial: whether it may decline a case (the test is then skipped with its reason).
    """

    backend: str
    device: str = "cpu"
    tolerance: float = 1e-5
    grad_tolerance: float = 2e-5
    half_grad_tolerance: float | None = None
    exact_batching: bool = True
    partial: bool = False

    def __str__(self) -> str:
        return self.backend if self.device == "cpu" else f"{self.backend}-{self.device}"


# A new backend joins every test by one entry here.
TARGETS = (
    Target("reference", tolerance=1e-6, grad_tolerance=2e-6),
    Target("cpu"),
    # bfloat16 tiles round at about 3e-3; more closely judged in test_triton and test_triton_backward.
    Target("triton", "cuda", tolerance=6e-3, grad_tolerance=2e-4, half_grad_tolerance=3e-2, partial=True),
    # Its own cases are in test_hopper and test_hopper_prefill: of these here it takes few.
    Target("hopper", "cuda", tolerance=6e-3, partial=True),
)


def targets(*, gradients_of_its_own: bool = False) -> list[Any]:
    """Pytest parameters for :data:`TARGETS`; without the reference where it is itself the measure."""
    chosen = [t for t in TARGETS if not (gradients_of_its_own and t.backend == "reference")]
    return [pytest.param(t, id=str(t), marks=[pytest.mark.gpu] if t.device == "cuda" else []) for t in chosen]


@dataclass(frozen=True)
class Case:
    """A call to ``kda`` by its description.

    Args:
        lengths: of packed sequences (then B is 1 and T their sum plus ``tail``); None for a plain batch.
        tail: rows past ``cu_seqlens[-1]``.
        strength: of the decay: ``strong``, ``slow``, ``saturated`` or (log gate only) ``hostile``.
        A_log, dt_bias: whether the gate has them; ``dt_bias="flat"`` is ``[HV * K]``.
        g_dtype: of the raw gate, if it is not float32 beside half-precision rows.
    """

    B: int = 1
    T: int = 70
    H: int = 2
    K: int = 16
    V: int = 16
    HV: int | None = None
    lengths: tuple[int, ...] | None = None
    tail: int = 0
    gate: str = "lower_bound"
    lower_bound: float = -5.0
    strength: str = "strong"
    A_log: bool = True
    dt_bias: str | None = "full"
    dtype: str = "float32"
    g_dtype: str | None = None
    cu_dtype: str = "int64"
    initial: bool = True
    state_dtype: str = "float32"
    final: bool = True
    layout: str = "vk"
    l2norm: bool = True
    logit: bool = True
    neg: bool = False
    scale: float | None = None
    seed: int = 0

    def __str__(self) -> str:
        changed = (
            f"{f.name}={'+'.join(map(str, value)) if isinstance(value, tuple) else value}"
            for f in dataclasses.fields(self)
            if (value := getattr(self, f.name)) != f.default
        )
        return ",".join(changed) or "default"

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def heads(self) -> int:
        return self.H if self.HV is None else self.HV

    @property
    def tokens(self) -> int:
        return self.T if self.lengths is None else sum(self.lengths) + self.tail

    @property
    def sequences(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)

    def build(self, device: str = "cpu") -> Call:
        """The arguments of the call, drawn from the seed."""
        rng = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        B, T, H, HV, K, V = self.B, self.tokens, self.H, self.heads, self.K, self.V
        dtype = getattr(torch, self.dtype)
        unit = 1.0 if self.l2norm else 0.8 * K**-0.5
        q, k, v = normal(B, T, H, K), unit * normal(B, T, H, K), normal(B, T, HV, V)
        beta = normal(B, T, HV) + 0.5
        if not self.logit:
            beta = torch.sigmoid(beta)
        # Gates and beta stay in float32 beside half-precision q, k and v, as models pass them.
        side = torch.float32 if self.dtype in ("bfloat16", "float16") else dtype
        call: Call = {
            "q": q.to(dtype),
            "k": k.to(dtype),
            "v": v.to(dtype),
            "g": self._raw_gate(normal(B, T, HV, K)).to(getattr(torch, self.g_dtype) if self.g_dtype else side),
            "beta": beta.to(side),
            "gate": self._gate(normal),
            "scale": self.scale,
            "output_final_state": self.final,
            "qk_l2norm": self.l2norm,
            "beta_is_logit": self.logit,
            "allow_neg_eigval": self.neg,
            "state_layout": self.layout,
            "initial_state": None,
            "cu_seqlens": None,
        }
        if self.initial:
            shape = (V, K) if self.layout == "vk" else (K, V)
            call["initial_state"] = normal(self.sequences, HV, *shape).to(getattr(torch, self.state_dtype))
        if self.lengths is not None:
            ends = np.cumsum((0, *self.lengths))
            call["cu_seqlens"] = torch.tensor(ends, dtype=getattr(torch, self.cu_dtype))
        return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.items()} | {
            "gate": on_device(call["gate"], device)
        }

    def _raw_gate(self, x: Tensor) -> Tensor:
        if self.gate == "log":
            if self.strength == "hostile":
                levels = torch.tensor([0.0, -1e-4, -0.1, -2.0, -20.0, -1000.0, -torch.inf], dtype=x.dtype)
                return levels[(x.abs() * 1000).long() % len(levels)]
            return {"strong": -x.exp(), "slow": -1e-3 * x.abs(), "saturated": torch.full_like(x, -5.0)}[self.strength]
        shift = {"strong": 0.5, "slow": -7.0, "saturated": 30.0}[self.strength]
        return x + shift

    def _gate(self, normal: Any) -> flash_kda.Gate:
        if self.gate == "log":
            return flash_kda.LogGate()
        HV, K = self.heads, self.K
        A_log = (0.4 * normal(HV)).float() if self.A_log else None
        dt_bias = None if self.dt_bias is None else normal(HV, K).float()
        if dt_bias is not None and self.dt_bias == "flat":
            dt_bias = dt_bias.flatten()
        if self.gate == "softplus":
            return flash_kda.SoftplusGate(A_log, dt_bias)
        return flash_kda.LowerBoundGate(A_log, dt_bias, self.lower_bound)


def on_device(gate: flash_kda.Gate, device: str) -> flash_kda.Gate:
    if isinstance(gate, flash_kda.LogGate):
        return gate
    moved = {name: x.to(device) for name in ("A_log", "dt_bias") if (x := getattr(gate, name)) is not None}
    return replace(gate, **moved)


def inputs_of(call: Call) -> Any:
    """The call as the checked value that the reference functions take."""
    from flash_kda.checks import check

    return check(**({"scale": None, "initial_state": None, "cu_seqlens": None} | call))


def spans_of(call: Call) -> list[tuple[int, int, int]]:
    """(batch row, first token, one past the last) of each sequence."""
    B, T = call["q"].shape[:2]
    if call.get("cu_seqlens") is None:
        return [(b, 0, T) for b in range(B)]
    ends = call["cu_seqlens"].tolist()
    return [(0, a, b) for a, b in itertools.pairwise(ends)]


def skip_if_declined(target: Target, problem: flash_kda.Problem) -> None:
    """Skip with the backend's reason where it may decline."""
    if target.partial:
        why = flash_kda.explain(problem, target.backend)
        if why.backend is None:
            pytest.skip(str(why))


def run_on(target: Target, function: Callable[..., Any], call: Call, problem: flash_kda.Problem) -> Any:
    """A function on the target, with the assertion that it was this backend that ran."""
    skip_if_declined(target, problem)
    with flash_kda.record_backends() as ran:
        out = function(**call, backend=target.backend)
    assert ran == [target.backend]
    return out


def run(target: Target, call: Call, **changes: Any) -> tuple[Tensor, Tensor | None]:
    """``kda`` on the target."""
    call = call | changes
    found: tuple[Tensor, Tensor | None] = run_on(target, flash_kda.kda, call, flash_kda.Problem.of(inputs_of(call)))
    return found


def changed_fields(case: Any, first: str) -> str:
    """A case by its ``first`` field, and the others that are not their defaults."""
    others = (f for f in dataclasses.fields(case) if f.name != first and getattr(case, f.name) != f.default)
    return "; ".join([str(getattr(case, first)), *(f"{f.name}={getattr(case, f.name)}" for f in others)])


def tensors_of(call: Call) -> dict[str, Tensor]:
    """All tensors of a call but the gate's, by name; those of lists and checkpoints too."""
    found: dict[str, Tensor] = {}
    for name, x in call.items():
        if isinstance(x, Tensor):
            found[name] = x
        elif isinstance(x, list):
            found |= {f"{name} {i}": part for i, part in enumerate(x)}
        elif isinstance(x, flash_kda.Checkpoints):
            parts = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
            found |= {f"{name}.{field}": part for field, part in parts.items() if part is not None}
    return found


def heads_first(call: Call) -> None:
    """Make the rows of a call parts of larger tensors, with heads before tokens and NaN beside them."""
    for name in ("q", "k", "v", "g"):
        x = call[name]
        wide = x.new_full((x.shape[0], x.shape[2], x.shape[1], x.shape[3] + 3), torch.nan)
        call[name] = wide.transpose(1, 2)[..., 1:-2].copy_(x)
    beta = call["beta"]
    wide = beta.new_full((beta.shape[0], beta.shape[2], beta.shape[1], 2), torch.nan)
    call["beta"] = wide[..., 1].transpose(1, 2).copy_(beta)


def variants(call: Call, changes: dict[str, Any]) -> list[Any]:
    """Pytest parameters: the call with one change each, an argument by its name or several in a dictionary."""
    return [pytest.param(call | (x if isinstance(x, dict) else {name: x}), id=name) for name, x in changes.items()]


def leaves(call: Call, names: tuple[str, ...] = (*TENSORS, "A_log", "dt_bias")) -> tuple[Call, dict[str, Tensor]]:
    """The call with fresh leaves that want gradients, and these by name."""
    call, found = dict(call), {}
    for name in TENSORS:
        if name in names and call.get(name) is not None:
            call[name] = found[name] = call[name].detach().clone().requires_grad_()
    gate = call["gate"]
    for name in ("A_log", "dt_bias"):
        x = getattr(gate, name, None)
        if name in names and x is not None:
            found[name] = x.detach().clone().requires_grad_()
            gate = replace(gate, **{name: found[name]})
    return call | {"gate": gate}, found


def oracle(call: Call) -> tuple[Tensor, Tensor]:
    """KDA by its definition in numpy float64, sharing no line with the package.

    Returns:
        Output ``[B, T, HV, V]`` and final states in the call's layout, both float64 on the CPU.
    """
    q, k, v, g, beta = (call[name].detach().cpu().double().numpy() for name in ("q", "k", "v", "g", "beta"))
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    gate, spans = call["gate"], spans_of(call)
    with np.errstate(all="ignore"):
        if call["qk_l2norm"]:
            q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        if call["beta_is_logit"]:
            beta = 1 / (1 + np.exp(-beta))
        if call["allow_neg_eigval"]:
            beta = beta + beta
        if gate.kind != "log":
            if gate.dt_bias is not None:
                g = g + gate.dt_bias.detach().cpu().double().numpy().reshape(HV, K)
            A = np.ones(HV) if gate.A_log is None else np.exp(gate.A_log.detach().cpu().double().numpy())
            if gate.kind == "lower_bound":
                g = gate.lower_bound / (1 + np.exp(-A[:, None] * g))
            else:
                g = -A[:, None] * np.logaddexp(0.0, g)
        head = np.arange(HV) // (HV // H)
        q, k = q[:, :, head], k[:, :, head]
        q = q * (1 / np.sqrt(K) if call["scale"] is None else call["scale"])
        o, states = np.zeros((B, T, HV, V)), np.zeros((len(spans), HV, K, V))
        if call["initial_state"] is not None:
            given = call["initial_state"].detach().cpu().double().numpy()
            states[:] = given.swapaxes(-1, -2) if call["state_layout"] == "vk" else given
        a = np.exp(g)
        for S, (b, first, end) in zip(states, spans, strict=True):
            for t in range(first, end):
                S *= a[b, t][:, :, None]
                delta = beta[b, t][:, None] * (v[b, t] - (k[b, t][:, None] @ S)[:, 0])
                S += k[b, t][:, :, None] * delta[:, None]
                o[b, t] = (q[b, t][:, None] @ S)[:, 0]
    final = torch.from_numpy(states)
    return torch.from_numpy(o), final.transpose(-1, -2) if call["state_layout"] == "vk" else final


_GATES = (
    *(Case(gate="lower_bound", strength=s) for s in ("strong", "slow", "saturated")),
    *(Case(gate="softplus", strength=s) for s in ("strong", "slow", "saturated")),
    *(Case(gate="log", strength=s) for s in ("strong", "slow", "saturated", "hostile")),
    *(
        Case(gate=gate, A_log=A_log, dt_bias=dt_bias)
        for gate in ("lower_bound", "softplus")
        for A_log, dt_bias in ((False, None), (False, "full"), (True, None), (True, "flat"))
    ),
    Case(lower_bound=-3.0, strength="saturated"),
    Case(lower_bound=-0.01),
)
_SIZES = (
    *(Case(T=T, initial=T % 2 == 1) for T in (0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200)),
    *(Case(T=33, H=1, K=K, V=V) for K, V in ((1, 1), (1, 5), (5, 1), (60, 100), (100, 60), (256, 3), (8, 256))),
    Case(T=65, H=1, K=128, V=128),
    *(Case(H=H, HV=HV, K=8, V=12) for H, HV in ((1, 2), (1, 3), (2, 4), (2, 6), (3, 3), (5, 10))),
    Case(B=3, T=66, K=12, V=5),
    Case(B=2, T=0),
    Case(B=0, T=5),
)
_PACKED = (
    Case(lengths=(64,)),
    Case(lengths=(0, 64, 0, 66), layout="kv", V=8),
    Case(lengths=(0, 0, 64, 0, 1, 0, 0), V=24),
    Case(lengths=(3, 17, 64, 65, 1, 130, 2, 2)),
    Case(lengths=(0, 0, 0)),
    Case(lengths=(0, 0), tail=5),
    Case(lengths=()),
    Case(lengths=(), tail=4),
    Case(lengths=(30, 0, 40), tail=26),
    Case(lengths=(100, 28, 0, 0), tail=1, cu_dtype="int32", HV=6),
    Case(lengths=(16, 16, 16, 16), cu_dtype="int32", gate="softplus"),
    Case(lengths=(1,) * 20, initial=False),
    Case(lengths=(5, 70), gate="log", strength="hostile"),
)
_OPTIONS = (
    *(Case(initial=i, final=f, layout=layout, V=7) for i in (0, 1) for f in (0, 1) for layout in ("vk", "kv")),
    Case(state_dtype="bfloat16", V=8),
    Case(state_dtype="bfloat16", layout="kv", lengths=(0, 20, 65)),
    Case(dtype="bfloat16"),
    Case(dtype="float16"),
    Case(dtype="float64"),
    Case(dtype="float64", initial=False),
    Case(dtype="float64", state_dtype="float64", lengths=(65, 0, 9)),
    Case(dtype="bfloat16", lengths=(65, 0, 9), tail=3, state_dtype="bfloat16"),
    Case(l2norm=False),
    Case(logit=False),
    Case(neg=True, strength="slow"),
    Case(l2norm=False, logit=False, gate="log", scale=1.0),
    Case(scale=-0.3),
    Case(scale=0.0),
)


def _boolean(case: Case) -> Case:
    return case.but(initial=bool(case.initial), final=bool(case.final))


CASES = tuple(_boolean(case) for case in (*_GATES, *_SIZES, *_PACKED, *_OPTIONS))


def parameters(cases: Iterable[Any]) -> list[Any]:
    return [pytest.param(case, id=str(case)) for case in cases]
