"""The demo from the first byte to the report."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

import flash_kda
from flash_kda.demo import agree, data, pictures
from flash_kda.demo.matrices import chunk_matrices
from flash_kda.demo.report import Results, write
from flash_kda.demo.train import (
    History,
    TrainConfig,
    bits_of,
    bits_per_byte,
    threads,
    train,
)
from flash_kda.nn import ByteLM, ByteLMConfig
from flash_kda.reference import decay

PROMPTS = (b"def __init__(self, ", b"import os\nimport sys\n\nclass ", b'    """Return the ')
CHUNK = 32


@dataclass(frozen=True)
class DemoConfig:
    """What to run.

    Args:
        steps: training steps. seed: of everything random. out: the report directory.
        seconds: training ends its schedule early rather than take longer.
        check_bytes: held-out bytes for the comparisons. new_bytes: to generate per prompt.
        excerpt: bytes of each held-out file to judge on. root: folder with the text; None means the standard library.
    """

    steps: int = 1300
    seed: int = 0
    out: Path = Path("demo-report")
    seconds: float = 75.0
    check_bytes: int = 448
    new_bytes: int = 200
    excerpt: int = 4096
    root: Path | None = None
    shape: ByteLMConfig = field(default_factory=ByteLMConfig)


def run(config: DemoConfig, console: Console) -> bool:
    """Train, compare, draw, and write the report. True if every comparison is within its limit.

    Raises:
        ValueError: a setting is out of range, or there is too little text.
        OSError: the report cannot be written.
    """
    start = time.perf_counter()
    if config.check_bytes < CHUNK:
        raise ValueError(f"check_bytes: got {config.check_bytes}, expected at least {CHUNK}")
    settings = TrainConfig(steps=config.steps, seed=config.seed, seconds=config.seconds)
    config.out.mkdir(parents=True, exist_ok=True)
    corpus = data.load(config.seed, config.root, excerpt=config.excerpt)
    console.print(
        f"Text: {len(corpus.train):,} bytes of {corpus.train_files} Python files to learn from, "
        f"{len(corpus.held_out_bytes):,} bytes of {corpus.held_out_files} held-out files to judge on."
    )
    baselines = {
        "byte unigram": data.unigram_bits(corpus),
        "byte bigram": data.bigram_bits(corpus),
        "gzip -9": data.gzip_bits(corpus),
    }
    # Every product is small: a second thread wins little on an idle machine, and on a busy one threads that wait for
    # each other are many times slower than one.
    with threads(1):
        model, history = _train(config, settings, corpus, console)
        with console.status("Reading the held-out files"):
            bits = bits_per_byte(model, [text for _, text in corpus.held_out])
        console.print(_bits_table(bits, baselines))
        results = _measure(config, settings, corpus, model, history, bits, baselines, console)
    console.print(_agreement_table(results.rows))
    results.facts += [("whole demo", f"{time.perf_counter() - start:.0f} s")]
    page = write(results, config.out)
    passed = sum(row.ok for row in results.rows)
    console.print(
        f"{passed} of {len(results.rows)} comparisons are within their limits. "
        f"Report: {page} ({time.perf_counter() - start:.0f} s in all)",
        style="green" if results.agreed else "bold red",
        soft_wrap=True,
    )
    return results.agreed


