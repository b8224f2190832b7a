"""The layer, its parts and the small language model."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Target, targets
from torch import Tensor
from torch.nn import functional as F

import flash_kda
from flash_kda.nn import (
    ByteLM,
    ByteLMConfig,
    DeltaRule,
    GatedRMSNorm,
    KimiDeltaAttention,
    LayerCache,
    RMSNorm,
    ShortConvolution,
    attention,
)

VARIANTS = {
    "softplus": {},
    "bounded": {"lower_bound": -5.0},
    "grouped": {"lower_bound": -2.0, "num_v_heads": 4, "expand_v": 0.5},
    "negative": {"allow_neg_eigval": True, "conv_bias": True, "conv_size": 3},
    "plain": {"use_short_conv": False, "expand_v": 2.0},
    "width one": {"conv_size": 1},
}
HIDDEN, K, H = 20, 8, 2


def layer(variant: str, dtype: torch.dtype = torch.float64, backend: str = "auto") -> KimiDeltaAttention:
    torch.manual_seed(3)
    made = KimiDeltaAttention(HIDDEN, K, H, **VARIANTS[variant], backend=backend).to(dtype)
    with torch.no_grad():
        # Ones and zeros hide a parameter that is left out.
        for p in made.parameters():
            p.add_(0.2 * torch.randn(p.shape, dtype=dtype))
    return made


def inputs(T: int, B: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(B, T, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def recompute(m: KimiDeltaAttention, x: Tensor) -> Tensor:
    """The layer written down again: loops over taps and tokens, from the state_dict alone."""
    w = m.state_dict()
    HV, V = m.num_v_heads, m.head_v_dim
    mixed = {}
    for name in "qkv":
        y = x @ w[f"{name}_proj.weight"].T
        if m.use_short_conv:
            filters = w[f"{name}_conv1d.weight"]
            z = torch.zeros_like(y)
            for t in range(y.shape[1]):
                for tap in range(filters.shape[-1]):
                    at = t - (filters.shape[-1] - 1) + tap
                    if at >= 0:
                        z[:, t] += filters[:, 0, tap] * y[:, at]
            y = z + w.get(f"{name}_conv1d.bias", torch.zeros(()))
        mixed[name] = y * torch.sigmoid(y)
    q, k = (mixed[name].unflatten(-1, (H, K)) for name in "qk")
    q, k = (u / (u.square().sum(-1, keepdim=True) + 1e-6).sqrt() for u in (q, k))
    q, k = (u.repeat_interleave(HV // H, 2) for u in (q, k))
    v = mixed["v"].unflatten(-1, (HV, V))
    raw = (x @ w["f_proj.0.weight"].T @ w["f_proj.1.weight"].T + w["dt_bias"]).unflatten(-1, (HV, K))
    amplitude = w["A_log"].exp()[:, None]
    if m.lower_bound is None:
        g = -amplitude * torch.log1p(raw.exp())
    else:
        g = m.lower_bound / (1 + (-amplitude * raw).exp())
    beta = torch.sigmoid(x @ w["b_proj.weight"].T) * (2 if m.delta_rule.allow_neg_eigval else 1)
    S = torch.zeros(x.shape[0], HV, K, V, dtype=x.dtype)
    o = torch.zeros(*x.shape[:2], HV, V, dtype=x.dtype)
    for t in range(x.shape[1]):
        S = g[:, t].exp()[..., None] * S
        delta = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, :, None] * S).sum(2))
        S = S + k[:, t, :, :, None] * delta[:, :, None]
        o[:, t] = K**-0.5 * (q[:, t, :, :, None] * S).sum(2)
    out_gate = (x @ w["g_proj.0.weight"].T @ w["g_proj.1.weight"].T + w["g_proj.1.bias"]).unflatten(-1, (HV, V))
    normed = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w["o_norm.weight"]
    return (normed * torch.sigmoid(out_gate)).flatten(-2) @ w["o_proj.weight"].T


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("T", [1, 2, 37])
def test_layer_is_what_it_says(variant: str, T: int) -> None:
    m = layer(variant)
    x = inputs(T)
    y, cache = m(x)
    assert cache is None
    torch.testing.assert_close(y, recompute(m, x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_state_dict_is_that_of_fla(lower_bound: float | None) -> None:
    """Names and shapes of fla.layers.KimiDeltaAttention (0.6), H = 3, HV = 6, K = 8, V = 16, with conv_bias."""
    m = KimiDeltaAttention(40, 8, 3, 6, 2.0, lower_bound=lower_bound, conv_bias=True)
    assert {name: tuple(p.shape) for name, p in m.state_dict().items()} == {
        "A_log": (6,),
        "dt_bias": (48,),
        "q_proj.weight": (24, 40),
        "k_proj.weight": (24, 40),
        "v_proj.weight": (96, 40),
        "q_conv1d.weight": (24, 1, 4),
        "q_conv1d.bias": (24,),
        "k_conv1d.weight": (24, 1, 4),
        "k_conv1d.bias": (24,),
        "v_conv1d.weight": (96, 1, 4),
        "v_conv1d.bias": (96,),
        "f_proj.0.weight": (16, 40),
        "f_proj.1.weight": (48, 16),
        "b_proj.weight": (6, 40),
        "g_proj.0.weight": (16, 40),
        "g_proj.1.weight": (96, 16),
        "g_proj.1.bias": (96,),
        "o_norm.weight": (16,),
        "o_proj.weight": (40, 96),
    }
    bare = KimiDeltaAttention(40, 8, 3, use_short_conv=False).state_dict()
    assert not [name for name in bare if "conv1d" in name]
    assert {m.A_log.dtype, m.dt_bias.dtype} == {torch.float32}


def test_initial_gate_parameters() -> None:
    torch.manual_seed(0)
    soft, bounded = KimiDeltaAttention(16, 32, 64), KimiDeltaAttention(16, 32, 64, lower_bound=-5.0)
    amplitude = soft.A_log.exp()
    assert amplitude.min() >= 1
    assert amplitude.max() <= 16
    assert amplitude.std() > 3
    assert (bounded.A_log == 0).all()
    step = F.softplus(soft.dt_bias)
    assert step.min() >= 0.99e-3
    assert step.max() <= 1.01e-1
    # Log-uniform: as many below a hundredth as above.
    assert 0.45 < float((step < 1e-2).double().mean()) < 0.55


def run_pieces(m: KimiDeltaAttention, x: Tensor, pieces: list[int]) -> tuple[Tensor, LayerCache]:
    cache, outputs = None, []
    for piece in x.split(pieces, 1):
        y, cache = m(piece, cache, return_cache=True)
        outputs.append(y)
    assert cache is not None
    return torch.cat(outputs, 1), cache


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("pieces", [[1] * 70, [1, 2, 0, 63, 3, 1], [69, 1]], ids=["single", "uneven", "last"])
def test_pieces_give_what_the_whole_gives(variant: str, pieces: list[int]) -> None:
    m = layer(variant, torch.float32)
    x = inputs(70, dtype=torch.float32)
    with torch.no_grad():
        whole, want = run_pieces(m, x, [70])
        got, cache = run_pieces(m, x, pieces)
    torch.testing.assert_close(got, whole, rtol=1e-4, atol=3e-5)
    for name in ("state", "q_conv", "k_conv", "v_conv"):
        a, b = getattr(cache, name), getattr(want, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == torch.float32
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert want.nbytes == cache.nbytes > 0


def test_a_call_leaves_its_cache_alone() -> None:
    m = layer("bounded", torch.float32)
    with torch.no_grad():
        _, cache = m(inputs(9, dtype=torch.float32), return_cache=True)
        before = copy.deepcopy(cache)
        first, _ = m(inputs(1, dtype=torch.float32, seed=1), cache, return_cache=True)
        second, _ = m(inputs(1, dtype=torch.float32, seed=1), cache, return_cache=True)
    assert torch.equal(first, second)
    for name in ("state", "q_conv", "k_conv", "v_conv"):
        assert torch.equal(getattr(cache, name), getattr(before, name))


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_sequences_are_separate(variant: str) -> None:
    m = layer(variant)
    x = inputs(40, B=1)
    ends = [0, 0, 3, 3, 4, 20, 37, 37]
    x[:, 37:] = torch.nan
    with torch.no_grad():
        _, cache = m(inputs(5, B=7, seed=9), return_cache=True)
        y, after = m(x, cache, return_cache=True, cu_seqlens=torch.tensor(ends))
        assert (y[:, 37:] == 0).all()
        for n, (start, end) in enumerate(itertools.pairwise(ends)):
            names = [f.name for f in cache.__dataclass_fields__.values() if getattr(cache, f.name) is not None]
            own = replace(cache, **{name: getattr(cache, name)[n : n + 1] for name in names})
            alone, end_cache = m(x[:, start:end], own, return_cache=True)
            torch.testing.assert_close(y[:, start:end], alone, rtol=1e-9, atol=1e-11)
            for name in names:
                torch.testing.assert_close(getattr(after, name)[n], getattr(end_cache, name)[0], rtol=1e-9, atol=1e-11)


def test_a_nan_stays_in_its_sequence_and_its_future() -> None:
    m = layer("bounded")
    x = inputs(30, B=1)
    cu = torch.tensor([0, 10, 22, 30])
    with torch.no_grad():
        clean, _ = m(x, cu_seqlens=cu)
        x[0, 15] = torch.nan
        spoilt, _ = m(x, cu_seqlens=cu)
    finite = spoilt[0].isfinite().all(-1)
    assert finite.tolist() == [not 15 <= t < 22 for t in range(30)]
    torch.testing.assert_close(spoilt[0, finite], clean[0, finite], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_reach_every_parameter(variant: str) -> None:
    """And they are those of the float64 reference, packed or not."""
    m = layer(variant)
    exact = layer(variant, backend="reference")
    x = inputs(23, B=1)
    weight = torch.randn(1, 23, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for cu in (None, torch.tensor([0, 11, 20])):
        for model in (m, exact):
            model.zero_grad()
            (model(x, cu_seqlens=cu)[0] * weight).sum().backward()
        for (name, p), want in zip(m.named_parameters(), exact.parameters(), strict=True):
            assert p.grad is not None, name
            assert p.grad.abs().max() > 0, name
            torch.testing.assert_close(p.grad, want.grad, rtol=1e-6, atol=1e-8, msg=lambda s, name=name: f"{name}: {s}")


def test_bfloat16_layer_keeps_its_state_and_gate_in_float32() -> None:
    m = layer("bounded", torch.bfloat16)
    assert m.gate.A_log is not None
    assert m.gate.A_log.dtype == torch.float32
    x = inputs(12, dtype=torch.bfloat16)
    with torch.no_grad():
        y, cache = m(x, return_cache=True)
        want, _ = copy.deepcopy(m).double()(x.double())
    assert y.dtype == torch.bfloat16
    assert {cache.state.dtype, cache.q_conv.dtype} == {torch.float32}
    assert float((y.double() - want).square().mean().sqrt() / want.square().mean().sqrt()) < 0.03


def test_convolution_is_torchs_own() -> None:
    torch.manual_seed(0)
    conv = ShortConvolution(6, 4, bias=True).double()
    own = torch.nn.Conv1d(6, 6, 4, groups=6, padding=3).double()
    own.load_state_dict(conv.state_dict())
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    y, state = conv(x)
    torch.testing.assert_close(y, F.silu(own(x.transpose(1, 2))[..., :9]).transpose(1, 2))
    assert torch.equal(state, x[:, 6:])
    one, cache = [], None
    for t in range(9):
        row, cache = conv(x[:, t : t + 1], cache)
        one.append(row)
    torch.testing.assert_close(torch.cat(one, 1), y, rtol=1e-12, atol=1e-14)
    assert torch.equal(cache, state)


def test_norms() -> None:
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    norm, gated = RMSNorm(8, 0.1).double(), GatedRMSNorm(8, 0.1).double()
    with torch.no_grad():
        norm.weight.copy_(torch.arange(8.0))
        gated.weight.copy_(torch.arange(8.0))
    want = F.rms_norm(x, (8,), torch.arange(8.0, dtype=torch.float64), 0.1)
    torch.testing.assert_close(norm(x), want)
    torch.testing.assert_close(gated(x, 3 * x), want * torch.sigmoid(3 * x))
    with pytest.raises(ValueError, match=r"gate: got None, expected the shape of x, \(3, 5, 8\)"):
        gated(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size: got 0"),
        ({"num_heads": 0}, "num_heads: got 0"),
        ({"num_v_heads": 3}, "num_v_heads: got 3, expected a multiple of num_heads = 2"),
        ({"expand_v": 0.3}, "expand_v: got a value head size of 2.4"),
        ({"lower_bound": -6.0}, "lower_bound: got -6.0"),
        ({"lower_bound": 0.0}, "lower_bound: got 0.0"),
        ({"conv_size": 0}, "width: got 0"),
    ],
)
def test_wrong_layer_arguments_are_named(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KimiDeltaAttention(**{"hidden_size": HIDDEN, "head_dim": 8, "num_heads": 2, **change})


def test_wrong_calls_are_named() -> None:
    m = layer("bounded", torch.float32)
    with pytest.raises(ValueError, match=r"x: got shape \(2, 3, 4\), expected \[B, T, D\] with D = 20"):
        m(torch.zeros(2, 3, 4))
    _, cache = m(inputs(4, B=3, dtype=torch.float32), return_cache=True)
    with pytest.raises(ValueError, match=r"state: got shape \(3, 3, 16\), expected \[N, W - 1, D\] = \(2, 3, 16\)"):
        m(inputs(4, dtype=torch.float32), cache)
    with pytest.raises(ValueError, match="cache: got one of a layer with use_short_conv=True"):
        layer("plain", torch.float32)(inputs(4, B=3, dtype=torch.float32), cache)


SMALL = ByteLMConfig(hidden_size=24, num_layers=2, num_heads=2, head_dim=8, mlp_size=40)


def language_model(**changes: object) -> ByteLM:
    torch.manual_seed(1)
    made = ByteLM(replace(SMALL, **changes))  # type: ignore[arg-type]
    with torch.no_grad():
        made.embedding.weight.mul_(20)
    return made


@pytest.mark.parametrize("tied", [True, False])
def test_language_model_in_pieces_and_packed(tied: bool) -> None:
    m = language_model(tie_embeddings=tied, lower_bound=-5.0 if tied else None)
    assert (m.head.weight is m.embedding.weight) == tied
    tokens = torch.randint(256, (1, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, none = m(tokens)
        assert none is None
        cache, out = None, []
        for piece in tokens.split([1, 30, 1, 18], 1):
            logits, cache = m(piece, cache, return_cache=True)
            out.append(logits)
        assert cache.tokens == 50
        torch.testing.assert_close(torch.cat(out, 1), whole, rtol=1e-4, atol=1e-4)
        packed, _ = m(tokens, cu_seqlens=torch.tensor([0, 20, 50]))
        torch.testing.assert_close(packed[:, :20], whole[:, :20], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(packed[:, 20:], m(tokens[:, 20:])[0], rtol=1e-4, atol=1e-4)
    loss = F.cross_entropy(m(tokens[:, :-1])[0][0], tokens[0, 1:])
    loss.backward()
    for name, p in m.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().max() > 0, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_single_tokens_are_decoded(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In copies of the states, with the results of ``kda``; not where gradients, drafts or packed rows are wanted."""
    decoded: list[tuple[str, Tensor]] = []

    def watch(name: str) -> None:
        def watched(*args: Any, **kwargs: Any) -> Tensor:
            decoded.append((name, kwargs["pool"]))
            return getattr(flash_kda, name)(*args, **kwargs)

        monkeypatch.setattr(attention, name, watched)

    watch("kda_decode")
    watch("kda_decode_step")
    m, x = layer(variant), inputs(4)
    with torch.no_grad():
        _, cache = m(x[:, :3], return_cache=True)
    assert cache is not None
    before = copy.deepcopy(cache)
    expected, after = m(x[:, 3:], cache, return_cache=True)
    assert not decoded
    with torch.no_grad():
        got, state = m(x[:, 3:], cache, return_cache=True)
        m(x[:, 3:], cache)
        m(x[:, 2:], cache, return_cache=True)
        m(x[:1, :2], cache, return_cache=True, cu_seqlens=torch.tensor([0, 1, 2]))
        with pytest.raises(ValueError, match="got"):
            m(x[:1, 3:], cache, return_cache=True)
    assert after is not None
    assert state is not None
    ((name, pool),) = decoded
    assert name == ("kda_decode_step" if m.use_short_conv else "kda_decode")
    assert pool is state.state
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert_caches_close(state, after, rtol=1e-12, atol=1e-12)
    assert_caches_close(cache, before, rtol=0.0, atol=0.0)
    assert state.nbytes == after.nbytes


