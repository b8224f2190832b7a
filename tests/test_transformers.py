"""The KDA layers of Transformers computed here: the same logits and gradients as Transformers' own torch code."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import Case, oracle
from compare import assert_outputs, assert_same_bits, assert_states, bits
from torch import Tensor

import flash_kda
from flash_kda.compat import transformers as compat

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
on_devices = pytest.mark.parametrize("device", DEVICES)
# Of the largest logit, float32.
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-3}
VOCABULARY = 97
KDA_LAYERS = 3


def modelling(model: str) -> ModuleType:
    """Transformers' module of a model; the test is skipped where there is none."""
    name = f"transformers.models.{model}.modeling_{model}"
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        pytest.skip(f"this version of transformers has no {model}")


def own(module: ModuleType, function: str) -> Any:
    """Transformers' own torch function, under what it may be wrapped in."""
    return inspect.unwrap(getattr(module, function))


@pytest.fixture
def kimi(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of Kimi Linear, with its own torch functions even where FLA is installed."""
    module = modelling("kimi_linear")
    for function in compat.FUNCTIONS:
        monkeypatch.setattr(module, function, own(module, function))
    yield module
    compat.unregister()


def small_model(module: ModuleType, device: str) -> Any:
    """Random, with every kind of layer, and weights large enough for the layers to matter."""
    config = module.KimiLinearConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=KDA_LAYERS + 1,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        linear_head_dim=16,
        linear_num_heads=3,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = module.KimiLinearForCausalLM(config).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("dt_bias"):
                x.normal_()
            elif name.endswith("A_log"):
                x.normal_(std=0.5)
    return model.to(device)


def continued(model: Any, cache: Any) -> dict[str, Any]:
    """The cache as an argument of the model, which was called past_key_values at first."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


def text(*shape: int, device: str = "cpu") -> Tensor:
    drawn = torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    return drawn.to(device)


def assert_logits(got: Tensor, want: Tensor, device: str) -> None:
    assert got.shape == want.shape
    error = (got.double() - want.double()).abs().max() / want.abs().max()
    assert error <= TOLERANCE[device], f"logits differ by {error:.3g} of the largest"


def here(calls: int, run: Any, device: str) -> Any:
    """What ``run`` gives with our layers, which ran so many times."""
    assert "kimi_linear" in compat.register("kimi_linear")
    try:
        with flash_kda.record_backends() as ran:
            result = run()
    finally:
        compat.unregister()
    assert len(ran) == calls
    assert set(ran) <= ({"cpu"} if device == "cpu" else {"triton", "hopper"})
    return result


@on_devices
@pytest.mark.parametrize("T", [1, 5, 64, 70])
def test_prefill(kimi: ModuleType, device: str, T: int) -> None:
    model, ids = small_model(kimi, device), text(2, T, device=device)
    with torch.no_grad():
        want = model(ids).logits
        got = here(KDA_LAYERS, lambda: model(ids).logits, device)
        assert_logits(got, want, device)
        assert_same_bits(model(ids).logits, want, "logits after unregister")


@on_devices
def test_cached_decoding(kimi: ModuleType, device: str) -> None:
    """A prompt, single tokens, several tokens at once, single tokens again: one cache."""
    model, ids = small_model(kimi, device), text(2, 60, device=device)
    pieces = (0, 40, 41, 42, 50, 51, 60)

    def run() -> Tensor:
        cache, logits = None, []
        for first, end in pairwise(pieces):
            out = model(ids[:, first:end], **continued(model, cache), use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
        return torch.cat(logits, 1)

    with torch.no_grad():
        whole, want = model(ids).logits, run()
        got = here(KDA_LAYERS * (len(pieces) - 1), run, device)
    assert_logits(got, want, device)
    assert_logits(got, whole, device)


@on_devices
def test_generation(kimi: ModuleType, device: str) -> None:
    model, ids = small_model(kimi, device), text(1, 20, device=device)

    def run() -> Tensor:
        made: Tensor = model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=True)
        return made

    want = run()
    assert torch.equal(here(KDA_LAYERS * 12, run, device), want)
    assert want.shape[1] > 21


@on_devices
def test_a_padded_batch(kimi: ModuleType, device: str) -> None:
    """Prompts of different lengths, padded on the left, then one token more."""
    model, ids = small_model(kimi, device), text(2, 30, device=device)
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    ids = ids.masked_fill(mask == 0, 0)

    def run() -> Tensor:
        out = model(ids, attention_mask=mask, use_cache=True)
        more = torch.cat([mask, mask[:, -1:]], 1)
        step = model(ids[:, -1:], attention_mask=more, **continued(model, out.past_key_values))
        return torch.cat([out.logits[0], out.logits[1, 11:], step.logits[0], step.logits[1]])

    with torch.no_grad():
        assert_logits(here(2 * KDA_LAYERS, run, device), run(), device)


def test_gradients(kimi: ModuleType) -> None:
    model, ids = small_model(kimi, "cpu"), text(2, 33)

    def run() -> dict[str, Tensor]:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}

    want, got = run(), here(KDA_LAYERS, run, "cpu")
    assert want.keys() == got.keys()
    assert any("A_log" in name for name in want)
    for name, right in want.items():
        error = (got[name].double() - right.double()).norm() / right.double().norm().clamp(min=1e-6)
        assert error <= 1e-4, f"gradient of {name}: relative error {error:.3g}"


