"""KDA on compute capability 9.0 in Gluon: hardware copies, asynchronous products, a warp per chunk.

It holds what is faster than ``flash_kda.backends.triton``, which runs everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from flash_kda.backends.reference import deliver
from flash_kda.backends.triton import kept_bytes as triton_kept_bytes
from flash_kda.backends.triton import supports as triton_supports
from flash_kda.backends.triton.config import CHUNK
from flash_kda.types import DecodeInputs, Inputs, Maybe, Prefiller, PrefillInputs, Problem, Runner, StepInputs

CAPABILITY = (9, 0)
# Gluon is young: these are the versions that the kernels have run with.
TRITON = ("3.6.",)


def supports(problem: Problem) -> str | None:
    """bfloat16, K = 128, V a multiple of 64, normalised keys, sequences of more than two chunks on average."""
    if (why := triton_supports(problem)) is not None:
        return why
    import triton

    p = problem
    if p.op in ("decode", "step"):
        return "has no kernel for decoding"
    if p.dtype != torch.bfloat16:
        return f"takes bfloat16; the tensors are {p.dtype}"
    if p.K != 128 or p.V % 64:
        return f"takes K = 128 and V in multiples of 64; they are {p.K} and {p.V}"
    if not (p.qk_l2norm and p.beta_is_logit):
        return "takes keys to normalise and logits of beta, which bound what it holds in float16"
    if not p.copyable:
        return "copies blocks of q, k, v and g, which must be bfloat16 with heads side by side and rows evenly spaced"
    tokens, sequences = p.B * p.T, max(1, p.N or p.B)
    if tokens <= 2 * CHUNK * sequences:
        return f"pays off from three chunks of {CHUNK} tokens per sequence on; there are {tokens} and {sequences}"
    if (tokens // CHUNK + 1 + sequences) * (p.HV or p.H) * max(3 * CHUNK, p.V) >= 2**31 or tokens >= 2**31:
        return "numbers the rows of its workspace with 32 bits, and there are more"
    if torch.cuda.get_device_capability() != CAPABILITY:
        return f"is made for compute capability 9.0; this GPU has {torch.cuda.get_device_capability()}"
    if not triton.__version__.startswith(TRITON):
        return f"was tested with Triton {' and '.join(x + 'x' for x in TRITON)}; this is {triton.__version__}"
    return None


def run(inputs: Inputs, out: Tensor | None = None, final_state: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Output in v's dtype and final state. What does not start at a multiple of 16 bytes goes to the Triton kernels."""
    if inputs.problem.grad:
        from flash_kda.backends.triton.autograd import run_with_grad

        return deliver(*run_with_grad(inputs, "hopper", _forward_of_gradients(), _backward()), out, final_state)
    return _forward()(inputs, out, final_state)


def runner(inputs: Inputs) -> Runner | None:
    """:func:`run` with all but a call's tensors worked out; where these start still chooses the kernels."""
    from flash_kda.backends.hopper.forward import runner

    plain = runner(inputs)
    if plain is None or not inputs.problem.grad:
        return plain
    from flash_kda.backends.triton.autograd import runner_with_grad

    return runner_with_grad(inputs, "hopper", plain, _forward_of_gradients(), _backward())


@cache
def _forward() -> Callable[[Inputs, Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]:
    """Imported when first used, since it needs Triton."""
    from flash_kda.backends.hopper.forward import forward

    return forward


@cache
def _forward_of_gradients() -> Callable[[Inputs], tuple[Tensor, Maybe, Maybe]]:
    from flash_kda.backends.hopper.forward import forward_of_gradients

    return forward_of_gradients


@cache
def _backward() -> Callable[[Inputs, Maybe, Maybe, Maybe], tuple[Tensor | None, ...]]:
    from flash_kda.backends.hopper.backward import backward

    return backward


def kept_bytes(problem: Problem) -> int:
    """As of the Triton kernels; see ``dispatch.Backend``."""
    return triton_kept_bytes(problem)


def run_keeping(inputs: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Off the tape; see ``dispatch.Backend``."""
    with torch.no_grad():
        return _forward_of_gradients()(inputs)


def gradients(inputs: Inputs, do: Tensor, dS: Tensor | None, kept: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Off the tape; see ``dispatch.Backend``."""
    with torch.no_grad():
        return _backward()(inputs, do, dS, kept)


def run_decode(call: DecodeInputs) -> tuple[Tensor, None]:
    """Not reached: ``supports`` refuses decode problems."""
    raise NotImplementedError(supports(call.problem))


def run_prefill(call: PrefillInputs) -> tuple[Tensor, Prefiller]:
    """Output in v's dtype as of :func:`run`, and the launches with all but their tensors worked out."""
    from flash_kda.backends.hopper.prefill_launch import run_prefill

    return run_prefill(call)


def run_step(call: StepInputs) -> tuple[Tensor, None]:
    """Not reached: ``supports`` refuses decode steps."""
    raise NotImplementedError(supports(call.problem))
