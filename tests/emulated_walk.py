"""The pooled walk of the Hopper backend in Python: its own source, with what Gluon has made of torch's tensors.

The steps from token to token are exact here, so that what is tested is where checkpoints are found and stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

K, COLUMNS = 8, 64


@dataclass
class Pointer:
    """An address, or many of them: elements of ``data`` from the offsets on."""

    data: Tensor
    at: Any = 0

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.data.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.data, self.at + other)


def _load(p: Pointer, mask: Any = True, other: int = 0) -> Tensor:
    at, mask = torch.as_tensor(p.at), torch.as_tensor(mask)
    assert not bool((mask & ((at < 0) | (at >= p.data.numel()))).any()), "a load outside of its tensor"
    return torch.where(mask, p.data.flatten()[torch.where(mask, at, 0)] if p.data.numel() else at * 0, other)


def _store(p: Pointer, x: Tensor, mask: Any = True) -> None:
    assert not bool(((p.at < 0) | (p.at >= p.data.numel())).any()), "a store outside of its tensor"
    p.data.view(-1)[p.at] = x


FAKE = SimpleNamespace(
    constexpr=Any,
    int32=torch.int32,
    int64=torch.int64,
    float32=torch.float32,
    NVMMADistributedLayout=lambda *_: None,
    BlockedLayout=lambda *_: None,
    SliceLayout=lambda *_: None,
    num_warps=lambda: 4,
    arange=lambda first, end, _: torch.arange(first, end, dtype=torch.int32),
    expand_dims=lambda x, dim: x.unsqueeze(dim),
    zeros=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype),
    where=lambda mask, x, y: torch.where(torch.as_tensor(mask), x, y),
    minimum=lambda x, y: torch.minimum(torch.as_tensor(x), torch.as_tensor(y)),
    maximum=lambda x, y: torch.maximum(torch.as_tensor(x), torch.as_tensor(y)),
    min=lambda x, _: x.min(),
    max=lambda x, dim: x.amax(dim),
    load=_load,
    store=_store,
)


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
) -> tuple[Tensor, list[int]]:
    """``S <- a S + v`` for the tokens of one sequence, or of its segment from token ``offset`` on.

    Args:
        S0: the state before it, ``[64, K]``. kept: ``[places, 64, K]``, which is written.

    Returns:
        The state after it, and the tokens whose output the chunks stored.
    """
    from flash_kda.backends.hopper import pooled

    for name in ("_first_checkpoint", "_next_checkpoint", "_entry", "_store_checkpoint"):
        monkeypatch.setattr(pooled, name, getattr(pooled, name).fn, raising=True)
    for name in ("SEARCH", "NEVER", "C", "BV", "MAP"):
        monkeypatch.setattr(pooled, name, getattr(pooled, name).value)
    monkeypatch.setattr(pooled, "exists", pooled.exists.fn)
    monkeypatch.setattr(pooled, "gl", FAKE)
    whole = len(decays)
    length = whole - offset if length is None else length
    chunks: list[int] = []

    def step_chunk(S: Tensor, first: Any, length: Any, stage: int, phase: int, *_: Any) -> tuple[Tensor, int, int]:
        first = int(first)
        chunks.append(first)
        tokens = slice(offset + first, offset + min(first + pooled.C, int(length)))
        return _after(S, decays[tokens], values[tokens]), stage, phase

    def walk_by_token(S: Tensor, *arguments: Any) -> Tensor:
        start, count = (int(x) for x in arguments[11:13])
        assert count > 0
        return _after(S, decays[start : start + count], values[start : start + count])

    monkeypatch.setattr(pooled, "step_chunk", step_chunk)
    monkeypatch.setattr(pooled, "walk_by_token", walk_by_token)
    monkeypatch.setattr(pooled, "state_before", lambda *_: S0)
    final = torch.full_like(S0, torch.nan)
    i32 = {"dtype": torch.int32}
    scalar = torch.tensor
    given: dict[str, Any] = dict.fromkeys(pooled._walk.arg_names, 0) | {
        "p_S": Pointer(final),
        "p_o": Pointer(torch.empty(0)),
        "p_offset": Pointer(torch.tensor(offsets, dtype=torch.int64)),
        "p_ends": Pointer(torch.tensor(ends, **i32)),
        "p_target": Pointer(torch.tensor(targets or [], **i32)),
        "p_kept": Pointer(kept),
        "S_strides": (0, 0, K, 1),
        "o_t": scalar(1),
        **{"offset_n": 1, "ends_n": 1, "target_n": 1, "kept_n": COLUMNS * K, "kept_v": K, "kept_k": 1},
        **{"start": scalar(offset), "length": scalar(length, **i32), "offset": scalar(offset), "whole": scalar(whole)},
        **{"n": scalar(0), "slot_S": scalar(0), "i_h": scalar(0), "column": scalar(0), "is_stored": True},
        **{"entries": scalar(len(offsets)), "places": scalar(len(kept)), "pad": scalar(pad)},
        **{"K": K, "MODE": 0, "PARTS": 1, "STORE_S": True, "CHECKPOINTS": True, "HAS_TARGET": targets is not None},
    }
    pooled._walk.fn(**given)
    return final, chunks
