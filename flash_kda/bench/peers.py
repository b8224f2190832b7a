"""What is measured: this library, FLA's ``chunk_kda`` and cuDNN's Hopper engine, all behind one interface.

Whatever a peer wants in another form (layouts, log gates) is made before the clock starts, in its favour, and its note
says what it therefore does not compute.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

import flash_kda
from flash_kda.bench.harness import Run
from flash_kda.bench.measuring import Named, run_watched
from flash_kda.bench.shapes import Call, boundaries
from flash_kda.reference import decay
from flash_kda.types import LowerBoundGate, gate_parameters, with_parameters

ALL_INSIDE = "normalisation, gate and sigmoid inside"
NO_RECOMPUTE = f"{ALL_INSIDE}, the preparation kept for the backward"
CUDNN_PLAN = "kda_hopper_cuda"


class Implementation(Named, Protocol):
    """One way to compute a prefill."""

    def available(self) -> str | None:
        """None if it can be imported and run here, otherwise the reason why not."""

    def why_not(self, call: Call) -> str | None:
        """None if it can compute this call, otherwise the reason why not."""

    def prepare(self, call: Call) -> Run:
        """A function that computes the call; its results are in the implementation's own layouts."""

    def trainable(self, call: Call) -> tuple[Run, list[Tensor]]:
        """As ``prepare``, from tensors that want gradients, and these: q, k, v, g, beta, the gate's if any."""

    def canonical(self, results: tuple[Tensor, Tensor], call: Call) -> tuple[Tensor, Tensor]:
        """Results as output ``[B, T, H, D]`` and state ``[N, H, V, K]``."""


