"""The serving example: whatever arrives when, every completion is the one that the model makes alone, byte by byte."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compare import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

import flash_kda
from flash_kda.nn import ByteLM, ByteLMConfig

ROOT = Path(__file__).parents[1]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("serve", ROOT / "examples" / "serve.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


serve = load()
# Real text: this file and its like repeat themselves, and start alike.
TEXT = b"".join((ROOT / "flash_kda" / name).read_bytes()[:1500] for name in ("decode.py", "api.py", "ops.py"))


@cache
def model() -> ByteLM:
    """Not trained: it writes an irregular text of four bytes that depends on all that came before.

    With so few bytes some guesses are right and some are not, and the choice is seldom so close that rounding decides.
    """
    torch.manual_seed(0)
    shape = ByteLMConfig(
        hidden_size=24, num_layers=2, num_heads=1, num_v_heads=2, head_dim=8, mlp_size=32, tie_embeddings=False
    )
    made = ByteLM(shape).eval()
    with torch.no_grad():
        for block in made.blocks:
            for out in (block.attn.o_proj, block.mlp.down_proj):
                out.weight.normal_(std=1.0)
        rows = torch.randn(2, 24)
        made.head.weight.zero_()
        made.head.weight[list(b"abcd")] = torch.cat([rows, -rows])
    return made


@cache
def alone(prompt: bytes, new: int) -> bytes:
    return model().generate(prompt, new, temperature=0)


def serve_all(engine: Any, arrivals: list[tuple[int, bytes, int]]) -> list[Any]:
    """Requests ``(steps to wait before it, prompt, new bytes)``, to the end; the slots are as many as before."""
    requests = []
    for wait, prompt, new in arrivals:
        for _ in range(wait):
            engine.step()
        requests.append(engine.add(prompt, new))
    for _ in range(10_000):
        if not engine.step():
            break
    assert not engine.running
    assert len(engine.pool.free) == engine.rows * (1 + engine.drafts)
    held = [*engine.pool.free, *engine.unused, *engine.prefixes.values()]
    assert sorted(held) == list(range(engine.pool.layers[0].state.shape[0]))
    return requests


@st.composite
def schedules(draw: st.DrawFn) -> tuple[dict[str, int], list[tuple[int, bytes, int]]]:
    options = {
        "rows": draw(st.integers(1, 5)),
        "piece": draw(st.sampled_from([1, 5, 16, 70])),
        "drafts": draw(st.integers(0, 6)),
        "prefixes": draw(st.integers(0, 4)),
    }
    # Few starts, so that prompts share prefixes, and one that is a part of another.
    start = st.sampled_from([0, 0, 31, 1500])
    arrivals = [
        (draw(st.integers(0, 6)), TEXT[a : a + draw(st.integers(1, 90))], draw(st.integers(0, 25)))
        for a in draw(st.lists(start, min_size=1, max_size=7))
    ]
    return options, arrivals


@settings(derandomize=True, deadline=None, database=None, max_examples=40)
@given(schedule=schedules())
def test_every_completion_is_that_of_the_model_alone(schedule: Any) -> None:
    options, arrivals = schedule
    requests = serve_all(serve.Engine(model(), **options), arrivals)
    for r, (_, prompt, new) in zip(requests, arrivals, strict=True):
        assert r.result == alone(prompt, new)


def test_prefixes_are_found_and_drafts_accepted() -> None:
    """The paths that the schedules are about are taken."""
    engine = serve.Engine(model(), rows=3, piece=16, drafts=4, prefixes=4)
    with flash_kda.record_backends() as ran:
        serve_all(engine, [(0, TEXT[:70], 40), (9, TEXT[:60], 40), (0, TEXT[:50] + b"else", 40)])
    counts = engine.counts
    assert set(ran) == {"cpu"}
    assert counts["bytes found in the cache"] == 48 + 48
    assert counts["bytes read"] == 69 + (59 - 48) + (53 - 48)
    assert counts["bytes decoded"] > 1.2 * counts["row calls"]
    assert engine.counts["bytes decoded"] >= 3 * 40


def test_the_least_used_prefix_makes_room() -> None:
    engine = serve.Engine(model(), rows=1, piece=8, drafts=0, prefixes=2)
    serve_all(engine, [(0, TEXT[:20], 1), (0, TEXT[:9], 1), (0, TEXT[100:109], 1)])
    assert list(engine.prefixes) == [TEXT[:8], TEXT[100:108]]


def test_drafts() -> None:
    assert serve.draft(b"for x in y: for x", 4) == b" in "
    assert serve.draft(b"aaaaaaaa", 3) == b"a"
    assert serve.draft(b"abc", 4) == b""
    assert serve.draft(b"a", 4) == b""


@torch.inference_mode()
def test_a_slot_holds_what_the_model_knows() -> None:
    """Packed pieces leave the caches of whole texts read alone."""
    pool = serve.Pool(model(), 4)
    texts = [TEXT[:30], TEXT[50:61]]
    for pieces in ((TEXT[:7], TEXT[50:60]), (TEXT[7:30], TEXT[60:61])):
        serve.prefill(model(), pool, [2, 0], pieces)
    for slot, text in zip((2, 0), texts, strict=True):
        _, cache = model()(torch.tensor([list(text)]), return_cache=True)
        assert cache is not None
        for layer, want in zip(pool.layers, cache.layers, strict=True):
            torch.testing.assert_close(layer.state[slot], want.state[0], rtol=1e-4, atol=1e-5)
    pool.copy(2, 1)
    for layer in pool.layers:
        for x in layer.tensors:
            assert_same_bits(x[1], x[2], "copy")
            assert not x[3].count_nonzero()


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt: got no bytes"):
        serve.Engine(model()).add(b"", 3)


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On text of the standard library, with a model that has hardly been trained."""
    monkeypatch.setattr(sys, "argv", ["serve.py", "--seconds", "1", "--requests", "4", "--new", "20"])
    serve.main()
    assert "4 of 4 completions are those of the model alone" in capsys.readouterr().out
