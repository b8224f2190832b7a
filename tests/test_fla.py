"""FLA's own ``chunk_kda`` where FLA sends it here: the shapes of FLA's tests of it, forwards and backwards."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import Call, changed_fields, inputs_of, leaves
from through_fla import as_fla, fall_through, real_fla
from torch import Tensor
from torch.nn import functional as F

import flash_kda
from flash_kda.bench.exact import exact
from flash_kda.compat import fla as compat

# RMSE ratios of whole tensors. FLA's limits, but for the gate's parameters, which have 0.001 there: here tiles are
# bfloat16, not float16.
LIMITS = {"o": 5e-3, "state": 5e-3, "q": 8e-3, "k": 8e-3, "v": 8e-3, "initial_state": 8e-3, "g": 2e-2, "beta": 2e-2}
LIMITS |= {"A_log": 4e-3, "dt_bias": 4e-3}


@dataclass(frozen=True)
class FlaCase:
    """A call of ``chunk_kda`` as FLA's tests make it.

    Args:
        B, T, H, D: heads of K = V = D; with ``lengths`` packed, where T is their sum.
        normalizer: of the log decays, which are log sigmoids of random numbers. masked: the share of them that is 0.
        scale: of q; None for the default.
        l2norm, gate: whether normalisation and the softplus gate are left to the function.
        inside: whether everything is, beta's sigmoid too, in bfloat16, as models call it; the gate is bounded then.
    """

    B: int = 1
    T: int = 0
    H: int = 4
    D: int = 128
    normalizer: float = 1.0
    masked: float = 0.0
    scale: float | None = None
    l2norm: bool = False
    gate: bool = False
    lengths: tuple[int, ...] | None = None
    inside: bool = False

    def __str__(self) -> str:
        return changed_fields(self, "D")

    def build(self, device: str) -> Call:
        """The arguments of ``kda``: q, k and v ~ U(0, 1), or packed ~ N(0, 1); the rest from a seed too."""
        rng = torch.Generator().manual_seed(42)
        T = self.T if self.lengths is None else sum(self.lengths)
        rows, N = (self.B, T, self.H), self.B if self.lengths is None else len(self.lengths)
        dtype = torch.bfloat16 if self.inside else torch.float16

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng)

        def row() -> Tensor:
            return normal(*rows, self.D) if self.lengths else torch.rand(*rows, self.D, generator=rng)

        q, k, v, g, beta = row(), row(), row(), normal(*rows, self.D), normal(*rows)
        if not (self.l2norm or self.inside):
            q, k = (F.normalize(x, dim=-1) for x in (q, k))
        gate: flash_kda.Gate = flash_kda.LogGate()
        if self.gate or self.inside:
            parameters = (x.to(device) for x in (normal(self.H), normal(self.H * self.D)))
            gate = (flash_kda.LowerBoundGate if self.inside else flash_kda.SoftplusGate)(*parameters)
        else:
            kept = torch.rand(g.shape, generator=rng) >= self.masked
            g = F.logsigmoid(g) / self.normalizer * kept
        if self.inside:
            g, beta = g.to(dtype), beta.to(dtype)
        else:
            beta = beta.sigmoid().to(dtype)
        cu = None if self.lengths is None else torch.tensor([0, *self.lengths]).cumsum(0)
        tensors = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "g": g, "beta": beta, "cu_seqlens": cu}
        tensors["initial_state"] = normal(N, self.H, self.D, self.D)
        return {name: None if x is None else x.to(device) for name, x in tensors.items()} | {
            "gate": gate,
            "scale": self.scale,
            "output_final_state": True,
            "qk_l2norm": self.l2norm or self.inside,
            "beta_is_logit": self.inside,
            "allow_neg_eigval": False,
            "state_layout": "kv",
        }


SMALL = (
    FlaCase(1, 63, 1, 64, scale=1.0),
    FlaCase(1, 63, 1, 64, scale=0.1, l2norm=True, gate=True),
    FlaCase(1, 63, 1, 64, inside=True),
    FlaCase(H=4, D=60, lengths=(15,)),
    FlaCase(H=2, D=60, lengths=(15, 85), masked=0.5),
)
CASES = (
    *SMALL,
    FlaCase(2, 500, 3, 60, scale=1.0),
    FlaCase(2, 1000, 3, 64, scale=0.1, masked=0.5),
    FlaCase(3, 1024, 4, 100, scale=1.0, normalizer=0.1),
    FlaCase(4, 1024, 4, 128, scale=0.1),
    FlaCase(4, 1024, 4, 128, scale=0.1, l2norm=True),
    FlaCase(2, 1500, 4, 128, scale=0.1, gate=True),
    FlaCase(4, 2048, 8, 64, scale=0.1, gate=True),
    FlaCase(4, 2048, 8, 64, scale=0.1, l2norm=True, gate=True),
    FlaCase(2, 1500, 4, 128, inside=True),
    FlaCase(D=64, lengths=(256, 244, 500)),
    FlaCase(D=128, lengths=(256, 244, 500), masked=0.5),
    FlaCase(D=100, lengths=(15, 85, 200, 900, 800)),
    FlaCase(D=256, lengths=(100, 200, 900, 1800, 1096)),
    FlaCase(D=128, lengths=(256, 244, 500), inside=True),
)


@pytest.fixture
def chunk_kda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """FLA's function with this library registered; its own kernels cannot be reached."""
    _, kda = real_fla()
    monkeypatch.setattr(importlib.import_module("fla.ops.kda.chunk").ChunkKDAFunction, "apply", fall_through)
    compat.register()
    yield kda.chunk_kda
    compat.unregister()


