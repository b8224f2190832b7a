"""Argument checks of :func:`flash_kda.kda_decode`, in the manner of ``checks``."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from flash_kda.checks import STATE_DTYPES, check
from flash_kda.types import DecodeInputs, Gate, Inputs, StateLayout

# More tokens of a row than this are a prefill: it has matrix products for them.
MOST_TOKENS = 16
INDEX_DTYPES = (torch.int32, torch.int64)


def check_tensor(name: str, x: object, allowed: tuple[torch.dtype, ...], q: Tensor) -> None:
    """Check that an argument is a tensor of one of some dtypes, where q is."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, expected a torch.Tensor")
    if x.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise TypeError(f"{name}: got {x.dtype}, expected one of {names}")
    if x.device != q.device:
        raise ValueError(f"{name}: got device {x.device}, expected {q.device}, where q is")


def check_dense_last(name: str, x: Tensor) -> None:
    """Check that what lies along the last dimension lies side by side."""
    if x.numel() and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(
            f"{name}: got last-dimension stride {x.stride(-1)}, expected 1; the other dimensions may be strided"
        )


def check_not_shared(name: str, x: Tensor) -> None:
    """Check that no two states of a tensor that is written have memory in common."""
    if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(f"{name}: got strides {x.stride()}, expected states that do not share memory")


def check_states(name: str, x: Tensor, inputs: Inputs, first: str) -> None:
    """Check a tensor of states that is written; ``first`` is the letter of its first dimension."""
    letters = f"[{first}, HV, V, K]" if inputs.state_layout == "vk" else f"[{first}, HV, K, V]"
    expected = inputs.state_shape[1:]
    if x.ndim != 4 or tuple(x.shape[1:]) != expected:
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}, expected {letters} with {expected} after the first dimension"
        )
    check_dense_last(name, x)
    check_not_shared(name, x)


def check_pool(pool: Tensor, inputs: Inputs) -> None:
    """Check the pool against the rows."""
    check_tensor("pool", pool, STATE_DTYPES, inputs.q)
    check_states("pool", pool, inputs, "slots")


def check_indices(indices: Tensor | None, pool: Tensor, inputs: Inputs) -> None:
    """Check the shape of the slot indices; what they hold is for the kernels to mask."""
    N = inputs.num_sequences
    if indices is None:
        if pool.shape[0] < N:
            raise ValueError(f"pool: got {pool.shape[0]} slots, expected one for each of N = {N} rows without indices")
        return
    check_tensor("indices", indices, INDEX_DTYPES, inputs.q)
    if indices.ndim not in (1, 2) or indices.shape[0] != N:
        raise ValueError(f"indices: got shape {tuple(indices.shape)}, expected [N] or [N, W] with N = {N}")


def check_lengths(inputs: Inputs, indices: Tensor | None) -> None:
    """Check how many tokens a row has, where that can be known without waiting for a device."""
    if inputs.cu_seqlens is None:
        longest = inputs.q.shape[1]
        name = "q"
    elif inputs.cu_seqlens.device.type == "cpu":
        longest = max((b - a for a, b in pairwise(inputs.cu_seqlens.tolist())), default=0)
        name = "cu_seqlens"
    else:
        return
    if longest > MOST_TOKENS:
        raise ValueError(f"{name}: got a row of {longest} tokens, expected at most {MOST_TOKENS}; kda takes any number")
    if indices is not None and indices.ndim == 2 and indices.shape[1] < longest:
        raise ValueError(
            f"indices: got W = {indices.shape[1]} slots a row, expected at least one for each of {longest} tokens"
        )


def check_row_values(name: str, x: Tensor, allowed: tuple[torch.dtype, ...], inputs: Inputs) -> None:
    """Check one value per row."""
    check_tensor(name, x, allowed, inputs.q)
    if tuple(x.shape) != (inputs.num_sequences,):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected [N] = {(inputs.num_sequences,)}")


def check_known(has_initial_state: Tensor | None, inputs: Inputs) -> None:
    """Check which rows have a state."""
    if has_initial_state is not None:
        check_row_values("has_initial_state", has_initial_state, (torch.bool,), inputs)


def check_pad_index(pad_index: int) -> None:
    """Check the index of padding, which kernels take with 32 bits."""
    if isinstance(pad_index, bool) or not isinstance(pad_index, int):
        raise TypeError(f"pad_index: got {pad_index!r}, expected an int")
    if not -(2**31) <= pad_index < 2**31:
        raise ValueError(f"pad_index: got {pad_index}, expected an int of 32 bits")


def check_flag(name: str, flag: bool) -> None:
    """Check an option that is on or off."""
    if not isinstance(flag, bool):
        raise TypeError(f"{name}: got {flag!r}, expected True or False")


def check_out(out: Tensor, inputs: Inputs) -> None:
    """Check the caller's tensor for the output."""
    v = inputs.v
    check_tensor("out", out, (v.dtype,), v)
    if out.shape != v.shape:
        raise ValueError(f"out: got shape {tuple(out.shape)}, expected [B, T, HV, V] = {tuple(v.shape)}")
    check_dense_last("out", out)


def check_decode(
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
    out: Tensor | None,
    gate: Gate,
    scale: float | None,
    qk_l2norm: bool,
    beta_is_logit: bool,
    allow_neg_eigval: bool,
    state_layout: StateLayout,
    pad_index: int,
    write_states: bool,
) -> DecodeInputs:
    """Check the arguments of :func:`flash_kda.kda_decode` and bring them into one value. Reads no data on a GPU."""
    inputs = check(
        q,
        k,
        v,
        g,
        beta,
        gate=gate,
        scale=scale,
        initial_state=None,
        output_final_state=False,
        cu_seqlens=cu_seqlens,
        qk_l2norm=qk_l2norm,
        beta_is_logit=beta_is_logit,
        allow_neg_eigval=allow_neg_eigval,
        state_layout=state_layout,
    )
    check_pool(pool, inputs)
    check_indices(indices, pool, inputs)
    check_lengths(inputs, indices)
    if num_accepted is not None:
        check_row_values("num_accepted", num_accepted, INDEX_DTYPES, inputs)
        if indices is None or indices.ndim != 2:
            raise ValueError("num_accepted: got a tensor, expected None unless indices are [N, W], one slot per token")
    check_known(has_initial_state, inputs)
    check_pad_index(pad_index)
    check_flag("write_states", write_states)
    if out is not None:
        check_out(out, inputs)
    return DecodeInputs(inputs, pool, indices, num_accepted, has_initial_state, pad_index, write_states, out)
