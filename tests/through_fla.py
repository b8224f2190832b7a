"""FLA's interface for the tests: a call of ``kda`` as FLA takes it, and FLA itself with its kernels out of reach."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from cases import Call

ROWS = ("q", "k", "v", "g", "beta")


def as_fla(call: Call, **changes: Any) -> dict[str, Any]:
    """The arguments of FLA's functions for a call of ``kda``."""
    gate = call["gate"]
    arguments = {name: call[name] for name in (*ROWS, "scale", "initial_state", "output_final_state", "cu_seqlens")}
    arguments |= {
        "use_qk_l2norm_in_kernel": call["qk_l2norm"],
        "use_gate_in_kernel": gate.kind != "log",
        "use_beta_sigmoid_in_kernel": call["beta_is_logit"],
        "allow_neg_eigval": call["allow_neg_eigval"],
        "state_v_first": call["state_layout"] == "vk",
    }
    if gate.kind != "log":
        arguments |= {"A_log": gate.A_log, "dt_bias": gate.dt_bias}
    if gate.kind == "lower_bound":
        arguments["lower_bound"] = gate.lower_bound
    return arguments | changes


class FellThrough(Exception):
    """FLA's own kernels were reached."""


def fall_through(*args: Any) -> Any:
    raise FellThrough("fla's own kernels")


def real_fla() -> tuple[Any, Any]:
    try:
        return importlib.import_module("fla.backends"), importlib.import_module("fla.ops.kda")
    except ImportError as error:
        pytest.skip(f"needs fla-core 0.6 ({error})")
