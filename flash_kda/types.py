"""The values that travel through the library: gates, problems and call arguments.

Nothing here reads data. Shapes use the field's letters: B batch, T tokens, H query/key heads, HV value heads,
K and V head sizes, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

StateLayout: TypeAlias = Literal["vk", "kv"]
GateKind: TypeAlias = Literal["lower_bound", "softplus", "log"]
Op: TypeAlias = Literal["forward", "decode", "prefill", "step"]


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


def with_parameters(gate: Gate, A_log: Tensor | None, dt_bias: Tensor | None) -> Gate:
    """The gate with other parameters, if it is of a kind that has any."""
    return gate if isinstance(gate, LogGate) else replace(gate, A_log=A_log, dt_bias=dt_bias)


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
        qk_l2norm, beta_is_logit: as for :func:`flash_kda.kda`.
        copyable: whether hardware can copy blocks of q, k, v and g: one dtype, heads side by side, tokens evenly spaced
            by multiples of 16 bytes.
        op: ``"forward"`` for :func:`flash_kda.kda`, ``"decode"`` for :func:`flash_kda.kda_decode`, ``"prefill"`` for
            :func:`flash_kda.kda_prefill`, ``"step"`` for :func:`flash_kda.kda_decode_step`.
        checkpoints: whether states inside of sequences are kept (``"prefill"`` alone).
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
    qk_l2norm: bool = True
    beta_is_logit: bool = True
    copyable: bool = True
    op: Op = "forward"
    checkpoints: bool = False

    @staticmethod
    def of(inputs: Inputs) -> Problem:
        """The problem that a checked call poses."""
        return inputs.problem


class Layout(NamedTuple):
    """All of a tensor but its data."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False)
