"""Argument checks of :func:`flash_kda.kda_decode_step`, in the manner of ``checks``."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from flash_kda.checks import INPUT_DTYPES, check_number
from flash_kda.checks_decode import check_decode, check_dense_last, check_not_shared, check_tensor
from flash_kda.types import Gate, Inputs, StateLayout, StepInputs

ROWS = ("q", "k", "v")


def triple(name: str, x: Any) -> tuple[Any, Any, Any]:
    """One of something for each of q, k and v."""
    # No union of types: torch.compile of torch 2.9 cannot trace one.
    if not isinstance(x, (tuple, list)):
        raise TypeError(f"{name}: got {type(x).__name__}, expected three tensors, of q, k and v")
    if len(x) != 3:
        raise ValueError(f"{name}: got {len(x)} of them, expected three tensors, of q, k and v")
    return x[0], x[1], x[2]


def _check_shape(name: str, x: Tensor, expected: tuple[int, ...], letters: str) -> None:
    if tuple(x.shape) != expected:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {letters} = {expected}")


def _check_z(z: Tensor, inputs: Inputs) -> None:
    check_tensor("z", z, INPUT_DTYPES, inputs.q)
    _check_shape("z", z, tuple(inputs.v.shape), "[N, 1, HV, V]")
    check_dense_last("z", z)


def _check_weights(weights: tuple[Tensor, Tensor, Tensor], inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Check the filters of the convolutions, and bring them into ``[channels, W]``."""
    found: list[Tensor] = []
    for row, x in zip(ROWS, weights, strict=True):
        name, channels = f"conv_weights of {row}", math.prod(getattr(inputs, row).shape[2:])
        check_tensor(name, x, INPUT_DTYPES, inputs.q)
        if x.ndim not in (2, 3) or x.shape[0] != channels or x.shape[-1] < 1 or (x.ndim == 3 and x.shape[1] != 1):
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)}, expected [{channels}, W] or [{channels}, 1, W], W of 1 or more"
            )
        if found and x.shape[-1] != found[0].shape[1]:
            raise ValueError(f"{name}: got W = {x.shape[-1]}, expected {found[0].shape[1]}, that of q")
        found.append(x if x.ndim == 2 else x[:, 0])
    return found[0], found[1], found[2]


def _check_biases(
    biases: tuple[Tensor | None, Tensor | None, Tensor | None], inputs: Inputs
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Check the biases of the convolutions: three of them, or none."""
    q, k, v = biases
    if q is None and k is None and v is None:
        return None
    for row, x in zip(ROWS, biases, strict=True):
        name, channels = f"conv_biases of {row}", math.prod(getattr(inputs, row).shape[2:])
        check_tensor(name, x, INPUT_DTYPES, inputs.q)
        _check_shape(name, x, (channels,), "[channels]")  # type: ignore[arg-type]  # a tensor, as has been checked
        check_dense_last(name, x)  # type: ignore[arg-type]
    return biases  # type: ignore[return-value]


def _check_conv_pool(conv_pool: Tensor, pool: Tensor, weights: tuple[Tensor, Tensor, Tensor], inputs: Inputs) -> None:
    """Check the pool of the convolutions' last inputs, which may have any strides."""
    check_tensor("conv_pool", conv_pool, INPUT_DTYPES, inputs.q)
    expected = (pool.shape[0], weights[0].shape[1] - 1, sum(x.shape[0] for x in weights))
    _check_shape("conv_pool", conv_pool, expected, "[slots, W - 1, channels of q, k and v]")
    check_not_shared("conv_pool", conv_pool)


def _check_norm(norm_weight: Tensor, norm_eps: float, inputs: Inputs) -> None:
    check_tensor("norm_weight", norm_weight, INPUT_DTYPES, inputs.q)
    _check_shape("norm_weight", norm_weight, (inputs.v.shape[3],), "[V]")
    check_dense_last("norm_weight", norm_weight)
    eps = check_number("norm_eps", norm_eps)
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"norm_eps: got {norm_eps}, expected a finite number of 0 or more")


def check_step(
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
    out: Tensor | None,
    gate: Gate,
    norm_eps: float,
    scale: float | None,
    qk_l2norm: bool,
    beta_is_logit: bool,
    allow_neg_eigval: bool,
    state_layout: StateLayout,
    pad_index: int,
) -> StepInputs:
    """Check the arguments of :func:`flash_kda.kda_decode_step` and bring them into one value; see ``check_decode``."""
    decode = check_decode(
        q,
        k,
        v,
        g,
        beta,
        pool,
        indices,
        num_accepted=None,
        has_initial_state=has_initial_state,
        cu_seqlens=None,
        out=out,
        gate=gate,
        scale=scale,
        qk_l2norm=qk_l2norm,
        beta_is_logit=beta_is_logit,
        allow_neg_eigval=allow_neg_eigval,
        state_layout=state_layout,
        pad_index=pad_index,
        write_states=True,
    )
    inputs = decode.inputs
    if q.shape[1] != 1:
        raise ValueError(f"q: got T = {q.shape[1]} tokens a row, expected 1; kda_decode takes up to 16")
    if indices is not None and indices.ndim != 1:
        raise ValueError(f"indices: got shape {tuple(indices.shape)}, expected [N] = {(q.shape[0],)}")
    _check_z(z, inputs)
    weights = _check_weights((q_weight, k_weight, v_weight), inputs)
    biases = _check_biases((q_bias, k_bias, v_bias), inputs)
    _check_conv_pool(conv_pool, pool, weights, inputs)
    _check_norm(norm_weight, norm_eps, inputs)
    return StepInputs(decode, z, conv_pool, weights, biases, norm_weight, float(norm_eps))
