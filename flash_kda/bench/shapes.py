"""The one registry of named shapes, and the random inputs of a case.

A case is a printable value; its inputs follow from it, the kind of gates and the number of the input set alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from flash_kda.checks import check
from flash_kda.types import Gate, GateKind, Inputs, LowerBoundGate, SoftplusGate, gate_parameters, with_parameters

Op: TypeAlias = Literal["prefill", "decode", "train", "scale"]
Gates: TypeAlias = Literal["strong", "slow", "softplus"]
GATES: tuple[Gates, ...] = ("strong", "slow", "softplus")
LOWER_BOUND = -5.0
# Of the short convolutions.
WIDTH = 4
# The uneven packed batch of FlashKDA's own benchmark: 8192 tokens in six sequences.
MIXED6 = (1300, 547, 2048, 963, 271, 3063)
# One long sequence among 63 short ones.
SKEWED = (*(128,) * 31, 65536, *(128,) * 32)


@dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
        name, op: by which it is found.
        lengths: tokens of each sequence. heads: H = HV.
        packed: sequences lie one after another along T with ``cu_seqlens``; otherwise they form the batch dimension.
        head_dim: K = V. seed: of the inputs.
        step: of decoding: with the convolutions before it and the norm after it.
        writes: of decoding: states go to the pool; otherwise the output is all there is.
    """

    name: str
    op: Op
    lengths: tuple[int, ...]
    heads: int
    packed: bool = False
    head_dim: int = 128
    seed: int = 0
    step: bool = False
    writes: bool = True

    @property
    def channels(self) -> tuple[int, int, int]:
        """Of the convolutions of q, k and v."""
        return (self.heads * self.head_dim,) * 3

    @property
    def tokens(self) -> int:
        """Tokens of all sequences together."""
        return sum(self.lengths)

    @property
    def batch(self) -> tuple[int, int]:
        """B and T of the tensors."""
        return (1, self.tokens) if self.packed else (len(self.lengths), self.lengths[0])

    @property
    def floor_bytes(self) -> int:
        """Bytes that are moved at least.

        Forward (prefill and scale): bf16 q, k, v, g, o and beta once, fp32 states in and out once. Decode: the states
        alone, which are what bounds it, in once and, if they are written, out once for each token; of a step the bf16
        last inputs of the convolutions too.
        Training: the forward, then its inputs and the output's gradient in once and five gradients out once.
        """
        if self.op == "decode":
            last_inputs = 2 * (WIDTH - 1) * sum(self.channels) if self.step else 0
            moved = len(self.lengths) + (self.tokens if self.writes else 0)
            return (4 * self.heads * self.head_dim**2 + last_inputs) * moved
        per_token_head = 2 * ((14 * self.head_dim + 3) if self.op == "train" else (5 * self.head_dim + 1))
        states = 2 * 4 * len(self.lengths) * self.head_dim**2
        return self.heads * (self.tokens * per_token_head + states)


