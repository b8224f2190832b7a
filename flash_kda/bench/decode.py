"""The decode benchmark: tokens of many rows, drafts to verify, steps of a layer; agreement first, then time."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

import flash_kda
from flash_kda.bench import harness, peers, shapes
from flash_kda.bench.exact import exact
from flash_kda.bench.measuring import Named, measure_all, refuse, row_of, run_watched
from flash_kda.bench.prefill import JUDGED_HEADS, SETS, SETS_BYTES, ratio
from flash_kda.bench.report import Keep, Row
from flash_kda.reference import sigmoid
from flash_kda.reference.layer import convolution, rms_norm
from flash_kda.types import GateKind, LowerBoundGate, Op, Problem


@dataclass(frozen=True, eq=False)
class DecodeCall:
    """Arguments of one decode call.

    Attributes:
        call: rows, gate and the states before them. pool: with these states in it; an implementation works on a copy.
        indices: ``[N]``, or ``[N, T]`` with a slot per token; accepted: ``[N]`` then, otherwise None.
        writes: whether states are written.
    """

    call: shapes.Call
    pool: Tensor
    indices: Tensor
    accepted: Tensor | None
    writes: bool

    @property
    def last(self) -> Tensor:
        """``[N]``: the slots of the states after the last token."""
        return (self.indices if self.accepted is None else self.indices[:, -1]).long()

    def exact(self) -> tuple[Tensor, Tensor]:
        """Output and states after the last tokens in float64, of the judged heads."""
        return exact(self.call.first_heads(JUDGED_HEADS).inputs())


NORM_EPS = 1e-5


@dataclass(frozen=True, eq=False)
class StepCall(DecodeCall):
    """Arguments of one decode step: in ``call`` q, k and v are those before the convolutions.

    Attributes:
        z: ``[N, 1, H, D]`` bf16. conv_pool: ``[slots, 3, 3 H D]`` bf16; an implementation works on a copy.
        conv_weights: fp32 of q, k and v, ``[H D, 4]``. norm_weight: ``[D]`` fp32.
    """

    z: Tensor
    conv_pool: Tensor
    conv_weights: tuple[Tensor, ...]
    norm_weight: Tensor

    def window(self, conv_pool: Tensor) -> Tensor:
        """``[N, 4, 3 H D]``: the last inputs before the tokens, and these."""
        rows = [x.flatten(2) for x in (self.call.q, self.call.k, self.call.v)]
        return torch.cat([conv_pool[self.last], torch.cat(rows, -1)], 1)

    def mixed(self, window: Tensor) -> list[Tensor]:
        """q, k and v after convolution and SiLU, in the window's dtype."""
        parts = zip(window.chunk(3, -1), self.conv_weights, strict=True)
        return [F.silu(convolution(part.unbind(1), w, None)).view(self.call.q.shape) for part, w in parts]

    def exact(self) -> tuple[Tensor, Tensor]:
        """Output and states in float64, of the judged heads."""
        q, k, v = self.mixed(self.window(self.conv_pool).double())
        o, states = exact(replace(self.call, q=q, k=k, v=v).first_heads(JUDGED_HEADS).inputs())
        z = self.z[:, :, :JUDGED_HEADS].double()
        return rms_norm(o, self.norm_weight.double(), NORM_EPS) * sigmoid(z), states


def as_step(call: DecodeCall) -> StepCall:
    """The call as one of a step, which it must be."""
    if not isinstance(call, StepCall):
        raise TypeError(f"call: got {type(call).__name__}, expected a StepCall")
    return call


def make_step(case: shapes.Case, plain: DecodeCall, rng: torch.Generator) -> StepCall:
    """What a step takes besides the arguments of a decode call."""

    def N(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device=rng.device)

    weights = tuple(0.5 * N(channels, shapes.WIDTH) for channels in case.channels)
    conv_pool = N(plain.pool.shape[0], shapes.WIDTH - 1, sum(case.channels)).bfloat16()
    z, norm_weight = N(*plain.call.v.shape).bfloat16(), 1 + 0.1 * N(case.head_dim)
    return StepCall(plain.call, plain.pool, plain.indices, None, True, z, conv_pool, weights, norm_weight)


def make(case: shapes.Case, gates: shapes.Gates, device: torch.device | str, index: int = 0) -> DecodeCall:
    """The inputs of a decode case: rows in random slots, drafts with random accepted counts. Slot 0 is nobody's."""
    call = shapes.make(case, gates, device, index)
    rng = torch.Generator(device).manual_seed(7000 + 1000 * case.seed + index)
    N, T = case.batch
    slots = 1 + torch.randperm(N * T, generator=rng, device=rng.device)
    pool = torch.zeros(N * T + 1, *call.initial_state.shape[1:], device=rng.device)
    table = slots.int().view(N, T)
    if T == 1:
        pool[table[:, 0].long()] = call.initial_state
        plain = DecodeCall(call, pool, table[:, 0], None, case.writes)
        return make_step(case, plain, rng) if case.step else plain
    accepted = torch.randint(1, T + 1, (N,), generator=rng, device=rng.device, dtype=torch.int32)
    pool[table.gather(1, accepted[:, None].long() - 1)[:, 0].long()] = call.initial_state
    return DecodeCall(call, pool, table, accepted, case.writes)