class Signature:
    """All of a call but the data of its tensors, before anything is checked. Equal signatures are one object.

    What follows from it alone (whether the arguments are right, the problem, the launches) is worked out once for all.

    Attributes:
        gate: type of the gate. lower_bound: the gate's, None where it has none.
        layouts: of the tensors, by the names of the arguments. What is no tensor is told by its type, maybe NoneType.
    """

    gate: type
    lower_bound: float | None
    scale: float | None
    output_final_state: bool
    qk_l2norm: bool
    beta_is_logit: bool
    allow_neg_eigval: bool
    state_layout: StateLayout
    recompute: bool
    layouts: Mapping[str, Layout | type]

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        gate: Gate,
        scale: float | None,
        initial_state: Tensor | None,
        output_final_state: bool,
        cu_seqlens: Tensor | None,
        qk_l2norm: bool,
        beta_is_logit: bool,
        allow_neg_eigval: bool,
        state_layout: StateLayout,
        recompute: bool = True,
    ) -> Signature:
        """The signature of a call of :func:`flash_kda.kda` with these arguments, whatever they are."""
        A_log, dt_bias = getattr(gate, "A_log", None), getattr(gate, "dt_bias", None)
        tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
        arguments: Any = (
            *(type(gate), getattr(gate, "lower_bound", None), scale, output_final_state),
            *(qk_l2norm, beta_is_logit, allow_neg_eigval, state_layout, recompute),
            *[(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else type(x) for x in tensors],
        )
        try:
            return _signature(*arguments)
        except TypeError:  # an option that cannot be a key, nor right: the checks name it
            return _signature.__wrapped__(*arguments)

    def layout(self, name: str) -> Layout | None:
        """The layout of a tensor; None if it is absent."""
        found = self.layouts[name]
        return found if isinstance(found, Layout) else None

    @cached_property
    def device(self) -> torch.device:
        """Where the tensors of a right call are."""
        return cast(Layout, self.layouts["q"]).device

    @cached_property
    def problem(self) -> Problem:
        """The problem that a right call poses where no gradient is wanted."""
        q, v = cast(Layout, self.layouts["q"]), cast(Layout, self.layouts["v"])
        cu, S0 = self.layout("cu_seqlens"), self.layout("initial_state")
        return Problem(
            B=q.shape[0],
            T=q.shape[1],
            H=q.shape[2],
            K=q.shape[3],
            V=v.shape[3],
            HV=v.shape[2],
            N=q.shape[0] if cu is None else cu.shape[0] - 1,
            dtype=q.dtype,
            state_dtype=state_dtype(q.dtype, None if S0 is None else S0.dtype),
            gate=cast(type[Gate], self.gate).kind,
            packed=cu is not None,
            device=q.device.type,
            qk_l2norm=self.qk_l2norm,
            beta_is_logit=self.beta_is_logit,
            copyable=self._copyable,
        )

    @property
    def _copyable(self) -> bool:
        def is_even(name: str, size: int) -> bool:
            x = cast(Layout, self.layouts[name])
            (B, T, heads, *_), (b, t, h, *last) = x.shape, x.strides
            is_one_row_per_token = (B == 1 or b == T * t) and (heads == 1 or h == size)
            return is_one_row_per_token and all(step == 1 for step in last)

        q, v = cast(Layout, self.layouts["q"]), cast(Layout, self.layouts["v"])
        rows = [cast(Layout, self.layouts[name]) for name in ("q", "k", "v", "g")]
        sizes = {"q": q.shape[3], "k": q.shape[3], "g": q.shape[3], "v": v.shape[3]}
        beta = cast(Layout, self.layouts["beta"])
        return (
            all(is_even(name, size) for name, size in sizes.items())
            and (beta.shape[0] == 1 or beta.strides[0] == beta.shape[1] * beta.strides[1])
            and all(x.dtype == q.dtype and x.strides[1] * x.dtype.itemsize % 16 == 0 < x.strides[1] for x in rows)
        )

    @cached_property
    def problem_with_gradient(self) -> Problem:
        return replace(self.problem, grad=True)


_TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")


# Typed: an option that is 1 and not True is another.
@lru_cache(maxsize=1024, typed=True)
def _signature(*arguments: Any) -> Signature:
    options, layouts = arguments[: -len(_TENSORS)], arguments[-len(_TENSORS) :]
    found = [x if isinstance(x, type) else Layout(*x) for x in layouts]
    return Signature(*options, dict(zip(_TENSORS, found, strict=True)))  # type: ignore[call-arg]  # of unknown length


def state_dtype(dtype: torch.dtype, given: torch.dtype | None) -> torch.dtype:
    """Storage of the final state: the initial state's, otherwise float32 (float64 for float64 inputs)."""
    return given or (torch.float64 if dtype == torch.float64 else torch.float32)


def state_shape(N: int, HV: int, K: int, V: int, layout: StateLayout) -> tuple[int, int, int, int]:
    """Shape of the states of N sequences."""
    return (N, HV, V, K) if layout == "vk" else (N, HV, K, V)


class _Arguments(NamedTuple):
    # A tuple, since every call makes one and a frozen dataclass takes three times as long.
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
    recompute: bool = True


class Inputs(_Arguments):
    """The checked arguments of one :func:`flash_kda.kda` call; ``checks.check`` is the only place that makes one.

    ``scale`` is resolved, ``gate.dt_bias`` is ``[HV, K]`` or None, and every tensor is the caller's own.
    """

    @property
    def num_sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    @property
    def state_dtype(self) -> torch.dtype:
        return state_dtype(self.q.dtype, None if self.initial_state is None else self.initial_state.dtype)

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return state_shape(self.num_sequences, self.v.shape[2], self.q.shape[3], self.v.shape[3], self.state_layout)

    @cached_property
    def signature(self) -> Signature:
        """The signature of the call."""
        return Signature.of(*self)

    @property
    def problem(self) -> Problem:
        """The problem that the call poses."""
        if torch.is_grad_enabled() and self._wants_gradient():
            return self.signature.problem_with_gradient
        return self.signature.problem

    def _wants_gradient(self) -> bool:
        tensors = (self.q, self.k, self.v, self.g, self.beta, self.initial_state, *gate_parameters(self.gate))
        return any(x is not None and x.requires_grad for x in tensors)

    def replace(self, **changes: Any) -> Inputs:
        return self._replace(**changes)


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

    @property
    def tensors(self) -> DecodeTensors:
        """The call's tensors but for the gate's."""
        x = self.inputs
        rows = (x.q, x.k, x.v, x.g, x.beta, self.pool)
        return (*rows, self.indices, self.num_accepted, self.has_initial_state, x.cu_seqlens, self.out)


@dataclass(frozen=True, eq=False)
class StepInputs:
    """The checked arguments of one :func:`flash_kda.kda_decode_step` call.

    Attributes:
        decode: the decode call inside, but with q, k and v from before the convolutions and the output from after the
            norm.
        z: ``[N, 1, HV, V]``, the raw output gate.
        conv_pool: ``[slots, W - 1, D]``, changed in place; D counts the channels of q, k and v.
        conv_weights, conv_biases: of q, k and v, ``[channels, W]`` and ``[channels]``.
        norm_weight: ``[V]``.
    """

    decode: DecodeInputs
    z: Tensor
    conv_pool: Tensor
    conv_weights: tuple[Tensor, Tensor, Tensor]
    conv_biases: tuple[Tensor, Tensor, Tensor] | None
    norm_weight: Tensor
    norm_eps: float

    @property
    def width(self) -> int:
        """W, how many tokens a filter sees."""
        return self.conv_weights[0].shape[1]

    @cached_property
    def problem(self) -> Problem:
        """What a backend needs to know of this call."""
        p = self.decode.problem
        others = (self.z, self.conv_pool, *self.conv_weights, *(self.conv_biases or ()), self.norm_weight)
        taped = torch.is_grad_enabled() and any(x.requires_grad for x in others)
        return replace(p, op="step", grad=p.grad or taped)

    @property
    def tensors(self) -> StepTensors:
        """The call's tensors but for the gate's."""
        x, d = self.decode.inputs, self.decode
        rows = (x.q, x.k, x.v, x.g, x.beta, self.z, d.pool, self.conv_pool, d.indices, d.has_initial_state)
        biases: tuple[Maybe, Maybe, Maybe] = self.conv_biases or (None, None, None)
        return (*rows, *self.conv_weights, *biases, self.norm_weight, d.out)


@dataclass(frozen=True, eq=False)
class Checkpoints:
    """Which states inside of sequences :func:`flash_kda.kda_prefill` keeps, and where they go.

    Sequence n has the entries ``cu_offsets[n]`` to ``cu_offsets[n + 1] - 1``, any number of them; entry i asks for the
    state after the first ``offsets[i]`` tokens of its sequence. Any offset will do; a multiple of 32 costs the least.

    Args:
        offsets: ``[M]`` int32 or int64. An offset that is not in 1..length is no checkpoint, on any backend: nothing is
            kept for its entry. The others must increase within a sequence. On the CPU those that do not are an error;
            on a GPU, which the host does not read, an offset that is not larger than all before it is no checkpoint.
        cu_offsets: ``[N + 1]`` int32 or int64: 0, and then where the entries of each sequence end, not decreasing and
            at most M. Checked on the CPU; on a GPU entries outside of 0..M-1 are not looked at.
        states: where the states go, ``[places, HV, V, K]`` (in the pool's layout), float32 or bfloat16 (float64 on the
            CPU), last dimension dense; None means slots of the pool. Places for which nothing is kept stay as they are.
        indices: ``[M]`` int32 or int64, the place of each entry; one that is the pad index or names no place drops its
            state. None means place i for entry i, of at least M places; the pool has no such order, and needs indices.
    """

    offsets: Tensor
    cu_offsets: Tensor
    states: Tensor | None = None
    indices: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.offsets, self.cu_offsets, self.states, self.indices


@dataclass(frozen=True, eq=False)
class PrefillInputs:
    """The checked arguments of one :func:`flash_kda.kda_prefill` call.

    Attributes:
        inputs: rows, gate and options, as for a forward without states.
        pool: ``[slots, HV, V, K]`` or ``[slots, HV, K, V]``, changed in place if ``write_states``.
        indices, has_initial_state: ``[N]`` or None.
        out: where the output goes; None means a new tensor.
    """

    inputs: Inputs
    pool: Tensor
    indices: Tensor | None
    has_initial_state: Tensor | None
    checkpoints: Checkpoints | None
    pad_index: int
    write_states: bool
    out: Tensor | None

    @cached_property
    def problem(self) -> Problem:
        """What a backend needs to know of this call."""
        kept = None if self.checkpoints is None else self.checkpoints.states
        written = any(x is not None and x.requires_grad for x in (self.pool, kept, self.out))
        return replace(
            self.inputs.problem,
            op="prefill",
            checkpoints=self.checkpoints is not None,
            state_dtype=self.pool.dtype,
            grad=self.inputs.problem.grad or (torch.is_grad_enabled() and written),
        )

    @property
    def kept(self) -> Tensor | None:
        """Where the states at checkpoints go."""
        if self.checkpoints is None:
            return None
        return self.pool if self.checkpoints.states is None else self.checkpoints.states

    @property
    def tensors(self) -> PrefillTensors:
        """The call's tensors but for the gate's."""
        x, c = self.inputs, self.checkpoints
        rows = (x.q, x.k, x.v, x.g, x.beta, self.pool)
        of_checkpoints = (None, None, None, None) if c is None else c.tensors
        return (*rows, self.indices, self.has_initial_state, x.cu_seqlens, *of_checkpoints, self.out)


Maybe: TypeAlias = Tensor | None
# q, k, v, g, beta, pool, indices, num_accepted, has_initial_state, cu_seqlens and out of a decode call.
DecodeTensors: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Maybe, Maybe, Maybe, Maybe, Maybe]
# A decode call as a function of these, A_log and dt_bias, for calls that differ from a checked one in nothing else.
Decoder: TypeAlias = Callable[[DecodeTensors, Maybe, Maybe], Tensor]
# q, k, v, g, beta, pool, indices, has_initial_state, cu_seqlens, those of the checkpoints and out of a prefill call.
PrefillTensors: TypeAlias = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe
]
# As Decoder, of a prefill call.
Prefiller: TypeAlias = Callable[[PrefillTensors, Maybe, Maybe], Tensor]
# q, k, v, g, beta, z, pool, conv_pool, indices, has_initial_state, the convolutions' weights and biases, norm_weight
# and out of a decode step.
StepTensors: TypeAlias = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Maybe, Maybe,
    Tensor, Tensor, Tensor, Maybe, Maybe, Maybe, Tensor, Maybe,
]  # fmt: skip
# As Decoder, of a decode step.
Stepper: TypeAlias = Callable[[StepTensors, Maybe, Maybe], Tensor]
# q, k, v, g, beta, initial_state, cu_seqlens, and the tensors for output and final state of a forward call.
ForwardTensors: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Maybe, Maybe, Maybe, Maybe]
# As Decoder, of a forward call.
Runner: TypeAlias = Callable[[ForwardTensors, Maybe, Maybe], tuple[Tensor, Maybe]]