@dataclass(frozen=True)
class Model:
    """A released model's attention: heads before tensor parallelism, its gate, and the usual parallel sizes."""

    name: str
    heads: int
    gate: GateKind
    parallel: tuple[int, ...]

    @property
    def heads_per_gpu(self) -> tuple[int, ...]:
        return tuple(self.heads // n for n in self.parallel)


# All have K = V = 128.
MODELS = (
    Model("Kimi K3", 96, "lower_bound", (1, 2, 4, 8, 16)),
    Model("GLM-5.3-Flash", 64, "lower_bound", (1, 2, 4, 8)),
    Model("Kimi-Linear-48B", 32, "softplus", (1, 2, 4, 8)),
    Model("Ling-3.0-flash", 32, "lower_bound", (1, 2, 4, 8)),
)


def uniform(op: Op, count: int, tokens: int, heads: int) -> Case:
    """``count`` sequences of equal length; several are packed."""
    return Case(f"{count}x{tokens}-h{heads}", op, (tokens,) * count, heads, packed=count > 1)


def mixed6(heads: int) -> Case:
    return Case(f"mixed6-{sum(MIXED6)}-h{heads}", "prefill", MIXED6, heads, packed=True)


def skewed(heads: int) -> Case:
    return Case(f"skewed{len(SKEWED)}-{sum(SKEWED)}-h{heads}", "scale", SKEWED, heads, packed=True)


def decode(batch: int, heads: int, tokens: int = 1, writes: bool = True) -> Case:
    """One token for each of ``batch`` rows, or a draft of several to verify, each with a slot for its state.

    Args:
        writes: False leaves the states as they are, as verification may that computes the accepted tokens once more.
    """
    drafted = (f"-t{tokens}" if tokens > 1 else "") + ("" if writes else "-out")
    return Case(f"b{batch}{drafted}-h{heads}", "decode", (tokens,) * batch, heads, writes=writes)


def step(batch: int, heads: int) -> Case:
    """One token for each of ``batch`` rows, from the projections before to the projection after."""
    return Case(f"b{batch}-step-h{heads}", "decode", (1,) * batch, heads, step=True)


MODEL_HEADS = sorted({heads for model in MODELS for heads in model.heads_per_gpu}, reverse=True)
CASES: tuple[Case, ...] = (
    *(uniform("prefill", 1, 8192, heads) for heads in MODEL_HEADS),
    *(mixed6(heads) for heads in (64, 96)),
    *(uniform("prefill", 8, 1024, heads) for heads in (64, 96)),
    uniform("prefill", 1, 65536, 8),
    uniform("prefill", 1, 32768, 32),
    uniform("prefill", 1, 512, 64),
    uniform("prefill", 32, 256, 32),
    uniform("prefill", 512, 16, 12),
    *(decode(batch, heads, tokens) for tokens in (1, 4) for heads in (12, 32) for batch in (1, 32, 128, 256)),
    *(decode(128, heads, 4, writes=False) for heads in (12, 32)),
    *(step(batch, heads) for heads in (12, 32) for batch in (1, 32, 128, 256)),
    *(uniform("train", 1, 8192, heads) for heads in (32, 64)),
    uniform("train", 1, 32768, 4),
    *(uniform("scale", 1, 2**n, 8) for n in range(13, 21)),
    uniform("scale", 63, 128, 8),
    skewed(8),
)
# The skewed batch, and its long and its short sequences alone.
SKEWED_CASE, *SKEWED_PARTS = "skewed64-73600-h8", "1x65536-h8", "63x128-h8"
# What `--quick` measures: one long sequence with many and with few heads, uneven and even packed batches.
QUICK_DECODE = ("b1-h12", "b128-h12", "b256-h32", "b128-t4-h12", "b128-t4-out-h12")
QUICK = ("1x8192-h64", "1x8192-h12", "mixed6-8192-h96", "8x1024-h64")


def cases(op: Op) -> dict[str, Case]:
    """The registered cases of one operation, by name."""
    return {case.name: case for case in CASES if case.op == op}


@dataclass(frozen=True, eq=False)
class Call:
    """Arguments of one prefill: q, k, v, raw g ``[B, T, H, D]``, beta logits ``[B, T, H]``, gate, states, boundaries.

    ``initial_state`` is ``[N, H, D, D]`` in the "vk" layout.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    gate: Gate
    initial_state: Tensor
    cu_seqlens: Tensor | None

    def arguments(self) -> dict[str, Any]:
        """For :func:`flash_kda.kda`, final state included."""
        return {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "g": self.g,
            "beta": self.beta,
            "gate": self.gate,
            "initial_state": self.initial_state,
            "output_final_state": True,
            "cu_seqlens": self.cu_seqlens,
        }

    def inputs(self) -> Inputs:
        """The checked call, as the references take it."""
        defaults = {"scale": None, "qk_l2norm": True, "beta_is_logit": True, "allow_neg_eigval": False}
        return check(**self.arguments(), **defaults, state_layout="vk")  # type: ignore[arg-type]  # a dict of all types

    def first_heads(self, count: int) -> Call:
        """The same call with only the first ``count`` heads: views, no copies."""
        A_log, dt_bias = (None if x is None else x[:count] for x in gate_parameters(self.gate))
        gate = with_parameters(self.gate, A_log, dt_bias)
        q, k, v, g, beta = (x[:, :, :count] for x in (self.q, self.k, self.v, self.g, self.beta))
        return Call(q, k, v, g, beta, gate, self.initial_state[:, :count], self.cu_seqlens)


def boundaries(lengths: tuple[int, ...], device: torch.device | str) -> Tensor:
    """``cu_seqlens`` ``[N + 1]`` int32."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def draw_gate(gates: Gates, heads: int, dim: int, rng: torch.Generator) -> Gate:
    """Gate parameters that go with raw gates ~ N(0, 1).

    ``strong``: lower bound -5, A_log and dt_bias ~ U(0, 1): every channel decays by about e^-3 a token on average.
    ``slow``: the same, but in half of the channels dt_bias ~ U(-8, -6): they remember for hundreds of tokens and more.
    ``softplus``: A_log = log U(1, 16) and dt_bias = inverse softplus of exp U(log 1e-3, log 1e-1), the initialisation
    of FLA's layer.
    """

    def U(shape: tuple[int, ...], low: float, high: float) -> Tensor:
        return torch.rand(shape, generator=rng, device=rng.device) * (high - low) + low

    if gates == "softplus":
        dt = U((heads, dim), math.log(1e-3), math.log(1e-1)).exp()
        return SoftplusGate(U((heads,), 1, 16).log(), dt + torch.log(-torch.expm1(-dt)))
    A_log, dt_bias = U((heads,), 0, 1), U((heads, dim), 0, 1)
    if gates == "slow":
        chosen = torch.rand(heads, dim, generator=rng, device=rng.device).argsort(-1) < dim // 2
        dt_bias = torch.where(chosen, dt_bias * 2 - 8, dt_bias)
    return LowerBoundGate(A_log, dt_bias, LOWER_BOUND)


def make(case: Case, gates: Gates, device: torch.device | str, index: int = 0) -> Call:
    """The inputs of a case: bf16 q, k, v, g ~ N(0, 1) and beta logits ~ N(0, 1), fp32 initial states ~ N(0, 1).

    Args:
        index: which input set; sets differ in every value, so that timing one does not warm the caches for another.
    """
    rng = torch.Generator(device).manual_seed(1000 * case.seed + index)
    B, T = case.batch
    H, D = case.heads, case.head_dim

    def N(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device=rng.device, dtype=torch.bfloat16)

    q, k, v, g = (N(B, T, H, D) for _ in range(4))
    beta = N(B, T, H)
    gate = draw_gate(gates, H, D, rng)
    states = torch.randn(len(case.lengths), H, D, D, generator=rng, device=rng.device)
    cu_seqlens = boundaries(case.lengths, rng.device) if case.packed else None
    return Call(q, k, v, g, beta, gate, states, cu_seqlens)
