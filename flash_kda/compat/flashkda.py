"""FlashKDA's interface: :func:`fwd` writes into the caller's tensors, as ``flash_kda.fwd``.

FLA and SGLang look for a module ``flash_kda`` and call ``fwd``; both find this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor

from flash_kda import dispatch, forms
from flash_kda.checks import STATE_DTYPES, check
from flash_kda.compat.engines import naming
from flash_kda.prefill import kda_prefill
from flash_kda.types import Checkpoints, ForwardTensors, Inputs, LowerBoundGate, Maybe, Runner


@naming(
    **{"checkpoints.states": "checkpoint_state"},
    **{"checkpoints.offsets": "checkpoint_offsets", "checkpoints.cu_offsets": "checkpoint_indptr"},
)
def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    out: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    workspace: Tensor | None = None,
    checkpoint_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_indptr: Tensor | None = None,
) -> None:
    """KDA with the lower-bound gate, written into ``out`` and ``final_state``; no gradients.

    q and k are normalised, the gate is applied to g and the sigmoid to beta, always. Everything FlashKDA takes is taken
    (bfloat16, K = V = 128, contiguous), and besides it what :func:`flash_kda.kda` takes: other head sizes and dtypes,
    grouped value heads, tensors with a dense last dimension and any other strides. :func:`flash_kda.record_backends`
    tells which backend ran.

    Args:
        q, k: ``[B, T, H, K]`` bfloat16, float16 or float32 (float64 on the CPU).
        v: ``[B, T, HV, V]``, dtype of q; HV is a multiple of H.
        g: ``[B, T, HV, K]`` raw gate, any float dtype.
        beta: ``[B, T, HV]`` logits, any float dtype.
        scale: factor on q; None means ``K ** -0.5``.
        out: ``[B, T, HV, V]``, dtype of v, written. Rows from ``cu_seqlens[-1]`` on become zero.
        A_log: ``[HV]`` float32, or None for unit amplitude.
        dt_bias: ``[HV, K]`` or ``[HV * K]`` float32, or None for no bias.
        lower_bound: the smallest natural-log decay per token, in [-5, 0).
        initial_state: ``[N, HV, V, K]`` float32 or bfloat16; None means zeros.
        final_state: ``[N, HV, V, K]`` float32 or bfloat16, written; None means not wanted. May be ``initial_state``
            itself. Where the two differ in dtype, ``initial_state`` is widened in a copy.
        cu_seqlens: ``[N + 1]`` int32 or int64 boundaries of packed sequences (then B = 1); see :func:`flash_kda.kda`.
        workspace: a buffer of at least :func:`get_workspace_size` bytes on q's device. It is checked and not used.
        checkpoint_state, checkpoint_offsets, checkpoint_indptr: states inside of sequences, as vLLM's fork keeps them.
            Offsets ``[N]`` or ``[N, P]`` count tokens of their sequence, those of a sequence increase, and the states
            after so many go to ``[N, HV, V, K]`` or ``[N, P, HV, V, K]``, float32 or bfloat16. With ``indptr``
            ``[N + 1]`` sequence n has the offsets ``indptr[n]`` to ``indptr[n + 1] - 1`` of ``[M]``, and there are
            states ``[M, HV, V, K]``. An offset that is not in 1..length keeps nothing. Any offset will do.

    ``out`` may not overlap an input, nor ``final_state`` any tensor but an ``initial_state`` that is the same; beyond
    equal addresses this is the caller's word.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what came and what was expected.
        NotImplementedError: no backend can run the call; the message gives each one's reason.
        Nothing has been written when one of these is raised.
    """
    gate = LowerBoundGate(A_log, dt_bias, lower_bound)
    tensors = (q, k, v, g, beta, initial_state, cu_seqlens, out, final_state)

    def checked() -> Inputs:
        return _check(tensors, gate, scale, workspace)

    with torch.no_grad():
        if checkpoint_state is None and checkpoint_offsets is None and checkpoint_indptr is None:
            given = (*tensors, workspace)
            launch = partial(_launch, tensors=tensors)
            forms.run(("fwd",), given, gate, (scale,), "auto", lambda *_: checked(), launch)
            return
        inputs = checked()
        kept = _checkpoints(inputs.num_sequences, checkpoint_state, checkpoint_offsets, checkpoint_indptr)
        _run(inputs, kept, out, final_state)


def _check(tensors: ForwardTensors, gate: LowerBoundGate, scale: float | None, workspace: object) -> Inputs:
    """The checked call; its initial state is at least as wide as the final one."""
    q, k, v, g, beta, initial_state, cu_seqlens, out, final_state = tensors
    inputs = check(
        *(q, k, v, g, beta),
        gate=gate,
        scale=scale,
        initial_state=initial_state,
        output_final_state=final_state is not None,
        cu_seqlens=cu_seqlens,
        qk_l2norm=True,
        beta_is_logit=True,
        allow_neg_eigval=False,
        state_layout="vk",
    )
    _check_out(inputs, out)
    if final_state is not None:
        inputs = _check_final_state(inputs, final_state)
    if workspace is not None:
        _check_workspace(inputs, workspace)
    return inputs


def _launch(
    module: dispatch.Backend, inputs: Inputs, tensors: ForwardTensors
) -> tuple[tuple[Tensor, Maybe], Runner | None]:
    """Run a checked call; and all calls of its form, whose tensors must not share memory either."""
    *_, initial_state, _, out, final_state = tensors
    result = module.run(inputs, out, final_state)
    # What is widened is a copy of this call's.
    runner = module.runner(inputs) if inputs.initial_state is initial_state else None
    if runner is None:
        return result, None

    def run(given: Any, A_log: Maybe, dt_bias: Maybe) -> tuple[Tensor, Maybe]:
        *rows, S0, cu, out, S, _ = given
        _check_own_memory(out, rows)
        if S0 is not None and S is not None:
            _check_same_memory(S0, S)
        return runner((*rows, S0, cu, out, S), A_log, dt_bias)

    return result, run


def _checkpoints(N: int, states: object, offsets: object, indptr: Tensor | None) -> Checkpoints:
    """The three arguments as one value, and offsets and states in one row."""
    for name, x in (("checkpoint_state", states), ("checkpoint_offsets", offsets)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, expected a torch.Tensor beside the other checkpoint_...")
    states, offsets = cast(Tensor, states), cast(Tensor, offsets)
    if indptr is not None:
        return Checkpoints(offsets, indptr, states)
    if offsets.ndim not in (1, 2) or offsets.shape[0] != N:
        raise ValueError(f"checkpoint_offsets: got shape {tuple(offsets.shape)}, expected [N] or [N, P] with N = {N}")
    if states.ndim != 3 + offsets.ndim or states.shape[: offsets.ndim] != offsets.shape:
        raise ValueError(
            f"checkpoint_state: got shape {tuple(states.shape)}, expected {tuple(offsets.shape)}, those of "
            "checkpoint_offsets, and [HV, V, K]"
        )
    each = 1
    if offsets.ndim == 2:
        each = offsets.shape[1]
        if states.numel() and each > 1 and N > 1 and states.stride(0) != each * states.stride(1):
            raise ValueError(f"checkpoint_state: got strides {states.stride()}, expected its first two evenly spaced")
        states, offsets = states.flatten(0, 1), offsets.flatten()
    ends = torch.arange(N + 1, dtype=torch.int32, device=offsets.device)
    return Checkpoints(offsets, ends if each == 1 else ends * each, states)


def _run(inputs: Inputs, kept: Checkpoints, out: Tensor, final_state: Tensor | None) -> None:
    """Run a checked call that keeps states inside of sequences.

    None is copied where the final state replaces the initial one or is not wanted.
    """
    S0 = inputs.initial_state
    is_own = False
    if S0 is None:
        pool = torch.zeros(inputs.state_shape, dtype=inputs.state_dtype, device=inputs.q.device)
    else:
        is_own = (final_state is None or final_state.data_ptr() == S0.data_ptr()) and 0 not in S0.stride()
        pool = S0 if is_own else S0.clone()
    kda_prefill(
        *(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta),
        gate=inputs.gate,
        pool=pool,
        checkpoints=kept,
        cu_seqlens=inputs.cu_seqlens,
        scale=inputs.scale,
        write_states=final_state is not None,
        out=out,
    )
    if final_state is not None and not is_own:
        final_state.copy_(pool)


def get_workspace_size(T_total: int, H: int, N: int = 1) -> int:
    """Bytes of ``workspace`` that :func:`fwd` needs from its caller: 0.

    Every backend takes its scratch memory from torch's caching allocator, CUDA graphs included, so no buffer that a
    caller holds would save anything.

    Args:
        T_total: tokens of all sequences. H: value heads. N: sequences.

    Raises:
        TypeError, ValueError: an argument is not an integer of 0 or more.
    """
    sizes: dict[str, object] = {"T_total": T_total, "H": H, "N": N}
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name}: got {value!r}, expected an integer")
        if int(value) < 0:
            raise ValueError(f"{name}: got {value}, expected 0 or more")
    return 0


def _check_written(name: str, x: object, shape: tuple[int, ...], letters: str, inputs: Inputs) -> Tensor:
    """A tensor that results go to: its shape and device, and a place of its own for every element."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, expected a torch.Tensor")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {letters} = {shape}")
    if x.device != inputs.q.device:
        raise ValueError(f"{name}: got device {x.device}, expected {inputs.q.device}, where q is")
    if x.is_contiguous():
        return x
    steps = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    if 0 in steps or (shape[-1] > 1 and x.stride(-1) != 1):
        raise ValueError(f"{name}: got strides {x.stride()}, expected a last one of 1 and none of 0")
    return x


