"""Training in one file: a byte model of about 20 million parameters learns the source of the Python standard library.

    python examples/train_lm.py train --minutes 4    # trains it, and judges it beside gzip and xz
    python examples/train_lm.py train --resume       # goes on where an interrupted run last saved
    python examples/train_lm.py curve                # its first steps beside those of the float32 reference
    python examples/train_lm.py speed                # tokens per second, beside FLA's layer
    python examples/train_lm.py plot train-lm/train-lm-h200.json

The first three write a JSON file to the folder ``--out``; the last draws such files. Only that needs matplotlib.

Text, split, model and schedule are those of ``flash-kda demo``. Bits per byte are those of the demo, too: every
held-out excerpt is read as one sequence from its start, nothing is carried over from another, and all of its bytes
count. The compressors get the excerpts joined, so that what they learn in one helps them in the next.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flash_kda
from flash_kda.bench import report
from flash_kda.bench.report import Row
from flash_kda.checks import check
from flash_kda.demo import data
from flash_kda.demo.train import TrainConfig, bits_per_byte, learning_rate, optimiser
from flash_kda.nn import ByteLM, ByteLMConfig, KimiDeltaAttention
from flash_kda.reference import kda_chunk
from flash_kda.types import LowerBoundGate, SoftplusGate

SHAPE = ByteLMConfig(hidden_size=512, num_layers=6, num_heads=4, head_dim=128, mlp_size=1280)
# 65 million bytes, about six times the training text.
CONFIG = TrainConfig(steps=1000, batch=32, length=2048, lr=2e-3, warmup=100)
# What rows and results files are called, by the command that makes them.
OPS = {"train": "train-lm", "curve": "train-lm-curve", "speed": "train-lm-speed"}
# Steps between two waits for the device, which are for a line of progress.
GROUP = 20
# Held-out excerpts that are judged on the way.
JUDGED = 8
# Tokens of a chunk of the float32 reference, whose memory is quadratic in it.
CHUNK = 64


def unchanged(model: ByteLM) -> None:
    """The model as it is."""


class Run:
    """A training run: all that changes from step to step. Equal arguments give equal steps.

    Args:
        train: the training bytes. device: that trains.
        autocast: whether to compute in bfloat16 where torch.autocast does.
        change: what to make of the new model before it is trained.
        compiled: whether torch.compile makes its training steps: it fuses what lies around the calls of this library.

    Attributes:
        losses: bits per byte of each step. held_out: (step, bits per byte) on the way. seconds: spent on the steps.
        backend: of this library that ran, or "" if none did.
    """

    def __init__(
        self,
        shape: ByteLMConfig,
        config: TrainConfig,
        train: bytes,
        device: str = "cpu",
        autocast: bool = True,
        change: Callable[[ByteLM], None] = unchanged,
        compiled: bool = False,
    ) -> None:
        self.config, self.device, self.autocast = config, device, autocast
        text = hashlib.sha256(train).hexdigest()
        self.settings = {**asdict(shape), **asdict(config), "compiled": compiled, "text": text}
        self.text = torch.frombuffer(bytearray(train), dtype=torch.uint8).to(device)
        # On the CPU, so that neither weights nor batches depend on the device.
        torch.manual_seed(config.seed)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.model = ByteLM(shape)
        change(self.model)
        self.model.to(device)
        self.predict = torch.compile(self.model, fullgraph=True) if compiled else self.model
        self.optimiser = optimiser(self.model, config, fused=True if device == "cuda" else None)
        self.losses: list[float] = []
        self.held_out: list[tuple[int, float]] = []
        self.seconds = 0.0
        self.backend = ""

    @property
    def steps(self) -> int:
        return len(self.losses)

    def progress(self, steps: int = 0, seconds: float = 0.0) -> float:
        """From 0 to 1, of the steps or of the time, whichever is further; with so many more of both."""
        config = self.config
        return min(1.0, max((self.steps + steps) / config.steps, (self.seconds + seconds) / config.seconds))

    def precision(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.autocast)

    def advance(self, steps: int) -> None:
        """Train for so many steps, or to the end; waits for the device once, at its end."""
        new: list[Tensor] = []
        begun = time.perf_counter()
        while len(new) < steps and (progress := self.progress(len(new), time.perf_counter() - begun)) < 1:
            new.append(self._step(self.steps + len(new), progress))
        self.losses += (torch.stack(new) / math.log(2)).tolist() if new else []
        self.seconds += time.perf_counter() - begun

    def _step(self, step: int, progress: float) -> Tensor:
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(step, progress, self.config)
        x = data.batch(self.text, self.config.batch, self.config.length, self.generator)
        with self.precision(), flash_kda.record_backends() as ran:
            logits, _ = self.predict(x[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        self.backend = ran[0] if ran else ""
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return loss.detach()

    def judge(self, texts: list[bytes]) -> float:
        """Bits per byte of texts, in the precision of training."""
        with self.precision():
            return bits_per_byte(self.model, texts, together=16)

    def save(self, path: Path) -> None:
        """Whole or not at all: a run that ends while it writes leaves the file before."""
        state = {
            "settings": self.settings,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            # Where the next batches lie: they are drawn from this alone.
            "generator": self.generator.get_state(),
            "losses": self.losses,
            "held_out": self.held_out,
            "seconds": self.seconds,
        }
        part = path.with_name(path.name + ".part")
        torch.save(state, part)
        os.replace(part, path)

    def restore(self, path: Path) -> None:
        """Go on where a run with the same settings saved.

        Raises:
            ValueError: its settings were others; the message names them.
        """
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        before = state["settings"]
        if other := [f"{k}: got {v}, {before.get(k)} there" for k, v in self.settings.items() if before.get(k) != v]:
            raise ValueError(f"{path}: it is of another run; {'; '.join(other)}")
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.generator.set_state(state["generator"])
        self.losses, self.held_out, self.seconds = state["losses"], state["held_out"], state["seconds"]


class ChunkReference(nn.Module):
    """In place of a layer's DeltaRule: the chunk form as it is written down, in float32, differentiated by torch.

    The recurrence takes a step per token, this one per chunk; tests/test_reference.py holds the two together.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, gate: LowerBoundGate | SoftplusGate, **_: Any
    ) -> tuple[Tensor, None]:
        B, _, HV, _ = v.shape
        # The rows of the batch as further heads, since the reference takes one sequence after the other.
        q, k, v, g, beta = (x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, v, g, beta))
        A_log, dt_bias = (None if x is None else x.repeat(B) for x in (gate.A_log, gate.dt_bias))
        inputs = check(
            *(q, k, v, g, beta),
            gate=replace(gate, A_log=A_log, dt_bias=dt_bias),
            scale=None,
            initial_state=None,
            output_final_state=False,
            cu_seqlens=None,
            qk_l2norm=True,
            beta_is_logit=True,
            allow_neg_eigval=False,
            state_layout="vk",
        )
        o, _, _ = kda_chunk(inputs, CHUNK, torch.float32)
        return o[0].unflatten(1, (B, HV)).transpose(0, 1), None


