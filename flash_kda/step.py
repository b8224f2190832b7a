"""The public function for one token of a whole layer: everything between its input and output projections.

Row n has one slot, ``indices[n]``, or n without indices, in two pools. One holds its state, the other the last inputs
of its convolutions; both are read before its token and written after it. A row whose slot is ``pad_index`` or lies
outside of the pools is padding: its output is zeros and it touches no slot. No index wraps and none is an error, on any
backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_kda import dispatch, forms, ops
from flash_kda.checks_step import check_step, triple
from flash_kda.types import Gate, StateLayout, StepInputs, Stepper, StepTensors


def kda_decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    z: Tensor,
    *,
    gate: Gate,
    pool: Tensor,
    conv_pool: Tensor,
    conv_weights: Sequence[Tensor],
    conv_biases: Sequence[Tensor] | None = None,
    norm_weight: Tensor,
    norm_eps: float = 1e-5,
    indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    beta_is_logit: bool = True,
    allow_neg_eigval: bool = False,
    state_layout: StateLayout = "vk",
    pad_index: int = -1,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """One token of each of N rows through short convolutions, :func:`flash_kda.kda_decode` and a gated norm.

    For each row and value head, with the channels of the projections ``x`` and W taps ``w`` in every channel::

        q, k, v = silu(bias + sum_i w[i] x_{t - W + 1 + i})        the last W - 1 inputs come from conv_pool
        o       = kda_decode(q, k, v, g, beta)                     the state comes from pool
        out     = o / sqrt(mean(o^2) + norm_eps) * norm_weight * sigmoid(z)

    Nothing between the arguments and the output is rounded to their dtype: it is float32 (float64 on the ``reference``
    backend). Both pools are updated in place. ``help("flash_kda.step")`` says which rows are padding. A slot must be no
    other row's.

    Args:
        q, k: ``[N, 1, H, K]``, v: ``[N, 1, HV, V]``, what the projections give, before the convolutions.
        g, beta, gate, scale, qk_l2norm, beta_is_logit, allow_neg_eigval, backend: as for :func:`flash_kda.kda`.
            q, k, v, g, beta and z may be strided views, such as parts of one fused projection.
        z: ``[N, 1, HV, V]``, any float dtype: the raw output gate.
        pool: states as for :func:`flash_kda.kda_decode`, in ``state_layout``.
        conv_pool: ``[slots, W - 1, H * K + H * K + HV * V]``, any float dtype: the last inputs of the convolutions of
            q, k and v beside each other, the oldest first. Any strides: a pool ``[slots, channels, W - 1]`` goes in as
            ``conv_pool.mT``.
        conv_weights: of q, k and v: ``[channels, W]``, or ``[channels, 1, W]`` as an ``nn.Conv1d`` has them; any float
            dtype and strides.
        conv_biases: of q, k and v, ``[channels]``, any float dtype; None for none.
        norm_weight: ``[V]``, any float dtype. norm_eps: added to the mean square.
        indices: ``[N]`` int32 or int64, any strides, for both pools. None: row n has slot n.
        has_initial_state: ``[N]`` bool; a row with False starts from zeros, whatever its slots hold. None: all True.
        pad_index: the index of padding, such as -1 or 0.
        out: where the output goes, of v's shape and dtype, last dimension dense.

    Returns:
        ``[N, 1, HV, V]`` in v's dtype, for the output projection: ``out`` if it was given. On a GPU a call is one
        kernel with the promises of :func:`flash_kda.kda_decode`.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what came and what was expected.
        NotImplementedError: no backend can run it, for instance since a gradient is wanted; each one's reason is given.
    """
    weights = triple("conv_weights", conv_weights)
    biases = (None, None, None) if conv_biases is None else triple("conv_biases", conv_biases)
    tensors = (
        *(q, k, v, g, beta, z, pool, conv_pool, indices, has_initial_state),
        *(*weights, *biases, norm_weight, out),
    )
    options = (norm_eps, scale, qk_l2norm, beta_is_logit, allow_neg_eigval, state_layout, pad_index)
    run = _traced if torch.compiler.is_compiling() else _step
    return run(tensors, gate, options, backend)


def _step(tensors: StepTensors, gate: Gate, options: tuple[Any, ...], backend: str) -> Tensor:
    """Run a call."""
    return forms.run(("step",), tensors, gate, options, backend, _check, _launch)


def _check(tensors: StepTensors, gate: Gate, options: tuple[Any, ...]) -> StepInputs:
    return check_step(*tensors, gate, *options)


def _launch(module: dispatch.Backend, call: StepInputs) -> tuple[Tensor, Stepper | None]:
    return module.run_step(call)


@torch.library.custom_op("flash_kda::decode_step", mutates_args=("pool", "conv_pool"))
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    z: Tensor,
    pool: Tensor,
    conv_pool: Tensor,
    indices: Tensor | None,
    has_initial_state: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    q_bias: Tensor | None,
    k_bias: Tensor | None,
    v_bias: Tensor | None,
    norm_weight: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    kind: str,
    lower_bound: float,
    norm_eps: float,
    scale: float | None,
    qk_l2norm: bool,
    beta_is_logit: bool,
    allow_neg_eigval: bool,
    state_layout: str,
    pad_index: int,
    backend: str,
) -> Tensor:
    """A call as one operator of torch, for torch.compile; its arguments are checked when it runs."""
    pools = (pool, conv_pool, indices, has_initial_state)
    convolutions = (q_weight, k_weight, v_weight, q_bias, k_bias, v_bias)
    options = (norm_eps, scale, qk_l2norm, beta_is_logit, allow_neg_eigval, state_layout, pad_index)
    tensors = (q, k, v, g, beta, z, *pools, *convolutions, norm_weight, None)
    return _step(tensors, ops.make_gate(kind, A_log, dt_bias, lower_bound), options, backend)


_operator.register_fake(ops.like_v)


def _traced(tensors: StepTensors, gate: Gate, options: tuple[Any, ...], backend: str) -> Tensor:
    """A call as a node of a graph."""
    *others, out = tensors
    o: Tensor = _operator(*others, *ops.gate_arguments(gate), *options, backend)
    return o if out is None else out.copy_(o)
