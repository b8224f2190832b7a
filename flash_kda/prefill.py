"""The public function for serving prefills: whole sequences, their states in a pool, and states on the way.

Sequence n has one slot of the pool: ``indices[n]``, or n without indices. Its state before its first token is read
there, and the state after its last token goes there. A sequence whose slot is ``pad_index`` or lies outside of the pool
is padding: its output is zeros, and nothing is written for it, checkpoints included. No index wraps and none is an
error, on any backend. A sequence without tokens writes nothing either, so its slot keeps its bits.

A checkpoint (:class:`flash_kda.Checkpoints`) is the state after some of a sequence's tokens, stored in the same call
into a tensor of its own or into further slots of the pool, such as the blocks of a prefix cache. One at the sequence's
length is the state after its last token: with ``write_states=False`` a sequence so starts from one slot, which others
may share, and ends in another.

This is not part of :func:`flash_kda.kda`, which changes no argument, returns new states and has gradients. Here states
are updated in place, and there is no gradient; half of the arguments of either would be refused beside those of the
other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_kda import dispatch, forms, ops
from flash_kda.checks_prefill import check_prefill
from flash_kda.types import Checkpoints, Gate, Prefiller, PrefillInputs, PrefillTensors, StateLayout


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    gate: Gate,
    pool: Tensor,
    indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    checkpoints: Checkpoints | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    beta_is_logit: bool = True,
    allow_neg_eigval: bool = False,
    state_layout: StateLayout = "vk",
    pad_index: int = -1,
    write_states: bool = True,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Whole sequences by :func:`flash_kda.kda`'s recurrence, long and short ones in one call, with states in a pool.

    The pool is updated in place. ``help("flash_kda.prefill")`` says which slots a sequence reads and writes, which
    sequences are padding, and why this is not :func:`flash_kda.kda`. A slot that a sequence or a checkpoint writes must
    be no other's, neither to read nor to write.

    Args:
        q, k, v, g, beta, gate, scale, cu_seqlens, qk_l2norm, beta_is_logit, allow_neg_eigval, backend: as for
            :func:`flash_kda.kda`.
        pool: states ``[slots, HV, V, K]``, or ``[slots, HV, K, V]`` with ``state_layout="kv"``, float32 or bfloat16
            (float64 on the CPU), last dimension dense. States are float32 inside; a bfloat16 pool rounds what it keeps.
        indices: ``[N]`` int32 or int64, any stride. None: sequence n has slot n.
        has_initial_state: ``[N]`` bool; a sequence with False starts from zeros, whatever its slot holds. None: all
            True.
        checkpoints: the states inside of sequences that are kept, and where. None: none.
        pad_index: the index of padding, such as -1 or 0, of slots and of the places of checkpoints.
        write_states: False leaves the sequences' slots as they are; checkpoints are stored all the same.
        out: where the output goes, of v's shape and dtype, last dimension dense.

    Returns:
        The output ``[B, T, HV, V]`` in v's dtype: ``out`` if it was given. Nothing but pool, ``checkpoints.states`` and
        ``out`` is changed. On a GPU a call never waits for the device, allocates the output and scratch memory alone,
        and can be captured into a CUDA graph, whose replay reads boundaries, indices, masks and offsets anew.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what came and what was expected.
        NotImplementedError: no backend can run it, for instance since a gradient is wanted; each one's reason is given.
    """
    if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
        raise TypeError(f"checkpoints: got {type(checkpoints).__name__}, expected flash_kda.Checkpoints or None")
    kept = (None, None, None, None) if checkpoints is None else checkpoints.tensors
    tensors = (q, k, v, g, beta, pool, indices, has_initial_state, cu_seqlens, *kept, out)
    options = (scale, qk_l2norm, beta_is_logit, allow_neg_eigval, state_layout, pad_index, write_states)
    run = _traced if torch.compiler.is_compiling() else _prefill
    return run(tensors, gate, options, checkpoints is not None, backend)


def _prefill(
    tensors: PrefillTensors, gate: Gate, options: tuple[Any, ...], has_checkpoints: bool, backend: str
) -> Tensor:
    """Run a call."""
    check = _check_checkpoints if has_checkpoints else _check
    return forms.run(("prefill", has_checkpoints), tensors, gate, options, backend, check, _launch)


def _check(tensors: PrefillTensors, gate: Gate, options: tuple[Any, ...]) -> PrefillInputs:
    *others, _, _, _, _, out = tensors
    arguments: Any = (*others, None, out, gate, *options)
    return check_prefill(*arguments)


def _check_checkpoints(tensors: PrefillTensors, gate: Gate, options: tuple[Any, ...]) -> PrefillInputs:
    *others, offsets, cu_offsets, states, indices, out = tensors
    # What is no tensor here the checks name.
    checkpoints = Checkpoints(offsets, cu_offsets, states, indices)  # type: ignore[arg-type]
    arguments: Any = (*others, checkpoints, out, gate, *options)
    return check_prefill(*arguments)


def _launch(module: dispatch.Backend, call: PrefillInputs) -> tuple[Tensor, Prefiller | None]:
    return module.run_prefill(call)


@torch.library.custom_op("flash_kda::prefill", mutates_args=("pool", "states"))
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    indices: Tensor | None,
    has_initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    offsets: Tensor | None,
    cu_offsets: Tensor | None,
    states: Tensor | None,
    places: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    kind: str,
    lower_bound: float,
    scale: float | None,
    qk_l2norm: bool,
    beta_is_logit: bool,
    allow_neg_eigval: bool,
    state_layout: str,
    pad_index: int,
    write_states: bool,
    has_checkpoints: bool,
    backend: str,
) -> Tensor:
    """A call as one operator of torch, for torch.compile; its arguments are checked when it runs."""
    rows = (q, k, v, g, beta, pool, indices, has_initial_state, cu_seqlens)
    options = (scale, qk_l2norm, beta_is_logit, allow_neg_eigval, state_layout, pad_index, write_states)
    gate = ops.make_gate(kind, A_log, dt_bias, lower_bound)
    return _prefill((*rows, offsets, cu_offsets, states, places, None), gate, options, has_checkpoints, backend)


_operator.register_fake(ops.like_v)


def _traced(
    tensors: PrefillTensors, gate: Gate, options: tuple[Any, ...], has_checkpoints: bool, backend: str
) -> Tensor:
    """A call as a node of a graph."""
    *others, out = tensors
    o: Tensor = _operator(*others, *ops.gate_arguments(gate), *options, has_checkpoints, backend)
    return o if out is None else out.copy_(o)