def use_reference(model: ByteLM) -> None:
    for block in model.blocks:
        block.attn.delta_rule = ChunkReference()


class FlaLayer(nn.Module):
    """FLA's layer with the weights of ours, in its place."""

    def __init__(self, ours: KimiDeltaAttention) -> None:
        super().__init__()
        from fla.layers import KimiDeltaAttention as Layer

        self.layer = Layer(
            hidden_size=ours.hidden_size,
            expand_v=ours.head_v_dim / ours.head_k_dim,
            head_dim=ours.head_k_dim,
            num_heads=ours.num_heads,
            num_v_heads=ours.num_v_heads,
            safe_gate=ours.lower_bound is not None,
            lower_bound=ours.lower_bound,
            conv_size=ours.q_conv1d.width,
            norm_eps=ours.o_norm.eps,
        )
        self.layer.load_state_dict(ours.state_dict())

    def forward(self, x: Tensor, cache: None = None, **_: Any) -> tuple[Tensor, None]:
        return self.layer(x)[0], None


def use_fla(model: ByteLM) -> None:
    for block in model.blocks:
        block.attn = FlaLayer(block.attn)


@contextmanager
def registered() -> Iterator[None]:
    """FLA's layer computes with this library inside."""
    from flash_kda.compat import fla

    fla.register()
    try:
        yield
    finally:
        fla.unregister()


