"""The recurrence as a backend: slow, exact, differentiable, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_kda.reference import kda_recurrent
from flash_kda.types import Inputs, Problem


def supports(problem: Problem) -> str | None:
    """The reference runs everything."""
    return None


def run(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Compute in float64; the output is rounded once, at the end."""
    return kda_recurrent(inputs, torch.float64)
