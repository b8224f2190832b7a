"""The public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_kda import dispatch, forms, ops
from flash_kda.checks import check
from flash_kda.types import ForwardTensors, Gate, Inputs, Maybe, Runner, StateLayout


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    gate: Gate,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    qk_l2norm: bool = True,
    beta_is_logit: bool = True,
    allow_neg_eigval: bool = False,
    state_layout: StateLayout = "vk",
    recompute: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention over whole sequences.

    Per sequence and value head, with ``a_t = exp(g_t)`` and the state ``S`` in R^(K x V)::

        S'  = Diag(a_t) S_{t-1}
        S_t = S' + k_t^T beta_t (v_t - k_t S')
        o_t = scale * q_t S_t

    (Kimi Linear, arXiv:2510.26692, eq. 1; docs/derivation.md derives the chunk form that the backends compute.)

    Args:
        q, k: ``[B, T, H, K]`` bfloat16, float16 or float32 (float64 on the CPU).
        v: ``[B, T, HV, V]``, dtype of q. HV is a multiple of H; value head i uses query/key head ``i // (HV / H)``.
        g: ``[B, T, HV, K]``, any float dtype: the raw gate, or the natural-log decay with :class:`LogGate`.
        beta: ``[B, T, HV]``, any float dtype: logits, or the values themselves with ``beta_is_logit=False``.
        gate: :class:`LowerBoundGate`, :class:`SoftplusGate` or :class:`LogGate`: what g means.
        scale: factor on q; None means ``K ** -0.5``.
        initial_state: state before each sequence, float32 or bfloat16, in ``state_layout``; None means zeros.
        output_final_state: whether to return the state after each sequence.
        cu_seqlens: ``[N + 1]`` int32 or int64 on q's device: boundaries of N sequences packed along T (then B = 1),
            starting with 0 and not decreasing. Rows from ``cu_seqlens[-1]`` on give zeros. The values are checked
            when they lie on the CPU; on a GPU a check would wait for the device, so there they are the caller's word.
        qk_l2norm: normalise q and k, ``x * rsqrt(sum(x^2) + 1e-6)``, before use.
        beta_is_logit: take ``sigmoid(beta)``.
        allow_neg_eigval: take ``2 * sigmoid(beta)``, so that the transition may have negative eigenvalues.
        state_layout: ``"vk"`` for states ``[N, HV, V, K]``, ``"kv"`` for ``[N, HV, K, V]``.
        recompute: whether the backward prepares the chunks again. With False a GPU keeps what the forward prepared:
            more memory until the backward, which is then faster and has the same bits (docs/training.md). Without
            effect on the CPU and where no gradient is wanted.
        backend: ``"auto"``, or one of ``flash_kda.BACKENDS``.

    Returns:
        ``o`` ``[B, T, HV, V]`` in v's dtype, and the final state (the initial state's dtype, otherwise float32), or
        None. The inputs are never changed. Gradients flow to q, k, v, g, beta, A_log, dt_bias and initial_state.

    Under ``torch.compile`` a call is one operator of the graph, ``flash_kda::forward``, and its gradients are another,
    ``flash_kda::backward``; these can be taken once.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what came and what was expected.
        NotImplementedError: no backend can run the call; the message gives each one's reason.
    """
    tensors = (q, k, v, g, beta, initial_state, cu_seqlens, None, None)
    options = (scale, output_final_state, qk_l2norm, beta_is_logit, allow_neg_eigval, state_layout, recompute)
    if torch.compiler.is_compiling():
        return ops.traced(*_arguments(tensors, gate, (*options, backend)))
    return forms.run(("kda",), tensors, gate, options, backend, _check, _launch, differentiable=True)


def _arguments(tensors: ForwardTensors, gate: Gate, options: tuple[Any, ...]) -> Any:
    """The arguments of the checks, in their order."""
    *rows, initial_state, cu_seqlens, _, _ = tensors
    scale, output_final_state, *others = options
    return *rows, gate, scale, initial_state, output_final_state, cu_seqlens, *others


def _check(tensors: ForwardTensors, gate: Gate, options: tuple[Any, ...]) -> Inputs:
    return check(*_arguments(tensors, gate, options))


def _launch(module: dispatch.Backend, inputs: Inputs) -> tuple[tuple[Tensor, Maybe], Runner | None]:
    return module.run(inputs), module.runner(inputs)
