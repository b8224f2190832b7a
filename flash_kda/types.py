"""The values that travel through the library: gates, problems and call arguments.

Nothing here computes. Shapes use the field's letters: B batch, T tokens, H query/key heads, HV value heads,
K and V head sizes, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

import torch
from torch import Tensor

StateLayout: TypeAlias = Literal["vk", "kv"]
GateKind: TypeAlias = Literal["lower_bound", "softplus", "log"]
Op: TypeAlias = Literal["forward", "decode"]


@dataclass(frozen=True, eq=False)
class LowerBoundGate:
    """``g = lower_bound * sigmoid(exp(A_log[h]) * (raw + dt_bias[h, c]))``, in [lower_bound, 0].

    Args:
        A_log: ``[HV]`` float32, log of the amplitude per value head; None means unit amplitude.
        dt_bias: ``[HV, K]`` or ``[HV * K]`` float32, added to the raw gate; None means no bias.
        lower_bound: the smallest natural-log decay per token, in [-5, 0).

    The gate of Kimi K3, GLM-5.3-Flash and Ling-3.
    """

    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: float = -5.0
    kind: GateKind = "lower_bound"


@dataclass(frozen=True, eq=False)
class SoftplusGate:
    """``g = -exp(A_log[h]) * softplus(raw + dt_bias[h, c])``, unbounded below.

    Args:
        A_log: ``[HV]`` float32, log of the amplitude per value head; None means unit amplitude.
        dt_bias: ``[HV, K]`` or ``[HV * K]`` float32, added to the raw gate; None means no bias.

    The gate of Kimi-Linear-48B.
    """

    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    kind: GateKind = "softplus"


@dataclass(frozen=True, eq=False)
class LogGate:
    """``g`` is the natural-log decay itself: any value <= 0, minus infinity included."""

    kind: GateKind = "log"


Gate: TypeAlias = LowerBoundGate | SoftplusGate | LogGate


def gate_parameters(gate: Gate) -> tuple[Tensor | None, Tensor | None]:
    """A_log and dt_bias, None where the gate has none."""
    return (None, None) if isinstance(gate, LogGate) else (gate.A_log, gate.dt_bias)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The checked arguments of one :func:`flash_kda.kda` call; ``checks.check`` is the only place that makes one.

    ``scale`` is resolved, ``gate.dt_bias`` is ``[HV, K]`` or None, and every tensor is the caller's own.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    gate: Gate
    scale: float
    initial_state: Tensor | None
    output_final_state: bool
    cu_seqlens: Tensor | None
    qk_l2norm: bool
    beta_is_logit: bool
    allow_neg_eigval: bool
    state_layout: StateLayout

    @property
    def num_sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    @property
    def state_dtype(self) -> torch.dtype:
        """Storage of the final state: the initial state's, otherwise float32 (float64 for float64 inputs)."""
        if self.initial_state is not None:
            return self.initial_state.dtype
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        HV, K, V = self.v.shape[2], self.q.shape[3], self.v.shape[3]
        return (self.num_sequences, HV, V, K) if self.state_layout == "vk" else (self.num_sequences, HV, K, V)

    @cached_property
    def problem(self) -> Problem:
        """What :meth:`Problem.of` says of this call, worked out once."""
        return Problem.of(self)

    def replace(self, **changes: object) -> Inputs:
        return replace(self, **changes)  # type: ignore[arg-type]  # dataclasses.replace is not typed per field


@dataclass(frozen=True)
class Problem:
    """What a backend needs to know to say whether it can run: shapes, dtypes and options, no data.

    Args:
        B, T, H, K, V: batch, tokens, query/key heads and head sizes.
        HV: value heads; None means ``H``.
        N: sequences; None means ``B``.
        dtype: of q, k, v. ``state_dtype``: of the states.
        gate: ``"lower_bound"``, ``"softplus"`` or ``"log"``.
        packed: whether ``cu_seqlens`` is given.
        grad: whether a gradient is wanted.
        device: torch device type, such as ``"cpu"`` or ``"cuda"``.
        op: ``"forward"`` for :func:`flash_kda.kda`, ``"decode"`` for :func:`flash_kda.kda_decode`.
    """

    B: int = 1
    T: int = 8192
    H: int = 64
    K: int = 128
    V: int = 128
    HV: int | None = None
    N: int | None = None
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    gate: GateKind = "lower_bound"
    packed: bool = False
    grad: bool = False
    device: str = "cuda"
    op: Op = "forward"

    @staticmethod
    def of(inputs: Inputs) -> Problem:
        """The problem that a checked call poses."""
        q, v, gate = inputs.q, inputs.v, inputs.gate
        tensors = (q, inputs.k, v, inputs.g, inputs.beta, inputs.initial_state, *gate_parameters(gate))
        return Problem(
            B=q.shape[0],
            T=q.shape[1],
            H=q.shape[2],
            K=q.shape[3],
            V=v.shape[3],
            HV=v.shape[2],
            N=inputs.num_sequences,
            dtype=q.dtype,
            state_dtype=inputs.state_dtype,
            gate=gate.kind,
            packed=inputs.cu_seqlens is not None,
            grad=torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors),
            device=q.device.type,
        )


@dataclass(frozen=True, eq=False)
class DecodeInputs:
    """The checked arguments of one :func:`flash_kda.kda_decode` call.

    Attributes:
        inputs: rows, gate and options, as for a forward without states; a sequence is called a row here.
        pool: ``[slots, HV, V, K]`` or ``[slots, HV, K, V]``, changed in place if ``write_states``.
        indices: ``[N]``, ``[N, W]`` or None; num_accepted, has_initial_state: ``[N]`` or None.
        out: where the output goes; None means a new tensor.
    """

    inputs: Inputs
    pool: Tensor
    indices: Tensor | None
    num_accepted: Tensor | None
    has_initial_state: Tensor | None
    pad_index: int
    write_states: bool
    out: Tensor | None

    @cached_property
    def problem(self) -> Problem:
        """What a backend needs to know of this call."""
        written = self.pool.requires_grad or (self.out is not None and self.out.requires_grad)
        return replace(
            self.inputs.problem,
            op="decode",
            state_dtype=self.pool.dtype,
            grad=self.inputs.problem.grad or (torch.is_grad_enabled() and written),
        )


Maybe: TypeAlias = Tensor | None
# q, k, v, g, beta, pool, indices, num_accepted, has_initial_state, cu_seqlens and out of a decode call.
DecodeTensors: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Maybe, Maybe, Maybe, Maybe, Maybe]
# A decode call as a function of these, A_log and dt_bias, for calls that differ from a checked one in nothing else.
Decoder: TypeAlias = Callable[[DecodeTensors, Maybe, Maybe], Tensor]
