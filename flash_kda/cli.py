"""The command line: `flash-kda demo`, `inspect`, `doctor`, `bench` and `accuracy`.

Optional packages are imported when a command needs them, so that what is missing can be named with its remedy.
Annotations stay real objects in this module: typer reads them.
"""

import importlib.metadata
import os
import platform
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

import flash_kda
from flash_kda.cli_errors import WRONG_USE, UserError, guarded, missing
from flash_kda.types import Gate, LogGate, LowerBoundGate, Problem, SoftplusGate

if TYPE_CHECKING:
    import typer


class GateName(str, Enum):
    """The gates by the names of the command line."""

    lower_bound = "lower-bound"
    softplus = "softplus"
    log = "log"


def run_demo(steps: int, seed: int, out: Path) -> int:
    """The demo; 0 if every comparison is within its limit, otherwise 1."""
    try:
        from rich.console import Console

        from flash_kda.demo.data import NoTextError
        from flash_kda.demo.run import DemoConfig, run
    except ImportError as error:
        raise missing(error) from error
    try:
        return 0 if run(DemoConfig(steps=steps, seed=seed, out=out), Console()) else 1
    except NoTextError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror or error}") from error


def random_call(gate: GateName, seed: int) -> dict[str, Tensor]:
    """Random arguments of one call: 128 tokens, two heads of 32."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, g = (torch.randn(1, 128, 2, 32, generator=generator) for _ in range(4))
    call = {"q": q, "k": k, "v": v, "beta": torch.randn(1, 128, 2, generator=generator)}
    if gate is GateName.log:
        return call | {"g": -(g - 2).exp()}
    # Raw gates around a slow decay, so that the picture shows more than the diagonal.
    return call | {"g": g - 3, "A_log": torch.zeros(2), "dt_bias": torch.zeros(64)}


def saved_call(path: Path, gate: GateName) -> dict[str, Tensor]:
    """The tensors of a ``torch.save``'d dictionary with q, k, v, g, beta and maybe A_log and dt_bias.

    Raises:
        UserError: there is no such file, it is not such a dictionary, or keys are missing.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        saved: object = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load fails in many ways on a file that is none of its own
        raise UserError(f"{path}: not a file of tensors that torch.save wrote ({type(error).__name__})") from error
    if not isinstance(saved, dict):
        raise UserError(f"{path}: got a {type(saved).__name__}, expected a dictionary with q, k, v, g and beta")
    wanted = ("q", "k", "v", "g", "beta")
    if absent := [name for name in wanted if name not in saved]:
        found = ", ".join(sorted(map(str, saved))) or "nothing"
        raise UserError(f"{path}: no {', '.join(absent)} in it, only {found}; expected q, k, v, g and beta")
    names = wanted if gate is GateName.log else (*wanted, "A_log", "dt_bias")
    call = {name: saved[name] for name in names if saved.get(name) is not None}
    for name, x in call.items():
        if not isinstance(x, Tensor):
            raise UserError(f"{path}: {name} is a {type(x).__name__}, expected a tensor")
    if gate is GateName.log and bool((call["g"] > 0).any()):
        raise UserError(f"{path}: g has values above 0, so it is no log decay; use --gate lower-bound or softplus")
    return call


def make_gate(name: GateName, lower_bound: float | None, A_log: Tensor | None, dt_bias: Tensor | None) -> Gate:
    """The gate value of the command line's options."""
    if lower_bound is not None and name is not GateName.lower_bound:
        raise UserError(f"--lower-bound goes with --gate lower-bound, not with --gate {name.value}")
    if name is GateName.lower_bound:
        return LowerBoundGate(A_log, dt_bias, -5.0 if lower_bound is None else lower_bound)
    return SoftplusGate(A_log, dt_bias) if name is GateName.softplus else LogGate()


def run_inspect(
    file: Path | None,
    gate: GateName,
    lower_bound: float | None,
    head: int,
    chunk: int,
    chunk_size: int,
    seed: int,
    out: Path,
) -> int:
    """Draw L, Mqk and T of one head of one chunk, and print what sizes they have."""
    try:
        from rich.console import Console
        from rich.table import Table

        from flash_kda.demo.matrices import chunk_matrices
        from flash_kda.demo.pictures import chunk_figure, png
    except ImportError as error:
        raise missing(error) from error
    call = random_call(gate, seed) if file is None else saved_call(file, gate)
    value = make_gate(gate, lower_bound, call.pop("A_log", None), call.pop("dt_bias", None))
    try:
        rows = (call["q"], call["k"], call["v"], call["g"], call["beta"])
        m = chunk_matrices(*rows, gate=value, head=head, chunk=chunk, chunk_size=chunk_size)
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error
    C = m.L.shape[0]
    source = f"random values, seed {seed}" if file is None else file.name
    title = f"{source}: head {head}, tokens {m.start} to {m.start + C - 1}, {gate.value} gate"
    try:
        out.write_bytes(png(chunk_figure(m, title)))
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror or error}") from error
    table = Table(title=title, title_justify="left")
    table.add_column("matrix")
    for name in ("largest entry", "mean size", "share above 0.01"):
        table.add_column(name, justify="right")
    for name, x, diagonal in (("L", m.L, -1), ("Mqk", m.Mqk, 0), ("T off its diagonal", m.T, -1)):
        entries = x[torch.ones(C, C, dtype=torch.bool).tril(diagonal)].abs()
        if entries.numel():
            share = float((entries > 0.01).double().mean())
            table.add_row(name, f"{float(entries.max()):.3g}", f"{float(entries.mean()):.3g}", f"{share:.0%}")
    console = Console()
    console.print(table)
    residual = (torch.eye(C, dtype=m.L.dtype) + m.L) @ m.T - torch.eye(C, dtype=m.L.dtype)
    console.print(f"(I + L) T differs from I by at most {float(residual.abs().max()):.1e}.")
    console.print(f"Picture: {out}", soft_wrap=True)
    return 0