def assert_caches_close(got: LayerCache, expected: LayerCache, **tolerances: float) -> None:
    for name in ("state", "q_conv", "k_conv", "v_conv"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), **tolerances)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "plain"])
@pytest.mark.parametrize("target", targets())
@torch.no_grad()
def test_the_step_is_the_parts(target: Target, variant: str, dtype: torch.dtype) -> None:
    """In one call or part by part, as a hook has it: the same tokens, one after the other, and the same caches."""
    if target.device == "cuda" and dtype == torch.float64:
        pytest.skip("the GPU kernels compute in float32")
    if target.backend == "hopper":
        pytest.skip("has no kernel for decoding")
    torch.manual_seed(3)
    sizes = {"head_dim": 16} | VARIANTS[variant] | ({"expand_v": 1.0} if variant == "grouped" else {})
    m = KimiDeltaAttention(HIDDEN, num_heads=H, **sizes, backend=target.backend)
    for p in m.parameters():
        p.add_(0.2 * torch.randn(p.shape))
    m = m.to(dtype).to(target.device)
    x = inputs(12, B=3, dtype=dtype).to(target.device)
    seen: list[int] = []

    def decode(m: KimiDeltaAttention, x: Tensor) -> tuple[Tensor, LayerCache]:
        _, cache = m(x[:, :4], return_cache=True)
        outputs = []
        for t in range(4, 12):
            y, cache = m(x[:, t : t + 1], cache, return_cache=True)
            outputs.append(y)
        assert cache is not None
        return torch.cat(outputs, 1), cache

    with flash_kda.record_backends() as ran:
        got, cache = decode(m, x)
    assert set(ran) == {target.backend}
    hook = m.o_norm.register_forward_hook(lambda *_: seen.append(1))
    want, parts = decode(m, x)
    hook.remove()
    # Prefill has one, too.
    assert len(seen) == 1 + 8
    if dtype == torch.bfloat16:
        # The parts round what they hand on: their error is the larger one.
        exact = copy.deepcopy(m).cpu().double()
        exact.delta_rule.backend = "reference"
        right, _ = decode(exact, x.cpu().double())
        errors = [float((y.cpu().double() - right).square().mean().sqrt()) for y in (got, want)]
        assert errors[0] <= 1.1 * errors[1], errors
        return
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert_caches_close(cache, parts, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("part", ["q_conv1d", "delta_rule", "o_norm"])
@torch.no_grad()
def test_a_part_that_is_watched_or_replaced_runs(part: str) -> None:
    m, x = layer("bounded"), inputs(4)
    _, cache = m(x[:, :3], return_cache=True)
    expected, _ = m(x[:, 3:], cache, return_cache=True)
    calls = []

    class Other(type(getattr(m, part))):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("replaced")
            return super().forward(*args, **kwargs)

    before = getattr(m, part).register_forward_pre_hook(lambda *_: calls.append("before"))
    got, _ = m(x[:, 3:], cache, return_cache=True)
    before.remove()
    getattr(m, part).__class__ = Other
    again, _ = m(x[:, 3:], cache, return_cache=True)
    assert calls == ["before", "replaced"]
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(again, expected, rtol=1e-12, atol=1e-12)


def test_generation_takes_the_decode_path() -> None:
    m = language_model()
    lengths = []
    rule = next(x for x in m.modules() if isinstance(x, DeltaRule))
    rule.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    out = m.generate(b"import", 5, temperature=0)
    assert lengths == [6, 1, 1, 1, 1]
    # Greedy, so each byte is the most likely one after everything before it.
    with torch.no_grad():
        for n in range(5):
            logits, _ = m(torch.tensor([list(b"import" + out[:n])]))
            assert int(logits[0, -1].argmax()) == out[n]
    draws = [m.generate(b"x", 20, top_k=5, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert m.generate(b"x", 0) == b""
    # One candidate leaves no choice.
    assert m.generate(b"import", 5, top_k=1) == out


def test_wrong_language_model_calls_are_named() -> None:
    m = language_model()
    with pytest.raises(TypeError, match=r"tokens: got torch.int32, expected torch.int64"):
        m(torch.zeros(1, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"tokens: got shape \(3,\), expected \[B, T\]"):
        m(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="num_layers: got 0"):
        replace(SMALL, num_layers=0)
    for wrong, message in (
        ({"prompt": b""}, "prompt: got no bytes"),
        ({"max_new_bytes": -1}, "max_new_bytes: got -1"),
        ({"temperature": -1.0}, "temperature: got -1.0"),
        ({"top_k": 0}, "top_k: got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            m.generate(**{"prompt": b"a", "max_new_bytes": 1, **wrong})
