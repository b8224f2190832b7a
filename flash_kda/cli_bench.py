"""The command line of measurements: `flash-kda bench` and `flash-kda accuracy`.

Annotations stay real objects in this module: typer reads them.
"""

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from flash_kda.cli_errors import UserError, guarded, missing

if TYPE_CHECKING:
    import typer


class GatesName(str, Enum):
    """The gates of the benchmarks: how fast channels forget."""

    strong = "strong"
    slow = "slow"
    softplus = "softplus"


class PeerName(str, Enum):
    """What can be measured beside this library."""

    fla = "fla"
    cudnn = "cudnn"


class DtypeName(str, Enum):
    """Dtypes that accuracy is judged for."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class DeviceName(str, Enum):
    """Where accuracy is judged."""

    cuda = "cuda"
    cpu = "cpu"


def peer_names(peers: bool, only: list[PeerName] | None) -> list[str]:
    """Names of the peers to measure: all, ``only`` these, or none."""
    return [name.value for name in only or PeerName] if peers else []


def _measured(action: Callable[[], int]) -> int:
    """The status of a command of ``flash_kda.bench``, whose refusals the user can mend."""
    try:
        from flash_kda.bench.commands import Refused
    except ImportError as error:
        raise missing(error) from error
    try:
        return action()
    except ImportError as error:
        raise missing(error) from error
    except Refused as error:
        raise UserError(str(error)) from error


def run_bench(op: str, out: Path | None, append: bool, **choice: Any) -> int:
    """`bench prefill`, `decode`, `train` and `scale`; see the functions of ``flash_kda.bench.commands``."""

    def action() -> int:
        from flash_kda.bench import commands

        run: Callable[..., int] = getattr(commands, op)
        return run(out, append, **choice)

    return _measured(action)


def run_bench_report(files: list[Path], document: Path) -> int:
    """`bench report`; see ``flash_kda.bench.commands.publish``."""

    def action() -> int:
        from flash_kda.bench import commands

        return commands.publish(files, document)

    return _measured(action)


def run_accuracy(out: Path | None, picture: Path | None, append: bool, **choice: Any) -> int:
    """`accuracy`; see ``flash_kda.bench.commands.accuracy``."""

    def action() -> int:
        from flash_kda.bench import commands

        return commands.accuracy(out, picture, append, **choice)

    return _measured(action)


def add_bench(app: "typer.Typer") -> None:
    """`bench prefill`, `decode`, `train`, `scale` and `report`."""
    import typer

    bench = typer.Typer(help="Measure speed on a GPU, and put results into a document.", no_args_is_help=True)
    app.add_typer(bench, name="bench")
    _add_forward(bench)
    _add_others(bench)


def _add_forward(bench: "typer.Typer") -> None:
    """Those of the forward: `prefill`, `decode` and `scale`."""
    import typer

    @bench.command()
    def prefill(
        case: Annotated[list[str] | None, typer.Option(help="Case, such as 1x8192-h64; may be repeated.")] = None,
        gates: Annotated[list[GatesName] | None, typer.Option(help="Kind of gates; may be repeated.")] = None,
        backend: Annotated[list[str] | None, typer.Option(help="Backend of ours; may be repeated.")] = None,
        peers: Annotated[bool, typer.Option(help="Whether to measure peers in the same run.")] = True,
        peer: Annotated[list[PeerName] | None, typer.Option(help="Only this peer; may be repeated.")] = None,
        first_call: Annotated[bool, typer.Option("--first-call", help="Also time first calls (slow).")] = False,
        quick: Annotated[bool, typer.Option("--quick", help="Four cases and fewer repeats.")] = False,
        append: Annotated[bool, typer.Option("--append", help="Keep the file's other rows.")] = False,
        out: Annotated[
            Path | None, typer.Option(help="JSON file; benchmarks/results/prefill-GPU.json if none.")
        ] = None,
    ) -> None:
        """Time the prefill forward on a GPU, with cold caches, beside peers and the floor of moving the bytes."""
        guarded(
            lambda: run_bench(
                "prefill",
                out,
                append,
                cases=case or [],
                gates=[name.value for name in gates or []],
                backends=backend or [],
                peers=peer_names(peers, peer),
                first_call=first_call,
                quick=quick,
            )
        )

    @bench.command()
    def decode(
        case: Annotated[list[str] | None, typer.Option(help="Case, such as b128-h12; may be repeated.")] = None,
        gates: Annotated[list[GatesName] | None, typer.Option(help="Kind of gates; may be repeated.")] = None,
        backend: Annotated[list[str] | None, typer.Option(help="Backend of ours; may be repeated.")] = None,
        peers: Annotated[bool, typer.Option(help="Whether to measure FLA in the same run.")] = True,
        quick: Annotated[bool, typer.Option("--quick", help="Four cases and fewer repeats.")] = False,
        append: Annotated[bool, typer.Option("--append", help="Keep the file's other rows.")] = False,
        out: Annotated[Path | None, typer.Option(help="JSON file; benchmarks/results/decode-GPU.json if none.")] = None,
    ) -> None:
        """Time decoding, verifying drafts and a layer's step on a GPU, beside FLA and the floor of moving states."""
        kinds = [name.value for name in gates or []]
        choice = {"cases": case or [], "gates": kinds, "backends": backend or [], "peers": peers, "quick": quick}
        guarded(lambda: run_bench("decode", out, append, **choice))

    @bench.command()
    def scale(
        case: Annotated[list[str] | None, typer.Option(help="Case, such as 1x65536-h8; may be repeated.")] = None,
        gates: Annotated[list[GatesName] | None, typer.Option(help="Kind of gates; may be repeated.")] = None,
        backend: Annotated[list[str] | None, typer.Option(help="Backend of ours; may be repeated.")] = None,
        append: Annotated[bool, typer.Option("--append", help="Keep the file's other rows.")] = False,
        out: Annotated[Path | None, typer.Option(help="JSON file; benchmarks/results/scale-GPU.json if none.")] = None,
    ) -> None:
        """Time one sequence of 8,192 to 1,048,576 tokens and a skewed batch on a GPU, and measure their workspace."""
        choice = {"cases": case or [], "gates": [name.value for name in gates or []], "backends": backend or []}
        guarded(lambda: run_bench("scale", out, append, **choice))


