"""Calls with a pool by means of a backend's ``run``. Reads indices and boundaries on the host.

Decoding goes one token of every row at a time, prefill from checkpoint to checkpoint of every sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_kda.reference.gate import sigmoid
from flash_kda.reference.layer import convolution, rms_norm
from flash_kda.reference.recurrent import spans
from flash_kda.types import DecodeInputs, Inputs, PrefillInputs, Problem, StepInputs

ROWS = ("q", "k", "v", "g", "beta")
CONVOLVED = ("q", "k", "v")


def no_gradient(problem: Problem) -> str | None:
    """The reason against a call with a pool that wants a gradient, or None."""
    if problem.op != "forward" and problem.grad:
        what = "prefill into a pool" if problem.op == "prefill" else "decoding"
        return f"{what} computes no gradients; call it under torch.no_grad() or torch.inference_mode()"
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


def step_in_parts(
    call: StepInputs, run: Callable[[Inputs], tuple[Tensor, Tensor | None]], dtype: torch.dtype
) -> Tensor:
    """The output ``[N, 1, HV, V]`` of a decode step: convolutions, decoding, norm; both pools are updated.

    Args:
        run: computes a forward call of one token.
        dtype: of everything between the arguments and the output.
    """
    decode, inputs, pool = call.decode, call.decode.inputs, call.conv_pool
    rows = live_rows(decode)
    batch, slots = [row.batch for row in rows], [row.slot for row in rows]
    with torch.no_grad():
        before = pool[slots].to(dtype)
        before[[i for i, row in enumerate(rows) if row.fresh]] = 0.0
        given = [getattr(inputs, name)[batch].flatten(2).to(dtype) for name in CONVOLVED]
        window = torch.cat([before, torch.cat(given, -1)], 1)
        parts = window.split([x.shape[-1] for x in given], -1)
        mixed = {}
        for name, part, weight, bias in zip(
            CONVOLVED, parts, call.conv_weights, call.conv_biases or (None, None, None), strict=True
        ):
            y = convolution(part.unbind(1), weight, bias)
            x = getattr(inputs, name)
            mixed[name] = x.new_zeros(x.shape, dtype=dtype)
            mixed[name][batch, 0] = (y * sigmoid(y)).unflatten(-1, x.shape[2:])
        o = decode_stepwise(replace(decode, inputs=inputs.replace(**mixed), out=None), run, dtype)[batch]
        o = rms_norm(o, call.norm_weight.to(dtype), call.norm_eps) * sigmoid(call.z[batch].to(dtype))
        v = inputs.v
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if decode.out is None else decode.out
        out.zero_()[batch] = o.to(out.dtype)
        pool[slots] = window[:, 1:].to(pool.dtype)
    return out


@dataclass(frozen=True)
class Sequence:
    """A sequence that takes part: tokens ``first`` and on of batch row ``batch``.

    Attributes:
        slot: where its state is. fresh: whether it starts from zeros all the same.
        stops: after how many tokens a state is kept, and its place (None: nowhere), in order; the length comes last.
    """

    batch: int
    first: int
    slot: int
    fresh: bool
    stops: list[tuple[int, int | None]]


def kept_states(call: PrefillInputs, n: int, length: int) -> list[tuple[int, int | None]]:
    """Offsets inside of sequence n whose states are kept, and the places of these."""
    c, kept = call.checkpoints, call.kept
    if c is None or kept is None:
        return []
    first, end = (min(max(x, 0), c.offsets.shape[0]) for x in c.cu_offsets[n : n + 2].tolist())
    found: list[tuple[int, int | None]] = []
    for i, offset in enumerate(c.offsets[first:end].tolist(), first):
        if not (found[-1][0] if found else 0) < offset <= length:
            continue
        place = i if c.indices is None else int(c.indices[i])
        exists = c.indices is None or (0 <= place < kept.shape[0] and place != call.pad_index)
        found.append((offset, place if exists else None))
    return found


def live_sequences(call: PrefillInputs) -> list[Sequence]:
    """The sequences that have tokens and a slot; the others are padding."""
    indices = None if call.indices is None else call.indices.tolist()
    known = None if call.has_initial_state is None else call.has_initial_state.tolist()
    found = []
    for n, (batch, first, end) in enumerate(spans(call.inputs)):
        slot = n if indices is None else indices[n]
        exists = indices is None or (0 <= slot < call.pool.shape[0] and slot != call.pad_index)
        if end > first and exists:
            stops = kept_states(call, n, end - first)
            if not stops or stops[-1][0] < end - first:
                stops.append((end - first, None))
            found.append(Sequence(batch, first, slot, known is not None and not known[n], stops))
    return found


def prefill_in_pieces(
    call: PrefillInputs, run: Callable[[Inputs], tuple[Tensor, Tensor | None]], dtype: torch.dtype
) -> Tensor:
    """The output ``[B, T, HV, V]``; states go to the pool and to the checkpoints' places as the call asks.

    Args:
        run: computes a forward call.
        dtype: of the states between pieces.
    """
    inputs, pool, kept = call.inputs, call.pool, call.kept
    sequences = live_sequences(call)
    out = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=inputs.v.device) if call.out is None else call.out
    out.zero_()
    with torch.no_grad():
        S = pool[[s.slot for s in sequences]].to(dtype)
        S[[i for i, s in enumerate(sequences) if s.fresh]] = 0.0
        for piece in range(max((len(s.stops) for s in sequences), default=0)):
            active = [i for i, s in enumerate(sequences) if len(s.stops) > piece]
            rows = []
            for s in (sequences[i] for i in active):
                start = s.stops[piece - 1][0] if piece else 0
                rows.append((s.batch, slice(s.first + start, s.first + s.stops[piece][0])))
            lengths = [at.stop - at.start for _, at in rows]
            tokens = {name: torch.cat([getattr(inputs, name)[at] for at in rows])[None] for name in ROWS}
            ends = torch.tensor([0, *lengths], device=pool.device).cumsum(0)
            o, after = run(inputs.replace(**tokens, initial_state=S[active], output_final_state=True, cu_seqlens=ends))
            if after is None:
                raise RuntimeError("a forward call gave no final state")
            S[active] = after
            for at, o_rows in zip(rows, o[0].split(lengths), strict=True):
                out[at] = o_rows
            for i in active:
                if kept is not None and (place := sequences[i].stops[piece][1]) is not None:
                    kept[place] = S[i].to(kept.dtype)
        if call.write_states:
            pool[[s.slot for s in sequences]] = S.to(pool.dtype)
    return out