def row_of(run: Run, op: str, **measured: Any) -> Row:
    """What every row says of a run."""
    return {
        "op": op,
        "impl": "flash_kda",
        "backend": run.backend,
        "dtype": "bfloat16" if run.autocast else "float32",
        "compiled": run.settings["compiled"],
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "steps": run.steps,
        "batch": run.config.batch,
        "length": run.config.length,
        "seed": run.config.seed,
        **measured,
    }


def train(run: Run, corpus: data.Corpus, checkpoint: Path, every: int) -> list[Row]:
    """Train to the end, saving on the way, and judge."""
    texts = [text for _, text in corpus.held_out]
    while run.progress() < 1:
        before, begun = run.steps, run.seconds
        # Groups end at multiples of GROUP and where the run is saved, after an interruption as without.
        run.advance(min(GROUP - before % GROUP, every - before % every))
        rate = (run.steps - before) * run.config.batch * run.config.length / (run.seconds - begun)
        mean = sum(run.losses[before:]) / max(1, run.steps - before)
        print(f"step {run.steps:5}  {mean:.3f} bits per byte  {rate:,.0f} tokens/s", flush=True)
        if run.steps % every == 0 or run.progress() == 1:
            run.held_out.append((run.steps, run.judge(texts[:JUDGED])))
            print(f"step {run.steps:5}  {run.held_out[-1][1]:.3f} on held-out text", flush=True)
            run.save(checkpoint)
    bits = run.judge(texts)
    baselines = {
        "gzip -9": data.gzip_bits(corpus),
        "xz -9e": data.xz_bits(corpus),
        "xz -9e after the training text": data.xz_bits_after_training(corpus),
    }
    for name, value in {"this model": bits, **baselines}.items():
        print(f"{value:.3f} bits per byte of {len(corpus.held_out_bytes):,} held-out bytes: {name}")
    return [
        row_of(
            run,
            OPS["train"],
            bits_per_byte=bits,
            baselines=baselines,
            train_bytes=len(corpus.train),
            held_out_bytes=len(corpus.held_out_bytes),
            seconds=run.seconds,
            losses=run.losses,
            held_out=run.held_out,
        )
    ]


def curve(
    shape: ByteLMConfig, config: TrainConfig, text: bytes, device: str, steps: int, keep: report.Keep, before: list[Row]
) -> list[Row]:
    """The first steps of one training with the reference in float32, and with this library in two precisions.

    Differences are between bits per byte of the same step.

    Args:
        keep: is told all rows after each training. before: rows whose reference, if it is that of the same training,
            need not train again.
    """
    same = {"impl": "reference", "steps": steps, "batch": config.batch, "length": config.length, "seed": config.seed}
    rows = [row for row in before if all(row.get(key) == value for key, value in same.items())]
    for impl, autocast, change in (
        ("reference", False, use_reference),
        ("flash_kda", True, unchanged),
        ("flash_kda", False, unchanged),
    )[len(rows) :]:
        run = Run(shape, config, text, device, autocast, change)
        run.advance(steps)
        backend = run.backend or f"chunks of {CHUNK} tokens"
        row = row_of(run, OPS["curve"], impl=impl, backend=backend, seconds=run.seconds, losses=run.losses)
        line = (
            f"{impl}, {row['dtype']}: {run.steps} steps in {run.seconds:.1f} s, last {run.losses[-1]:.4f} bits per byte"
        )
        if rows:
            apart = [abs(a - b) for a, b in zip(run.losses, rows[0]["losses"], strict=True)]
            row |= {"max_difference": max(apart), "mean_difference": sum(apart) / len(apart)}
            line += f", apart at most {max(apart):.4f}, {row['mean_difference']:.4f} in the mean"
        print(line, flush=True)
        rows.append(row)
        keep(rows)
    return rows


