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

import pytest
import torch

import flash_kda

Cases = Mapping[str, Callable[[], None]]


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


def selected_results(request: pytest.FixtureRequest, module: ModuleType, test: str) -> dict[str, str | None]:
    """What the cases of a module gave for which the test of the asking file was selected, from one process."""
    pytest.importorskip("triton")
    selected = {
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module and item.originalname == test
    }
    assert module.__file__
    command = [sys.executable, module.__file__, *(name for name in module.CASES if name in selected)]
    # The package under test, wherever an installed one lies.
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(flash_kda.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, str | None] = json.loads(done.stdout)
    return found
