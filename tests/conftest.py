"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flash_kda import dispatch, forms

# The cases are small: one thread is faster than two that wait for each other.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped, with the reason, where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def fresh_choices() -> Iterator[None]:
    """Choices of backends are remembered; a test that changes the backends must not meet or leave one."""
    forget()
    yield
    forget()


def forget() -> None:
    """Forget which backend runs what, and how."""
    dispatch._choose.cache_clear()
    forms.form.cache_clear()