def _check_out(inputs: Inputs, out: object) -> None:
    out = _check_written("out", out, tuple(inputs.v.shape), "[B, T, HV, V]", inputs)
    if out.dtype != inputs.v.dtype:
        raise TypeError(f"out: got {out.dtype}, expected {inputs.v.dtype}, the dtype of v")
    _check_own_memory(out, inputs[:5])


def _check_own_memory(out: Tensor, rows: Sequence[Tensor]) -> None:
    address = out.data_ptr()
    for name, x in zip(("q", "k", "v", "g", "beta"), rows, strict=True):
        if address == x.data_ptr() and out.numel():
            raise ValueError(f"out: got the memory of {name}, expected memory of its own")


def _check_final_state(inputs: Inputs, final_state: object) -> Inputs:
    """The call with an initial state that is at least as wide as the final one."""
    S = _check_written("final_state", final_state, inputs.state_shape, "[N, HV, V, K]", inputs)
    if S.dtype not in STATE_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in STATE_DTYPES)
        raise TypeError(f"final_state: got {S.dtype}, expected one of {names}")
    S0 = inputs.initial_state
    if S0 is None or S0 is S:
        return inputs
    _check_same_memory(S0, S)
    if S.dtype == S0.dtype:
        return inputs
    return inputs.replace(initial_state=S0.to(torch.promote_types(S0.dtype, S.dtype)))


def _check_same_memory(S0: Tensor, S: Tensor) -> None:
    """Check a final state that lies where the initial one does."""
    if S.data_ptr() == S0.data_ptr() and (S.dtype, S.stride()) != (S0.dtype, S0.stride()) and S.numel():
        raise ValueError(
            f"final_state: got the memory of initial_state as {S.dtype} with strides {S.stride()}, expected "
            f"{S0.dtype} with {S0.stride()}, or memory of its own"
        )


def _check_workspace(inputs: Inputs, workspace: object) -> None:
    if not isinstance(workspace, Tensor):
        raise TypeError(f"workspace: got {type(workspace).__name__}, expected a torch.Tensor")
    if workspace.device != inputs.q.device:
        raise ValueError(f"workspace: got device {workspace.device}, expected {inputs.q.device}, where q is")
    B, T, HV = inputs.beta.shape
    size, needed = workspace.numel() * workspace.element_size(), get_workspace_size(B * T, HV, inputs.num_sequences)
    if size < needed or not workspace.is_contiguous():
        raise ValueError(f"workspace: got {size} bytes, strides {workspace.stride()}, expected {needed}, contiguous")
