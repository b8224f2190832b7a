"""The pooled walk of the Hopper backend in Python: its own source, with what Gluon has made of torch's tensors.

The steps from token to token are exact here, so that what is tested is where checkpoints are found and stored.
"""

from __future__ import annotations

from typing import Any

import emulated_gluon
import pytest
import torch
from emulated_gluon import Pointer, value
from torch import Tensor

K, COLUMNS = 8, 64


def _after(S: Tensor, decays: Tensor, values: Tensor) -> Tensor:
    for a, v in zip(decays, values, strict=True):
        S = S * a + v
    return S


def walk(
    monkeypatch: pytest.MonkeyPatch,
    S0: Tensor,
    decays: Tensor,
    values: Tensor,
    offsets: list[int],
    ends: list[int],
    targets: list[int] | None,
    kept: Tensor,
    *,
    pad: int = -1,
    offset: int = 0,
    length: int | None = None,
    is_mapped: bool = False,
) -> tuple[Tensor, list[int]]:
    """``S <- a S + v`` for the tokens of one sequence, or of its segment from token ``offset`` on.

    Args:
        S0: the state before it, ``[64, K]``. kept: ``[places, 64, K]``, which is written.
        is_mapped: whether it is a walk of MAP, and the state after it is one of the maps.

    Returns:
        The state after it, and the tokens whose output the chunks stored.
    """
    from flash_kda.backends.hopper import pooled

    names = pooled._walk.arg_names
    emulated_gluon.emulate(monkeypatch, pooled)
    whole = len(decays)
    length = whole - offset if length is None else length
    chunks: list[int] = []

    def step_chunks(S: Tensor, begin: Any, end: Any, length: Any, stage: Any, phase: Any, *_: Any) -> tuple[Any, ...]:
        for first in range(int(begin), int(end), pooled.C):
            chunks.append(first)
            tokens = slice(offset + first, offset + min(first + pooled.C, int(length)))
            S = _after(S, decays[tokens], values[tokens])
        return S, stage, phase

    def walk_by_token(S: Tensor, *arguments: Any) -> Tensor:
        start, count = (int(x) for x in arguments[11:13])
        assert count > 0
        return _after(S, decays[start : start + count], values[start : start + count])

    monkeypatch.setattr(pooled, "step_chunks", step_chunks)
    monkeypatch.setattr(pooled, "walk_by_token", walk_by_token)
    monkeypatch.setattr(pooled, "state_before", lambda *_: S0)
    final = torch.full_like(S0, torch.nan)
    i32 = {"dtype": torch.int32}
    mode = {"MODE": pooled.MAP if is_mapped else pooled.WHOLE, "is_first": offset == 0}
    given: dict[str, Any] = dict.fromkeys(names, 0) | {
        "p_S": Pointer(None if is_mapped else final),
        "p_map": Pointer(final if is_mapped else None),
        "p_o": Pointer(torch.empty(0)),
        "p_offset": Pointer(torch.tensor(offsets, dtype=torch.int64)),
        "p_ends": Pointer(torch.tensor(ends, **i32)),
        "p_target": Pointer(torch.tensor(targets or [], **i32)),
        "p_kept": Pointer(kept),
        "S_strides": (0, 0, K, 1),
        "o_t": value(1),
        **{"offset_n": 1, "ends_n": 1, "target_n": 1, "kept_n": COLUMNS * K, "kept_v": K, "kept_k": 1},
        **{"start": value(offset), "length": value(length, **i32), "offset": value(offset), "whole": value(whole)},
        **{"n": value(0), "slot_S": value(0), "i_h": value(0), "column": value(0)},
        **{"is_mapped": is_mapped, "is_stored": not is_mapped},
        **{"entries": value(len(offsets)), "places": value(len(kept)), "pad": value(pad)},
        **mode,
        **{"K": K, "PARTS": 1, "STORE_S": True, "CHECKPOINTS": True, "HAS_TARGET": targets is not None},
    }
    pooled._walk(**given)
    return final, chunks