def typical_problems() -> dict[str, Problem]:
    """Calls that users make, by what they are for."""
    return {
        "prefill, 96 heads, bounded gate": Problem(T=8192, H=96),
        "prefill, 32 heads, softplus gate": Problem(T=8192, H=32, gate="softplus"),
        "prefill, 6 packed sequences": Problem(T=8192, H=64, N=6, packed=True),
        "training, 32 heads": Problem(T=8192, H=32, grad=True),
        "decode, 128 rows": Problem(B=128, T=1, H=12, op="decode"),
        "a layer's decode step, 128 rows": Problem(B=128, T=1, H=12, op="step"),
        "prefill into a pool": Problem(T=8192, H=64, N=6, packed=True, op="prefill", checkpoints=True),
        "float32 on the processor": Problem(T=1024, H=4, dtype=torch.float32, grad=True, device="cpu"),
    }


def machine_facts() -> list[tuple[str, str]]:
    """What matters here, by name: Python, torch, threads, GPUs, Triton."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "not installed: pip install 'flash_kda[triton]'"
    facts = [
        ("flash_kda", flash_kda.__version__),
        ("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        ("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"),
        ("threads", f"{torch.get_num_threads()} of {os.cpu_count()} processors"),
        ("Triton", triton),
    ]
    if not torch.cuda.is_available():
        return [*facts, ("GPU", "none that torch can use")]
    for i in range(torch.cuda.device_count()):
        p: Any = torch.cuda.get_device_properties(i)
        what = f"{p.name}, compute capability {p.major}.{p.minor}, {p.multi_processor_count} multiprocessors"
        facts.append((f"GPU {i}", f"{what}, {p.total_memory / 2**30:.0f} GiB"))
    return facts


def run_doctor() -> int:
    """Print what this machine has and which backends can run typical calls."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise missing(error) from error
    console = Console()
    facts = Table(title="This machine", title_justify="left", show_header=False, box=box.SIMPLE_HEAD)
    for name, value in machine_facts():
        facts.add_row(name, Text(value))
    console.print(facts)
    table = Table(title="Which backend runs", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("problem", "backend", "why not the others"):
        table.add_column(name)
    for name, problem in typical_problems().items():
        found = flash_kda.explain(problem)
        backend = Text(found.backend, "green") if found.backend else Text("none", "bold red")
        reasons = Text("\n".join(f"{other}: {why}" for other, why in found.reasons.items()))
        table.add_row(name, backend, reasons, end_section=True)
    console.print(table)
    return 0


def build_app() -> "typer.Typer":
    """The application with its commands; needs typer."""
    import typer

    app = typer.Typer(
        help="Kimi Delta Attention: see it work, look inside it, ask what this machine can run, measure it.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.command()
    def demo(
        steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 1300,
        seed: Annotated[int, typer.Option(help="Seed of the split, the model and the text.")] = 0,
        out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("demo-report"),
    ) -> None:
        """Train a small model on Python's own library, check every way of running it, and write a report.

        Takes about a minute and a half on two cores. Leaves with 1 if a comparison is outside its limit.
        """
        guarded(lambda: run_demo(steps, seed, out))

    @app.command()
    def inspect(
        file: Annotated[
            Path | None,
            typer.Argument(
                help="torch.save'd dict of q, k, v, g, beta (logits), maybe A_log, dt_bias. Random if none."
            ),
        ] = None,
        gate: Annotated[GateName, typer.Option(help="What g means.")] = GateName.lower_bound,
        lower_bound: Annotated[
            float | None, typer.Option(help="Smallest log decay, in [-5, 0).", show_default="-5")
        ] = None,
        head: Annotated[int, typer.Option(help="Value head.")] = 0,
        chunk: Annotated[int, typer.Option(help="Which chunk, counted from 0.")] = 0,
        chunk_size: Annotated[int, typer.Option(help="Tokens per chunk, at most 64.")] = 32,
        seed: Annotated[int, typer.Option(help="Seed of the random values.")] = 0,
        out: Annotated[Path, typer.Option(help="PNG file to write.")] = Path("chunk.png"),
    ) -> None:
        """Draw the matrices L, Mqk and T of one chunk."""
        guarded(lambda: run_inspect(file, gate, lower_bound, head, chunk, chunk_size, seed, out))

    @app.command()
    def doctor() -> None:
        """Say what this machine has, which backends can run, and why the others cannot."""
        guarded(run_doctor)

    from flash_kda.cli_bench import add_accuracy, add_bench

    add_bench(app)
    add_accuracy(app)
    return app


def main() -> None:
    """Entry point of `flash-kda`."""
    try:
        app = build_app()
    except ImportError as error:
        sys.exit(_without_typer(error))
    app()


def _without_typer(error: ImportError) -> int:
    print(f"flash-kda: {missing(error)}", file=sys.stderr)
    return WRONG_USE
