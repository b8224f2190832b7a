"""FLA's interface: :func:`chunk_kda` and :func:`fused_recurrent_kda` with the arguments of FLA (flash-linear-attention)
0.6, and :func:`register`, which makes FLA's own ``chunk_kda`` call this library.

How arguments map onto :func:`flash_kda.kda`:

- ``use_gate_in_kernel``: :class:`LowerBoundGate` if ``lower_bound`` is set, otherwise :class:`SoftplusGate`. Without
  it g is the log decay (:class:`LogGate`), and ``A_log``, ``dt_bias`` and ``lower_bound`` are not read.
- ``use_qk_l2norm_in_kernel``, ``use_beta_sigmoid_in_kernel``: ``qk_l2norm``, ``beta_is_logit``.
- ``state_v_first`` and its old name ``transpose_state_layout``: ``state_layout="vk"``, otherwise ``"kv"``.
- ``disable_recompute``: ``recompute=False``.
- ``safe_gate``, ``chunk_size`` and ``cu_seqlens_cpu`` choose between ways to the same result in FLA. Here there is one
  way: it is exact for any gate and needs no host copy of ``cu_seqlens``. They are accepted, and the first two are
  checked as FLA checks them.

What is not implemented is refused by name, and so is every keyword that FLA does not have.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeAlias

import torch
from torch import Tensor

from flash_kda import dispatch
from flash_kda.checks import check
from flash_kda.types import Gate, Inputs, LogGate, LowerBoundGate, SoftplusGate

BACKEND_TYPE = "flash_kda_compat"
CHUNK_SIZES = (32, 64)
HALF = (torch.bfloat16, torch.float16)

P = ParamSpec("P")
Result: TypeAlias = tuple[Tensor, Tensor | None]


def _runs(mapping: Callable[P, Inputs]) -> Callable[P, Result]:
    """The function that runs the call which ``mapping`` makes of its arguments; ``inspect.unwrap`` undoes this."""

    @wraps(mapping)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        return dispatch.run(mapping(*args, **kwargs), "auto")

    shown = inspect.signature(mapping).replace(return_annotation="tuple[Tensor, Tensor | None]")
    call.__signature__ = shown  # type: ignore[attr-defined]  # what help() shows
    return call


@_runs
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    chunk_size: int = 64,
) -> Inputs:
    """FLA's ``chunk_kda``. The module's docstring says what becomes of each argument.

    Args:
        q, k: ``[B, T, H, K]``. v: ``[B, T, HV, V]``. g: ``[B, T, HV, K]``. beta: ``[B, T, HV]``. Dtypes and strides as
            for :func:`flash_kda.kda`.
        initial_state: ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with ``state_v_first``, float32.
        A_log: ``[HV]`` of any float dtype; may be None if ``lower_bound`` is set.
        dt_bias: ``[HV * K]`` of any float dtype, or None.

    Returns:
        ``o`` ``[B, T, HV, V]`` in v's dtype, and the final state in float32 (float64 for float64 inputs) or None.
        Gradients flow as in :func:`flash_kda.kda`.

    Raises:
        TypeError, ValueError: an argument is wrong or unknown; the message names it.
        NotImplementedError: ``return_intermediate_states``, ``cp_context``, ``use_graph`` or ``max_num_seqs`` is set,
            or no backend can run the call.
    """
    _refuse(
        return_intermediate_states=return_intermediate_states or None,
        cp_context=cp_context,
        use_graph=use_graph or None,
        max_num_seqs=max_num_seqs,
    )
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size: got {chunk_size}, expected one of {', '.join(map(str, CHUNK_SIZES))}")
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise ValueError("lower_bound: got None with safe_gate and use_gate_in_kernel, expected a value in [-5, 0)")
    if isinstance(initial_state, Tensor) and initial_state.dtype in HALF:
        raise TypeError(f"initial_state: got {initial_state.dtype}, expected float32")
    return _inputs(
        (q, k, v, g, beta),
        _gate(use_gate_in_kernel, lower_bound, A_log, dt_bias),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        qk_l2norm=use_qk_l2norm_in_kernel,
        beta_is_logit=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        v_first=_v_first(state_v_first, transpose_state_layout),
        recompute=not disable_recompute,
    )


@_runs
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Inputs:
    """FLA's ``fused_recurrent_kda``: the same function of its arguments as :func:`chunk_kda`, and run the same way.

    Args, returns and errors are those of :func:`chunk_kda`, but ``initial_state`` may also be bfloat16 or float16.
    Where a gradient is wanted it is given, or NotImplementedError is raised if no backend can (FLA's own gives none
    and says nothing).
    """
    if isinstance(initial_state, Tensor) and initial_state.dtype in HALF:
        initial_state = initial_state.float()
    return _inputs(
        (q, k, v, g, beta),
        _gate(use_gate_in_kernel, lower_bound, A_log, dt_bias),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        qk_l2norm=use_qk_l2norm_in_kernel,
        beta_is_logit=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        v_first=_v_first(state_v_first, transpose_state_layout),
    )


def why_not(*args: Any, **kwargs: Any) -> str | None:
    """Why :func:`chunk_kda` would refuse a call with these arguments, or None if it would run it."""
    try:
        inputs: Inputs = inspect.unwrap(chunk_kda)(*args, **kwargs)
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    explanation = dispatch.explain(inputs.problem)
    return None if explanation.backend is not None else str(explanation)


def register(priority: int = 2) -> None:
    """Make FLA's ``chunk_kda`` call this library wherever it can; elsewhere FLA goes on as before.

    FLA asks its backends by rising priority and takes the first that accepts the call. Its own adapter for a package
    named ``flash_kda`` (forward only, K = V = 128, one kind of gate) has 3. FLA reports nothing when a backend refuses:
    :func:`flash_kda.record_backends` around the call tells whether this library ran, :func:`why_not` why not.
    Calling this again changes the priority and nothing else.

    Raises:
        ImportError: fla-core 0.6 or later cannot be imported.
        RuntimeError: FLA's ``chunk_kda`` does not ask its backends. Nothing is left registered.
    """
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TypeError(f"priority: got {priority!r}, expected an integer")
    try:
        _put(priority, enabled=True)
        reached = _reached()
    except KeyError:
        reached = False
    if reached:
        return
    unregister()
    raise RuntimeError(
        "register: FLA's chunk_kda does not ask its backends: either FLA_DISABLE_BACKEND_DISPATCH=1 is set, or this "
        "pair of fla and torch loses the dispatcher around it (flash-linear-attention issue 1110), or another backend "
        "takes every call first; use flash_kda.compat.fla.chunk_kda itself"
    )


def unregister() -> None:
    """Undo :func:`register`; harmless where nothing is registered."""
    if "fla.backends" in sys.modules:
        try:
            _put(0, enabled=False)
        except KeyError:
            return


def _put(priority: int, *, enabled: bool) -> None:
    """Register under BACKEND_TYPE, in place of what was there. KeyError: FLA has no backends for ``chunk_kda``."""
    backends, kda = _modules()
    attributes = {"backend_type": BACKEND_TYPE, "priority": priority, "is_enabled": lambda self: enabled}
    backend = type("FlashKDACompatBackend", (backends.BaseBackend,), attributes)
    backends.register(kda.chunk_kda, backend=backend, verifier=_verify)(_run)


def _modules() -> tuple[Any, Any]:
    """``fla.backends`` and ``fla.ops.kda``; imported by name, so that neither mypy nor the package needs FLA."""
    try:
        return importlib.import_module("fla.backends"), importlib.import_module("fla.ops.kda")
    except ImportError as error:
        raise ImportError(f"register: needs fla-core 0.6 or later, which cannot be imported ({error})") from error


# Stands for q in the call that asks FLA's dispatcher whether it comes here.
_PROBE = object()


def _reached() -> bool:
    """Whether FLA's ``chunk_kda`` comes to :func:`_run`. FLA's own function raises when it gets the probe."""
    try:
        return _modules()[1].chunk_kda(_PROBE, None, None, None, None) is _PROBE
    except Exception:
        return False


def _verify(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
    """FLA's question whether this backend takes a call, and the reason if not."""
    reason = None if args and args[0] is _PROBE else why_not(*args, **kwargs)
    return reason is None, reason


