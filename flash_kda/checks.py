"""Argument checks of :func:`flash_kda.kda`: every error names the argument, what came and what was expected."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from numbers import Real
from types import NoneType

import torch
from torch import Tensor

from flash_kda.types import (
    Gate,
    Inputs,
    Layout,
    LogGate,
    LowerBoundGate,
    Signature,
    SoftplusGate,
    StateLayout,
    state_shape,
)

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
GATE_DTYPES = (torch.float32, torch.float64)
LOWEST_BOUND = -5.0


def _tensor(name: str, x: Layout | type) -> Layout:
    if isinstance(x, type):
        raise TypeError(f"{name}: got {x.__name__}, expected a torch.Tensor")
    return x


def _dtype(name: str, x: Layout, allowed: tuple[torch.dtype, ...]) -> None:
    if x.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise TypeError(f"{name}: got {x.dtype}, expected one of {names}")


def _shape(name: str, x: Layout, expected: tuple[int, ...], letters: str) -> None:
    if x.shape != expected:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {letters} = {expected}")


def _device(name: str, x: Layout, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name}: got device {x.device}, expected {device}, where q is")


def _dense_last(name: str, x: Layout) -> None:
    if 0 not in x.shape and x.shape[-1] > 1 and x.strides[-1] != 1:
        raise ValueError(
            f"{name}: got last-dimension stride {x.strides[-1]}, expected 1; the other dimensions may be strided"
        )


def check_number(name: str, x: object) -> float:
    """Check that an argument is a number."""
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(f"{name}: got {x!r}, expected a number")
    return float(x)


def _check_rows(signature: Signature) -> tuple[Layout, Layout]:
    """Check the token rows against each other; returns q's and v's layout."""
    rows = []
    for name in ("q", "k", "v", "g", "beta"):
        rows.append(_tensor(name, signature.layouts[name]))
        _dtype(name, rows[-1], INPUT_DTYPES)
    q, k, v, g, beta = rows
    if len(q.shape) != 4:
        raise ValueError(f"q: got shape {tuple(q.shape)}, expected [B, T, H, K]")
    if len(v.shape) != 4:
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
    return q, v


def _check_gate(signature: Signature, HV: int, K: int, device: torch.device) -> None:
    """Check a gate against HV value heads of size K."""
    gate, lower_bound = signature.gate, signature.lower_bound
    if not issubclass(gate, LowerBoundGate | SoftplusGate | LogGate):
        raise TypeError(f"gate: got {gate.__name__}, expected LowerBoundGate, SoftplusGate or LogGate")
    if issubclass(gate, LowerBoundGate) and not LOWEST_BOUND <= check_number("lower_bound", lower_bound) < 0:
        raise ValueError(f"lower_bound: got {lower_bound}, expected a value in [{LOWEST_BOUND}, 0)")
    A_log, dt_bias = signature.layouts["A_log"], signature.layouts["dt_bias"]
    if A_log is not NoneType:
        A_log = _tensor("A_log", A_log)
        _dtype("A_log", A_log, GATE_DTYPES)
        _shape("A_log", A_log, (HV,), "[HV]")
        _device("A_log", A_log, device)
    if dt_bias is not NoneType:
        dt_bias = _tensor("dt_bias", dt_bias)
        _dtype("dt_bias", dt_bias, GATE_DTYPES)
        if dt_bias.shape not in ((HV, K), (HV * K,)):
            raise ValueError(
                f"dt_bias: got shape {tuple(dt_bias.shape)}, expected [HV, K] = {(HV, K)} or [HV * K] = {(HV * K,)}"
            )
        _device("dt_bias", dt_bias, device)


def _check_cu_seqlens(cu_seqlens: Layout, B: int, device: torch.device) -> None:
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: got {cu_seqlens.dtype}, expected int32 or int64")
    if len(cu_seqlens.shape) != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens: got shape {tuple(cu_seqlens.shape)}, expected [N + 1]")
    if B != 1:
        raise ValueError(f"cu_seqlens: got a batch of {B} with packed sequences, expected q of shape [1, T, H, K]")
    _device("cu_seqlens", cu_seqlens, device)


def _check_options(signature: Signature) -> None:
    if signature.scale is not None and not math.isfinite(check_number("scale", signature.scale)):
        raise ValueError(f"scale: got {signature.scale}, expected a finite number")
    for name in ("output_final_state", "qk_l2norm", "beta_is_logit", "allow_neg_eigval", "recompute"):
        if not isinstance(flag := getattr(signature, name), bool):
            raise TypeError(f"{name}: got {flag!r}, expected True or False")
    if signature.allow_neg_eigval and not signature.beta_is_logit:
        raise ValueError(
            "allow_neg_eigval: got True with beta_is_logit=False, expected logits: it doubles their sigmoid"
        )
    if signature.state_layout not in ("vk", "kv"):
        raise ValueError(f"state_layout: got {signature.state_layout!r}, expected 'vk' or 'kv'")


@lru_cache(maxsize=1024)
def check_signature(signature: Signature) -> None:
    """Check everything about a call that is no data. A signature that was right is not looked at again."""
    q, v = _check_rows(signature)
    (B, _, _, K), (_, _, HV, V) = q.shape, v.shape
    _check_gate(signature, HV, K, q.device)
    N = B
    if (cu_seqlens := signature.layouts["cu_seqlens"]) is not NoneType:
        cu_seqlens = _tensor("cu_seqlens", cu_seqlens)
        _check_cu_seqlens(cu_seqlens, B, q.device)
        N = cu_seqlens.shape[0] - 1
    _check_options(signature)
    if (S0 := signature.layouts["initial_state"]) is not NoneType:
        S0 = _tensor("initial_state", S0)
        _dtype("initial_state", S0, STATE_DTYPES)
        letters = "[N, HV, V, K]" if signature.state_layout == "vk" else "[N, HV, K, V]"
        _shape("initial_state", S0, state_shape(N, HV, K, V, signature.state_layout), letters)
        _device("initial_state", S0, q.device)
        _dense_last("initial_state", S0)


def check_boundaries(cu_seqlens: Tensor, T: int) -> None:
    """Check the values of packed-sequence boundaries, which must lie on the CPU: elsewhere that would wait."""
    values = cu_seqlens.tolist()
    if values[0] != 0:
        raise ValueError(f"cu_seqlens: got first entry {values[0]}, expected 0")
    for i, (a, b) in enumerate(pairwise(values)):
        if b < a:
            raise ValueError(f"cu_seqlens: got {b} after {a} at index {i + 1}, expected non-decreasing entries")
    if values[-1] > T:
        raise ValueError(f"cu_seqlens: got last entry {values[-1]}, expected at most T = {T}")


def check(
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
    recompute: bool = True,
) -> Inputs:
    """Check the arguments of :func:`flash_kda.kda` and bring them into one value. Reads no tensor data on a GPU."""
    options = (output_final_state, cu_seqlens, qk_l2norm, beta_is_logit, allow_neg_eigval, state_layout, recompute)
    signature = Signature.of(q, k, v, g, beta, gate, scale, initial_state, *options)
    check_signature(signature)
    if cu_seqlens is not None and cu_seqlens.is_cpu:
        check_boundaries(cu_seqlens, signature.problem.T)
    scale = signature.problem.K**-0.5 if scale is None else float(scale)
    if not isinstance(gate, LogGate) and gate.dt_bias is not None and gate.dt_bias.ndim == 1:
        gate = replace(gate, dt_bias=gate.dt_bias.reshape(v.shape[2], -1))
    inputs = Inputs(q, k, v, g, beta, gate, scale, initial_state, *options)
    inputs.__dict__["signature"] = signature  # not to be worked out again
    return inputs
