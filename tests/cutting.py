"""How packed sequences are cut into segments, by definition; and to have sequences cut that are too short for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

# What of ``hopper.config`` has all of a few chunks cut into the shortest segments that fill the device.
SHORT = {"LEAST_SAVED": 64, "LEAST_SAVED_OF_PACKED": 64, "SCAN_STEP": 1}
NEVER = dict.fromkeys(("LEAST_SAVED", "LEAST_SAVED_OF_PACKED"), math.inf)


@contextmanager
def short_segments(is_cut: bool = True) -> Iterator[None]:
    """Sequences are cut into the shortest segments that fill the device, or never."""
    from flash_kda.backends.hopper import config, forward

    def forget() -> None:
        config.configure.cache_clear()
        forward.plan.cache_clear()

    wanted = SHORT | ({} if is_cut else NEVER)
    try:
        with mock.patch.multiple(config, **wanted), mock.patch.object(forward, "LEAST_SEGMENT", 32):
            forget()
            yield
    finally:
        forget()


def cuts_of(lengths: Sequence[int], segment: int, later: int, least: int) -> list[int]:
    """What ``cut_sequences`` is to find: tokens of a segment, and for each later one its sequence and number in it."""

    def counts(tokens: int) -> list[int]:
        return [max(0, -(-length // tokens) - 1) for length in lengths]

    shortest = next(x for x in range(min(least, segment), segment + 1, 32) if sum(counts(x)) <= later)
    found = [(n, i) for n, count in enumerate(counts(shortest)) for i in range(count)]
    found += [(len(lengths) - 1, -1)] * (later - len(found))
    return [shortest, *(n for n, _ in found), *(i for _, i in found)]
