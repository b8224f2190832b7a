"""What all tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch
from compiling import Build, Built, under_way
from interpreting import results_of

from flash_kda import dispatch, forms
from flash_kda.backends.hopper import TRITON
from flash_kda.backends.triton import is_too_old


def triton_version() -> str:
    """Of an installed Triton, or nothing."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


if (found := triton_version()) and is_too_old(found):
    # One that is too old for the kernels is as none.
    sys.modules["triton"] = None  # type: ignore[assignment]

# The cases are small: one thread is faster than two that wait for each other.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests are skipped, with the reason, where there is no GPU, or another Triton than they know."""
    reasons = {}
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs an NVIDIA GPU"
    if found and not found.startswith(TRITON):
        reasons |= dict.fromkeys(("offline", "triton36"), f"is made for Triton {TRITON[0]}x; this is {found}")
    for item in items:
        if item.path.name.startswith("test_hopper"):
            item.add_marker("triton36")
        for name, reason in reasons.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def fresh_choices() -> Iterator[None]:
    """Choices of backends are remembered; a test that changes the backends must not meet or leave one."""
    forget()
    yield
    forget()


def forget() -> None:
    """Forget which backend runs what, and how."""
    dispatch._choose.cache_clear()
    forms.forget()


def selected(request: pytest.FixtureRequest, parameter: str, fixture: str) -> list[Any]:
    """A parameter's values in the selected tests of the asking file that use the fixture."""
    return [
        item.callspec.params[parameter]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module and fixture in item.fixturenames
    ]


@pytest.fixture(scope="module")
def interpreted_results(request: pytest.FixtureRequest) -> dict[str, str | None]:
    """What a file's cases in Triton's interpreter gave, from one process."""
    cases = selected(request, "went_wrong", "went_wrong")
    (module,) = {module for module, _ in cases}
    return results_of(module, [name for _, name in cases])


@pytest.fixture
def went_wrong(request: pytest.FixtureRequest, interpreted_results: dict[str, str | None]) -> str | None:
    """What went wrong in a case in Triton's interpreter: see ``interpreted_cases``."""
    _, name = request.param
    return interpreted_results[name]


@pytest.fixture(scope="module")
def builds_under_way(request: pytest.FixtureRequest) -> Iterator[Mapping[Build, Future[Built]]]:
    """A file's builds, under way in other processes while the first ones are judged."""
    with under_way(selected(request, "build", "built")) as found:
        yield found


@pytest.fixture
def built(build: Build, builds_under_way: Mapping[Build, Future[Built]]) -> Built:
    """What became of a test's build."""
    return builds_under_way[build].result()
