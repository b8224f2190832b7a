"""How sequences are cut into chunks, and chunks gathered into groups that are computed together.

A sequence's chunk size depends on its own length alone, and products never mix sequences, so that a sequence gives
the same bits whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flash_kda.reference.recurrent import spans
from flash_kda.types import Inputs

CHUNK = 64
# Elements of one [lanes, chunks, C, K] tile of a group: large enough to fill the cores, small enough for the cache.
GROUP_ELEMENTS = 1 << 19


def chunk_size(length: int) -> int:
    """Tokens per chunk of a sequence: CHUNK, or the power of two that holds a shorter one."""
    return min(CHUNK, 1 << (length - 1).bit_length())


@dataclass(frozen=True)
class Span:
    """Sequence ``index`` is tokens start..end-1 of batch row ``row``."""

    index: int
    row: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class Group:
    """``chunks`` consecutive chunks of ``C`` tokens, from the same offset in each of some sequences of equal C.

    ``spans`` are sorted by falling length, so that the sequences that go on are always the first ones.
    """

    spans: tuple[Span, ...]
    offset: int
    chunks: int
    C: int

    @property
    def tokens(self) -> int:
        return self.chunks * self.C

    @cached_property
    def sequences(self) -> Tensor:
        """``[n]`` indices of the sequences along N."""
        return torch.tensor([s.index for s in self.spans])

    @cached_property
    def _whole_batch(self) -> bool:
        """Whether the rows are the same full slice of every batch row, in order: then no gather is needed."""
        return all(s.row == i and s.start == 0 and s.end >= self.offset + self.tokens for i, s in enumerate(self.spans))

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Batch row ``[n, 1]``, token ``[n, tokens]`` (the last one repeated past the end) and validity."""
        first = torch.tensor([s.start for s in self.spans])[:, None] + self.offset
        last = torch.tensor([s.end for s in self.spans])[:, None] - 1
        token = first + torch.arange(self.tokens)
        return torch.tensor([s.row for s in self.spans])[:, None], token.clamp(max=last), token <= last

    def _by_chunk(self, x: Tensor) -> Tensor:
        by_chunk: Tensor = x.unflatten(1, (self.chunks, self.C))
        return by_chunk

    @property
    def valid(self) -> Tensor | None:
        """``[n, chunks, C]``, False where a row lies past its sequence's end; None if every row is real."""
        if self._whole_batch:
            return None
        valid = self._rows[2]
        return None if bool(valid.all()) else self._by_chunk(valid)

    def take(self, x: Tensor) -> Tensor:
        """The group's rows of ``[B, T, ...]`` as ``[n, chunks, C, ...]``; past an end the last real one is repeated."""
        if self._whole_batch:
            return self._by_chunk(x[: len(self.spans), self.offset : self.offset + self.tokens])
        row, token, _ = self._rows
        return self._by_chunk(x[row, token])

    def put(self, out: Tensor, x: Tensor) -> None:
        """Write ``[n, chunks, C, ...]`` into the group's rows of ``[B, T, ...]``, leaving out those past an end."""
        if self._whole_batch:
            self._by_chunk(out[: len(self.spans), self.offset : self.offset + self.tokens]).copy_(x)
            return
        row, token, valid = self._rows
        out[row.expand_as(token)[valid], token[valid]] = x.flatten(1, 2)[valid].to(out.dtype)


def plan(inputs: Inputs) -> Iterator[list[Group]]:
    """The groups of each chunk size in the order of time. Empty sequences appear in none."""
    HV, K = inputs.v.shape[2], inputs.q.shape[3]
    by_size: dict[int, list[Span]] = {}
    for i, span in enumerate(spans(inputs)):
        s = Span(i, *span)
        if s.length:
            by_size.setdefault(chunk_size(s.length), []).append(s)
    for C, members in by_size.items():
        members.sort(key=lambda s: -s.length)
        groups = []
        offset = 0
        while active := tuple(s for s in members if s.length > offset):
            left = -(-(active[0].length - offset) // C)
            chunks = max(1, min(left, GROUP_ELEMENTS // (len(active) * HV * C * K)))
            groups.append(Group(active, offset, chunks, C))
            offset += chunks * C
        yield groups
