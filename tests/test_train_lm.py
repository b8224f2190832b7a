"""The training example: interrupted runs go on as if they had not been, and its figures are what they say."""

from __future__ import annotations

import importlib.util
import json
import lzma
import math
import re
import sys
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Target
from compare import assert_same_bits, rms
from torch import Tensor, nn

from flash_kda.bench import report
from flash_kda.demo import data
from flash_kda.demo.train import bits_per_byte
from flash_kda.nn import KimiDeltaAttention

ROOT = Path(__file__).parents[1]
PNG = b"\x89PNG\r\n\x1a\n"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_lm", ROOT / "examples" / "train_lm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_lm"] = module
    spec.loader.exec_module(module)
    return module


train_lm = load()
SHAPE = replace(train_lm.SHAPE, hidden_size=24, num_layers=2, num_heads=2, head_dim=16, mlp_size=40)
CONFIG = replace(train_lm.CONFIG, steps=6, batch=2, length=40, warmup=2)
on_devices = pytest.mark.parametrize(
    "target",
    [
        pytest.param(Target("cpu"), id="cpu"),
        pytest.param(Target("triton", "cuda"), id="triton-cuda", marks=pytest.mark.gpu),
    ],
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> data.Corpus:
    """This package as a library."""
    root = tmp_path_factory.mktemp("library")
    for path in sorted((ROOT / "flash_kda").glob("*.py")):
        (root / path.name).write_bytes(path.read_bytes())
    return data.load(root=root, held_out_share=0.2, excerpt=300)


def new_run(corpus: data.Corpus, target: Target, config: Any = CONFIG) -> Any:
    return train_lm.Run(replace(SHAPE, backend=target.backend), config, corpus.train, target.device)


def tensors(x: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors of nested dictionaries and lists by where they are."""
    if isinstance(x, Tensor):
        return {name: x}
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, (list, tuple)) else ()
    return {k: v for key, value in items for k, v in tensors(value, f"{name}/{key}").items()}


@on_devices
def test_an_interrupted_run_goes_on_with_the_same_bits(
    target: Target, corpus: data.Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in step 5, after a checkpoint at step 3: batches, losses, weights and optimizer are those of one run."""
    straight = new_run(corpus, target)
    (want,) = train_lm.train(straight, corpus, tmp_path / "straight.pt", 3)
    assert straight.backend == target.backend

    checkpoint, step = tmp_path / "checkpoint.pt", train_lm.Run._step

    def stopped(self: Any, number: int, progress: float) -> Tensor:
        if number == 4:
            raise KeyboardInterrupt
        found: Tensor = step(self, number, progress)
        return found

    first = new_run(corpus, target)
    with monkeypatch.context() as patch:
        patch.setattr(train_lm.Run, "_step", stopped)
        with pytest.raises(KeyboardInterrupt):
            train_lm.train(first, corpus, checkpoint, 3)
    # Whatever was drawn since has no say.
    torch.rand(7)
    resumed = new_run(corpus, target)
    resumed.restore(checkpoint)
    assert (resumed.steps, len(resumed.held_out)) == (3, 1)
    (got,) = train_lm.train(resumed, corpus, checkpoint, 3)
    assert resumed.steps == 6
    for name in ("losses", "held_out", "bits_per_byte"):
        assert got[name] == want[name], name
    states = [torch.load(tmp_path / name, weights_only=True) for name in ("straight.pt", "checkpoint.pt")]
    ends = [tensors({k: state[k] for k in ("model", "optimiser", "generator")}) for state in states]
    assert ends[0].keys() == ends[1].keys()
    assert any("exp_avg_sq" in name for name in ends[0])
    for name, x in ends[0].items():
        assert_same_bits(ends[1][name], x, name)


def test_a_finished_run_is_only_judged_again(corpus: data.Corpus, tmp_path: Path) -> None:
    run = new_run(corpus, Target("cpu"))
    (want,) = train_lm.train(run, corpus, tmp_path / "checkpoint.pt", 4)
    again = new_run(corpus, Target("cpu"))
    again.restore(tmp_path / "checkpoint.pt")
    assert train_lm.train(again, corpus, tmp_path / "checkpoint.pt", 4) == [want | {"backend": ""}]


def test_seeds_differ(corpus: data.Corpus) -> None:
    losses = []
    for seed in (0, 0, 1):
        run = new_run(corpus, Target("cpu"), replace(CONFIG, seed=seed))
        run.advance(2)
        losses.append(run.losses)
    assert losses[0] == losses[1]
    assert all(a != b for a, b in zip(losses[0], losses[2], strict=True))


def test_a_run_that_ends_while_it_saves_leaves_the_checkpoint_before(
    corpus: data.Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint.pt"
    run = new_run(corpus, Target("cpu"))
    run.advance(2)
    run.save(path)
    assert [f.name for f in tmp_path.iterdir()] == ["checkpoint.pt"]
    run.advance(1)

    def half(state: Any, file: Path) -> None:
        file.write_bytes(b"half a checkpoint")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", half)
        with pytest.raises(OSError, match="no space left"):
            run.save(path)
    found = new_run(corpus, Target("cpu"))
    found.restore(path)
    assert found.losses == run.losses[:2]
    run.save(path)
    found.restore(path)
    assert found.losses == run.losses


def test_a_checkpoint_of_another_run_is_refused(corpus: data.Corpus, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    new_run(corpus, Target("cpu")).save(path)
    with pytest.raises(ValueError, match=r"it is of another run; batch: got 3, 2 there; seed: got 1, 0 there$"):
        new_run(corpus, Target("cpu"), replace(CONFIG, batch=3, seed=1)).restore(path)
    with pytest.raises(ValueError, match="text: got"):
        new_run(replace(corpus, train=corpus.train[1:]), Target("cpu")).restore(path)


def test_the_clock_can_end_a_run(corpus: data.Corpus, tmp_path: Path) -> None:
    run = new_run(corpus, Target("cpu"), replace(CONFIG, steps=sys.maxsize, seconds=0.2))
    train_lm.train(run, corpus, tmp_path / "checkpoint.pt", 10**6)
    assert 1 <= run.steps < 10**4
    assert 0.2 <= run.seconds < 20
    assert run.held_out[-1][0] == run.steps


class Frequencies(nn.Module):
    """A model for which an a has probability 1/2, a b 1/4, and every other byte the same, whatever came before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        p = torch.full((256,), 0.25 / 254)
        p[ord("a")], p[ord("b")] = 0.5, 0.25
        return p.log().expand(*tokens.shape, 256), None


def test_bits_per_byte_by_hand(corpus: data.Corpus) -> None:
    """An a costs one bit, a b two: 1 + 1 + 2, 2, 2 + 1 and 1 + 2 + 1 of 3 + 1 + 2 + 3 bytes."""
    texts = [b"aab", b"b", b"ba", b"aba"]
    assert bits_per_byte(Frequencies(), texts, together=2) == pytest.approx(13 / 9, rel=1e-6)  # type: ignore[arg-type]
    run = new_run(corpus, Target("cpu"))
    run.model, run.autocast = Frequencies(), False
    assert run.judge(texts) == pytest.approx(13 / 9, rel=1e-6)
    assert run.judge([b"?"]) == pytest.approx(math.log2(4 * 254), rel=1e-6)


def test_compressors(corpus: data.Corpus) -> None:
    """Against zlib and lzma themselves; what they wrote can be read again."""
    text = corpus.held_out_bytes
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = deflate.compress(text) + deflate.flush()
    assert zlib.decompress(packed, -15) == text
    # A gzip file is a header of 10 bytes, this, and a trailer of 8.
    assert data.gzip_bits(corpus) == 8 * (18 + len(packed)) / len(text)

    def xz(x: bytes) -> int:
        compressor = lzma.LZMACompressor(lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)
        packed = compressor.compress(x) + compressor.flush()
        assert lzma.decompress(packed) == x
        return len(packed)

    assert data.xz_bits(corpus) == 8 * xz(text) / len(text)
    after = data.xz_bits_after_training(corpus)
    assert after == 8 * (xz(corpus.train + text) - xz(corpus.train)) / len(text)
    assert after < data.xz_bits(corpus)


@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["lower_bound", "softplus"])
def test_the_float32_reference_is_the_recurrence(lower_bound: float | None) -> None:
    """Values and gradients of a layer with grouped value heads; the length is no whole number of chunks."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(20, 8, 2, 4, 0.5, lower_bound=lower_bound, backend="reference")
    x, weight = torch.randn(2, 2 * train_lm.CHUNK + 5, 20), torch.randn(2, 2 * train_lm.CHUNK + 5, 20)
    results = []
    for rule in (layer.delta_rule, train_lm.ChunkReference()):
        layer.delta_rule = rule
        y, _ = layer(x)
        results.append((y, *torch.autograd.grad((y * weight).sum(), list(layer.parameters()))))
    for name, *pair in zip(("y", *dict(layer.named_parameters())), *results, strict=True):
        want, got = (x.detach() for x in pair)
        dims = tuple(range(want.ndim))
        assert float(rms(got - want, dims) / rms(want, dims)) < 1e-4, name


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, corpus: data.Corpus) -> None:
    monkeypatch.setattr(train_lm, "SHAPE", SHAPE)
    monkeypatch.setattr(train_lm, "CONFIG", CONFIG)
    monkeypatch.setattr(data, "load", lambda: corpus)


def invoke(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *args])
    train_lm.main()


def options(target: Target, out: Path) -> list[str]:
    return ["--out", str(out), "--device", target.device, "--backend", target.backend]


def results_of(out: Path, op: str) -> tuple[report.Meta, list[report.Row]]:
    (path,) = (f for f in out.glob("*.json") if re.fullmatch(rf"{op}-[a-z0-9]+\.json", f.name))
    assert set(json.loads(path.read_text())) == {"meta", "rows"}
    return report.read(path)


@on_devices
@pytest.mark.usefixtures("small")
def test_train_command(target: Target, corpus: data.Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes its results, and goes on from its checkpoint."""
    command = ["train", *options(target, tmp_path / "out"), "--steps", "4", "--save-every", "3"]
    invoke(monkeypatch, *command)
    meta, (row,) = results_of(tmp_path / "out", "train-lm")
    assert meta["command"].startswith("python examples/train_lm.py train --out")
    assert {"date", "gpu", "driver", "torch", "triton", "python"} <= set(meta)
    assert (row["op"], row["impl"], row["backend"], row["dtype"]) == (
        "train-lm",
        "flash_kda",
        target.backend,
        "bfloat16",
    )
    assert (row["steps"], row["batch"], row["length"], row["seed"]) == (4, 2, 40, 0)
    assert len(row["losses"]) == 4
    assert [step for step, _ in row["held_out"]] == [3, 4]
    assert 5 < row["bits_per_byte"] < 9
    assert row["held_out_bytes"] == len(corpus.held_out_bytes)
    assert row["baselines"] == {
        "gzip -9": data.gzip_bits(corpus),
        "xz -9e": data.xz_bits(corpus),
        "xz -9e after the training text": data.xz_bits_after_training(corpus),
    }
    invoke(monkeypatch, *command, "--resume")
    assert results_of(tmp_path / "out", "train-lm")[1][0]["losses"] == row["losses"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--resume", "--seed", "1"], "checkpoint.pt: it is of another run; seed: got 1, 0 there"),
        (["--resume", "--compile"], "checkpoint.pt: it is of another run; compiled: got True, False there"),
        (["--resume", "--out", "nowhere"], "No such file or directory: 'nowhere/checkpoint.pt'"),
        (["--backend", "triton"], "not triton: runs on CUDA devices"),
        (["--steps", "3", "--minutes", "3"], "not allowed with argument --steps"),
    ],
)
def test_what_cannot_be_done_is_said(
    more: list[str],
    message: str,
    corpus: data.Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    new_run(corpus, Target("auto"), replace(CONFIG, steps=6)).save(tmp_path / "checkpoint.pt")
    with pytest.raises(SystemExit) as left:
        invoke(monkeypatch, "train", "--device", "cpu", "--out", ".", *more)
    assert left.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@on_devices
@pytest.mark.usefixtures("small")
def test_curve_command(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both precisions stay near the float32 reference, and float32 nearer."""
    invoke(monkeypatch, "curve", *options(target, tmp_path), "--steps", "5", "--batch", "2", "--seq", "70")
    _, (reference, half, single) = results_of(tmp_path, "train-lm-curve")
    assert [(row["impl"], row["backend"], row["dtype"]) for row in (reference, half, single)] == [
        ("reference", "chunks of 64 tokens", "float32"),
        ("flash_kda", target.backend, "bfloat16"),
        ("flash_kda", target.backend, "float32"),
    ]
    assert "max_difference" not in reference
    for row, limit in ((half, 3e-2), (single, 2e-4)):
        apart = [abs(a - b) for a, b in zip(row["losses"], reference["losses"], strict=True)]
        assert len(apart) == row["steps"] == 5
        assert row["max_difference"] == max(apart)
        assert row["mean_difference"] == pytest.approx(sum(apart) / 5)
        assert max(apart) < limit
    assert len(set(reference["losses"])) == 5


@pytest.mark.usefixtures("small")
def test_a_curve_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference trains once, unless another training is asked for."""
    command = ["curve", *options(Target("cpu"), tmp_path), "--steps", "3", "--batch", "1"]
    with pytest.MonkeyPatch.context() as m:
        m.setattr(train_lm, "unchanged", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            invoke(monkeypatch, *command, "--seq", "40")
    _, (reference,) = results_of(tmp_path, "train-lm-curve")
    used = mock.Mock(wraps=train_lm.use_reference)
    monkeypatch.setattr(train_lm, "use_reference", used)
    invoke(monkeypatch, *command, "--seq", "40", "--resume")
    _, rows = results_of(tmp_path, "train-lm-curve")
    assert not used.called
    assert rows[0] == reference
    assert len(rows) == 3
    assert all(row["max_difference"] < 3e-2 for row in rows[1:])
    invoke(monkeypatch, *command, "--seq", "50", "--resume")
    assert used.call_count == 1


class Peer(nn.Module):
    """What the example uses of FLA's layer."""

    def __init__(self, safe_gate: bool, conv_size: int, lower_bound: float | None, **sizes: Any) -> None:
        super().__init__()
        assert safe_gate == (lower_bound is not None)
        self.inner = KimiDeltaAttention(lower_bound=lower_bound, conv_size=conv_size, backend="reference", **sizes)

    def load_state_dict(self, state: Any, **_: Any) -> Any:
        return self.inner.load_state_dict(state)

    def forward(self, x: Tensor) -> tuple[Tensor, None, None]:
        return self.inner(x)[0], None, None


@on_devices
@pytest.mark.parametrize("peer", [False, True], ids=["alone", "with a peer"])
@pytest.mark.usefixtures("small")
def test_speed_command(
    target: Target, peer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A peer that is missing, or that is computed by the wrong library, is left out aloud."""
    module = ModuleType("fla.layers")
    if peer:
        module.KimiDeltaAttention = Peer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.layers", module)
    monkeypatch.setattr(train_lm, "registered", train_lm.nullcontext)
    # All of torch.compile but its code generator, for which a machine may have no compiler.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    invoke(monkeypatch, "speed", *options(target, tmp_path), "--steps", "2")
    _, rows = results_of(tmp_path, "train-lm-speed")
    said = capsys.readouterr().out
    assert [row["compiled"] for row in rows[:2]] == [False, True]
    assert rows[1]["backend"] == target.backend
    if not peer:
        assert [row["impl"] for row in rows] == ["flash_kda", "flash_kda, compiled"]
        assert "fla is left out: ImportError" in said
        assert "fla, computed here is left out: ImportError" in said
    else:
        # The stand-in is this library's layer, so that only where this library is expected it is accepted.
        assert [row["impl"] for row in rows] == ["flash_kda", "flash_kda, compiled", "fla, computed here"]
        assert "fla is left out: RuntimeError: of flash_kda there ran: reference" in said
        assert rows[2]["backend"] == "reference"
    assert all(row["max_difference"] < 3e-2 for row in rows)
    assert rows[0]["max_difference"] == 0
    assert all(row["tokens_per_s"] > 0 for row in rows)


@pytest.mark.usefixtures("small")
def test_plot_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    target = Target("cpu")
    for command in ("train", "curve", "speed"):
        invoke(monkeypatch, command, *options(target, tmp_path), "--steps", "3", "--batch", "1", "--seq", "30")
    files = [tmp_path / f"{op}-cpu.json" for op in ("train-lm", "train-lm-curve")]
    invoke(monkeypatch, "plot", *map(str, files))
    assert all(f.with_suffix(".png").read_bytes().startswith(PNG) for f in files)
    with pytest.raises(ValueError, match="got rows of train-lm-speed, expected those of train or of curve"):
        train_lm.plot(tmp_path / "train-lm-speed-cpu.json")


def test_the_model_has_about_20_million_parameters() -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in train_lm.ByteLM(train_lm.SHAPE).parameters())
    assert 19e6 < count < 21e6
