"""bfloat16 and TF32 as a GPU rounds them, in Triton's interpreter, which by itself gets the first wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch


def to_bfloat16(x: Any) -> Any:
    """float32 as the bits of the nearest bfloat16."""
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def from_bfloat16(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_tf32(x: Any) -> Any:
    """float32 rounded to 10 bits of mantissa; not for NaN and infinity, whose bits it changes little enough."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(x), rounded, x)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Conversions to and from bfloat16 round to nearest, and products of it and of TF32 are those of its values."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    plain_cast = builder.cast_impl

    def cast(self: Any, source: Any, target: Any) -> Any:
        kinds = (source.dtype.scalar, target.scalar)
        if kinds == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(to_bfloat16(source.data), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(from_bfloat16(source.data), tl.float32)
        return plain_cast(self, source, target)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, _: Any) -> Any:
        def values(x: Any) -> Any:
            if x.dtype.scalar == tl.bfloat16:
                return from_bfloat16(x.data)
            is_tf32 = x.dtype.scalar == tl.float32 and str(precision).endswith("TF32")
            return to_tf32(x.data) if is_tf32 else x.data.astype(np.float32)

        return interpreter.TensorHandle(np.matmul(values(a), values(b)) + d.data, d.dtype.scalar)

    with mock.patch.multiple(builder, cast_impl=cast, create_dot=dot):
        yield
