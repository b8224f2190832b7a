"""Decoding by means of a backend's ``run``: one token of every row at a time. Reads the indices on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_kda.reference.recurrent import spans
from flash_kda.types import DecodeInputs, Inputs, Problem

ROWS = ("q", "k", "v", "g", "beta")


def no_gradient(problem: Problem) -> str | None:
    """The reason against a decode call that wants a gradient, or None."""
    if problem.op == "decode" and problem.grad:
        return "decoding computes no gradients; call it under torch.no_grad() or torch.inference_mode()"
    return None


@dataclass(frozen=True)
class Row:
    """A row that takes part: tokens ``first`` to ``first + length - 1`` of batch row ``batch``.

    Attributes:
        slot: where its state is. fresh: whether it starts from zeros all the same.
        targets: the slot that takes the state after token t, for those t that have one.
    """

    batch: int
    first: int
    length: int
    slot: int
    fresh: bool
    targets: dict[int, int]


def live_rows(call: DecodeInputs) -> list[Row]:
    """The rows that have tokens and a slot; the others are padding."""
    slots = call.pool.shape[0]
    indices = None if call.indices is None else call.indices.tolist()
    accepted = None if call.num_accepted is None else call.num_accepted.tolist()
    known = None if call.has_initial_state is None else call.has_initial_state.tolist()

    def exists(slot: int) -> bool:
        return 0 <= slot < slots and slot != call.pad_index

    found = []
    for n, (batch, first, end) in enumerate(spans(call.inputs)):
        length = end - first
        if indices is None:
            slot, targets = n, {length - 1: n}
        elif isinstance(indices[n], int):
            slot, targets = indices[n], {length - 1: indices[n]}
        else:
            count = 1 if accepted is None else accepted[n]
            if not 0 <= count <= len(indices[n]):
                continue
            slot = indices[n][max(count, 1) - 1]
            targets = {t: target for t, target in enumerate(indices[n]) if exists(target)}
        if length and (exists(slot) or (indices is None)):
            fresh = known is not None and not known[n]
            found.append(Row(batch, first, length, slot, fresh, targets))
    return found


def decode_stepwise(
    call: DecodeInputs, run: Callable[[Inputs], tuple[Tensor, Tensor | None]], dtype: torch.dtype
) -> Tensor:
    """The output ``[B, T, HV, V]``; states go to the pool as the call asks.

    Args:
        run: computes a forward call of one token.
        dtype: of the states between tokens.
    """
    inputs, pool = call.inputs, call.pool
    rows = live_rows(call)
    out = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=inputs.v.device) if call.out is None else call.out
    out.zero_()
    with torch.no_grad():
        S = pool[[row.slot for row in rows]].to(dtype)
        S[[i for i, row in enumerate(rows) if row.fresh]] = 0.0
        for t in range(max((row.length for row in rows), default=0)):
            active = [i for i, row in enumerate(rows) if row.length > t]
            where = [rows[i].batch for i in active], [rows[i].first + t for i in active]
            tokens = {name: getattr(inputs, name)[where][:, None] for name in ROWS}
            step = inputs.replace(**tokens, initial_state=S[active], output_final_state=True, cu_seqlens=None)
            o, after = run(step)
            if after is None:
                raise RuntimeError("a forward call gave no final state")
            S[active] = after
            out[where] = o[:, 0]
            if call.write_states:
                kept = [(i, rows[i].targets[t]) for i in active if t in rows[i].targets]
                pool[[slot for _, slot in kept]] = S[[i for i, _ in kept]].to(pool.dtype)
    return out
