"""Real text that every machine has: the source of the Python standard library, and simple models of its bytes."""

from __future__ import annotations

import gzip
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Installed packages are not the standard library, and its tests come and go with the distribution. The code pages in
# encodings are generated tables, near copies of one another: a split by file would not hold them out.
SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"})
# Every text starts as if after a line end, so that its first byte is predicted like the others.
START = b"\n"


class NoTextError(ValueError):
    """There is too little text to learn from."""


@dataclass(frozen=True)
class Corpus:
    """Files split into those to learn from and those held out.

    Attributes:
        train: the training files, each after a START, as one string.
        held_out: name and text of each held-out excerpt; no byte of its file is in ``train``.
        train_files, held_out_files: how many files each side has.
    """

    train: bytes
    held_out: tuple[tuple[str, bytes], ...]
    train_files: int
    held_out_files: int

    @property
    def held_out_bytes(self) -> bytes:
        return b"".join(text for _, text in self.held_out)


def library_files(root: Path | None = None) -> list[Path]:
    """The ``*.py`` files of the running interpreter's standard library (or of ``root``), in one fixed order."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = (f for f in root.rglob("*.py") if not SKIPPED & set(f.relative_to(root).parts))
    return sorted(files, key=lambda f: f.relative_to(root).as_posix())


def load(seed: int = 0, root: Path | None = None, held_out_share: float = 0.05, excerpt: int = 4096) -> Corpus:
    """Read the library and split it by file.

    Args:
        seed: of the split and of where in a held-out file its excerpt starts.
        root: folder to read; None means the standard library.
        held_out_share: part of the files to hold out, at least one.
        excerpt: bytes of each held-out file to judge on; shorter files are taken whole.

    Raises:
        NoTextError: there are fewer than two files with text.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    texts = [(f.relative_to(root).as_posix(), f.read_bytes()) for f in library_files(root)]
    texts = [(name, text) for name, text in texts if text.strip()]
    if len(texts) < 2:
        raise NoTextError(f"root: got {len(texts)} Python files with text under {root}, expected 2 or more")
    rng = random.Random(seed)
    rng.shuffle(texts)
    n = max(1, round(len(texts) * held_out_share))
    held_out = []
    for name, text in texts[:n]:
        start = rng.randrange(max(1, len(text) - excerpt))
        held_out.append((name, text[start : start + excerpt]))
    return Corpus(b"".join(START + text for _, text in texts[n:]), tuple(held_out), len(texts) - n, n)


def as_tensor(text: bytes) -> Tensor:
    """``[len(text)]`` int64."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch(train: Tensor, size: int, length: int, generator: torch.Generator) -> Tensor:
    """``[size, length + 1]`` int64 windows at random places of the training bytes ``[n]``, on their device.

    The generator is one of the CPU, so that places do not depend on the device.
    """
    starts = torch.randint(len(train) - length, (size, 1), generator=generator).to(train.device, non_blocking=True)
    return train[starts + torch.arange(length + 1, device=train.device)].long()


def unigram_bits(corpus: Corpus) -> float:
    """Bits per held-out byte of byte frequencies in the training text, each count one higher."""
    counts = as_tensor(corpus.train).bincount(minlength=256).double() + 1
    bits = -(counts / counts.sum()).log2()
    return float(bits[as_tensor(corpus.held_out_bytes)].mean())


def bigram_bits(corpus: Corpus) -> float:
    """Bits per held-out byte of byte frequencies after each byte in the training text, each count one higher."""
    train = as_tensor(corpus.train)
    counts = (train[:-1] * 256 + train[1:]).bincount(minlength=256 * 256).double().view(256, 256) + 1
    bits = -(counts / counts.sum(1, keepdim=True)).log2()
    total = 0.0
    for _, text in corpus.held_out:
        x = as_tensor(START + text)
        total += float(bits[x[:-1], x[1:]].sum())
    return total / len(corpus.held_out_bytes)


def gzip_bits(corpus: Corpus) -> float:
    """Bits per byte of all held-out bytes compressed together at gzip's highest level, its header included."""
    text = corpus.held_out_bytes
    return 8 * len(gzip.compress(text, 9, mtime=0)) / len(text)


def xz_bits(corpus: Corpus) -> float:
    """Bits per byte of all held-out bytes compressed together at xz's highest level, its container included."""
    text = corpus.held_out_bytes
    return 8 * len(_xz(text)) / len(text)


def xz_bits_after_training(corpus: Corpus) -> float:
    """Bits per held-out byte that xz adds to the compressed training text: its window, 64 MiB, holds all of it."""
    text = corpus.held_out_bytes
    return 8 * (len(_xz(corpus.train + text)) - len(_xz(corpus.train))) / len(text)


def _xz(text: bytes) -> bytes:
    # Some builds of Python come without it.
    import lzma

    return lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
