"""The backward of the Triton backend: in the interpreter, compiled for four architectures, and on a GPU."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import interpreted_backward
import pytest
import torch
from test_triton import DEVICES, Built, meta_inputs, source_of

from flash_kda.backends.triton.config import Config, configure
from flash_kda.types import GateKind, Inputs, Problem

KERNELS = ("walk_states", "walk_gradient", "chunk_gradient", "head_gradient")


@dataclass(frozen=True)
class Build:
    """One kernel of the backward of one problem on one architecture."""

    kernel: str
    capability: int
    problem: Problem

    @property
    def config(self) -> Config:
        return configure(self.problem, DEVICES[self.capability])

    def __str__(self) -> str:
        p = self.problem
        name = f"sm_{self.capability}-{self.kernel}-{'bf16' if self.config.split else 'fp32'}-K{p.K}-V{p.V}-{p.gate}"
        return f"{name}{'-packed' if p.packed else ''}"


def described(problem: Problem, config: Config, inputs: Inputs | None = None):
    """The launches of one backward call, and the dtypes of all that they are passed, by name."""
    from flash_kda.backends.triton import gradients

    inputs = inputs or meta_inputs(problem)
    dS = torch.empty(inputs.state_shape, dtype=inputs.state_dtype, device="meta")
    with mock.patch.object(gradients, "device_facts", return_value=DEVICES[90]):
        planner = mock.Mock()
        gradients.compute(inputs, torch.empty_like(inputs.v), dS, planner)
    (call, of_dS), (tensors,) = planner.call_args.args, planner.return_value.call_args.args
    scratch, launches = gradients.describe_backward(call, config, of_dS)
    given = zip(gradients.TENSORS, tensors, strict=True)
    dtypes = {name: inputs.q.dtype if x is None else x.dtype for name, x in given}
    return dtypes | {name: dtype for name, (_, dtype) in scratch.items()}, launches


def compile_one(build: Build) -> Built:
    """Compile in this process; errors are told, not raised."""
    import triton
    from triton.backends.compiler import GPUTarget

    dtypes, launches = described(build.problem, build.config)
    (launch,) = (x for x in launches if x.kernel.__name__ == build.kernel)
    target = GPUTarget("cuda", build.capability, 32)
    try:
        compiled = triton.compile(source_of(launch, dtypes), target=target, options=dict(launch.options))
    except Exception as error:
        return Built(error=f"{type(error).__name__}: {error}")
    with tempfile.TemporaryDirectory() as folder:
        (cubin := Path(folder, "kernel.cubin")).write_bytes(compiled.asm["cubin"])
        usage = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    registers, stack = map(int, found.groups())
    return Built(
        shared=compiled.metadata.shared,
        tensor_memory=getattr(compiled.metadata, "tmem_size", None) or 0,
        registers=registers,
        stack=stack,
        wgmma="wgmma.mma_async" in compiled.asm["ptx"],
    )
