"""Results as JSON, as tables on the terminal and in Markdown, and their insertion into a document.

Documents are made from the JSON files alone.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich import box
from rich.table import Table

from flash_kda.bench import published, shapes

Row: TypeAlias = dict[str, Any]
Meta: TypeAlias = dict[str, Any]
# Told all rows so far after every case, so that a run that is cut off leaves something.
Keep: TypeAlias = Callable[[list[Row]], None]
# What makes two rows results of the same thing, and two runs comparable.
KEY = ("op", "case", "gates", "setting", "layout", "dtype", "tokens", "impl", "backend", "work")
SAME_MACHINE = ("gpu", "driver", "torch", "triton", "cuda")
# Between the commands that made a file.
JOINT = " && "
# Aims of the rows of scale: bytes of workspace per token and head (or a constant), and the time of the skewed batch as
# a multiple of the longer of its parts'.
MOST_WORKSPACE, MOST_SKEW = 200, 1.15


def gpu_slug(name: str) -> str:
    """``h200`` for "NVIDIA H200": the last word of a device name, fit for a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().split()[-1]).strip("-")


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.split()[0] if done.returncode == 0 and done.stdout.strip() else "unknown"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(command: str, device: str = "cuda") -> Meta:
    """What a result depends on besides its inputs. ``command`` is how to get it again."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else "no GPU"
    meta: Meta = {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "gpu": gpu,
        "driver": _driver() if device == "cuda" else "none",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
    }
    peers = {name: _version(name) for name in ("fla-core", "nvidia-cudnn-frontend")}
    return meta | {name: version for name, version in peers.items() if version is not None}


def write(path: Path, meta: Meta, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"meta": meta, "rows": list(rows)}, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> tuple[Meta, list[Row]]:
    """Meta and rows of a results file.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return dict(found["meta"]), [dict(row) for row in found["rows"]]
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f'{path}: expected {{"meta": ..., "rows": [...]}} ({error})') from error


def merge(path: Path, meta: Meta, rows: Sequence[Row]) -> list[Row]:
    """The rows of a file with new ones in place of their predecessors; the new ones alone if there is no file.

    Raises:
        ValueError: the file's rows come from another machine or other versions.
    """
    if not path.exists():
        return list(rows)
    before, old = read(path)
    if different := [f"{k} {before.get(k)} there, {meta[k]} now" for k in SAME_MACHINE if before.get(k) != meta[k]]:
        raise ValueError(f"{path}: its rows are not comparable: {'; '.join(different)}")
    new = {tuple(row.get(k) for k in KEY): row for row in rows}
    return [new.pop(tuple(row.get(k) for k in KEY), row) for row in old] + list(new.values())


def continued(path: Path, meta: Meta) -> Meta:
    """``meta`` of a measurement that keeps a file's other rows: made with the file's commands and this one."""
    if not path.exists():
        return meta
    commands, own = read(path)[0]["command"].split(JOINT), f"{meta['command']} --append"
    return {**meta, "command": JOINT.join([*(x for x in commands if x != own), own])}


def time_of(row: Row) -> float | None:
    """Milliseconds of a row: the graph replay, or the eager call where there is no graph."""
    ms = row.get("ms")
    return row.get("eager_ms") if ms is None else ms


def _number(x: float | None, digits: int = 3) -> str:
    return "" if x is None else f"{x:.{digits}f}"


def digits_of(row: Row) -> int:
    """Decimal places of milliseconds: a decode call may take a few microseconds."""
    return 4 if row.get("op") == "decode" else 3


def _scientific(x: float | None, digits: int = 1) -> str:
    return "" if x is None else f"{x:.{digits}e}"


def label(row: Row) -> str:
    """The name of a row's implementation in tables and pictures."""
    work = str(row.get("work", ""))
    how = {"given": ", gates given", "in parts": ", in parts", "kept": ", kept"}
    return f"{row['impl']} {row['backend']}{''.join(text for sign, text in how.items() if sign in work)}"


PREFILL_COLUMNS = (
    "case",
    "gates",
    "implementation",
    "ms",
    "x floor",
    "floor",
    "eager ms",
    "host µs",
    "peak MiB",
    "ns/token",
    "workspace MiB",
    "bytes/token/head",
    "first call s",
    "again s",
    "output error",
    "state error",
)


