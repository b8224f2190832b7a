"""What `flash-kda bench` and `flash-kda accuracy` do, without the parsing of their options."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

import flash_kda
from flash_kda.bench import accuracy as judging
from flash_kda.bench import decode as decoding
from flash_kda.bench import prefill as timing
from flash_kda.bench import report, shapes
from flash_kda.bench import scale as scaling
from flash_kda.bench import train as training

RESULTS = Path("benchmarks", "results")
# Columns of text that the full table takes; a narrower terminal gets only the summary, a pipe always gets both.
WIDE = 180


class Refused(Exception):
    """Something that whoever gave the command can mend; the message says what."""


def require_gpu(command: str, otherwise: str) -> None:
    """Refuse a command that cannot run here, and say what it needs."""
    if not torch.cuda.is_available():
        has = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA built in"
        raise Refused(
            f"{command} needs an NVIDIA GPU and a CUDA build of torch; torch {torch.__version__} here has {has} and "
            f"sees no GPU. {otherwise}"
        )


def chosen(names: Sequence[str], known: Sequence[str], option: str) -> tuple[str, ...]:
    """The names given, or all; an unknown one is refused with those that there are."""
    if unknown := [name for name in names if name not in known]:
        raise Refused(f"{option}: got {', '.join(unknown)}, expected some of {', '.join(known)}")
    return tuple(names or known)


def say(text: str) -> None:
    """One line of progress."""
    Console().print(text, markup=False, soft_wrap=True, highlight=False)


def show(rows: Sequence[report.Row], title: str) -> None:
    """The tables of the rows."""
    if not rows:
        say("Nothing was measured.")
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    console.print(report.terminal_table(title, *report.summary(rows)))
    for line in report.remarks(rows):
        say(f"{line}.")
    if console.width >= WIDE:
        console.print(report.terminal_table("Details", *report.details(rows)))


def prefill(
    out: Path | None,
    append: bool,
    *,
    cases: Sequence[str],
    gates: Sequence[str],
    backends: Sequence[str],
    peers: Sequence[str],
    first_call: bool,
    quick: bool,
) -> int:
    """Measure prefill, write the rows and show them.

    Args:
        out: results file; None names it after the GPU. append: keep its other rows.
        cases, gates, backends: names; none means all (``quick``: four cases) and the backend of choice.
        peers: names of ``flash_kda.bench.peers.PEERS``, maybe none.
    """
    given = [*(f"--case {name}" for name in cases), *(f"--gates {name}" for name in gates)]
    given += [f"--backend {name}" for name in backends]
    given += [f"--peer {name}" for name in peers] or ["--no-peers"]
    given += [flag for flag, on in (("--first-call", first_call), ("--quick", quick)) if on]
    names = chosen(cases or (shapes.QUICK if quick else ()), list(shapes.cases("prefill")), "--case")
    kinds = tuple(kind for kind in shapes.GATES if kind in chosen(gates, shapes.GATES, "--gates"))
    backends = chosen(backends or ["auto"], ["auto", *flash_kda.BACKENDS], "--backend")
    require_gpu("bench prefill", "`make bench-cpu` times the CPU backend.")
    options = timing.Options(names, kinds, backends, tuple(peers), 10 if quick else 30, first_call)
    return _measure("prefill", given, out, append, lambda keep: timing.run(options, say, keep))


def decode(
    out: Path | None,
    append: bool,
    *,
    cases: Sequence[str],
    gates: Sequence[str],
    backends: Sequence[str],
    peers: bool,
    quick: bool,
) -> int:
    """Measure decoding, write the rows and show them.

    Args:
        out, append: as for :func:`prefill`.
        cases, gates, backends: names; none means all (``quick``: four cases), strong gates and the backend of choice.
        peers: whether FLA is measured beside us.
    """
    given = [*(f"--case {name}" for name in cases), *(f"--gates {name}" for name in gates)]
    given += [*(f"--backend {name}" for name in backends), *([] if peers else ["--no-peers"])]
    given += ["--quick"] if quick else []
    names = chosen(cases or (shapes.QUICK_DECODE if quick else ()), list(shapes.cases("decode")), "--case")
    wanted = chosen(gates or ("strong",), shapes.GATES, "--gates")
    backends = chosen(backends or ["auto"], ["auto", *flash_kda.BACKENDS], "--backend")
    require_gpu("bench decode", "There is no other use for its figures.")
    kinds = tuple(kind for kind in shapes.GATES if kind in wanted)
    options = decoding.Options(names, kinds, backends, peers, 10 if quick else 50)
    return _measure("decode", given, out, append, lambda keep: decoding.run(options, say, keep))


def train(
    out: Path | None,
    append: bool,
    *,
    cases: Sequence[str],
    gates: Sequence[str],
    backends: Sequence[str],
    peers: Sequence[str],
    first_call: bool,
    no_recompute: bool,
) -> int:
    """Measure forward and backward, write the rows and show them.

    Args:
        out, append: as for :func:`prefill`.
        cases, gates, backends: names; none means all cases, strong gates and "auto".
        peers: names of ``flash_kda.bench.peers.PEERS``, maybe none. first_call: whether first calls are timed.
        no_recompute: whether ours runs without recomputation, too.
    """
    given = [*(f"--case {name}" for name in cases), *(f"--gates {name}" for name in gates)]
    given += [f"--backend {name}" for name in backends]
    given += [f"--peer {name}" for name in peers] or ["--no-peers"]
    given += [flag for flag, on in (("--first-call", first_call), ("--no-recompute", no_recompute)) if on]
    names = chosen(cases, list(shapes.cases("train")), "--case")
    wanted = chosen(gates or ("strong",), shapes.GATES, "--gates")
    backends = chosen(backends or ["auto"], ["auto", *flash_kda.BACKENDS], "--backend")
    require_gpu("bench train", "There is no other use for its figures.")
    kinds = tuple(kind for kind in shapes.GATES if kind in wanted)
    options = training.Options(names, kinds, backends, tuple(peers), first_call=first_call, no_recompute=no_recompute)
    return _measure("train", given, out, append, lambda keep: training.run(options, say, keep))


def scale(
    out: Path | None, append: bool, *, cases: Sequence[str], gates: Sequence[str], backends: Sequence[str]
) -> int:
    """Measure how time and memory grow with the sequence, write the rows and show them.

    Args:
        out, append: as for :func:`prefill`.
        cases, gates, backends: names; none means all cases, strong gates and the backend of choice.
    """
    given = [*(f"--case {name}" for name in cases), *(f"--gates {name}" for name in gates)]
    given += [f"--backend {name}" for name in backends]
    names = chosen(cases, list(shapes.cases("scale")), "--case")
    wanted = chosen(gates or ("strong",), shapes.GATES, "--gates")
    backends = chosen(backends or ["auto"], ["auto", *flash_kda.BACKENDS], "--backend")
    require_gpu("bench scale", "There is no other use for its figures.")
    options = scaling.Options(names, tuple(kind for kind in shapes.GATES if kind in wanted), backends)
    return _measure("scale", given, out, append, lambda keep: scaling.run(options, say, keep))


TITLES = {"scale": "ns per token / bytes of workspace per token and head"}


def _measure(
    op: str, given: Sequence[str], out: Path | None, append: bool, run: Callable[[report.Keep], list[report.Row]]
) -> int:
    """Run a measurement into its results file, and show it.

    Args:
        given: the options that were given, to be run again. run: measures, telling its argument the rows so far.
    """
    meta = report.describe(" ".join([f"flash-kda bench {op}", *given]))
    path = out or RESULTS / f"{op}-{report.gpu_slug(meta['gpu'])}.json"
    keep = _keeper(path, meta, append)
    try:
        rows = run(keep)
    except NotImplementedError as error:
        raise Refused(str(error)) from error
    show(rows, f"{op.capitalize()}, {TITLES.get(op, 'ms (multiples of the floor)')}, {meta['gpu']}")
    say(f"Results: {path}")
    return 0


def _keeper(path: Path, meta: report.Meta, append: bool) -> report.Keep:
    """What writes rows to a results file, beside its other rows if ``append``; refused before anything is measured."""

    def keep(rows: list[report.Row]) -> None:
        report.write(path, meta, report.merge(path, meta, rows) if append else rows)

    try:
        if append:
            report.merge(path, meta, [])
            meta = report.continued(path, meta)
        path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise Refused(f"--out {path}: {error}") from error
    return keep


def publish(files: Sequence[Path], document: Path) -> int:
    """Put the tables and pictures of results files into a document."""
    for file in files:
        try:
            say(f"{file}: table in {document}, picture in {report.publish(file, document)}")
        except (OSError, ValueError) as error:
            raise Refused(f"{file} into {document}: {error}") from error
    return 0


def accuracy(
    out: Path | None,
    picture: Path | None,
    append: bool,
    *,
    dtype: str,
    device: str,
    backend: str,
    peers: Sequence[str],
    settings: Sequence[str],
    tokens: int,
    drift: int,
    limit: float | None,
    against_peers: bool,
) -> int:
    """Compare with float64, write the rows and show them; 1 if an error is beyond what is allowed, otherwise 0.

    Args:
        out: results file; None names it after dtype and device. append: keep its other rows.
        picture: PNG file to draw; None draws none.
        limit: largest RMSE ratio of output and of final state; None takes the dtype's.
        The others: as in ``flash_kda.bench.accuracy.Options`` and ``judge``.
    """
    names = chosen(settings, [setting.name for setting in judging.SETTINGS], "--setting")
    chosen([backend], ["auto", *flash_kda.BACKENDS], "--backend")
    if device == "cuda":
        require_gpu("accuracy", "`--device cpu --tokens 512` judges the CPU backend.")
    options = judging.Options(dtype, device, backend, tuple(peers), tokens, settings=names, drift=drift)
    command = f"flash-kda accuracy --dtype {dtype} --device {device} --backend {backend} --tokens {tokens}"
    command += f" --drift {drift}" + ("" if peers else " --no-peers")
    meta = report.describe(command + "".join(f" --setting {shlex.quote(name)}" for name in settings), device)
    path = out or RESULTS / f"accuracy-{dtype}-{report.gpu_slug(meta['gpu']) if device == 'cuda' else 'cpu'}.json"
    keep = _keeper(path, meta, append)
    try:
        rows = judging.run(options, say)
    except NotImplementedError as error:
        raise Refused(str(error)) from error
    try:
        keep(rows)
        if picture is not None:
            from flash_kda.bench import plots

            picture.write_bytes(plots.picture(meta, rows))
    except OSError as error:
        raise Refused(f"{error.filename or path}: {error.strerror or error}") from error
    show(rows, f"RMSE ratio, output / final state, {meta['gpu']}")
    wrong = judging.judge(rows, judging.LIMITS[dtype] if limit is None else limit, against_peers)
    for text in wrong:
        say(f"beyond what is allowed: {text}")
    say(f"Results: {path}")
    return 1 if wrong else 0
