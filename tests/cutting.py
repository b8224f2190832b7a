"""How packed sequences are cut into segments, by definition."""

from __future__ import annotations

from collections.abc import Sequence


def cuts_of(lengths: Sequence[int], segment: int, later: int, least: int) -> list[int]:
    """What ``cut_sequences`` is to find: tokens of a segment, and for each later one its sequence and number in it."""

    def counts(tokens: int) -> list[int]:
        return [max(0, -(-length // tokens) - 1) for length in lengths]

    shortest = next(x for x in range(min(least, segment), segment + 1, 32) if sum(counts(x)) <= later)
    found = [(n, i) for n, count in enumerate(counts(shortest)) for i in range(count)]
    found += [(len(lengths) - 1, -1)] * (later - len(found))
    return [shortest, *(n for n, _ in found), *(i for _, i in found)]