def _importable(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # binary packages fail in many ways; the reason is shown
        return f"{module} cannot be imported ({type(error).__name__}: {error})"
    return None


def _needs_gpu() -> str | None:
    return None if torch.cuda.is_available() else "needs an NVIDIA GPU; torch sees none"


def leaves(call: Call) -> tuple[Call, list[Tensor]]:
    """The call with tensors that want gradients: rows and the gate's parameters, not the initial state."""
    rows = {name: getattr(call, name).detach().requires_grad_() for name in ("q", "k", "v", "g", "beta")}
    A_log, dt_bias = (None if x is None else x.detach().requires_grad_() for x in gate_parameters(call.gate))
    found = [*rows.values(), *(x for x in (A_log, dt_bias) if x is not None)]
    return replace(call, gate=with_parameters(call.gate, A_log, dt_bias), **rows), found


class FromTheCall:
    """What differentiates with respect to the call's own tensors."""

    def trainable(self: Implementation, call: Call) -> tuple[Run, list[Tensor]]:
        call, wanted = leaves(call)
        return self.prepare(call), wanted


@dataclass(frozen=True)
class Ours(FromTheCall):
    """:func:`flash_kda.kda` on a backend."""

    backend: str = "auto"
    recompute: bool = True
    impl: str = "flash_kda"

    @property
    def work(self) -> str:
        return ALL_INSIDE if self.recompute else NO_RECOMPUTE

    @property
    def note(self) -> str:
        return "" if self.recompute else "with recompute=False"

    def available(self) -> str | None:
        return None

    def why_not(self, call: Call) -> str | None:
        found = flash_kda.explain(flash_kda.Problem.of(call.inputs()), self.backend)
        return None if found.backend else str(found)

    def prepare(self, call: Call) -> Run:
        arguments = call.arguments()

        def run() -> tuple[Tensor, Tensor]:
            o, state = flash_kda.kda(**arguments, recompute=self.recompute, backend=self.backend)
            if state is None:
                raise RuntimeError("no final state came back")
            return o, state

        return run

    def canonical(self, results: tuple[Tensor, Tensor], call: Call) -> tuple[Tensor, Tensor]:
        return results


@dataclass(frozen=True)
class Fla(FromTheCall):
    """``fla.ops.kda.chunk_kda`` with everything in its kernels."""

    impl: str = "fla"
    backend: str = "chunk_kda"
    work: str = ALL_INSIDE
    note: str = "FLA's Triton kernels: safe_gate with the lower-bound gate, state in FLA's own [K, V] layout"

    def available(self) -> str | None:
        return _needs_gpu() or _importable("fla.ops.kda")

    def why_not(self, call: Call) -> str | None:
        return None

    def prepare(self, call: Call) -> Run:
        chunk_kda: Any = importlib.import_module("fla.ops.kda").chunk_kda
        gate = call.gate
        bounded = isinstance(gate, LowerBoundGate)
        cu = None if call.cu_seqlens is None else call.cu_seqlens.long()
        arguments: dict[str, Any] = {
            "q": call.q,
            "k": call.k,
            "v": call.v,
            "g": call.g,
            "beta": call.beta,
            "A_log": getattr(gate, "A_log", None),
            "dt_bias": None if (bias := getattr(gate, "dt_bias", None)) is None else bias.flatten(),
            # FLA hands calls with state_v_first=True to a package named flash_kda, which is this one.
            "initial_state": call.initial_state.transpose(-1, -2).contiguous(),
            "state_v_first": False,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "safe_gate": bounded,
            "lower_bound": gate.lower_bound if isinstance(gate, LowerBoundGate) else None,
            "cu_seqlens": cu,
            # Known on the host, so that FLA need not ask the device for it.
            "cu_seqlens_cpu": None if cu is None else cu.cpu(),
        }

        def run() -> tuple[Tensor, Tensor]:
            o, state = chunk_kda(**arguments)
            return o, state

        return run

    def canonical(self, results: tuple[Tensor, Tensor], call: Call) -> tuple[Tensor, Tensor]:
        o, state = results
        return o, state.transpose(-1, -2)


@dataclass(frozen=True)
class Cudnn:
    """cuDNN frontend's Hopper engine, from ready-made log gates or with everything inside."""

    inside: bool
    impl: str = "cudnn"
    backend: str = CUDNN_PLAN

    @property
    def work(self) -> str:
        return ALL_INSIDE if self.inside else "log gates, normalised q, k and beta given"

    @property
    def note(self) -> str:
        common = "drops history once decay falls below 2^-20, so its time depends on the gates"
        if self.inside:
            return f"{common}; its kernel reads fp32 gates, so bf16 ones are widened by a pass of its own"
        return f"computes neither gate nor normalisation nor sigmoid: fp32 log gates are handed over; {common}"

    def available(self) -> str | None:
        if (why := _needs_gpu()) is not None:
            return why
        if torch.cuda.get_device_capability() != (9, 0):
            return f"its plan {CUDNN_PLAN} needs compute capability 9.0"
        return _importable("cudnn.linear_attention.ops")

    def why_not(self, call: Call) -> str | None:
        if call.q.dtype != torch.bfloat16:
            return f"takes bfloat16; the tensors are {call.q.dtype}"
        if self.inside and not isinstance(call.gate, LowerBoundGate):
            return "has no softplus gate inside"
        return None

    def _rows(self, call: Call) -> dict[str, Tensor]:
        """q, k, v, g and beta as the kernel takes them."""
        rows = {name: getattr(call, name).flatten(0, 1) for name in ("q", "k", "v", "g", "beta")}
        if self.inside:
            return rows
        return rows | {
            "q": F.normalize(rows["q"].float(), dim=-1).to(call.q.dtype),
            "k": F.normalize(rows["k"].float(), dim=-1).to(call.k.dtype),
            "g": decay(rows["g"].float(), call.gate),
            "beta": rows["beta"].float().sigmoid(),
        }

    def _run(self, call: Call, rows: dict[str, Tensor]) -> Run:
        attention: Any = importlib.import_module("cudnn.linear_attention.ops").kimi_delta_attention
        B, T = call.q.shape[:2]
        arguments: dict[str, Any] = rows | {
            "cu_seqlens": boundaries((T,) * B, call.q.device) if call.cu_seqlens is None else call.cu_seqlens.int(),
            "initial_state": call.initial_state,
            "output_final_state": True,
            "plan_name": CUDNN_PLAN,
        }
        if self.inside and isinstance(call.gate, LowerBoundGate):
            arguments |= {
                "a_log": call.gate.A_log,
                "dt_bias": call.gate.dt_bias,
                "gate_lower_bound": call.gate.lower_bound,
                "safe_gate": True,
                "use_qk_l2norm_in_kernel": True,
                "use_beta_sigmoid_in_kernel": True,
            }

        def run() -> tuple[Tensor, Tensor]:
            found = attention(**arguments)
            return found[0], found[1]

        return run

    def prepare(self, call: Call) -> Run:
        return self._run(call, self._rows(call))

    def trainable(self, call: Call) -> tuple[Run, list[Tensor]]:
        # Gradients of what is handed over: where that is normalised q and k, theirs.
        gate = with_parameters(call.gate, *(None if x is None else x.detach() for x in gate_parameters(call.gate)))
        rows = {name: x.detach().requires_grad_() for name, x in self._rows(call).items()}
        parameters = [x.requires_grad_() for x in gate_parameters(gate) if x is not None] if self.inside else []
        return self._run(replace(call, gate=gate), rows), [*rows.values(), *parameters]

    def canonical(self, results: tuple[Tensor, Tensor], call: Call) -> tuple[Tensor, Tensor]:
        o, state = results
        return o.view_as(call.v), state


PEERS: dict[str, tuple[Implementation, ...]] = {"fla": (Fla(),), "cudnn": (Cudnn(inside=True), Cudnn(inside=False))}


def implementations(
    backends: Sequence[str], names: Sequence[str], say: Callable[[str], None], recompute: Sequence[bool] = (True,)
) -> list[Implementation]:
    """Our backends in these ways, and the peers of these names that this machine can run; ``say`` is told why another
    one cannot.
    """
    found: list[Implementation] = [Ours(backend, way) for backend in backends for way in recompute]
    for peer in (peer for name in names for peer in PEERS[name]):
        if (why := peer.available()) is None:
            found.append(peer)
        else:
            say(f"{peer.impl} ({peer.work}) is left out: {why}")
    return found


def find(impl: str, work: str, backend: str) -> Implementation:
    """The implementation of a row of results."""
    if impl == "flash_kda":
        return Ours(backend, recompute=work != NO_RECOMPUTE)
    for peer in PEERS.get(impl, ()):
        if peer.work == work:
            return peer
    raise ValueError(f"impl, work: got {impl!r}, {work!r}, expected 'flash_kda' or one of {', '.join(PEERS)}")


def run_once(implementation: Implementation, call: Call) -> tuple[tuple[Tensor, Tensor], str]:
    """Compute a call once: canonical results, and the backend that ran.

    Raises:
        RuntimeError: a peer computed it with this library, or the other way round.
    """
    results, backend = run_watched(implementation, implementation.prepare(call))
    return implementation.canonical(results, call), backend