def speed(
    shape: ByteLMConfig, config: TrainConfig, text: bytes, device: str, steps: int, keep: report.Keep
) -> list[Row]:
    """Tokens per second of whole training steps, after as many that are not timed; nothing is saved or judged."""
    rows: list[Row] = []
    ours: list[float] = []
    for impl, change, inside, compiled in (
        ("flash_kda", unchanged, nullcontext, False),
        ("flash_kda, compiled", unchanged, nullcontext, True),
        ("fla", use_fla, nullcontext, False),
        ("fla, computed here", use_fla, registered, False),
    ):
        try:
            with inside():
                run = Run(shape, config, text, device, change=change, compiled=compiled)
                run.advance(steps)
                before = run.seconds
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                run.advance(steps)
            if (impl == "fla") == bool(run.backend):
                raise RuntimeError(f"of flash_kda there ran: {run.backend or 'nothing'}")
        except Exception as error:
            # A peer's failure is news, not the end, and so is a compiler's; our own is a fault.
            if impl == "flash_kda":
                raise
            print(f"{impl} is left out: {type(error).__name__}: {error}", flush=True)
            continue
        ours = ours or run.losses
        row = row_of(
            run,
            OPS["speed"],
            impl=impl,
            tokens_per_s=steps * config.batch * config.length / (run.seconds - before),
            peak_mb=torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None,
            max_difference=max(abs(a - b) for a, b in zip(run.losses, ours, strict=True)),
        )
        apart = f"losses at most {row['max_difference']:.4f} bits from ours"
        print(f"{impl}: {row['tokens_per_s']:,.0f} tokens/s, {apart}", flush=True)
        rows.append(row)
        keep(rows)
    return rows


def plot(path: Path) -> Path:
    """Draw a file that ``train`` or ``curve`` wrote; returns the picture's path, beside it."""
    from matplotlib.figure import Figure

    from flash_kda.demo import pictures

    meta, rows = report.read(path)
    draw = {"train-lm": draw_training, "train-lm-curve": draw_curves}.get(rows[0]["op"])
    if draw is None:
        raise ValueError(f"{path}: got rows of {rows[0]['op']}, expected those of train or of curve")
    figure = Figure(figsize=(9, 6), layout="constrained")
    figure.suptitle(f"{meta['gpu']}, {meta['date']}", x=0.01, ha="left", color=pictures.MUTED, fontsize=10)
    draw(figure, rows)
    for ax in figure.axes:
        ax.grid(True, color=pictures.GRID, linewidth=0.8)
        ax.legend(frameon=False, fontsize=9)
    image = path.with_suffix(".png")
    image.write_bytes(pictures.png(figure))
    return image


def draw_training(figure: Any, rows: list[Row]) -> None:
    """Bits per byte of training text, in the mean of the last steps, and of held-out text; compressors as lines."""
    from flash_kda.demo.pictures import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE

    (row,) = rows
    losses, n = row["losses"], GROUP
    means = [sum(losses[max(0, i - n) : i]) / min(i, n) for i in range(1, len(losses) + 1)]
    ax = figure.subplots()
    ax.plot(range(1, len(losses) + 1), means, color=BLUE, label=f"training text, mean of {n} steps")
    ax.plot(*zip(*row["held_out"], strict=True), "o-", color=ORANGE, label="held-out text, part of it")
    label = f"held-out text, all of it: {row['bits_per_byte']:.3f}"
    ax.plot([len(losses)], [row["bits_per_byte"]], "D", color=INK, label=label)
    for (name, bits), colour in zip(row["baselines"].items(), (MUTED, PURPLE, GREEN), strict=True):
        ax.axhline(bits, color=colour, linestyle="--", label=f"{name}: {bits:.3f}")
    # The first steps, from 8 bits down, would flatten all that follows.
    ax.set(xlabel="step", ylabel="bits per byte", ylim=(0, max(4.0, 1.2 * row["bits_per_byte"])))


