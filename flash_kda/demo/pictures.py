"""The pictures of the report and of `flash-kda inspect`, drawn with matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from flash_kda.demo.matrices import ChunkMatrices
from flash_kda.demo.train import History

INK, MUTED, GRID, PAPER = "#1c2733", "#6b7785", "#e3e7ec", "#ffffff"
BLUE, ORANGE, GREEN, PURPLE = "#2563a8", "#d9772b", "#2f8f6b", "#8054a5"


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=144, facecolor=PAPER)
    return out.getvalue()


def _dress(ax: Axes, title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=10)
    ax.set_xlabel(x, color=MUTED)
    ax.set_ylabel(y, color=MUTED)
    ax.tick_params(colors=MUTED, labelsize=9)
    ax.grid(True, color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(GRID)


def loss_curve(history: History, baselines: dict[str, float], final: float) -> Figure:
    """Bits per byte of every training step and of held-out text, with the baselines as lines."""
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    ax = figure.subplots()
    steps = torch.arange(1, len(history.train) + 1).tolist()
    ax.plot(steps, history.train, color=BLUE, alpha=0.22, linewidth=1)
    # A running mean that starts unbiased.
    mean, weight, smooth = 0.0, 0.0, []
    for bits in history.train:
        mean, weight = 0.92 * mean + 0.08 * bits, 0.92 * weight + 0.08
        smooth.append(mean / weight)
    ax.plot(steps, smooth, color=BLUE, linewidth=2.2, label="training text, running mean")
    if history.held_out:
        x, y = zip(*history.held_out, strict=True)
        ax.plot(x, y, "o-", color=ORANGE, markersize=5, linewidth=1.5, label="held-out files, part of them")
    ax.plot(
        [steps[-1]], [final], "D", color=INK, markersize=8, zorder=5, label=f"held-out files, all of them: {final:.2f}"
    )
    for (name, bits), colour in zip(baselines.items(), (MUTED, PURPLE, GREEN), strict=False):
        ax.axhline(bits, color=colour, linewidth=1.2, linestyle=(0, (5, 3)))
        # Beside the axes, where no curve passes.
        ax.annotate(
            f"{name}  {bits:.2f}",
            (1.0, bits),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=9,
        )
    low = min(*baselines.values(), final, *smooth)
    ax.set_ylim(max(0.0, low - 0.4), max(8.2, max(history.train) * 1.02))
    ax.set_xlim(0, steps[-1] * 1.02 + 1)
    _dress(ax, "Learning to read the standard library", "step", "bits per byte")
    legend = ax.legend(frameon=False, fontsize=9, loc="upper center")
    for text in legend.get_texts():
        text.set_color(INK)
    return figure


def _labels(text: bytes) -> list[str]:
    """One visible character per byte."""
    marks = {0x20: "·", 0x0A: "↵", 0x09: "→", 0x0D: "↵"}
    return [marks.get(b, chr(b) if 0x20 < b < 0x7F else "▪") for b in text]


def _matrix(figure: Figure, ax: Axes, x: Tensor, title: str, note: str, scale: float, labels: list[str]) -> None:
    C = x.shape[0]
    shown = x.masked_fill(torch.ones(C, C, dtype=torch.bool).triu(1), math.nan)
    image = ax.imshow(shown.tolist(), cmap="RdBu_r", vmin=-scale, vmax=scale, interpolation="nearest")
    ax.set_title(title, loc="left", color=INK, fontsize=13, fontweight="bold", pad=22)
    ax.text(0, 1.018, note, transform=ax.transAxes, color=MUTED, fontsize=9)
    if labels:
        size = 8.5 if C <= 32 else 5
        ax.set_xticks(range(C), labels, fontsize=size, family="monospace")
        ax.set_yticks(range(C), labels, fontsize=size, family="monospace")
    ax.tick_params(colors=MUTED, length=0, labelsize=None if labels else 9)
    ax.set_facecolor("#f4f6f8")
    for spine in ax.spines.values():
        spine.set_visible(False)
    bar = figure.colorbar(image, ax=ax, shrink=0.75, pad=0.02, extend="both")
    bar.ax.tick_params(colors=MUTED, labelsize=8, length=0)
    bar.outline.set_visible(False)


def _scale(x: Tensor) -> float:
    """Colour range that a few large entries do not flatten: the 99th percentile of what is not zero."""
    values = x.abs().flatten()
    values = values[values > 0]
    return max(float(values.quantile(0.99)) if values.numel() else 0.0, 1e-12)


def chunk_figure(c: ChunkMatrices, title: str, text: bytes = b"") -> Figure:
    """L, Mqk and T of a chunk side by side; ``text``, one byte per row, labels rows and columns."""
    figure = Figure(figsize=(17, 6), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=14)
    labels = _labels(text) if len(text) == c.L.shape[0] else []
    axes = figure.subplots(1, 3)
    _matrix(
        figure, axes[0], c.L, "L", "how much of an earlier key a write meets (β kᵢ·kⱼ, decayed)", _scale(c.L), labels
    )
    _matrix(figure, axes[1], c.Mqk, "Mqk", "what a query reads of each write in the chunk", _scale(c.Mqk), labels)
    _matrix(
        figure,
        axes[2],
        c.T,
        "T = (I + L)⁻¹",
        "the chain of corrections; its diagonal is 1",
        _scale(c.T.tril(-1)),
        labels,
    )
    for ax in axes:
        ax.set_xlabel("written at token j" if labels else "column j", color=MUTED)
    axes[0].set_ylabel("token i" if labels else "row i", color=MUTED)
    return figure


def error_histogram(errors: dict[str, Tensor], values: Tensor) -> Figure:
    """Distribution of the absolute error of each way, on a logarithmic axis, beside that of the values themselves."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    ax = figure.subplots()

    def log10(x: Tensor) -> list[float]:
        x = x.abs().flatten()
        return list(x[x > 0].log10().tolist())

    def edges(found: list[float]) -> list[float]:
        """Eighths of a decade around what was found: a histogram that ends where its values end."""
        low, high = math.floor(8 * min(found)), math.floor(8 * max(found)) + 1
        return [i / 8 for i in range(low, high + 1)]

    if shown := log10(values):
        ax.hist(shown, bins=edges(shown), color="#cfd6de", label="the outputs themselves")
    for (way, e), colour in zip(errors.items(), (BLUE, ORANGE, GREEN), strict=False):
        found = log10(e)
        if found:
            ax.hist(found, bins=edges(found), histtype="step", color=colour, linewidth=1.8, label=f"error, {way}")
    low, high = -13, 2
    ax.set_xlim(low, high)
    ax.set_xticks(list(range(low + 1, high, 2)), [f"1e{t}" for t in range(low + 1, high, 2)])
    _dress(ax, "Float32 against the float64 recurrence, on real activations", "absolute value", "entries")
    ax.legend(frameon=False, fontsize=9, labelcolor=INK, loc="upper left")
    return figure


