"""KDA as one operator of torch, for torch.compile: the graph holds a node, and the backend is chosen when it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_kda import dispatch
from flash_kda.checks import check
from flash_kda.types import Gate, Inputs, LogGate, LowerBoundGate, SoftplusGate, StateLayout, gate_parameters


def make_gate(kind: str, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float) -> Gate:
    """The gate value of an operator's arguments."""
    if kind == "lower_bound":
        return LowerBoundGate(A_log, dt_bias, lower_bound)
    return SoftplusGate(A_log, dt_bias) if kind == "softplus" else LogGate()


def gate_arguments(gate: Gate) -> tuple[Tensor | None, Tensor | None, str, float]:
    """A gate as operators take it: A_log, dt_bias, kind and lower bound; see :func:`make_gate`."""
    return *gate_parameters(gate), gate.kind, gate.lower_bound if isinstance(gate, LowerBoundGate) else 0.0


def like_v(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    """The output of an operator that returns nothing else, without data."""
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


def _arguments(tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """The arguments of the checks in their order, which is that of ``Inputs``, from the operators' own.

    Args:
        tensors: the operator's, from q to cu_seqlens. options: the others, without the backend.
    """
    *rows, A_log, dt_bias, initial_state, cu_seqlens = tensors
    kind, lower_bound, scale, output_final_state, *others = options
    gate = make_gate(kind, A_log, dt_bias, lower_bound)
    return *rows, gate, scale, initial_state, output_final_state, cu_seqlens, *others


@torch.library.custom_op("flash_kda::forward", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    gate: str,
    lower_bound: float,
    scale: float | None,
    output_final_state: bool,
    qk_l2norm: bool,
    beta_is_logit: bool,
    allow_neg_eigval: bool,
    state_layout: str,
    backend: str,
    recompute: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`flash_kda.kda`, and what it keeps for the backward; what is not asked for is an empty tensor."""
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    flags = (qk_l2norm, beta_is_logit, allow_neg_eigval, state_layout, recompute)
    inputs = check(*_arguments(tensors, (gate, lower_bound, scale, output_final_state, *flags)))
    with torch.no_grad():
        o, state, kept = dispatch.run_keeping(inputs, backend)
        if kept is None and _kept_bytes(inputs, backend):
            # The graph counts on it. It is of rows as they may lie by the time of the backward, which looks at that.
            rows = {name: getattr(inputs, name).clone() for name in ("q", "k", "v", "g")}
            kept = dispatch.run_keeping(inputs.replace(**rows), backend)[2]
    nothing = q.new_empty(0, dtype=torch.uint8)
    return o.contiguous(), q.new_empty(0) if state is None else state, nothing if kept is None else kept


def _kept_bytes(inputs: Inputs, backend: str) -> int:
    """What the forward keeps."""
    return 0 if inputs.recompute else dispatch.kept_bytes(inputs.signature.problem_with_gradient, backend)


@forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    gate: str,
    lower_bound: float,
    scale: float | None,
    output_final_state: bool,
    qk_l2norm: bool,
    beta_is_logit: bool,
    allow_neg_eigval: bool,
    state_layout: str,
    backend: str,
    recompute: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    # Not checked, since no data can be read here: only what these arguments say of the other results is asked.
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    flags = (qk_l2norm, beta_is_logit, allow_neg_eigval, state_layout, recompute)
    inputs = Inputs(*_arguments(tensors, (gate, lower_bound, scale or 0.0, True, *flags)))
    kept = q.new_empty(_kept_bytes(inputs, backend), dtype=torch.uint8)
    state = q.new_empty(inputs.state_shape, dtype=inputs.state_dtype) if output_final_state else q.new_empty(0)
    return o, state, kept


@torch.library.custom_op("flash_kda::backward", mutates_args=())
def backward(
    do: Tensor,
    dS: Tensor,
    kept: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    gate: str,
    lower_bound: float,
    scale: float | None,
    output_final_state: bool,
    qk_l2norm: bool,
    beta_is_logit: bool,
    allow_neg_eigval: bool,
    state_layout: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`forward` for its first eight tensors, empty for those that are absent.

    Args:
        dS: empty for zero. kept: the forward's.
    """
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    options = (gate, lower_bound, scale, output_final_state, qk_l2norm, beta_is_logit, allow_neg_eigval, state_layout)
    inputs = check(*_arguments(tensors, options))
    found = dispatch.gradients(inputs, backend, do, dS if dS.numel() else None, kept if kept.numel() else None)
    sources = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    # An operator's results share no memory with its arguments.
    a, b, c, d, e, f, h, s = (
        q.new_empty(0) if x is None or like is None else x.reshape(like.shape).clone() if x is dS else _dense(x, like)
        for x, like in zip(found, sources, strict=True)
    )
    return a, b, c, d, e, f, h, s


def _dense(x: Tensor, like: Tensor) -> Tensor:
    return x.reshape(like.shape).contiguous()


@backward.register_fake
def _(
    do: Tensor,
    dS: Tensor,
    kept: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    a, b, c, d, e, f, h, s = (
        q.new_empty(0) if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in (q, k, v, g, beta, A_log, dt_bias, initial_state)
    )
    return a, b, c, d, e, f, h, s


# Tensors among the arguments of the operator, all but the last with gradients.
TENSORS = 9


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    # Otherwise there would be zeros for what is kept, too.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSORS], output[2])
    *ctx.options, _ = inputs[TENSORS:]


def _gradients(ctx: Any, do: Tensor | None, dS: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    *tensors, kept = ctx.saved_tensors
    v = tensors[2]
    do = torch.zeros(v.shape, dtype=v.dtype, device=v.device) if do is None else do
    found = backward(do, v.new_empty(0) if dS is None else dS, kept, *tensors, *ctx.options)
    return *(None if x is None else d for d, x in zip(found, tensors, strict=False)), *[None] * (len(ctx.options) + 2)


forward.register_autograd(_gradients, setup_context=_keep)


def _no_second_derivatives(ctx: Any, *_: Tensor) -> None:
    raise NotImplementedError(
        "flash_kda::backward has no second derivatives; a call that is not compiled, with backend='reference', can be "
        "differentiated twice"
    )


backward.register_autograd(_no_second_derivatives)


def traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    gate: Gate,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    qk_l2norm: bool,
    beta_is_logit: bool,
    allow_neg_eigval: bool,
    state_layout: StateLayout,
    recompute: bool,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """A call of :func:`flash_kda.kda` as one node; its arguments are checked when the node runs."""
    A_log, dt_bias, kind, lower_bound = gate_arguments(gate)
    given = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    o, state, _ = forward(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state,
        cu_seqlens,
        kind,
        lower_bound,
        scale,
        output_final_state,
        qk_l2norm,
        beta_is_logit,
        allow_neg_eigval,
        state_layout,
        backend,
        recompute if wanted else True,
    )
    return o, state if output_final_state else None