class Implementation(Named, Protocol):
    """One way to decode; see ``peers.Implementation``. A run returns the output and the tensor of the states."""

    def available(self) -> str | None: ...

    def prepare(self, call: DecodeCall) -> Callable[[], tuple[Tensor, Tensor]]: ...

    def states(self, states: Tensor, call: DecodeCall) -> Tensor:
        """The states ``[N, H, V, K]`` after the last tokens."""


@dataclass(frozen=True)
class Ours:
    """:func:`flash_kda.kda_decode` on a backend."""

    backend: str = "auto"
    impl: str = "flash_kda"
    work: str = peers.ALL_INSIDE
    note: str = ""

    def available(self) -> str | None:
        return None

    def prepare(self, call: DecodeCall) -> Callable[[], tuple[Tensor, Tensor]]:
        x, pool = call.call, call.pool.clone()

        def run() -> tuple[Tensor, Tensor]:
            o = flash_kda.kda_decode(
                *(x.q, x.k, x.v, x.g, x.beta),
                gate=x.gate,
                pool=pool,
                indices=call.indices,
                num_accepted=call.accepted,
                write_states=call.writes,
                backend=self.backend,
            )
            return o, pool

        return run

    def states(self, states: Tensor, call: DecodeCall) -> Tensor:
        return states[call.last]


@dataclass(frozen=True)
class OurStep(Ours):
    """:func:`flash_kda.kda_decode_step` on a backend."""

    work: str = f"convolutions, {peers.ALL_INSIDE}, norm and output gate"

    def prepare(self, call: DecodeCall) -> Callable[[], tuple[Tensor, Tensor]]:
        call = as_step(call)
        x, pool = call.call, call.pool.clone()
        conv_pool = call.conv_pool.clone()

        def run() -> tuple[Tensor, Tensor]:
            o = flash_kda.kda_decode_step(
                *(x.q, x.k, x.v, x.g, x.beta, call.z),
                gate=x.gate,
                pool=pool,
                conv_pool=conv_pool,
                conv_weights=call.conv_weights,
                norm_weight=call.norm_weight,
                norm_eps=NORM_EPS,
                indices=call.indices,
                backend=self.backend,
            )
            return o, pool

        return run


@dataclass(frozen=True)
class OurParts(Ours):
    """The same by :func:`flash_kda.kda_decode` between operations of torch."""

    work: str = f"{OurStep.work}, in parts"
    note: str = "kda_decode, and what is around it by operations of torch that gather and scatter the last inputs"

    def prepare(self, call: DecodeCall) -> Callable[[], tuple[Tensor, Tensor]]:
        call = as_step(call)
        x, pool = call.call, call.pool.clone()
        conv_pool, last = call.conv_pool.clone(), call.last

        def run() -> tuple[Tensor, Tensor]:
            window = call.window(conv_pool)
            conv_pool[last] = window[:, 1:]
            q, k, v = (y.to(x.q.dtype) for y in call.mixed(window.float()))
            options = {"pool": pool, "indices": call.indices, "backend": self.backend}
            o = flash_kda.kda_decode(q, k, v, x.g, x.beta, gate=x.gate, **options)  # type: ignore[arg-type]
            y = rms_norm(o.float(), call.norm_weight, NORM_EPS) * torch.sigmoid(call.z.float())
            return y.to(o.dtype), pool

        return run