def prefill_cells(row: Row) -> tuple[str, ...]:
    """One row as text, in the order of PREFILL_COLUMNS."""
    ms, floor, digits = time_of(row), row.get("floor_ms"), digits_of(row)
    no_graph = " (no graph)" if row.get("ms") is None else ""
    return (
        str(row["case"]),
        str(row["gates"]),
        label(row),
        f"{_number(ms, digits)}{no_graph}",
        _number(ms / floor, 2) if ms is not None and floor else "",
        _number(floor, digits),
        _number(row.get("eager_ms"), digits),
        _number(row.get("host_us"), 0),
        _number(row.get("peak_mb"), 0),
        _number(row.get("ns_per_token"), 2),
        _number(row.get("workspace_mb"), 0),
        _number(row.get("workspace_bytes"), 0),
        _number(row.get("first_call_s"), 1),
        _number(row.get("first_call_cached_s"), 1),
        _scientific(row.get("output_error")),
        _scientific(row.get("state_error")),
    )


ACCURACY_COLUMNS = (
    "setting",
    "layout",
    "implementation",
    *(f"{of} {name}" for of in ("output", "state") for name in ("max", "MAE", "RMSE", "ratio")),
    "worst block",
)


def accuracy_cells(row: Row) -> tuple[str, ...]:
    """One row as text, in the order of ACCURACY_COLUMNS."""
    values = [_scientific(row[of][name], 2) for of in ("output", "state") for name in ("max", "mae", "rmse", "ratio")]
    worst = _scientific(row["output"]["worst_block"], 2)
    return str(row["setting"]), str(row["layout"]), label(row), *values, worst


def operation(rows: Sequence[Row]) -> str:
    """The one operation that all rows are of.

    Raises:
        ValueError: there are no rows, or rows of several operations or of one that has no table.
    """
    ops = {str(row.get("op")) for row in rows}
    if len(ops) != 1 or not ops <= {"prefill", "decode", "train", "scale", "accuracy"}:
        got = ", ".join(sorted(ops)) or "no rows"
        raise ValueError(f"op: got {got}, expected rows of prefill, of decode, of train, of scale or of accuracy")
    return ops.pop()