def _add_others(bench: "typer.Typer") -> None:
    """`train` and `report`."""
    import typer

    @bench.command()
    def train(
        case: Annotated[list[str] | None, typer.Option(help="Case, such as 1x8192-h32; may be repeated.")] = None,
        gates: Annotated[list[GatesName] | None, typer.Option(help="Kind of gates; may be repeated.")] = None,
        backend: Annotated[list[str] | None, typer.Option(help="Backend of ours; may be repeated.")] = None,
        peers: Annotated[bool, typer.Option(help="Whether to measure peers in the same run.")] = True,
        peer: Annotated[list[PeerName] | None, typer.Option(help="Only this peer; may be repeated.")] = None,
        first_call: Annotated[bool, typer.Option("--first-call", help="Also time first calls (slow).")] = False,
        no_recompute: Annotated[
            bool, typer.Option("--no-recompute", help="Also measure ours with recompute=False.")
        ] = False,
        append: Annotated[bool, typer.Option("--append", help="Keep the file's other rows.")] = False,
        out: Annotated[Path | None, typer.Option(help="JSON file; benchmarks/results/train-GPU.json if none.")] = None,
    ) -> None:
        """Time forward and backward on a GPU, and their memory, beside peers and the floor of moving the bytes."""
        kinds = [name.value for name in gates or []]
        choice = {"cases": case or [], "gates": kinds, "backends": backend or [], "peers": peer_names(peers, peer)}
        flags = {"first_call": first_call, "no_recompute": no_recompute}
        guarded(lambda: run_bench("train", out, append, **flags, **choice))

    @bench.command()
    def report(
        files: Annotated[list[Path], typer.Argument(help="JSON files of `bench` and `accuracy`.")],
        document: Annotated[Path, typer.Option(help="Document with the markers.")] = Path("docs", "performance.md"),
    ) -> None:
        """Put the table and the picture of results files between their markers in a document."""
        guarded(lambda: run_bench_report(files, document))


def add_accuracy(app: "typer.Typer") -> None:
    """`accuracy`."""
    import typer

    @app.command()
    def accuracy(
        dtype: Annotated[DtypeName, typer.Option(help="Of q, k, v, g and beta.")] = DtypeName.bfloat16,
        device: Annotated[DeviceName, typer.Option(help="Where to compute.")] = DeviceName.cuda,
        backend: Annotated[str, typer.Option(help="Backend of ours.")] = "auto",
        peers: Annotated[bool, typer.Option(help="Whether to judge FLA too.")] = True,
        setting: Annotated[list[str] | None, typer.Option(help="Setting, such as 'gate -8'; may be repeated.")] = None,
        tokens: Annotated[int, typer.Option(min=6, help="Tokens of a setting.")] = 8192,
        drift: Annotated[int, typer.Option(min=0, help="Tokens of a sequence that forgets slowly; 0: none.")] = 0,
        limit: Annotated[
            float | None, typer.Option(help="Largest RMSE ratio.", show_default="0.004, float32 2e-5")
        ] = None,
        against_peers: Annotated[
            bool, typer.Option("--against-peers", help="Also allow no more than the better of FLA and FlashKDA.")
        ] = False,
        append: Annotated[bool, typer.Option("--append", help="Keep the file's other rows.")] = False,
        out: Annotated[Path | None, typer.Option(help="JSON file; in benchmarks/results if none.")] = None,
        picture: Annotated[Path | None, typer.Option(help="PNG file with the distributions of errors.")] = None,
    ) -> None:
        """Judge output and final state against float64. Leaves with 1 if an error is beyond the limit."""
        guarded(
            lambda: run_accuracy(
                out,
                picture,
                append,
                dtype=dtype.value,
                device=device.value,
                backend=backend,
                peers=["fla"] if peers else [],
                settings=setting or [],
                tokens=tokens,
                drift=drift,
                limit=limit,
                against_peers=against_peers,
            )
        )
