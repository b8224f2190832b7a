"""Cases in Triton's interpreter: one side runs them in a process of their own, the other asks for what they gave.

The interpreter is chosen by TRITON_INTERPRET=1 when triton is first imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch

import flash_kda

Cases = Mapping[str, Callable[[], None]]
Test = TypeVar("Test", bound=Callable[..., Any])


def run_cases(cases: Cases, names: list[str]) -> dict[str, str | None]:
    """Run some of the cases: null for a success, otherwise the error."""
    results: dict[str, str | None] = {}
    for name in names:
        try:
            cases[name]()
            results[name] = None
        except AssertionError as error:
            results[name] = str(error) or traceback.format_exc()
        except Exception:
            results[name] = traceback.format_exc()
    return results


def main(cases: Cases) -> None:
    """Print as JSON what the cases named on the command line give, or all of them."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    warnings.simplefilter("ignore")  # numpy reports every inf and NaN
    torch.set_num_threads(1)
    # Fresh memory holds NaN (scratch memory bytes of 255, so NaN too): nothing can rely on what it happens to hold.
    torch.use_deterministic_algorithms(True)
    json.dump(run_cases(cases, sys.argv[1:] or list(cases)), sys.stdout, indent=1)


def interpreted_cases(module: ModuleType) -> Callable[[Test], Test]:
    """For a test that is told, as ``went_wrong``, what went wrong in a case of the module: a test for each of them."""
    cases = [pytest.param((module, name), id=name) for name in module.CASES]

    def mark(test: Test) -> Test:
        return pytest.mark.interpreter(pytest.mark.parametrize("went_wrong", cases, indirect=True)(test))

    return mark


def results_of(module: ModuleType, names: list[str]) -> dict[str, str | None]:
    """What some cases of a module gave, from one process."""
    pytest.importorskip("triton")
    assert module.__file__
    command = [sys.executable, module.__file__, *names]
    # The package under test, wherever an installed one lies.
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(flash_kda.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, str | None] = json.loads(done.stdout)
    return found