@pytest.mark.parametrize(("dtype", "l2norm"), [("bfloat16", True), ("float32", True), ("float32", False)])
@pytest.mark.parametrize("model", compat.MODELS)
def test_functions_are_transformers_functions(model: str, dtype: str, l2norm: bool) -> None:
    """Each of a module's two functions, with and without a state, in the layers' layout of q, k and v."""
    module = modelling(model)
    case = Case(B=2, T=70, H=3, V=24, gate="log", logit=False, dtype=dtype, layout="kv", l2norm=l2norm)
    call = case.build()
    for function, T in ((compat.FUNCTIONS[0], 70), (compat.FUNCTIONS[1], 1)):
        names = zip(("query", "key", "value", "g", "beta"), ("q", "k", "v", "g", "beta"), strict=True)
        rows = {name: call[x][:, :T] for name, x in names}
        for name in ("query", "key", "value"):  # the last dimension is not dense after the convolution
            rows[name] = rows[name].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        for state in (None, call["initial_state"]):
            options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": l2norm}
            want, right = own(module, function)(**rows, **options)
            got, final = getattr(compat, function)(**rows, **options, output_attentions=False)
            assert got.dtype == want.dtype
            assert_outputs(got, want.double(), {"q": rows["query"]}, 1e-2 if dtype == "bfloat16" else 2e-5)
            assert_states(final, right.double(), 2e-5)
            assert getattr(compat, function)(**rows, **options | {"output_final_state": False})[1] is None


# Without Transformers


def test_the_functions_by_the_definition() -> None:
    call = Case(B=2, T=70, H=3, V=24, gate="log", logit=False, layout="kv").build()
    o, final = oracle(call)
    rows = [call[name] for name in ("q", "k", "v", "g", "beta")]
    kept = [bits(x).clone() for x in rows]
    for function in (compat.chunk_kimi_delta_attention, compat.recurrent_kimi_delta_attention):
        got, state = function(
            *rows, initial_state=call["initial_state"], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        assert_outputs(got, o, call, 1e-5)
        assert state is not None
        assert_states(state, final, 1e-5)
    assert all(torch.equal(bits(x), old) for x, old in zip(rows, kept, strict=True))


def test_packed_sequences() -> None:
    call = Case(lengths=(30, 0, 41), tail=2, H=3, gate="log", logit=False, layout="kv", initial=False).build()
    rows = [call[name] for name in ("q", "k", "v", "g", "beta")]
    options = {"use_qk_l2norm_in_kernel": True, "seq_idx": torch.zeros(1, 73)}
    o, _ = compat.chunk_kimi_delta_attention(*rows, cu_seqlens=call["cu_seqlens"], **options)
    assert_outputs(o, oracle(call)[0], call, 1e-5)
    for function in (compat.chunk_kimi_delta_attention, compat.recurrent_kimi_delta_attention):
        with pytest.raises(NotImplementedError, match=r"^seq_idx:"):
            function(*rows, **options)


def test_register_says_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module = modelling("kimi_linear")
    before = {name: getattr(module, name) for name in compat.FUNCTIONS}
    found = compat.register()
    try:
        assert found == compat.register()
        assert "kimi_linear" in found
        for name in compat.FUNCTIONS:
            assert getattr(module, name) is getattr(compat, name)
    finally:
        compat.unregister()
    assert {name: getattr(module, name) for name in compat.FUNCTIONS} == before
    others = {name: object() for name in compat.FUNCTIONS}
    for name, other in others.items():
        monkeypatch.setattr(module, name, other)
    compat.unregister()  # nothing is registered: what others put there stays
    assert {name: getattr(module, name) for name in compat.FUNCTIONS} == others


def test_register_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^models: got 'kimi'"):
        compat.register("kimi")
    real = importlib.import_module

    def without(gone: str) -> Any:
        def load(name: str, package: str | None = None) -> ModuleType:
            if name.startswith(gone):
                raise ModuleNotFoundError(f"No module named {gone!r}", name=gone)
            return ModuleType(name) if name == "transformers" else real(name, package)

        return load

    monkeypatch.setattr(importlib, "import_module", without("transformers"))
    with pytest.raises(ImportError, match="needs transformers"):
        compat.register()
    monkeypatch.setattr(importlib, "import_module", without("transformers.models"))
    with pytest.raises(ImportError, match="no KDA layers of kimi_linear"):
        compat.register("kimi_linear")


def test_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The last block of docs/drop-in.md."""
    modelling("kimi_linear")
    text = (Path(__file__).parents[1] / "docs" / "drop-in.md").read_text()
    try:
        exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1], {"torch": torch, "flash_kda": flash_kda})
    finally:
        compat.unregister()
    assert capsys.readouterr().out == "('kimi_linear',)\n['cpu']\n"
