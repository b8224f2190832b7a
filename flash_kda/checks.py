"""Argument checks of :func:`flash_kda.kda`: every error names the argument, what came and what was expected."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from numbers import Real

import torch
from torch import Tensor

from flash_kda.types import Gate, Inputs, LogGate, LowerBoundGate, SoftplusGate, StateLayout

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
LOWEST_BOUND = -5.0


def _tensor(name: str, x: object) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, expected a torch.Tensor")
    return x


def _shape(name: str, x: Tensor, expected: tuple[int, ...], letters: str) -> None:
    if tuple(x.shape) != expected:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {letters} = {expected}")


def _dtype(name: str, x: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if x.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise TypeError(f"{name}: got {x.dtype}, expected one of {names}")


def _dense_last(name: str, x: Tensor) -> None:
    if x.numel() and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(
            f"{name}: got last-dimension stride {x.stride(-1)}, expected 1; the other dimensions may be strided"
        )


def _number(name: str, x: object) -> float:
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(f"{name}: got {x!r}, expected a number")
    return float(x)


def _flag(name: str, x: object) -> bool:
    if not isinstance(x, bool):
        raise TypeError(f"{name}: got {x!r}, expected True or False")
    return x


def check_gate(gate: object, HV: int, K: int, device: torch.device) -> Gate:
    """Check a gate against ``HV`` value heads of size ``K``; returns it with ``dt_bias`` as ``[HV, K]``."""
    if isinstance(gate, LogGate):
        return gate
    if not isinstance(gate, LowerBoundGate | SoftplusGate):
        raise TypeError(f"gate: got {type(gate).__name__}, expected LowerBoundGate, SoftplusGate or LogGate")
    if isinstance(gate, LowerBoundGate) and not LOWEST_BOUND <= _number("lower_bound", gate.lower_bound) < 0:
        raise ValueError(f"lower_bound: got {gate.lower_bound}, expected a value in [{LOWEST_BOUND}, 0)")
    A_log, dt_bias = gate.A_log, gate.dt_bias
    if A_log is not None:
        _dtype("A_log", _tensor("A_log", A_log), (torch.float32, torch.float64))
        _shape("A_log", A_log, (HV,), "[HV]")
        _device("A_log", A_log, device)
    if dt_bias is not None:
        _dtype("dt_bias", _tensor("dt_bias", dt_bias), (torch.float32, torch.float64))
        if tuple(dt_bias.shape) not in ((HV, K), (HV * K,)):
            raise ValueError(
                f"dt_bias: got shape {tuple(dt_bias.shape)}, expected [HV, K] = {(HV, K)} or [HV * K] = {(HV * K,)}"
            )
        _device("dt_bias", dt_bias, device)
        gate = replace(gate, dt_bias=dt_bias.reshape(HV, K))
    return gate


def _device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name}: got device {x.device}, expected {device}, where q is")


def check_cu_seqlens(cu_seqlens: Tensor, B: int, T: int, device: torch.device) -> None:
    """Check packed-sequence boundaries; the values are read only where that costs no device synchronisation."""
    if _tensor("cu_seqlens", cu_seqlens).dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: got {cu_seqlens.dtype}, expected int32 or int64")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"cu_seqlens: got shape {tuple(cu_seqlens.shape)}, expected [N + 1]")
    if B != 1:
        raise ValueError(f"cu_seqlens: got a batch of {B} with packed sequences, expected q of shape [1, T, H, K]")
    _device("cu_seqlens", cu_seqlens, device)
    if cu_seqlens.device.type != "cpu":
        return
    values = cu_seqlens.tolist()
    if values[0] != 0:
        raise ValueError(f"cu_seqlens: got first entry {values[0]}, expected 0")
    for i, (a, b) in enumerate(pairwise(values)):
        if b < a:
            raise ValueError(f"cu_seqlens: got {b} after {a} at index {i + 1}, expected non-decreasing entries")
    if values[-1] > T:
        raise ValueError(f"cu_seqlens: got last entry {values[-1]}, expected at most T = {T}")


def check_rows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Check shapes, dtypes, devices and strides of the token rows against each other."""
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        _dtype(name, _tensor(name, x), INPUT_DTYPES)
    if q.ndim != 4:
        raise ValueError(f"q: got shape {tuple(q.shape)}, expected [B, T, H, K]")
    if v.ndim != 4:
        raise ValueError(f"v: got shape {tuple(v.shape)}, expected [B, T, HV, V]")
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if min(H, K, HV, V) < 1:
        raise ValueError(
            f"q, v: got shapes {tuple(q.shape)} and {tuple(v.shape)}, expected H, K, HV and V of 1 or more"
        )
    if HV % H:
        raise ValueError(f"v: got HV = {HV} value heads, expected a multiple of the H = {H} heads of q and k")
    _shape("k", k, (B, T, H, K), "[B, T, H, K]")
    _shape("v", v, (B, T, HV, V), "[B, T, HV, V]")
    _shape("g", g, (B, T, HV, K), "[B, T, HV, K]")
    _shape("beta", beta, (B, T, HV), "[B, T, HV]")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: got {x.dtype}, expected {q.dtype}, the dtype of q")
    for name, x in (("k", k), ("v", v), ("g", g), ("beta", beta)):
        _device(name, x, q.device)
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g)):
        _dense_last(name, x)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    gate: Gate,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    qk_l2norm: bool,
    beta_is_logit: bool,
    allow_neg_eigval: bool,
    state_layout: StateLayout,
) -> Inputs:
    """Check the arguments of :func:`flash_kda.kda` and bring them into one value. Reads no tensor data on a GPU."""
    check_rows(q, k, v, g, beta)
    B, T, _, K = q.shape
    gate = check_gate(gate, v.shape[2], K, q.device)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, T, q.device)
    scale = K**-0.5 if scale is None else _number("scale", scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale: got {scale}, expected a finite number")
    for name, flag in (
        ("output_final_state", output_final_state),
        ("qk_l2norm", qk_l2norm),
        ("beta_is_logit", beta_is_logit),
        ("allow_neg_eigval", allow_neg_eigval),
    ):
        _flag(name, flag)
    if allow_neg_eigval and not beta_is_logit:
        raise ValueError(
            "allow_neg_eigval: got True with beta_is_logit=False, expected logits: it doubles their sigmoid"
        )
    if state_layout not in ("vk", "kv"):
        raise ValueError(f"state_layout: got {state_layout!r}, expected 'vk' or 'kv'")
    inputs = Inputs(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        gate=gate,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        qk_l2norm=qk_l2norm,
        beta_is_logit=beta_is_logit,
        allow_neg_eigval=allow_neg_eigval,
        state_layout=state_layout,
    )
    if initial_state is not None:
        _dtype("initial_state", _tensor("initial_state", initial_state), STATE_DTYPES)
        letters = "[N, HV, V, K]" if state_layout == "vk" else "[N, HV, K, V]"
        _shape("initial_state", initial_state, inputs.state_shape, letters)
        _device("initial_state", initial_state, q.device)
        _dense_last("initial_state", initial_state)
    return inputs