Seeds = list[tuple[Tensor, Tensor]]


def seeds(call: Call, o: Tensor, state: Tensor) -> Seeds:
    """Gradients of the output and of the final states, twice: random ones, for the gradients of rows and states; and
    their values, for those of the gate's parameters, whose sums over all tokens would cancel in the first.
    """
    rng = torch.Generator().manual_seed(7)
    drawn = [torch.randn(x.shape, generator=rng).to(x.device) for x in (o, state)]
    pairs = [drawn, [o.detach(), 0.1 * state.detach()]]
    return [(do.to(call["v"].dtype), dS.float()) for do, dS in pairs]


def gradients(o: Tensor, state: Tensor, found: dict[str, Tensor], given: Seeds) -> dict[str, Tensor]:
    """Of all leaves."""
    parameters = [name for name in found if name in ("A_log", "dt_bias")]
    rows = [name for name in found if name not in parameters]
    got: dict[str, Tensor] = {}
    for names, (do, dS) in zip((rows, parameters), given, strict=True):
        if names:
            loss = (o * do.to(o.dtype)).sum() + (state * dS.to(state.dtype)).sum()
            wanted = torch.autograd.grad(loss, [found[name] for name in names], retain_graph=True)
            got |= dict(zip(names, wanted, strict=True))
    return got


def expected(call: Call) -> tuple[dict[str, Tensor], Seeds]:
    """Output, final states and gradients in float64, and for which gradients of the first two."""
    wide = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in call.items()}
    taped, found = leaves(wide)
    o, state = exact(inputs_of(taped))
    given = seeds(call, o, state)
    return {"o": o, "state": state, **gradients(o, state, found, given)}, given


def ratios(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Root mean square errors over root mean square values."""
    assert got.keys() == want.keys()
    return {
        name: float((got[name].detach().double() - x.detach()).norm() / x.detach().norm()) for name, x in want.items()
    }


def check(chunk_kda: Any, case: FlaCase, device: str) -> None:
    """Output, final states and all gradients through FLA's function, and that the backend of choice computed them."""
    call = case.build(device)
    taped, found = leaves(call)
    backend = flash_kda.explain(inputs_of(taped).problem).backend
    with flash_kda.record_backends() as ran:
        o, state = chunk_kda(**as_fla(taped, safe_gate=case.inside))
    assert ran == [backend]
    assert ran[0] in (("hopper", "triton") if device == "cuda" else ("cpu",))
    want, given = expected(call)
    errors = ratios({"o": o, "state": state, **gradients(o, state, found, given)}, want)
    assert all(x <= LIMITS[name] for name, x in errors.items()), f"RMSE ratios {errors}"


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_shapes_of_fla(chunk_kda: Any, case: FlaCase) -> None:
    check(chunk_kda, case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes_of_fla_on_a_gpu(chunk_kda: Any, case: FlaCase) -> None:
    check(chunk_kda, case, "cuda")


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_what_it_is_compared_with(case: FlaCase) -> None:
    """The chunked answer that is quick on a GPU has the gradients of the recurrence."""
    call = case.build("cpu")
    wide = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in call.items()}
    taped, found = leaves(wide)
    o, state = flash_kda.kda(**taped, backend="reference")
    assert state is not None
    chunked, given = expected(call)
    recurrent = {"o": o, "state": state, **gradients(o, state, found, given)}
    # Gradients of the gate's float32 parameters are float32.
    assert all(x < 1e-6 for x in ratios(chunked, recurrent).values())
