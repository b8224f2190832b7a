"""Training of the demo's model, and its bits per byte."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flash_kda.demo import data
from flash_kda.nn import ByteLM, ByteLMConfig


@dataclass(frozen=True)
class TrainConfig:
    """How to train.

    Args:
        steps: optimiser steps.
        batch, length: windows per step, and the bytes that each predicts.
        lr: peak learning rate; ``warmup`` steps up to it, then a cosine down to a fiftieth.
        seed: of the initialisation and of the windows.
        seconds: the schedule ends early rather than take longer than this.
        evaluations: how often to judge a part of the held-out text on the way.
    """

    steps: int
    batch: int = 2
    length: int = 256
    lr: float = 5e-3
    warmup: int = 15
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    seconds: float = math.inf
    evaluations: int = 8

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "length"):
            if (n := getattr(self, name)) < 1:
                raise ValueError(f"{name}: got {n}, expected 1 or more")


@dataclass
class History:
    """Bits per byte of each training step, and of held-out text as (step, bits); ``seconds`` of training."""

    train: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Let torch use ``n`` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bits_of(model: ByteLM, texts: Sequence[bytes]) -> Tensor:
    """Bits ``[texts, length]`` that the model needs for each byte of texts of one length, each read from its start."""
    x = torch.stack([data.as_tensor(data.START + text) for text in texts]).to(model.embedding.weight.device)
    with torch.no_grad():
        logits, _ = model(x[:, :-1])
    return F.cross_entropy(logits.double().transpose(1, 2), x[:, 1:], reduction="none") / math.log(2)


def bits_per_byte(model: ByteLM, texts: Sequence[bytes], together: int = 4) -> float:
    """Mean bits per byte over all bytes of the texts, each one sequence; ``together`` of equal length make a batch."""
    by_length: dict[int, list[bytes]] = {}
    for text in texts:
        by_length.setdefault(len(text), []).append(text)
    total = 0.0
    for same in by_length.values():
        for i in range(0, len(same), together):
            total += float(bits_of(model, same[i : i + together]).sum())
    return total / sum(map(len, texts))


def optimiser(model: nn.Module, config: TrainConfig, fused: bool | None = None) -> torch.optim.AdamW:
    """AdamW; matrices decay, while norms, gates, biases and convolution filters do not. ``fused``: as torch has it."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=fused)


def learning_rate(step: int, progress: float, config: TrainConfig) -> float:
    """Linear warm-up over ``warmup`` steps, cosine over ``progress`` from 0 to 1."""
    warm = min(1.0, (step + 1) / config.warmup)
    return config.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def _loss(model: ByteLM, x: Tensor) -> Tensor:
    logits, _ = model(x[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())


def train(
    shape: ByteLMConfig,
    corpus: data.Corpus,
    config: TrainConfig,
    report: Callable[[int, float, float], None] = lambda step, progress, bits: None,
) -> tuple[ByteLM, History]:
    """Train a model from scratch.

    Args:
        report: called after every step with how many are done, the progress from 0 to 1, and the step's bits per byte.

    Returns:
        The model and its history.
    """
    torch.manual_seed(config.seed)
    model = ByteLM(shape)
    generator = torch.Generator().manual_seed(config.seed)
    text = torch.frombuffer(bytearray(corpus.train), dtype=torch.uint8)
    judged = [excerpt[:1024] for _, excerpt in corpus.held_out[:8]]
    opt, history = optimiser(model, config), History()
    start = time.perf_counter()
    marks = [i / config.evaluations for i in range(1, config.evaluations + 1)]
    step, progress = 0, 0.0
    while progress < 1:
        for group in opt.param_groups:
            group["lr"] = learning_rate(step, progress, config)
        loss = _loss(model, data.batch(text, config.batch, config.length, generator))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        opt.step()
        opt.zero_grad()
        step += 1
        history.train.append(loss.item() / math.log(2))
        history.seconds = time.perf_counter() - start
        # The clock drives the schedule only where the steps alone would overrun it, so that it still ends annealed.
        progress = min(1.0, max(step / config.steps, history.seconds / config.seconds))
        report(step, progress, history.train[-1])
        if marks and progress >= marks[0]:
            marks = [mark for mark in marks if mark > progress]
            history.held_out.append((step, bits_per_byte(model, judged)))
    return model.eval(), history
