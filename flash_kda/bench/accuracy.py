"""Errors against float64 on hard inputs: collinear keys, gates from nearly open to nearly closed, long sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from flash_kda.bench import peers, published, shapes
from flash_kda.bench.exact import exact, verify
from flash_kda.bench.report import Row
from flash_kda.types import LowerBoundGate

Kind: TypeAlias = Literal["constant", "uniform", "normal", "sign"]
LAYOUTS = ("one", "six")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Largest RMSE ratio of output and of final state.
LIMITS = {"bfloat16": 4e-3, "float32": 2e-5}
HEADS, DIM, TOKENS = 2, 128, published.TOKENS
# Rows that one local error is taken over, and edges of the histograms in log10 of the absolute error.
BLOCK = 256
EDGES = tuple(i / 8 for i in range(-96, 25))
DRIFT_DECAY = 0.99992
DRIFT_SPANS = 8
# What the ratio of a part may be, as a multiple of the first part's.
DRIFT_GROWTH = 1.1


@dataclass(frozen=True)
class Draw:
    """How values are drawn: ``size`` itself, U(-size, size), N(0, size), or plus or minus ``size``."""

    kind: Kind
    size: float

    def tensor(self, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        if self.kind == "constant":
            return torch.full(shape, self.size, device=rng.device)
        if self.kind == "normal":
            return self.size * torch.randn(shape, generator=rng, device=rng.device)
        u = torch.rand(shape, generator=rng, device=rng.device)
        if self.kind == "uniform":
            return self.size * (2 * u - 1)
        return torch.where(u < 0.5, -self.size, self.size)


ZERO = Draw("constant", 0.0)


@dataclass(frozen=True)
class Setting:
    """Raw gates and bias of one setting; the amplitude is 1 and the lower bound -5."""

    name: str
    raw: Draw = ZERO
    bias: Draw = ZERO


SETTINGS = (
    *(Setting(f"gate {size}", raw=Draw("constant", float(size))) for size in (-8, -4, 0, 8)),
    Setting("gate U(-8,8)", raw=Draw("uniform", 8.0)),
    Setting("gate N(0,8)", raw=Draw("normal", 8.0)),
    *(Setting(f"bias +-{size}", bias=Draw("sign", float(size))) for size in (4, 8)),
    Setting("bias U(-8,8)", bias=Draw("uniform", 8.0)),
    Setting("bias N(0,8)", bias=Draw("normal", 8.0)),
)


@dataclass(frozen=True)
class Errors:
    """Of one tensor against its float64 value.

    Attributes:
        max, mae, rmse: of the absolute error. ratio: rmse over the root mean square of the value.
        worst_block: the largest RMSE of 256 rows of one head, over that head's root mean square.
        histogram: how many absolute errors lie between neighbouring EDGES of their log10; zeros are not counted.
    """

    max: float
    mae: float
    rmse: float
    ratio: float
    worst_block: float
    histogram: list[int]


def errors(got: Tensor, right: Tensor) -> Errors:
    """Errors of ``[..., H, rows, columns]``. NaN and infinity make every figure NaN or infinite."""
    e = (got.double() - right).abs()
    value = right.square().mean((-2, -1)).sqrt()
    blocks = torch.stack([part.square().mean((-2, -1)).sqrt() for part in e.split(BLOCK, -2)])
    rmse = float(e.square().mean().sqrt())
    logs = e[(e > 0) & e.isfinite()].log10()
    histogram = torch.histc(logs, len(EDGES) - 1, EDGES[0], EDGES[-1])
    return Errors(
        max=float(e.max()),
        mae=float(e.mean()),
        rmse=rmse,
        ratio=rmse / float(right.square().mean().sqrt()),
        worst_block=float((blocks / value).max()),
        histogram=[int(n) for n in histogram.tolist()],
    )


def lengths(layout: str, tokens: int) -> tuple[int, ...]:
    """Sequence lengths: all tokens, or the six lengths of FlashKDA's packed batch scaled to ``tokens``."""
    if layout == "one":
        return (tokens,)
    whole = sum(shapes.MIXED6)
    first = [n * tokens // whole for n in shapes.MIXED6[:-1]]
    return (*first, tokens - sum(first))


@dataclass(frozen=True)
class Options:
    """What to compare.

    Attributes:
        dtype: of q, k, v, g and beta. device: ``"cuda"`` or ``"cpu"``. backend: ours. peers: names of ``peers.PEERS``.
        tokens, heads: of a setting. settings, layouts: names. drift: tokens of the drift case; 0 leaves it out.
    """

    dtype: str = "bfloat16"
    device: str = "cuda"
    backend: str = "auto"
    peers: tuple[str, ...] = ("fla",)
    tokens: int = TOKENS
    heads: int = HEADS
    settings: tuple[str, ...] = tuple(setting.name for setting in SETTINGS)
    layouts: tuple[str, ...] = LAYOUTS
    drift: int = 0
    seed: int = 42


def make(setting: Setting, layout: str, options: Options) -> shapes.Call:
    """q, k, v ~ U(0, 1), beta logits ~ N(0, 1), initial states ~ N(0, 1) in float32; the same for every setting."""
    rng = torch.Generator(options.device).manual_seed(options.seed)
    dtype = DTYPES[options.dtype]
    found = lengths(layout, options.tokens)
    shape = (1, options.tokens, options.heads, DIM)
    q, k, v = (torch.rand(shape, generator=rng, device=rng.device).to(dtype) for _ in range(3))
    beta = torch.randn(shape[:3], generator=rng, device=rng.device).to(dtype)
    states = torch.randn(len(found), options.heads, DIM, DIM, generator=rng, device=rng.device)
    bias = setting.bias.tensor((options.heads, DIM), rng)
    g = setting.raw.tensor(shape, rng).to(dtype)
    gate = LowerBoundGate(torch.zeros(options.heads, device=rng.device), bias, shapes.LOWER_BOUND)
    cu_seqlens = shapes.boundaries(found, rng.device) if len(found) > 1 else None
    return shapes.Call(q, k, v, g, beta, gate, states, cu_seqlens)


def make_drift(options: Options) -> shapes.Call:
    """One head, one long sequence, every channel decaying by the same 0.99992 a token; q, k, v ~ N(0, 1)."""
    rng = torch.Generator(options.device).manual_seed(options.seed)
    shape = (1, options.drift, 1, DIM)
    dtype = DTYPES[options.dtype]
    q, k, v = (torch.randn(shape, generator=rng, device=rng.device, dtype=dtype) for _ in range(3))
    beta = torch.randn(shape[:3], generator=rng, device=rng.device, dtype=dtype)
    share = math.log(DRIFT_DECAY) / shapes.LOWER_BOUND
    bias = torch.full((1, DIM), math.log(share / (1 - share)), device=rng.device)
    gate = LowerBoundGate(torch.zeros(1, device=rng.device), bias, shapes.LOWER_BOUND)
    states = torch.randn(1, 1, DIM, DIM, generator=rng, device=rng.device)
    return shapes.Call(q, k, v, torch.zeros_like(q), beta, gate, states, None)


def compare(
    call: shapes.Call, implementations: Sequence[peers.Implementation], spans: int, say: Callable[[str], None]
) -> list[Row]:
    """Errors of each implementation on one call; with ``spans``, also the output's ratio in that many equal parts."""
    o_right, S_right = exact(call.inputs())
    rows: list[Row] = []
    for implementation in implementations:
        if (why := implementation.why_not(call)) is not None:
            say(f"{implementation.impl}: {why}")
            continue
        (o, state), backend = peers.run_once(implementation, call)
        row: Row = {"impl": implementation.impl, "backend": backend, "work": implementation.work}
        row["note"] = implementation.note
        # Heads before rows, so that every error is one head's.
        row["output"] = asdict(errors(o.transpose(1, 2), o_right.transpose(1, 2)))
        row["state"] = asdict(errors(state, S_right))
        if spans:
            parts = zip(o.tensor_split(spans, 1), o_right.tensor_split(spans, 1), strict=True)
            row["spans"] = [errors(x.transpose(1, 2), y.transpose(1, 2)).ratio for x, y in parts]
        rows.append(row)
    return rows


@torch.no_grad()
def run(options: Options, say: Callable[[str], None]) -> list[Row]:
    """Rows of ``op`` "accuracy": every chosen setting and layout, then the drift case.

    Args:
        say: told about progress and about what is left out, one line at a time.

    Raises:
        NotImplementedError: this library cannot run a setting.
        RuntimeError: the exact answer does not agree with the recurrence.
    """
    say(f"exact answers agree with the recurrence to {verify(options.device):.1e}")
    found: list[peers.Implementation] = [peers.Ours(options.backend)]
    for name in options.peers:
        for peer in peers.PEERS[name]:
            why = "needs --device cuda" if options.device != "cuda" else peer.available()
            if why is None:
                found.append(peer)
            else:
                say(f"{peer.impl} is left out: {why}")
    todo = [
        (setting.name, layout, options.tokens, make(setting, layout, options), 0)
        for layout in options.layouts
        for setting in SETTINGS
        if setting.name in options.settings
    ]
    if options.drift:
        todo.append((f"decay {DRIFT_DECAY}", "one", options.drift, make_drift(options), DRIFT_SPANS))
    rows: list[Row] = []
    for name, layout, tokens, call, spans in todo:
        if (why := found[0].why_not(call)) is not None:
            raise NotImplementedError(why)
        case = {"op": "accuracy", "setting": name, "layout": layout, "dtype": options.dtype, "tokens": tokens}
        rows += ({**case, **row} for row in compare(call, found, spans, say))
        say(f"{name}, {layout}: done")
    return rows


def judge(rows: Sequence[Row], limit: float, against_peers: bool) -> list[str]:
    """What is wrong with our rows, in words; empty if nothing is.

    The drift case is none of the settings: the ratio of its output may not grow by more than DRIFT_GROWTH.

    Args:
        limit: of the RMSE ratio of output and of final state. NaN is beyond every limit.
        against_peers: whether ours must also be no worse than the better of FLA, as measured beside it, and FlashKDA,
            as measured before, each where there is a figure.
    """
    wrong = []
    for row in rows:
        if row["impl"] != "flash_kda":
            continue
        where = (str(row["setting"]), str(row["layout"]))
        if "spans" in row:
            first, most = row["spans"][0], max(row["spans"], key=lambda x: (x != x, x))
            if not most <= DRIFT_GROWTH * first:
                wrong.append(f"{', '.join(where)}: output from {first:.2e} to {most:.2e}, {DRIFT_GROWTH} times at most")
            continue
        known = published.accuracy(*where, str(row["dtype"]), row["tokens"])
        for i, of in enumerate(("output", "state")):
            allowed = [("the limit", limit)]
            if against_peers:
                others = [r for r in rows if r["impl"] == "fla" and (r["setting"], r["layout"]) == where]
                rivals = [("FLA", r[of]["ratio"]) for r in others]
                rivals += [("FlashKDA", known[i])] if known is not None else []
                allowed += [min(rivals, key=lambda rival: rival[1])] if rivals else []
            got = row[of]["ratio"]
            wrong += [
                f"{', '.join(where)}: {of} {got:.2e}, {who} {most:.2e}" for who, most in allowed if not got <= most
            ]
    return wrong
