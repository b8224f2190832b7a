"""Forward and prefill calls on Hopper in Python: all launches that the backend describes, by their kernels' own source.

Each launch sees what those before it have stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import emulated_gluon
import emulated_hardware
import pytest
import torch
from cases import Call, inputs_of
from compiling import H200
from prefilling import checked
from torch import Tensor

from flash_kda.backends.hopper.config import HopperConfig
from flash_kda.backends.triton.config import configure
from flash_kda.types import PrefillInputs


def _arrive(bar: Any, count: int = 1) -> None:
    """The compiler has all threads of a warpgroup come together before one of them arrives."""
    emulated_hardware.thread_barrier()
    emulated_hardware.arrive(bar, count)


def _runner(names: Sequence[str], described: Any, last_first: bool) -> Callable[[Sequence[Tensor | None]], None]:
    scratch, launches = described

    def run(given: Sequence[Tensor | None]) -> None:
        tensors = dict(zip(names, given, strict=True))
        for name, (elements, dtype) in scratch.items():
            fill = torch.nan if dtype.is_floating_point else -1
            tensors[name] = torch.full((elements,), fill, dtype=dtype) if elements else None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(emulated_gluon.HARDWARE["mbarrier"], "arrive", _arrive)
            for launch in launches:
                emulated_gluon.run(launch, tensors, last_first=last_first)

    return run


def forward(call: Call, config: HopperConfig, *, in_place: bool, last_first: bool) -> tuple[Tensor, Tensor]:
    """Output and final states, which overwrite copies of the initial ones if ``in_place``."""
    from flash_kda.backends.hopper.forward import describe
    from flash_kda.backends.triton import forward as portable

    def planner(call: Any, *results: Any) -> Any:
        described = describe(call, config, configure(call.problem, H200), *results)
        return _runner(portable.TENSORS, described, last_first)

    S0 = call["initial_state"]
    S0 = None if S0 is None else S0.clone()
    inputs = inputs_of(call | {"initial_state": S0})
    out = torch.full_like(call["v"], torch.nan)
    final = S0 if in_place and S0 is not None else torch.full(inputs.state_shape, torch.nan, dtype=inputs.state_dtype)
    portable.launch(inputs, out, final, planner)
    return out, final


def prefill(call: Call, config: HopperConfig, *, last_first: bool) -> Tensor:
    """Output; the pool and what checkpoints go to are written."""
    from flash_kda.backends.hopper.prefill_launch import describe
    from flash_kda.backends.triton import prefill_launch as portable

    def planner(call: PrefillInputs, out: Tensor) -> Any:
        described = describe(call, config, configure(call.problem, H200), torch.full_like(call.inputs.v, torch.nan))
        return _runner(portable.TENSORS, described, last_first)

    with mock.patch.object(torch.cuda, "current_device", return_value=None):
        return portable.run_prefill(checked(call), planner)[0]
