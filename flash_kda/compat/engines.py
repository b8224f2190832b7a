"""What the interfaces of serving engines share: gates as engines store them, and parts of one packed projection.

Nothing here copies a tensor or reads its data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from torch import Tensor

from flash_kda.types import Gate, LowerBoundGate, SoftplusGate

P = ParamSpec("P")
R = TypeVar("R")


def naming(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make errors about this library's arguments name the engine's: ``naming(pool="ssm_states")``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except (TypeError, ValueError) as error:
                name, colon, rest = str(error).partition(":")
                if not colon or name not in names:
                    raise
                raise type(error)(f"{names[name]}:{rest}") from None

        return call

    return decorate


def refuse(**arguments: object) -> None:
    """Name the first argument that is set: what it asks for is not implemented.

    Raises:
        NotImplementedError: one is neither None nor False.
    """
    for name, value in arguments.items():
        if value is not None and value is not False:
            shown = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{name}: got {shown}, which is not implemented; expected None")


def gate_of(A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Gate:
    """The gate of a raw gate projection: bounded if there is a lower bound, otherwise softplus.

    Args:
        A_log: HV values in any shape, such as ``[1, 1, HV, 1]``.
        dt_bias: HV * K values in any shape, or None.
    """
    A_log, dt_bias = _flat(A_log), _flat(dt_bias)
    return SoftplusGate(A_log, dt_bias) if lower_bound is None else LowerBoundGate(A_log, dt_bias, lower_bound)


def _flat(x: Tensor | None) -> Tensor | None:
    # What is no tensor is left to the checks, which name it.
    return x.view(-1) if isinstance(x, Tensor) and x.is_contiguous() else x


def tensor(name: str, x: object) -> Tensor:
    """An argument that must be a tensor here, where :func:`flash_kda.kda_decode` could do without."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, expected a torch.Tensor")
    return x


def first_rows(name: str, x: object, N: int) -> Tensor:
    """The first N entries of a table that may have more: engines keep tables for as many rows as may come."""
    x = tensor(name, x)
    if x.ndim < 1 or x.shape[0] < N:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected at least N = {N} rows")
    return x if x.shape[0] == N else x[:N]


def rows_of(cu_seqlens: object, name: str) -> tuple[Tensor, int]:
    """Boundaries of packed rows, which engines always give, and how many rows they bound."""
    boundaries = tensor(name, cu_seqlens)
    if boundaries.ndim != 1 or boundaries.shape[0] < 1:
        raise ValueError(f"{name}: got shape {tuple(boundaries.shape)}, expected [N + 1]")
    return boundaries, boundaries.shape[0] - 1


def split_packed(mixed_qkv: object, pool: object) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of single tokens ``[N, 1, heads, size]`` as views of ``[N, 2 * H * K + HV * V]``.

    Args:
        mixed_qkv: rows of q, k and v beside each other, at any distance from each other.
        pool: states ``[slots, HV, V, K]``, which say how the row is divided.
    """
    x, states = tensor("mixed_qkv", mixed_qkv), tensor("pool", pool)
    if states.ndim != 4:
        raise ValueError(f"pool: got shape {tuple(states.shape)}, expected [slots, HV, V, K]")
    _, HV, V, K = states.shape
    keys = x.shape[1] - HV * V if x.ndim == 2 else 0
    if keys < 1 or keys % (2 * K):
        raise ValueError(
            f"mixed_qkv: got shape {tuple(x.shape)}, expected [N, 2 * H * K + HV * V] with HV, V, K = {(HV, V, K)}"
        )
    N, H, first = x.shape[0], keys // (2 * K), x.storage_offset()
    row, step = x.stride()
    # One call each: split, unsqueeze and unflatten take three times as long.
    q, k = (x.as_strided((N, 1, H, K), (row, row, K * step, step), first + i * H * K * step) for i in (0, 1))
    return q, k, x.as_strided((N, 1, HV, V), (row, row, V * step, step), first + keys * step)


def heads_apart(name: str, x: object, leading: tuple[int, ...], heads: int, size: int) -> Tensor:
    """A projection as ``[*leading, heads, size]`` (without the last for size 0), whatever of this it was flattened to.

    Raises:
        ValueError: this takes a copy, or the sizes do not fit.
    """
    x = tensor(name, x)
    shape = (*leading, heads, size) if size else (*leading, heads)
    if x.shape == shape:
        return x
    try:
        return x.view(shape)
    except RuntimeError:
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)} with strides {x.stride()}, expected a view of {shape}"
        ) from None