@dataclass(frozen=True)
class Fla:
    """FLA's recurrent kernel: its public function for one token, the function below it for drafts."""

    impl: str = "fla"
    backend: str = "fused_recurrent_kda"
    work: str = peers.ALL_INSIDE
    note: str = (
        "FLA's Triton kernel with [V, K] states; one token: its public function, which writes states to a new tensor; "
        "drafts: fused_recurrent_kda_fwd, in place, with a slot per token"
    )

    def available(self) -> str | None:
        return peers.Fla().available()

    def prepare(self, call: DecodeCall) -> Callable[[], tuple[Tensor, Tensor]]:
        module: Any = importlib.import_module("fla.ops.kda.fused_recurrent")
        x, gate = call.call, call.call.gate
        bias = getattr(gate, "dt_bias", None)
        arguments: dict[str, Any] = {
            "A_log": getattr(gate, "A_log", None),
            "dt_bias": None if bias is None else bias.flatten(),
            "lower_bound": gate.lower_bound if isinstance(gate, LowerBoundGate) else None,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "state_v_first": True,
        }
        rows = {name: getattr(x, name) for name in ("q", "k", "v", "g", "beta")}
        if call.accepted is None:
            arguments |= rows | {"initial_state": x.initial_state}
            function = module.fused_recurrent_kda
        else:
            N, T = x.q.shape[:2]
            arguments |= {name: tensor.flatten(0, 1)[None] for name, tensor in rows.items()}
            arguments |= {
                "initial_state": call.pool.clone(),
                "inplace_final_state": True,
                "cu_seqlens": shapes.boundaries((T,) * N, x.q.device).long(),
                "ssm_state_indices": call.indices,
                "num_accepted_tokens": call.accepted,
            }
            function = module.fused_recurrent_kda_fwd

        def run() -> tuple[Tensor, Tensor]:
            o, states = function(**arguments)
            return o, states

        return run

    def states(self, states: Tensor, call: DecodeCall) -> Tensor:
        return states if call.accepted is None else states[call.last]


@dataclass(frozen=True)
class Options:
    """What to measure: names of cases, gates and our backends, whether FLA too, timed calls of each kind."""

    cases: tuple[str, ...]
    gates: tuple[shapes.Gates, ...] = ("strong",)
    backends: tuple[str, ...] = ("auto",)
    peers: bool = True
    repeats: int = 50


def measure_row(
    implementation: Implementation,
    calls: Sequence[DecodeCall],
    right: tuple[Tensor, Tensor],
    flush: Tensor,
    repeats: int,
) -> Row:
    """Errors on the judged heads, then times, of one implementation; where states are not written, of the output alone.

    Raises:
        RuntimeError: a peer computed it with this library, or the other way round.
    """
    first = calls[0]
    (o, states), backend = run_watched(implementation, implementation.prepare(first))
    errors = {"output_error": ratio(o.view_as(first.call.v)[:, :, :JUDGED_HEADS], right[0])}
    if first.writes:
        states = implementation.states(states, first)
        errors["state_error"] = ratio(states[:, :JUDGED_HEADS], right[1])
    elif not torch.equal(states, first.pool):
        raise RuntimeError(f"{implementation.impl} was to leave the states as they are, but it changed some")
    del o, states
    runs = [implementation.prepare(call) for call in calls]
    # A replay is seen to have run by its output; the states in a pool are its input too, and stay as they are.
    timing = harness.measure([lambda run=run: (run()[0],) * 2 for run in runs], flush, repeats)  # type: ignore[misc]
    return row_of(implementation, backend, timing, **errors)


def inputs(case: shapes.Case, gates: shapes.Gates) -> list[DecodeCall]:
    """As many input sets as fit into the memory meant for them; implementations copy their pools once more."""
    count = max(1, min(SETS, SETS_BYTES // case.floor_bytes))
    return [make(case, gates, "cuda", index) for index in range(count)]


def refuse_undecodable(options: Options, device: str) -> None:
    """Refuse what this library cannot run; see :func:`measuring.refuse`."""
    kinds: list[GateKind] = ["softplus" if gates == "softplus" else "lower_bound" for gates in options.gates]
    ops: list[Op] = ["decode", "step"]
    refuse(options.backends, [Problem(T=1, gate=kind, device=device, op=op) for kind in kinds for op in ops])


@torch.no_grad()
def run(options: Options, say: Callable[[str], None], keep: Keep) -> list[Row]:
    """Rows of ``op`` "decode": everything that ``options`` names, on the current CUDA device; see
    :func:`measuring.measure_all`.

    Raises:
        KeyError: there is no such case. NotImplementedError: this library cannot run one.
    """
    chosen = [shapes.cases("decode")[name] for name in options.cases]
    refuse_undecodable(options, "cuda")
    ours: list[Implementation] = [Ours(backend) for backend in options.backends]
    found = [*ours]
    steps: list[Implementation] = [way(backend) for backend in options.backends for way in (OurStep, OurParts)]
    if options.peers:
        if (why := Fla().available()) is None:
            found.append(Fla())
        else:
            say(f"fla is left out: {why}")
    return measure_all(
        chosen,
        options.gates,
        # FLA has no call that verifies drafts and writes nothing.
        lambda case: steps if case.step else found if case.writes else ours,
        inputs,
        lambda call: call.exact(),
        lambda case, gates, way, calls, right, flush: measure_row(way, calls, right, flush, options.repeats),
        lambda row, ms: f"{1e3 * ms:.1f} us, {ms / row['floor_ms']:.2f} x floor, {row['host_us']:.0f} us of host time",
        say,
        keep,
    )
