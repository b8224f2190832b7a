"""Compiling kernels without a GPU: builds under way in other processes, and what the assembler says of a kernel."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

Build = TypeVar("Build")
Built = TypeVar("Built")


def builds_under_way(
    request: pytest.FixtureRequest, test: Callable[..., None], compile_one: Callable[[Build], Built]
) -> Iterator[dict[Build, Future[Built]]]:
    """The builds for which the test was selected, under way in two processes: the body of a fixture of its module."""
    pytest.importorskip("triton")
    selected = [
        item.callspec.params["build"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test
    ]
    # Not a fork: torch's threads would not be in it.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield {build: pool.submit(compile_one, build) for build in selected}
        pool.shutdown(cancel_futures=True)


def registers_and_stack(compiled: Any) -> tuple[int, int]:
    """Registers of a thread of a compiled kernel, and the bytes that it spills."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        (cubin := Path(folder, "kernel.cubin")).write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2])
