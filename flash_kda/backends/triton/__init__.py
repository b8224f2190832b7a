"""KDA on NVIDIA GPUs in portable Triton: a parallel preparation of chunks, then a recurrence per head and V part."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from flash_kda.backends.reference import deliver
from flash_kda.backends.stepwise import no_gradient
from flash_kda.backends.triton import config
from flash_kda.types import (
    DecodeInputs,
    Decoder,
    Inputs,
    Prefiller,
    PrefillInputs,
    Problem,
    Runner,
    StepInputs,
    Stepper,
)

MAX_HEAD = 256
MIN_CAPABILITY = (8, 0)
MIN_TRITON = (3, 5)


def is_too_old(version: str) -> bool:
    """Whether a Triton of this version lacks what the kernels use."""
    return tuple(map(int, version.split(".")[:2])) < MIN_TRITON


def supports(problem: Problem) -> str | None:
    """CUDA tensors on compute capability 8.0 or newer, K and V in 16..256; decoding without gradients."""
    if problem.device != "cuda":
        return f"runs on CUDA devices; the tensors are on {problem.device}"
    import triton  # its absence is a reason, reported by the caller

    if is_too_old(triton.__version__):
        return f"needs Triton {'.'.join(map(str, MIN_TRITON))} or newer; this is {triton.__version__}"
    if (why := no_gradient(problem)) is not None:
        return why
    if problem.dtype == torch.float64:
        return "computes in float32 at most; the tensors are float64"
    for name in ("K", "V"):
        if not 16 <= (size := getattr(problem, name)) <= MAX_HEAD:
            return f"takes head sizes 16..{MAX_HEAD}; {name} is {size}"
    if torch.version.hip is not None or not torch.cuda.is_available():
        return "needs an NVIDIA GPU; torch sees none"
    if torch.cuda.get_device_capability() < MIN_CAPABILITY:
        return f"needs compute capability 8.0; this GPU has {torch.cuda.get_device_capability()}"
    return None


def run(inputs: Inputs, out: Tensor | None = None, final_state: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Output in v's dtype and final state; products of bfloat16 tiles, or float32 quality for float32 inputs."""
    if inputs.problem.grad:
        return deliver(*_with_grad()(inputs), out, final_state)
    return _forward()(inputs, out, final_state)


def runner(inputs: Inputs) -> Runner | None:
    """:func:`run` with all but a call's tensors worked out, where a call is one plan of launches."""
    from flash_kda.backends.triton.forward import runner

    plain = runner(inputs)
    if plain is None or not inputs.problem.grad:
        return plain
    from flash_kda.backends.triton.autograd import runner_with_grad

    return runner_with_grad(inputs, "triton", plain)


@cache
def _forward() -> Callable[[Inputs, Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]:
    """Imported when first used, since it needs Triton."""
    from flash_kda.backends.triton.forward import forward

    return forward


@cache
def _with_grad() -> Callable[[Inputs], tuple[Tensor, Tensor | None]]:
    from flash_kda.backends.triton.autograd import run_with_grad

    return run_with_grad


def kept_bytes(problem: Problem) -> int:
    """Of the workspace between preparation and walks; see ``dispatch.Backend``."""
    return config.kept_bytes(problem)


def run_keeping(inputs: Inputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Off the tape; see ``dispatch.Backend``."""
    from flash_kda.backends.triton.forward import forward_of_gradients

    with torch.no_grad():
        return forward_of_gradients(inputs)


def gradients(inputs: Inputs, do: Tensor, dS: Tensor | None, kept: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Off the tape; see ``dispatch.Backend``."""
    from flash_kda.backends.triton.backward import backward

    with torch.no_grad():
        return backward(inputs, do, dS, kept)


def run_decode(call: DecodeInputs) -> tuple[Tensor, Decoder]:
    """Output in v's dtype by one launch, float32 arithmetic; and the launch with all but its tensors worked out."""
    from flash_kda.backends.triton.decode_launch import run_decode

    return run_decode(call)


def run_prefill(call: PrefillInputs) -> tuple[Tensor, Prefiller]:
    """Output in v's dtype as of :func:`run`, and the launches with all but their tensors worked out."""
    from flash_kda.backends.triton.prefill_launch import run_prefill

    return run_prefill(call)


def run_step(call: StepInputs) -> tuple[Tensor, Stepper]:
    """Output in v's dtype by one launch, float32 arithmetic; and the launch with all but its tensors worked out."""
    from flash_kda.backends.triton.step_launch import run_step

    return run_step(call)