def draw_curves(figure: Any, rows: list[Row]) -> None:
    """The loss curves on one another, and below them how far they are apart."""
    from flash_kda.demo.pictures import BLUE, MUTED, ORANGE

    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, rows[0]["steps"] + 1)
    for row, colour, width in zip(rows, (MUTED, BLUE, ORANGE), (5, 1.8, 1), strict=True):
        name = f"{row['impl']}, {row['backend']}, {row['dtype']}"
        above.plot(steps, row["losses"], color=colour, linewidth=width, alpha=0.4 if width == 5 else 1, label=name)
        if row is not rows[0]:
            # Equal losses have a place on the logarithmic axis, too.
            apart = [max(1e-7, abs(a - b)) for a, b in zip(row["losses"], rows[0]["losses"], strict=True)]
            name = f"{row['dtype']}: mean {row['mean_difference']:.1e}, at most {row['max_difference']:.1e}"
            below.plot(steps, apart, color=colour, linewidth=1, label=name)
    above.set(ylabel="bits per byte")
    below.set(xlabel="step", ylabel="apart", yscale="log")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    shared.add_argument("--backend", choices=("auto", *flash_kda.BACKENDS), default="auto")
    shared.add_argument(
        "--seed", type=int, default=0, help="of weights and batches; the held-out text is always the same"
    )
    shared.add_argument("--out", type=Path, default=Path("train-lm"), help="folder for results and the checkpoint")

    def sizes(command: argparse.ArgumentParser, batch: int, length: int) -> None:
        command.add_argument("--batch", type=int, default=batch, help=f"windows per step ({batch})")
        command.add_argument("--seq", type=int, default=length, help=f"bytes of a window ({length})")

    command = commands.add_parser("train", parents=[shared], help="train, save, and judge beside gzip and xz")
    sizes(command, CONFIG.batch, CONFIG.length)
    end = command.add_mutually_exclusive_group()
    end.add_argument("--steps", type=int, default=CONFIG.steps, help=f"of training ({CONFIG.steps})")
    end.add_argument("--minutes", type=float, help="of training, in place of a number of steps")
    command.add_argument("--save-every", type=int, default=200, metavar="STEPS", help="between checkpoints (200)")
    command.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    command.add_argument("--compile", action="store_true", help="training steps made by torch.compile")

    # Small steps: the reference launches a few hundred kernels for every chunk.
    command = commands.add_parser("curve", parents=[shared], help="compare the first steps with the float32 reference")
    sizes(command, 8, 512)
    command.add_argument("--steps", type=int, default=200, help="to compare (200)")
    command.add_argument("--resume", action="store_true", help="take the reference's losses from the file in --out")

    command = commands.add_parser("speed", parents=[shared], help="measure tokens per second, beside FLA's layer")
    sizes(command, CONFIG.batch, CONFIG.length)
    command.add_argument("--steps", type=int, default=GROUP, help=f"to time, after as many to warm up ({GROUP})")

    command = commands.add_parser("plot", help="draw results of train and curve, each beside its file")
    command.add_argument("files", type=Path, nargs="+")
    return parser


def main() -> None:
    parser = arguments()
    options = parser.parse_args()
    if options.command == "plot":
        for path in options.files:
            print(plot(path))
        return
    shape, device = replace(SHAPE, backend=options.backend), options.device
    config = replace(CONFIG, batch=options.batch, length=options.seq, seed=options.seed)
    problem = flash_kda.Problem(H=shape.num_heads, K=shape.head_dim, V=shape.head_dim, device=device, grad=True)
    if (found := flash_kda.explain(problem, options.backend)).backend is None:
        parser.error(str(found))
    corpus = data.load()
    options.out.mkdir(parents=True, exist_ok=True)
    meta = report.describe(shlex.join(["python", "examples/train_lm.py", *sys.argv[1:]]), device)
    where = report.gpu_slug(meta["gpu"]) if device == "cuda" else "cpu"
    path = options.out / f"{OPS[options.command]}-{where}.json"

    def keep(rows: list[Row]) -> None:
        # Each Python has a standard library of its own.
        report.write(path, meta | {"python": platform.python_version()}, rows)

    if options.command == "train":
        if options.minutes is None:
            config = replace(config, steps=options.steps)
        else:
            config = replace(config, steps=sys.maxsize, seconds=60 * options.minutes)
        run = Run(shape, config, corpus.train, device, compiled=options.compile)
        checkpoint = options.out / "checkpoint.pt"
        if options.resume:
            try:
                run.restore(checkpoint)
            except (OSError, ValueError) as error:
                parser.error(f"--resume: {error}")
        rows = train(run, corpus, checkpoint, options.save_every)
        keep(rows)
    elif options.command == "curve":
        before = report.read(path)[1] if options.resume and path.exists() else []
        curve(shape, config, corpus.train, device, options.steps, keep, before)
    else:
        speed(shape, config, corpus.train, device, options.steps, keep)
    print(f"Results: {path}")


if __name__ == "__main__":
    main()
