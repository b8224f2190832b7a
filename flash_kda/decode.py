"""The public function for serving: one or a few tokens of many rows, their states in a pool.

Row n reads its state from a slot of the pool, goes through its tokens, and leaves a state in the pool:

- ``indices`` ``[N]``: it reads slot ``indices[n]`` and writes the state after its last token there.
- ``indices`` ``[N, W]``, one slot per token (speculative decoding): it reads slot ``indices[n, a - 1]`` with
  ``a = num_accepted[n]``, and writes the state after its token t to ``indices[n, t]``. The next call, told how many of
  these tokens were accepted, starts after the last of them. ``a = 0``, nothing verified yet, is read as 1: the state is
  in the row's first slot. So rows that drafted nothing need no call of their own.
- ``indices`` None: row n has slot n.

A row is padding if the slot that it reads is ``pad_index`` or lies outside of the pool, or if ``num_accepted`` lies
outside of 0..W: its output is zeros and it writes no slot. Where only the slot that a state after a token goes to is
``pad_index`` or outside of the pool, that state is dropped and the row is computed all the same. No index wraps and
none is an error, on any backend. A row without tokens writes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_kda import dispatch, forms, ops
from flash_kda.checks_decode import check_decode
from flash_kda.types import DecodeInputs, Decoder, DecodeTensors, Gate, StateLayout


def kda_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    gate: Gate,
    pool: Tensor,
    indices: Tensor | None = None,
    num_accepted: Tensor | None = None,
    has_initial_state: Tensor | None = None,
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
    """One to 16 tokens of each of N rows, by :func:`flash_kda.kda`'s recurrence, with the states in a pool.

    The pool is updated in place. ``help("flash_kda.decode")`` says which slots a row reads and writes, and which rows
    are padding. A slot that a row writes must be no other row's.

    Args:
        q, k, v, g, beta, gate, scale, qk_l2norm, beta_is_logit, allow_neg_eigval, backend: as for
            :func:`flash_kda.kda`, ``[N, T, ...]`` with T at most 16, or packed. Strided views, such as parts of one
            fused projection, are read where they lie.
        pool: states ``[slots, HV, V, K]``, or ``[slots, HV, K, V]`` with ``state_layout="kv"``, float32 or bfloat16
            (float64 on the CPU), last dimension dense. States are float32 inside; a bfloat16 pool rounds what it keeps.
        indices: ``[N]``, or ``[N, W]`` with W at least T; int32 or int64, any strides. None: row n has slot n.
        num_accepted: ``[N]`` int32 or int64, for ``indices`` ``[N, W]``; None means 1 everywhere.
        has_initial_state: ``[N]`` bool; a row with False starts from zeros, whatever its slot holds. None: all True.
        cu_seqlens: ``[N + 1]`` int32 or int64, boundaries of rows packed along T as for :func:`flash_kda.kda`. On a GPU
            lengths are not checked: a longer row is computed, and of ``[N, W]`` W states are kept.
        pad_index: the index of padding, such as -1 or 0.
        write_states: False leaves the pool as it is.
        out: where the output goes, of v's shape and dtype, last dimension dense.

    Returns:
        The output ``[N, T, HV, V]`` (or packed) in v's dtype: ``out`` if it was given. Nothing but pool and ``out`` is
        changed. On a GPU a call is one kernel, never waits for the device, allocates nothing but the output, and can be
        captured into a CUDA graph, whose replay reads indices, lengths and counts anew.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what came and what was expected.
        NotImplementedError: no backend can run it, for instance since a gradient is wanted; each one's reason is given.
    """
    tensors = (q, k, v, g, beta, pool, indices, num_accepted, has_initial_state, cu_seqlens, out)
    options = (scale, qk_l2norm, beta_is_logit, allow_neg_eigval, state_layout, pad_index, write_states)
    run = _traced if torch.compiler.is_compiling() else _decode
    return run(tensors, gate, options, backend)


def _decode(tensors: DecodeTensors, gate: Gate, options: tuple[Any, ...], backend: str) -> Tensor:
    """Run a call."""
    return forms.run(("decode",), tensors, gate, options, backend, _check, _launch)


def _check(tensors: DecodeTensors, gate: Gate, options: tuple[Any, ...]) -> DecodeInputs:
    return check_decode(*tensors, gate, *options)


def _launch(module: dispatch.Backend, call: DecodeInputs) -> tuple[Tensor, Decoder | None]:
    return module.run_decode(call)


@torch.library.custom_op("flash_kda::decode", mutates_args=("pool",))
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    indices: Tensor | None,
    num_accepted: Tensor | None,
    has_initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
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
    backend: str,
) -> Tensor:
    """A call as one operator of torch, for torch.compile; its arguments are checked when it runs."""
    tensors = (q, k, v, g, beta, pool, indices, num_accepted, has_initial_state, cu_seqlens, None)
    options = (scale, qk_l2norm, beta_is_logit, allow_neg_eigval, state_layout, pad_index, write_states)
    return _decode(tensors, ops.make_gate(kind, A_log, dt_bias, lower_bound), options, backend)


_operator.register_fake(ops.like_v)


def _traced(tensors: DecodeTensors, gate: Gate, options: tuple[Any, ...], backend: str) -> Tensor:
    """A call as a node of a graph."""
    *others, out = tensors
    o: Tensor = _operator(*others, *ops.gate_arguments(gate), *options, backend)
    return o if out is None else out.copy_(o)
