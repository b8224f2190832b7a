"""Errors judged per head and per block of rows, and what is worst said in words."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager

import torch
from cases import Call, spans_of, tensors_of
from torch import Tensor

BLOCK = 16
# A block much quieter than its head is measured against this part of the head's size.
QUIET = 1e-2


def worst(got: Tensor, expected: Tensor) -> str:
    """Where two tensors differ most, with both values."""
    difference = (got.double() - expected.double()).abs().nan_to_num(nan=torch.inf)
    i = tuple(int(x) for x in torch.unravel_index(difference.argmax(), difference.shape))
    return f"worst at {i}: got {got[i].item():.9g}, expected {expected[i].item():.9g}"


def rms(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.square().mean(dims).sqrt()


def _ratio(got: Tensor, expected: Tensor) -> tuple[float, float]:
    """Largest RMSE ratio of the blocks of 16 to 31 rows of ``[rows, columns]``, and the ratio of the whole."""
    whole = rms(expected, (0, 1))
    error = got - expected
    count = max(1, len(expected) // BLOCK)
    blocks = [
        float(rms(e, (0, 1)) / torch.maximum(rms(x, (0, 1)), QUIET * whole).clamp(min=1e-300))
        for e, x in zip(error.tensor_split(count), expected.tensor_split(count), strict=True)
    ]
    return max(blocks), float(rms(error, (0, 1)) / whole.clamp(min=1e-300))


def assert_close(
    got: Tensor, expected: Tensor, tolerance: float, label: str, *, baseline: Tensor | None = None
) -> None:
    """Compare ``[rows, heads, columns]`` per head, whole and in blocks of 16 to 31 rows.

    Args:
        expected: float64.
        tolerance: allowed RMSE ratio, besides what rounding ``expected`` to got's dtype costs by itself in the block.
            Twice that if there are fewer rows than a block: the errors of so few average out little, while what they
            are measured against may happen to cancel.
        baseline: a computation in the same precision; twice its error is allowed.
    """
    assert got.shape == expected.shape, f"{label}: got shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if not expected.numel():
        return
    got, expected = got.detach().cpu(), expected.detach().cpu()
    rounded = expected.to(got.dtype)
    baseline = expected if baseline is None else baseline.detach().cpu()
    assert torch.equal(got.isfinite(), expected.isfinite()), f"{label}: not finite; {worst(got, expected)}"
    values, expected = got.double(), expected.double()
    finite = expected.isfinite()
    if len(expected) < BLOCK:
        tolerance = 2 * tolerance
    values, expected, rounded, baseline = (
        torch.where(finite, x.double(), 0.0) for x in (values, expected, rounded, baseline)
    )
    for head in range(expected.shape[1]):
        x = expected[:, head]
        errors = (_ratio(y[:, head], x) for y in (values, rounded, baseline))
        for kind, error, rounding, same in zip(("a block", "the whole"), *errors, strict=True):
            allowed = max(tolerance, 2 * same) + 1.05 * rounding
            assert error <= allowed, (
                f"{label}, head {head}: RMSE ratio of {kind} {error:.3g}, allowed {allowed:.3g}; {worst(got, expected)}"
            )


def assert_outputs(
    got: Tensor, expected: Tensor, call: Call, tolerance: float, label: str = "o", *, baseline: Tensor | None = None
) -> None:
    """Compare ``[B, T, HV, ...]`` sequence by sequence; rows that belong to none must be zero."""
    assert got.shape == expected.shape, f"{label}: got shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if got.ndim == 3:
        got, expected = got[..., None], expected[..., None]
        baseline = None if baseline is None else baseline[..., None]
    spans = spans_of(call)
    for n, (b, first, end) in enumerate(spans):
        rows = slice(first, end)
        same = None if baseline is None else baseline[b, rows]
        assert_close(got[b, rows], expected[b, rows], tolerance, f"{label} of sequence {n}", baseline=same)
    if call.get("cu_seqlens") is not None:
        end = spans[-1][2] if spans else 0
        assert not got[0, end:].count_nonzero(), f"{label}: rows past the last sequence are not zero"


def assert_states(
    got: Tensor, expected: Tensor, tolerance: float, label: str = "state", *, baseline: Tensor | None = None
) -> None:
    """Compare ``[N, HV, rows, columns]`` sequence by sequence and head by head."""
    assert got.shape == expected.shape, f"{label}: got shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    for n, (x, y) in enumerate(zip(got, expected, strict=True)):
        same = None if baseline is None else baseline[n].transpose(0, 1)
        assert_close(x.transpose(0, 1), y.transpose(0, 1), tolerance, f"{label} {n}", baseline=same)


def assert_rows(
    o: Tensor, expected: Tensor, call: Call, padding: Container[int], tolerance: float, row: str = "row"
) -> None:
    """The output of a call on a pool, each row by itself; zeros for ``padding``, and for what belongs to nobody."""
    spans = spans_of(call)
    for n, (batch, first, end) in enumerate(spans):
        got = o[batch, first:end]
        if n in padding:
            assert not got.count_nonzero(), f"padding {row} {n} is not zeros"
        else:
            assert_close(got, expected[batch, first:end], tolerance, f"o of {row} {n}")
    if call.get("cu_seqlens") is not None:
        assert not o[0, spans[-1][2] if spans else 0 :].count_nonzero(), "rows that belong to nobody are not zeros"


def bits(x: Tensor) -> Tensor:
    """The tensor as integers, so that equality means equal bits (NaN equals itself, -0 is not 0)."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().contiguous().view(kinds[x.element_size()])


def assert_same_bits(got: Tensor | None, expected: Tensor | None, label: str) -> None:
    if got is None or expected is None:
        assert got is expected, f"{label}: one of the two is None"
        return
    assert got.dtype == expected.dtype, f"{label}: got {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{label}: got shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    assert torch.equal(bits(got), bits(expected)), f"{label}: bits differ; {worst(got, expected)}"


@contextmanager
def unchanged(call: Call, *but: str) -> Iterator[None]:
    """The tensors of a call, ``but`` for some, keep their bits."""
    kept = {name: bits(x).clone() for name, x in tensors_of(call).items() if name not in but}
    yield
    found = tensors_of(call)
    for name, x in kept.items():
        assert torch.equal(bits(found[name]), x), f"{name} was changed"
