"""The demo: its text, its baselines, its training, its judgement and its report."""

from __future__ import annotations

import base64
import gzip
import io
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import flash_kda
from flash_kda.demo import agree, data, report, run, train
from flash_kda.nn import ByteLM, ByteLMConfig

pytest.importorskip("matplotlib")

SHAPE = ByteLMConfig(hidden_size=32, num_layers=2, num_heads=2, head_dim=16, mlp_size=48)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small part of the real standard library, with folders that must be skipped."""
    root = tmp_path_factory.mktemp("library")
    for f in data.library_files()[:40]:
        if 600 < f.stat().st_size < 30_000:
            (root / f"{f.parent.name}_{f.name}").write_bytes(f.read_bytes())
    for folder in ("test", "site-packages/inner", "encodings"):
        (root / folder).mkdir(parents=True)
        (root / folder / "skipped.py").write_text("SKIPPED = 1\n")
    (root / "empty.py").write_text("\n")
    (root / "notes.txt").write_text("SKIPPED = 2\n")
    return root


@pytest.fixture(scope="module")
def corpus(library: Path) -> data.Corpus:
    return data.load(0, library, held_out_share=0.2, excerpt=700)


def small(library: Path, out: Path, **changes: object) -> run.DemoConfig:
    base = run.DemoConfig(
        steps=2, out=out, check_bytes=140, new_bytes=12, excerpt=300, root=library, shape=SHAPE, seconds=math.inf
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_the_standard_library_is_there() -> None:
    names = [f.name for f in data.library_files()]
    assert len(names) > 200
    assert {"argparse.py", "random.py"} <= set(names)
    assert data.library_files() == data.library_files()


def test_files_are_held_out_whole(library: Path, corpus: data.Corpus) -> None:
    texts = {f.name: f.read_bytes() for f in library.glob("*.py") if f.name != "empty.py"}
    assert corpus.train_files + corpus.held_out_files == len(texts)
    assert corpus.held_out_files == len(corpus.held_out) == round(0.2 * len(texts))
    assert b"SKIPPED" not in corpus.train + corpus.held_out_bytes
    held_out = {name for name, _ in corpus.held_out}
    for name, excerpt in corpus.held_out:
        assert excerpt in texts[name]
        assert len(excerpt) == min(700, len(texts[name]))
    assert len(corpus.train) == sum(len(text) + 1 for name, text in texts.items() if name not in held_out)
    assert not [name for name in held_out if texts[name] in corpus.train]
    assert data.load(0, library, held_out_share=0.2, excerpt=700) == corpus
    assert data.load(1, library, held_out_share=0.2, excerpt=700).held_out != corpus.held_out


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(data.NoTextError, match="root: got 1 Python files"):
        data.load(0, tmp_path)


def test_baselines_are_what_they_say(corpus: data.Corpus) -> None:
    text = corpus.held_out_bytes
    single = Counter(corpus.train)
    total = len(corpus.train) + 256
    want = -sum(math.log2((single[b] + 1) / total) for b in text) / len(text)
    assert data.unigram_bits(corpus) == pytest.approx(want, rel=1e-9)
    pairs = Counter(zip(corpus.train, corpus.train[1:], strict=False))
    first = Counter(corpus.train[:-1])
    bits = 0.0
    for _, excerpt in corpus.held_out:
        for a, b in zip(b"\n" + excerpt, excerpt, strict=False):
            bits -= math.log2((pairs[a, b] + 1) / (first[a] + 256))
    assert data.bigram_bits(corpus) == pytest.approx(bits / len(text), rel=1e-9)
    assert gzip.decompress(gzip.compress(text, 9)) == text
    assert data.gzip_bits(corpus) == pytest.approx(8 * len(gzip.compress(text, 9)) / len(text))


def test_batches_are_windows_of_the_text(corpus: data.Corpus) -> None:
    text = torch.frombuffer(bytearray(corpus.train), dtype=torch.uint8)
    x = data.batch(text, 3, 20, torch.Generator().manual_seed(0))
    assert (x.shape, x.dtype) == ((3, 21), torch.int64)
    assert all(bytes(row.tolist()) in corpus.train for row in x)
    assert len({bytes(row.tolist()) for row in x}) == 3


def test_bits_per_byte_counts_every_byte_once(corpus: data.Corpus) -> None:
    torch.manual_seed(0)
    model = ByteLM(SHAPE)
    texts = [b"import os\n", b"x", corpus.held_out[0][1][:50], b"import re\n"]
    total = 0.0
    for text in texts:
        for i, b in enumerate(text):
            with torch.no_grad():
                logits, _ = model(torch.tensor([list(b"\n" + text[:i])]))
            total -= float(logits[0, -1].double().log_softmax(-1)[b]) / math.log(2)
    assert train.bits_per_byte(model, texts) == pytest.approx(total / sum(map(len, texts)), rel=1e-5)
    assert train.bits_per_byte(model, texts, together=1) == pytest.approx(train.bits_per_byte(model, texts), rel=1e-5)


def test_training_learns(corpus: data.Corpus) -> None:
    seen: list[tuple[int, float]] = []
    settings = train.TrainConfig(steps=40, batch=4, length=64, evaluations=4)
    model, history = train.train(SHAPE, corpus, settings, lambda step, progress, bits: seen.append((step, progress)))
    assert len(history.train) == 40
    assert seen[0] == (1, 1 / 40)
    assert seen[-1] == (40, 1.0)
    assert [step for step, _ in history.held_out] == [10, 20, 30, 40]
    assert history.train[0] > 7.5
    # Better than equal frequencies by far, on text that it did not see.
    assert train.bits_per_byte(model, [text for _, text in corpus.held_out]) < 5.5
    assert not model.training


def test_the_clock_ends_training_early(corpus: data.Corpus) -> None:
    _, history = train.train(SHAPE, corpus, train.TrainConfig(steps=10**6, batch=1, length=8, seconds=0.2))
    assert 1 <= len(history.train) < 10**4
    assert history.seconds >= 0.2
    assert history.held_out[-1][0] == len(history.train)


def test_learning_rate_warms_up_and_falls() -> None:
    config = train.TrainConfig(steps=100, lr=1.0, warmup=10)
    rates = [train.learning_rate(step, step / 100, config) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9]
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.02)
    with pytest.raises(ValueError, match="steps: got 0"):
        train.TrainConfig(steps=0)


def test_judgement_finds_one_bad_block() -> None:
    want = torch.randn(200, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = want.clone()
    good = agree.compare("o", "a", "b", got, want, 1e-6)
    assert good.ok
    assert good.max_error == good.worst == 0
    got[70, 1] += 1e-4
    bad = agree.compare("o", "a", "b", got, want, 1e-6)
    block = want[64:128, 1]
    assert bad.worst == pytest.approx((8e-8 / block.numel()) ** 0.5 / float(block.square().mean().sqrt()), rel=1e-6)
    assert bad.max_error == pytest.approx(1e-4)
    assert bad.mean_error == pytest.approx(8e-4 / want.numel())
    assert bad.relative < bad.worst
    assert not bad.ok
    got[0, 0, 0] = torch.nan
    assert not agree.compare("o", "a", "b", got, want, 1.0).ok


def test_cuts_cover_every_token() -> None:
    for T in (1, 2, 64, 129, 140, 448):
        for pieces in agree.cuts(T).values():
            assert sum(pieces) == T
            assert min(pieces) > 0


def captured() -> tuple[ByteLM, torch.Tensor]:
    torch.manual_seed(0)
    model = ByteLM(replace(SHAPE, lower_bound=None, num_v_heads=4))
    with torch.no_grad():
        model.embedding.weight.mul_(30)
    return model, data.as_tensor(Path(data.__file__).read_bytes()[:140])[None]


def test_real_activations_are_captured_and_agree() -> None:
    model, tokens = captured()
    layers = agree.capture(model, tokens)
    assert [c.layer for c in layers] == [0, 1]
    for i, c in enumerate(layers):
        shapes = [tuple(x.shape) for x in c.rows]
        assert shapes == [(1, 140, 2, 16), (1, 140, 2, 16), (1, 140, 4, 16), (1, 140, 4, 16), (1, 140, 4)]
        rows, errors = agree.check_layer(c)
        assert [row.ok for row in rows] == [True] * 10, rows
        assert list(errors) == list(agree.cuts(140))
        assert all(0 < float(e.abs().max()) < 1e-5 for e in errors.values()), i
    # What was captured is what the model used.
    first = model.blocks[0]
    with torch.no_grad():
        q = first.attn.q_conv1d(first.attn.q_proj(first.attn_norm(model.embedding(tokens))))[0]
    torch.testing.assert_close(layers[0].q.flatten(2), q)
    rows = agree.check_model(model, tokens)
    assert [row.ok for row in rows] == [True] * 5, rows


def test_a_lost_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = captured()
    c = agree.capture(model, tokens)[1]
    right = flash_kda.kda

    def forgetful(*args: object, **options: object) -> object:
        return right(*args, **{**options, "initial_state": None})  # type: ignore[arg-type]

    monkeypatch.setattr(agree.flash_kda, "kda", forgetful)
    rows, _ = agree.check_layer(c)
    assert {(row.way, row.ok) for row in rows} == {
        ("whole prefill", True),
        ("prefill in pieces", False),
        ("token by token", False),
    }


def test_demo_writes_its_report(library: Path, tmp_path: Path) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    assert run.run(small(library, tmp_path / "new" / "report"), console) is True
    # Whole rows fit into 80 columns.
    rows = [line.split() for line in console.export_text().splitlines() if " float64 " in line]
    assert len(rows) == 15
    assert all(row[-1] == "agrees" and all(float(x) > 0 for x in row[-6:-1]) for row in rows), rows
    out = tmp_path / "new" / "report"
    pictures = {"loss", "errors", "chunk", "memory"}
    assert {f.name for f in out.iterdir()} == {"index.html", "activations.pt", *(f"{name}.png" for name in pictures)}
    page = (out / "index.html").read_text(encoding="utf-8")
    embedded = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert {base64.b64decode(x) for x in embedded} == {(out / f"{name}.png").read_bytes() for name in pictures}
    assert all(base64.b64decode(x).startswith(b"\x89PNG\r\n\x1a\n") for x in embedded)
    # One file that needs nothing else.
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "http" not in re.sub(r"<pre>.*?</pre>", "", page, flags=re.S)
    assert page.count("agrees") == 25
    assert "DIFFERS" not in page
    corpus = data.load(0, library, excerpt=300)
    assert f"{data.bigram_bits(corpus):.3f}" in page
    saved = torch.load(out / "activations.pt", weights_only=True)
    assert saved["q"].shape == (1, 140, 2, 16)
    assert set(saved) == {"q", "k", "v", "g", "beta", "A_log", "dt_bias"}


@pytest.mark.parametrize("limit", ["OPERATOR_LIMIT", "LOGITS_LIMIT"])
def test_demo_tells_of_a_disagreement(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(agree, limit, 1e-12)
    assert run.run(small(library, tmp_path), Console(quiet=True)) is False
    assert "DIFFERS" in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_surprise_shows_every_character() -> None:
    text = 'a<b> "é" \xff'.encode() + b"\xff\x80"
    bits = [float(i) for i in range(len(text))]
    spans = report.surprise_spans(text, bits)
    assert "".join(s for s, _, _ in spans) == text.decode("utf-8", "replace")
    wide = next(i for i, (s, _, _) in enumerate(spans) if s == "é")
    assert float(spans[wide][2]) == bits[wide] + bits[wide + 1]
    assert spans[0][1] != spans[-1][1]


def test_pages_escape_text(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may write anything, markup included."""
    monkeypatch.setattr(ByteLM, "generate", lambda *args, **options: b"<script>x</script>\xff")
    run.run(small(library, tmp_path), Console(quiet=True))
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert page.count("&lt;script&gt;x&lt;/script&gt;\ufffd") == len(run.PROMPTS)
    assert "<script" not in page