def memory_map(layers: Sequence[Tensor]) -> Figure:
    """Half-life in tokens of every channel, from log decays ``[T, HV, K]`` of each layer; channels sorted per head."""
    figure = Figure(figsize=(9, 0.9 + 1.25 * len(layers)), layout="constrained")
    axes = figure.subplots(len(layers), 1, squeeze=False)[:, 0]
    image = None
    for i, (ax, g) in enumerate(zip(axes, layers, strict=True)):
        half = (math.log(2) / (-g.double().mean(0)).clamp(min=1e-6)).log10().sort(-1).values
        image = ax.imshow(half.tolist(), cmap="viridis", aspect="auto", vmin=-0.5, vmax=3, interpolation="nearest")
        ax.set_ylabel(f"layer {i + 1}", color=INK)
        heads = range(half.shape[0])
        ax.set_yticks(list(heads), [f"head {h}" for h in heads])
        ax.set_xticks([])
        ax.tick_params(colors=MUTED, labelsize=8, length=0)
        for spine in ax.spines.values():
            spine.set_visible(False)
    axes[0].set_title("How long each channel remembers", loc="left", color=INK, fontsize=12, fontweight="bold", pad=8)
    axes[-1].set_xlabel("channels of the head, sorted", color=MUTED)
    if image is not None:
        bar = figure.colorbar(image, ax=list(axes), pad=0.02)
        bar.set_ticks([0, 1, 2, 3], labels=["1", "10", "100", "1000"])
        bar.set_label("half-life, tokens", color=MUTED)
        bar.ax.tick_params(colors=MUTED, labelsize=8, length=0)
        bar.outline.set_visible(False)
    return figure