def details(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and cells of all that was measured, a line for each row; columns that are empty are left out."""
    prefill = operation(rows) != "accuracy"
    columns: tuple[str, ...] = PREFILL_COLUMNS if prefill else ACCURACY_COLUMNS
    cells = [(prefill_cells if prefill else accuracy_cells)(row) for row in rows]
    used = [i for i in range(len(columns)) if any(line[i] for line in cells)]
    return tuple(columns[i] for i in used), [tuple(line[i] for i in used) for line in cells]


def published_cell(row: Row) -> str:
    """FlashKDA's figure for what a row measured, or ""."""
    if row["op"] in ("train", "scale"):
        return ""
    if row["op"] != "accuracy":
        return _number(published.prefill_ms(str(row["case"]), str(row["gates"])))
    known = published.accuracy(str(row["setting"]), str(row["layout"]), str(row.get("dtype")), row.get("tokens"))
    return "" if known is None else f"{known[0]:.3g} / {known[1]:.3g}"


def summary(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and cells of the one figure that counts, a line for each case, a column for each implementation.

    Prefill, decode and train: milliseconds, and multiples of the floor. Scale: nanoseconds per token / bytes of
    workspace per token and head. Accuracy: RMSE ratio of output / final state.
    """
    op = operation(rows)
    prefill = op not in ("scale", "accuracy")
    keys = ("setting", "layout") if op == "accuracy" else ("case", "gates")
    labels = list(dict.fromkeys(label(row) for row in rows))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault(tuple(str(row[k]) for k in keys), {"FlashKDA*": published_cell(row)})
        if prefill:
            ms, floor = time_of(row), row.get("floor_ms")
            line["floor"] = _number(floor, digits_of(row))
            line[label(row)] = _number(ms, digits_of(row)) + (
                f" ({ms / floor:.1f} x)" if ms is not None and floor else ""
            )
        elif op == "scale":
            line[label(row)] = f"{row['ns_per_token']:.2f} / {row['workspace_bytes']:.0f}"
        else:
            line[label(row)] = f"{row['output']['ratio']:.3g} / {row['state']['ratio']:.3g}"
    columns = [*(["floor"] if prefill else []), *labels, "FlashKDA*"]
    columns = [name for name in columns if any(line.get(name) for line in lines.values())]
    return (*keys, *columns), [(*key, *(line.get(name, "") for name in columns)) for key, line in lines.items()]


def by_length(rows: Sequence[Row]) -> list[Row]:
    """Those of a single sequence, the shortest first."""
    return sorted((row for row in rows if str(row["case"]).startswith("1x")), key=lambda row: int(row["tokens"]))


def skew(rows: Sequence[Row]) -> float | None:
    """The skewed batch's time as a multiple of the longer of its parts'; None where one was not measured."""
    found = {str(row["case"]): time_of(row) for row in rows}
    whole, *parts = (found.get(name) for name in (shapes.SKEWED_CASE, *shapes.SKEWED_PARTS))
    known = [ms for ms in parts if ms is not None]
    return whole / max(known) if whole is not None and len(known) == len(parts) else None


def _growth(rows: Sequence[Row], name: str) -> list[str]:
    """How rows of scale, of one implementation and kind of gates, stand to their aims."""
    found = []
    if len(long := by_length(rows)) > 1:
        ns = [row["ns_per_token"] for row in long]
        first, last = long[0]["tokens"], long[-1]["tokens"]
        found.append(
            f"{name}: a token takes {min(ns):.2f} to {max(ns):.2f} ns from {first} to {last} tokens, at most "
            f"{max(ns) / ns[0]:.2f} times what it takes at {first} (aim: flat)"
        )
        most, bytes_ = max(row["workspace_mb"] for row in long), [row["workspace_bytes"] for row in long]
        found.append(
            f"{name}: the workspace takes {min(bytes_):.0f} to {max(bytes_):.0f} bytes per token and head, at most "
            f"{most:.0f} MiB (aim: below {MOST_WORKSPACE} bytes, or a constant)"
        )
    if (ratio := skew(rows)) is not None:
        alone = " and ".join(shapes.SKEWED_PARTS)
        found.append(
            f"{name}: {shapes.SKEWED_CASE} takes {ratio:.2f} times the longer of {alone} (aim: at most {MOST_SKEW})"
        )
    return found


def remarks(rows: Sequence[Row]) -> list[str]:
    """What is to be said below the table: of scale how it stands to its aims, of accuracy how errors grow."""
    op = operation(rows)
    if op == "accuracy":
        return [
            f"{row['setting']}, {row['layout']}, {label(row)}: RMSE ratio of the output in {len(row['spans'])} equal "
            f"parts of {row['tokens']} tokens: {', '.join(f'{x:.3g}' for x in row['spans'])}"
            for row in rows
            if row.get("spans")
        ]
    if op != "scale":
        return []
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{label(row)}, {row['gates']} gates", []).append(row)
    return [line for name, group in groups.items() for line in _growth(group, name)]


def terminal_table(title: str, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    """A table for the terminal; what is not of this run is said below it."""
    caption = f"* {published.SOURCE}" if "FlashKDA*" in columns else None
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < 2 or name == "implementation" else "right")
    for line in cells:
        table.add_row(*line)
    return table


def _markdown_table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    left = [i < 2 or name == "implementation" for i, name in enumerate(columns)]
    # An asterisk alone would start emphasis.
    head = [name.replace("*", "\\*") for name in columns]
    rule = "|".join("---" if x else "---:" for x in left)
    return [f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(line)} |" for line in cells)]


def markdown(meta: Meta, rows: Sequence[Row], picture: str) -> str:
    """Picture, tables and where it all comes from; ``picture`` is the path that the document links to."""
    columns, cells = summary(rows)
    lines = [f"![The table below as a picture]({picture})", "", *_markdown_table(columns, cells), ""]
    if "FlashKDA*" in columns:
        lines += [f"\\* {published.SOURCE}.", ""]
    lines += [*(f"- {line}." for line in said), ""] if (said := remarks(rows)) else []
    notes = {f"{label(row)} ({row['work']})": row["note"] for row in rows if row.get("note")}
    lines += [*(f"- {name}: {note}." for name, note in notes.items()), *([""] if notes else [])]
    lines += ["<details><summary>All that was measured</summary>", "", *_markdown_table(*details(rows)), ""]
    lines += ["</details>", ""]
    versions = ", ".join(f"{name} {value}" for name, value in meta.items() if name not in ("command", "date", "gpu"))
    lines.append(f"{meta['gpu']}, {meta['date']}, {versions}. Made with `{meta['command']}`.")
    return "\n".join(lines)


def insert(document: str, name: str, text: str) -> str:
    """The document with ``text`` between its markers ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.

    Raises:
        ValueError: the markers are not there, each once and in this order.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if document.count(begin) != 1 or document.count(end) != 1 or document.index(begin) > document.index(end):
        raise ValueError(f"expected one {begin} and after it one {end}")
    head, _, rest = document.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{text}\n{end}{tail}"


def publish(results: Path, document: Path) -> Path:
    """Draw a results file and put its table into a document; returns the picture's path (beside it, in ``images``)."""
    from flash_kda.bench.plots import picture

    meta, rows = read(results)
    name = results.stem
    image = document.parent / "images" / f"{name}.png"
    text = insert(document.read_text(encoding="utf-8"), name, markdown(meta, rows, f"images/{image.name}"))
    data = picture(meta, rows)
    image.parent.mkdir(parents=True, exist_ok=True)
    image.write_bytes(data)
    document.write_text(text, encoding="utf-8")
    return image
