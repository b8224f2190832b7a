"""The shape of the package, read from its source: import purity and direction, sizes, no bare assert."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import flash_kda

ROOT = Path(flash_kda.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py"))

# A module imports from lower layers and from its own folder. What is not named here is at the top.
LAYERS = (
    {"types", "config", "device"},
    {"reference", "checks"},
    {"checks_decode"},
    {"checks_prefill", "checks_step"},
    {"backends"},
    {"dispatch"},
    {"ops", "forms"},
    {"api", "decode", "prefill", "step"},
    {"compat", "nn", "integrations", "distributed", "bench"},
    {"demo"},
    {"cli_errors"},
    {"cli_bench"},
    {"cli"},
)
LAYER = {name: i for i, names in enumerate(LAYERS) for name in names}
files = pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def part(path: Path) -> str:
    """The module or folder right under the package: ``backends`` for ``backends/cpu/plan.py``."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported(path: Path) -> Iterator[str]:
    """Dotted names of all imports of a file, those inside functions included; ``from a import b`` gives ``a.b``."""
    package = ("flash_kda", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield from (".".join((*base, *filter(None, [node.module]), alias.name)) for alias in node.names)


def own_parts(path: Path) -> set[str]:
    """Parts of the package that a file imports."""
    found = set()
    for name in imported(path):
        words = name.split(".")
        if words[0] != "flash_kda" or len(words) < 2:
            continue
        inside = (ROOT / words[1]).is_dir() or (ROOT / f"{words[1]}.py").is_file()
        # A name that the package itself offers (flash_kda.kda) stands for the public interface.
        found.add(words[1] if inside else "api")
    return found


def test_the_walk_finds_something() -> None:
    assert {"api.py", "backends/cpu/chunk.py", "reference/recurrent.py"} <= {str(p.relative_to(ROOT)) for p in FILES}
    assert "dispatch" in own_parts(ROOT / "api.py")
    assert "types" in own_parts(ROOT / "backends/cpu/plan.py")


@files
def test_import_direction(path: Path) -> None:
    here = part(path)
    if here == "__init__":
        return
    layer = LAYER.get(here, len(LAYERS))
    for other in own_parts(path) - {here}:
        assert LAYER.get(other, len(LAYERS)) < layer, f"{here} may not import {other}: layers go {LAYERS}"


@pytest.mark.parametrize("path", [p for p in FILES if part(p) == "reference"], ids=lambda p: p.name)
def test_the_reference_needs_only_torch(path: Path) -> None:
    allowed = {"torch", "flash_kda", *sys.stdlib_module_names}
    assert {name.split(".")[0] for name in imported(path)} <= allowed
    assert own_parts(path) <= {"types", "reference"}


@files
def test_optional_packages_are_imported_where_they_belong(path: Path) -> None:
    """Triton in GPU backends, benchmarks and integrations; nothing but torch in what every import loads."""
    top = {name.split(".")[0] for name in imported(path)}
    if part(path) in {
        "types",
        "config",
        "device",
        "reference",
        "checks",
        "checks_decode",
        "checks_prefill",
        "checks_step",
        "dispatch",
        "forms",
        "api",
        "decode",
        "prefill",
        "step",
        "__init__",
    }:
        assert top <= {"torch", "flash_kda", *sys.stdlib_module_names}


@files
def test_sizes(path: Path) -> None:
    """At most 500 lines a file, 80 a host function, 250 a device function."""
    assert len(path.read_text().splitlines()) <= 500
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            limit = 250 if any("jit" in ast.unparse(d) for d in node.decorator_list) else 80
            size = (node.end_lineno or 0) - node.lineno + 1
            assert size <= limit, f"{node.name}: got {size} lines, expected at most {limit}"


@files
def test_no_bare_assert(path: Path) -> None:
    found = [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Assert)]
    assert not found, f"bare assert in lines {found}"


@files
def test_isinstance_takes_no_union(path: Path) -> None:
    """Which torch.compile of torch 2.9 and before cannot trace."""
    calls = (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call))
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id == "isinstance":
            assert not isinstance(call.args[1], ast.BinOp), f"line {call.lineno}"


@files
def test_every_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(tree(path)), "expected a docstring that says what the file is for"


def environment_reads(path: Path) -> list[str]:
    """What a file does with the environment, as source text."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"))
        or (isinstance(node, ast.Name) and node.id in ("environ", "getenv"))
    ]


def test_at_most_three_environment_variables() -> None:
    found = [f"{path.relative_to(ROOT)}: {text}" for path in FILES for text in environment_reads(path)]
    assert len(found) <= 3, found


def in_a_fresh_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT.parent)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_pure() -> None:
    """No GPU, no optional package, no backend and no environment variable, and nothing is printed."""
    code = """
import os, sys, torch
before = set(sys.modules)
class Watched(dict):
    def __getitem__(self, key): raise SystemExit(f"the environment was read: {key}")
    def get(self, key, default=None): raise SystemExit(f"the environment was read: {key}")
    def __contains__(self, key): raise SystemExit(f"the environment was read: {key}")
real = os.environ
os.environ = Watched(real)
os.getenv = lambda key, default=None: Watched()[key]
import flash_kda
os.environ = real
new = {name.split(".")[0] for name in set(sys.modules) - before}
unwanted = new & {"triton", "typer", "rich", "matplotlib", "jinja2", "fla", "transformers", "numpy", "cutlass"}
if unwanted: raise SystemExit(f"imported {unwanted}")
backends = [name for name in sys.modules if name.startswith("flash_kda.backends.")]
if backends: raise SystemExit(f"imported {backends}")
if torch.cuda.is_initialized(): raise SystemExit("CUDA was initialised")
"""
    assert in_a_fresh_process(code) == ""


def test_public_names_exist() -> None:
    assert all(hasattr(flash_kda, name) for name in flash_kda.__all__)
    assert sorted(set(flash_kda.__all__)) == sorted(flash_kda.__all__)


def test_the_package_is_typed() -> None:
    assert (ROOT / "py.typed").is_file()
