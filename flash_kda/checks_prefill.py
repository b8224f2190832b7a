"""Argument checks of :func:`flash_kda.kda_prefill`, in the manner of ``checks``."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from flash_kda.checks import STATE_DTYPES, check
from flash_kda.checks_decode import (
    INDEX_DTYPES,
    check_flag,
    check_indices,
    check_known,
    check_out,
    check_pad_index,
    check_pool,
    check_states,
    check_tensor,
)
from flash_kda.types import Checkpoints, Gate, Inputs, PrefillInputs, StateLayout


def _check_entries(name: str, x: Tensor, q: Tensor, size: int | None, expected: str) -> None:
    """Check integers in one dimension."""
    check_tensor(name, x, INDEX_DTYPES, q)
    if x.ndim != 1 or (size is not None and x.shape[0] != size):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {expected}")


def check_checkpoints(c: Checkpoints, inputs: Inputs) -> None:
    """Check checkpoints against the sequences, but for the values of offsets."""
    if not isinstance(c, Checkpoints):
        raise TypeError(f"checkpoints: got {type(c).__name__}, expected flash_kda.Checkpoints or None")
    q, N = inputs.q, inputs.num_sequences
    _check_entries("checkpoints.offsets", c.offsets, q, None, "[M]")
    M = c.offsets.shape[0]
    _check_entries("checkpoints.cu_offsets", c.cu_offsets, q, N + 1, f"[N + 1] = {(N + 1,)}")
    if c.indices is not None:
        _check_entries("checkpoints.indices", c.indices, q, M, f"[M] = {(M,)}, one for each offset")
    if c.states is None:
        if c.indices is None:
            raise ValueError("checkpoints: got neither states nor indices, expected either or both")
        return
    check_tensor("checkpoints.states", c.states, STATE_DTYPES, q)
    check_states("checkpoints.states", c.states, inputs, "places")
    if c.indices is None and c.states.shape[0] < M:
        raise ValueError(
            f"checkpoints.states: got {c.states.shape[0]} places, expected one for each of M = {M} offsets "
            "without indices"
        )


def check_offsets(c: Checkpoints, lengths: list[int]) -> None:
    """Check the values of boundaries and offsets, which must lie on the CPU: elsewhere that would wait."""
    ends, offsets = c.cu_offsets.tolist(), c.offsets.tolist()
    if ends[0] != 0:
        raise ValueError(f"checkpoints.cu_offsets: got first entry {ends[0]}, expected 0")
    for n, (a, b) in enumerate(pairwise(ends)):
        if b < a:
            raise ValueError(
                f"checkpoints.cu_offsets: got {b} after {a} at index {n + 1}, expected non-decreasing entries"
            )
    if ends[-1] > len(offsets):
        raise ValueError(f"checkpoints.cu_offsets: got last entry {ends[-1]}, expected at most M = {len(offsets)}")
    for n, (a, b) in enumerate(pairwise(ends)):
        inside = [offset for offset in offsets[a:b] if 0 < offset <= lengths[n]]
        for first, second in pairwise(inside):
            if second <= first:
                raise ValueError(
                    f"checkpoints.offsets: got {second} after {first} in sequence {n}, expected increasing offsets"
                )


def check_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    indices: Tensor | None,
    has_initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    checkpoints: Checkpoints | None,
    out: Tensor | None,
    gate: Gate,
    scale: float | None,
    qk_l2norm: bool,
    beta_is_logit: bool,
    allow_neg_eigval: bool,
    state_layout: StateLayout,
    pad_index: int,
    write_states: bool,
) -> PrefillInputs:
    """Check the arguments of :func:`flash_kda.kda_prefill` and bring them into one value. Reads no data on a GPU."""
    options = (cu_seqlens, qk_l2norm, beta_is_logit, allow_neg_eigval, state_layout)
    inputs = check(q, k, v, g, beta, gate, scale, None, False, *options)
    check_pool(pool, inputs)
    check_indices(indices, pool, inputs)
    if indices is not None and indices.ndim != 1:
        raise ValueError(f"indices: got shape {tuple(indices.shape)}, expected [N] = {(inputs.num_sequences,)}")
    check_known(has_initial_state, inputs)
    check_pad_index(pad_index)
    check_flag("write_states", write_states)
    if out is not None:
        check_out(out, inputs)
    if checkpoints is not None:
        check_checkpoints(checkpoints, inputs)
        if q.is_cpu:
            lengths = [q.shape[1]] * q.shape[0] if cu_seqlens is None else cu_seqlens.diff().tolist()
            check_offsets(checkpoints, lengths)
    return PrefillInputs(inputs, pool, indices, has_initial_state, checkpoints, pad_index, write_states, out)
