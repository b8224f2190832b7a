"""Pictures of results files, drawn with matplotlib from nothing but the rows."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flash_kda.bench import published, shapes
from flash_kda.bench.accuracy import EDGES
from flash_kda.bench.report import MOST_WORKSPACE, Meta, Row, by_length, label, operation, skew, time_of

INK, MUTED, GRID, PAPER = "#1c2733", "#6b7785", "#e3e7ec", "#ffffff"
OURS, OTHERS = ("#2563a8", "#5aa0e0", "#123a66"), ("#d9772b", "#2f8f6b", "#8054a5", "#b03a5b")


def colours(rows: Sequence[Row]) -> dict[str, str]:
    """One colour for each implementation: blues for this library, in the order of appearance."""
    found: dict[str, str] = {}
    for row in rows:
        ours = row["impl"] == "flash_kda"
        palette = OURS if ours else OTHERS
        taken = sum(colour in palette for colour in found.values())
        found.setdefault(label(row), palette[taken % len(palette)])
    return found


def _dress(ax: Axes, title: str, x: str) -> None:
    ax.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold")
    ax.set_xlabel(x, color=MUTED)
    ax.tick_params(colors=MUTED, labelsize=9)
    ax.grid(True, color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)


TITLES = {"prefill": "Prefill forward", "decode": "Decode", "train": "Forward and backward"}


def times_figure(meta: Meta, rows: Sequence[Row]) -> Figure:
    """Milliseconds of every case on a logarithmic axis, a panel for each kind of gates, the floor as a tick."""
    cases = list(dict.fromkeys(str(row["case"]) for row in rows))
    gates = list(dict.fromkeys(str(row["gates"]) for row in rows))
    figure = Figure(figsize=(2.4 + 4.4 * len(gates), 2.2 + 0.34 * len(cases)), layout="constrained")
    op = operation(rows)
    figure.suptitle(f"{TITLES[op]}, {meta['gpu']}, {meta['date']}", x=0.01, ha="left", color=INK, fontsize=13)
    axes = figure.subplots(1, len(gates), sharex=True, sharey=True, squeeze=False)[0]
    palette = colours(rows)
    for ax, kind in zip(axes, gates, strict=True):
        here = [row for row in rows if row["gates"] == kind]
        floors = {cases.index(str(row["case"])): row["floor_ms"] for row in here}
        ax.plot(list(floors.values()), list(floors), "|", color=INK, markersize=13, label="floor: bytes over copy rate")
        for name, colour in palette.items():
            points = [(time_of(row), cases.index(str(row["case"]))) for row in here if label(row) == name]
            style = "o" if name.startswith("flash_kda") else "s"
            ax.plot(*zip(*points, strict=True), style, color=colour, markersize=6.5, label=name) if points else None
        known = [(ms, i) for i, case in enumerate(cases) if (ms := published.prefill_ms(case, kind)) is not None]
        if known and op == "prefill":
            ax.plot(*zip(*known, strict=True), "D", color=MUTED, fillstyle="none", markersize=6, label=published.SOURCE)
        ax.set_xscale("log")
        _dress(ax, f"{kind} gates", "ms, cold L2")
    axes[0].set_yticks(range(len(cases)), cases)
    axes[0].set_ylim(len(cases) - 0.5, -0.5)
    handles = {name: handle for ax in axes for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(), handles, loc="outside lower left", ncols=2, frameon=False, fontsize=9, labelcolor=INK
    )
    return figure


def _distribution(ax: Axes, rows: Sequence[Row], palette: dict[str, str], title: str) -> None:
    """Errors of the output, as shares of its values, over the logarithm of their size."""
    for row in rows:
        counts = row["output"]["histogram"]
        share = [count / max(1, sum(counts)) for count in counts]
        text = f"{label(row)}  {row['output']['ratio']:.2g}"
        ax.stairs(share, EDGES, color=palette[label(row)], linewidth=1.6, label=text)
    # The thin tail of tiny errors is left outside.
    used = [
        i
        for row in rows
        for i, count in enumerate(row["output"]["histogram"])
        if count > 5e-4 * sum(row["output"]["histogram"])
    ]
    if used:
        ax.set_xlim(EDGES[max(0, min(used) - 1)], EDGES[min(len(EDGES) - 1, max(used) + 2)])
    _dress(ax, title, "log10 of the absolute error of the output")
    ax.legend(frameon=False, fontsize=7.5, labelcolor=INK, loc="upper left", title="RMSE ratio", title_fontsize=7.5)


def _spans(ax: Axes, rows: Sequence[Row], palette: dict[str, str], title: str) -> None:
    """RMSE ratio of the output along the sequence."""
    for row in rows:
        spans = row["spans"]
        ends = [(i + 1) / len(spans) * row["tokens"] for i in range(len(spans))]
        ax.plot(ends, spans, "o-", color=palette[label(row)], markersize=4, label=label(row))
    _dress(ax, title, "token")
    ax.set_ylabel("RMSE ratio of the output", color=MUTED)
    ax.set_ylim(0, 1.25 * max(max(row["spans"]) for row in rows))
    ax.legend(frameon=False, fontsize=7.5, labelcolor=INK, loc="lower right")


def accuracy_figure(meta: Meta, rows: Sequence[Row]) -> Figure:
    """A panel for each setting and layout."""
    panels = list(dict.fromkeys((str(row["setting"]), str(row["layout"])) for row in rows))
    columns = min(5, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 0.6 + 3.1 * lines), layout="constrained")
    figure.suptitle(f"Errors against float64, {meta['gpu']}, {meta['date']}", x=0.01, ha="left", color=INK, fontsize=13)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    palette = colours(rows)
    for ax, (setting, layout) in zip(axes, panels, strict=False):
        here = [row for row in rows if (row["setting"], row["layout"]) == (setting, layout)]
        draw = _spans if all("spans" in row for row in here) else _distribution
        draw(ax, here, palette, f"{setting}, {layout}")
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    return figure


def _parts(ax: Axes, groups: dict[str, list[Row]], palette: dict[str, str]) -> None:
    """Milliseconds of the skewed batch and of its parts alone."""
    names = (*shapes.SKEWED_PARTS, shapes.SKEWED_CASE)
    for name, rows in groups.items():
        times = {str(row["case"]): time_of(row) for row in rows}
        points = [(ms, i) for i, case in enumerate(names) if (ms := times.get(case)) is not None]
        text = "" if (ratio := skew(rows)) is None else f"  {ratio:.2f} times the longer part"
        if points:
            ax.plot(*zip(*points, strict=True), "o", color=palette[name], markersize=6.5, label=f"{name}{text}")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlim(left=0)


def scale_figure(meta: Meta, rows: Sequence[Row]) -> Figure:
    """Time and workspace per token over the length of one sequence, and the skewed batch beside its parts."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{label(row)}, {row['gates']}", []).append(row)
    colour_of = dict(zip(groups, (*OURS, *OTHERS), strict=False))
    figure = Figure(figsize=(15.6, 4.2), layout="constrained")
    figure.suptitle(f"Forward, 8 heads, {meta['gpu']}, {meta['date']}", x=0.01, ha="left", color=INK, fontsize=13)
    time, memory, parts = figure.subplots(1, 3)
    for name, group in groups.items():
        long = by_length(group)
        tokens = [row["tokens"] for row in long]
        for ax, figure_of in ((time, "ns_per_token"), (memory, "workspace_bytes")):
            ax.plot(tokens, [row[figure_of] for row in long], "o-", color=colour_of[name], markersize=5, label=name)
    memory.axhline(MOST_WORKSPACE, color=MUTED, linewidth=1, linestyle="--", label=f"{MOST_WORKSPACE} bytes")
    _parts(parts, groups, colour_of)
    _dress(time, "ns per token", "tokens of one sequence")
    _dress(memory, "workspace, bytes per token and head", "tokens of one sequence")
    _dress(parts, "one long sequence among short ones", "ms, cold L2")
    for ax in (time, memory):
        ax.set_xscale("log", base=2)
        ax.set_ylim(bottom=0)
    for ax in (time, memory, *([parts] if parts.lines else [])):
        ax.legend(frameon=False, fontsize=8, labelcolor=INK, loc="lower left")
    return figure


FIGURES = {"accuracy": accuracy_figure, "scale": scale_figure}


def picture(meta: Meta, rows: Sequence[Row]) -> bytes:
    """The picture of a results file, as a PNG file."""
    figure = FIGURES.get(operation(rows), times_figure)(meta, rows)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110, facecolor=PAPER)
    return out.getvalue()