def _run(*args: Any, **kwargs: Any) -> Any:
    return _PROBE if args and args[0] is _PROBE else chunk_kda(*args, **kwargs)


def _refuse(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name}: got {value!r}, which is not implemented; expected its default")


def _v_first(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """``state_v_first``, which may come under its old name."""
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError("transpose_state_layout: got it beside state_v_first, expected one: it is the old name")
    warnings.warn("transpose_state_layout is the old name of state_v_first", DeprecationWarning, stacklevel=4)
    return transpose_state_layout


def _gate(in_kernel: bool, lower_bound: float | None, A_log: Tensor | None, dt_bias: Tensor | None) -> Gate:
    if not in_kernel:
        return LogGate()
    if lower_bound is not None:
        return LowerBoundGate(_parameter(A_log), _parameter(dt_bias), lower_bound)
    if A_log is None:
        raise ValueError("A_log: got None with use_gate_in_kernel and no lower_bound, expected a tensor [HV]")
    return SoftplusGate(_parameter(A_log), _parameter(dt_bias))


def _parameter(x: Tensor | None) -> Tensor | None:
    """A gate parameter as a flat tensor, widened from half precision: FLA takes any shape, and what a model's
    ``.bfloat16()`` leaves."""
    if not isinstance(x, Tensor):
        return x
    return x.flatten().float() if x.dtype in HALF else x.flatten()


def _inputs(
    rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], gate: Gate, *, v_first: bool, **options: Any
) -> Inputs:
    if options["allow_neg_eigval"] and not options["beta_is_logit"]:
        raise ValueError(
            "allow_neg_eigval: got True without use_beta_sigmoid_in_kernel, expected both: it doubles that"
        )
    return check(*rows, gate=gate, state_layout="vk" if v_first else "kv", **options)