def _train(config: DemoConfig, settings: TrainConfig, corpus: data.Corpus, console: Console) -> tuple[ByteLM, History]:
    columns = (
        SpinnerColumn(),
        TextColumn("Training"),
        BarColumn(),
        TextColumn("step {task.fields[step]}  {task.fields[bits]:.2f} bits per byte"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("train", total=1.0, step=0, bits=8.0)
        shown = 8.0

        def report(step: int, progress: float, bits: float) -> None:
            nonlocal shown
            shown = bits if step == 1 else 0.95 * shown + 0.05 * bits
            bar.update(task, completed=progress, step=step, bits=shown)

        model, history = train(config.shape, corpus, settings, report)
    if len(history.train) < config.steps:
        console.print(
            f"This machine was slow: training ended after {len(history.train)} of {config.steps} steps "
            f"and {history.seconds:.0f} s, its learning rate lowered in time."
        )
    return model, history


def _check_text(corpus: data.Corpus, size: int) -> tuple[str, bytes]:
    """The first held-out excerpt that is long enough, or all of them joined if none is."""
    for name, text in corpus.held_out:
        if len(text) >= size:
            return name, text[:size]
    joined = corpus.held_out_bytes[:size]
    if len(joined) < CHUNK:
        raise data.NoTextError(f"root: got {len(joined)} held-out bytes, expected at least {CHUNK}")
    return "the held-out files", joined


def _measure(
    config: DemoConfig,
    settings: TrainConfig,
    corpus: data.Corpus,
    model: ByteLM,
    history: History,
    bits: float,
    baselines: dict[str, float],
    console: Console,
) -> Results:
    """Everything after training."""
    name, text = _check_text(corpus, config.check_bytes)
    tokens = data.as_tensor(text)[None]
    with console.status("Comparing whole prefill, pieces and token by token with the float64 recurrence"):
        layers = agree.capture(model, tokens)
        rows: list[agree.Agreement] = []
        errors: dict[str, Tensor] = {}
        for layer in layers:
            found, errors = agree.check_layer(layer)
            rows += found
        rows += agree.check_model(model, tokens)
        _, cache = model(tokens[:, :1], return_cache=True)
    with console.status("Writing a few lines"):
        generator = torch.Generator().manual_seed(config.seed)
        begun = time.perf_counter()
        samples = [
            (prompt, model.generate(prompt, config.new_bytes, temperature=0.6, top_k=40, generator=generator))
            for prompt in PROMPTS
        ]
        speed = config.new_bytes * len(PROMPTS) / (time.perf_counter() - begun)
    for prompt, new in samples:
        console.rule(style="dim")
        console.print((prompt + new).decode("utf-8", "replace"), style="cyan", markup=False, highlight=False)
    console.rule(style="dim")
    last = layers[-1]
    with console.status("Drawing"):
        images = _draw(model, layers, text, history, baselines, bits, errors)
    _save_activations(last, config.out)
    return Results(
        parameters=sum(p.numel() for p in model.parameters()),
        history=history,
        model_bits=bits,
        baselines=baselines,
        train_bytes=len(corpus.train),
        seen_bytes=len(history.train) * settings.batch * settings.length,
        held_out_bytes=len(corpus.held_out_bytes),
        held_out_files=corpus.held_out_files,
        rows=rows,
        check_bytes=len(text),
        cache_bytes=cache.nbytes,
        samples=samples,
        bytes_per_second=speed,
        excerpt_name=name,
        surprise=(text, bits_of(model, [text])[0].tolist()),
        chunk_tokens=CHUNK,
        chunk_layer=last.layer + 1,
        facts=_facts(config, settings, len(history.train)),
        images=images,
    )


def _draw(
    model: ByteLM,
    layers: list[agree.Captured],
    text: bytes,
    history: History,
    baselines: dict[str, float],
    bits: float,
    errors: dict[str, Tensor],
) -> dict[str, bytes]:
    last = layers[-1]
    o, _ = agree.run_operator(last, [len(text)])
    chunk = min(4, len(text) // CHUNK - 1)
    matrices = [
        chunk_matrices(*last.rows, gate=last.gate, head=h, chunk=chunk, chunk_size=CHUNK)
        for h in range(last.v.shape[2])
    ]
    # The head with the most to see: the largest corrections off the diagonal.
    head = max(range(len(matrices)), key=lambda h: float(matrices[h].L.abs().mean()))
    m = matrices[head]
    title = f"Layer {last.layer + 1}, head {head}, tokens {m.start} to {m.start + CHUNK - 1}"
    with torch.no_grad():
        decays = [decay(c.g[0].double(), c.gate) for c in layers]
    return {
        "loss": pictures.png(pictures.loss_curve(history, baselines, bits)),
        "errors": pictures.png(pictures.error_histogram(errors, o)),
        "chunk": pictures.png(pictures.chunk_figure(m, title, text[m.start : m.start + CHUNK])),
        "memory": pictures.png(pictures.memory_map(decays)),
    }


def _save_activations(c: agree.Captured, out: Path) -> None:
    """The last layer's real activations, for `flash-kda inspect`."""
    saved = dict(zip(("q", "k", "v", "g", "beta"), c.rows, strict=True))
    for name, x in (("A_log", c.gate.A_log), ("dt_bias", c.gate.dt_bias)):
        if x is not None:
            saved[name] = x.detach().clone()
    torch.save(saved, out / "activations.pt")


def _facts(config: DemoConfig, settings: TrainConfig, steps: int) -> list[tuple[str, str]]:
    shape = config.shape
    return [
        ("flash_kda", flash_kda.__version__),
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
        ("processor", f"{platform.machine()}, {platform.system()}"),
        (
            "model",
            f"{shape.num_layers} blocks of width {shape.hidden_size}, {shape.num_heads} heads of {shape.head_dim}, "
            f"MLP {shape.mlp_size}, log decay at least {shape.lower_bound}",
        ),
        (
            "training",
            f"{steps} steps of {settings.batch} windows of {settings.length} bytes, AdamW, peak rate {settings.lr}",
        ),
        ("seed", str(config.seed)),
    ]


def _bits_table(bits: float, baselines: dict[str, float]) -> Table:
    table = Table(title="Bits per byte on held-out text", title_justify="left")
    table.add_column("predictor")
    table.add_column("bits per byte", justify="right")
    table.add_row("this model", f"{bits:.3f}", style="bold")
    for name, value in baselines.items():
        table.add_row(name, f"{value:.3f}")
    return table


# So that a row fits into 80 columns.
SHORT = {
    "whole prefill": "whole",
    "prefill in pieces": "pieces",
    "token by token": "tokens",
    agree.EXACT: "float64",
}


def _agreement_table(rows: list[agree.Agreement]) -> Table:
    limits = f"{agree.OPERATOR_LIMIT:.0e} for layers, {agree.LOGITS_LIMIT:.0e} for logits"
    table = Table(
        title="Agreement on real activations",
        title_justify="left",
        caption="Whole prefill, prefill in pieces, token by token; float64: the recurrence.\n"
        f"rel.: RMS error over RMS value; worst: that of the worst head and {agree.BLOCK} rows.\n"
        f"Limits of worst: {limits}.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    for name in ("what", "way", "against"):
        table.add_column(name, no_wrap=True)
    for name in ("max", "mean", "RMSE", "rel.", "worst"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for i, row in enumerate(rows):
        figures = (row.max_error, row.mean_error, row.rmse, row.relative, row.worst)
        verdict = "[green]agrees" if row.ok else "[bold red]DIFFERS"
        last = i + 1 == len(rows) or rows[i + 1].subject != row.subject
        table.add_row(
            row.subject,
            SHORT.get(row.way, row.way),
            SHORT.get(row.against, row.against),
            *(f"{x:.1e}" for x in figures),
            verdict,
            end_section=last,
        )
    return table
