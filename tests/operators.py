"""Calls under torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from cases import Call, Target, tensors_of
from compare import assert_same_bits
from torch import Tensor


def assert_one_operator(
    target: Target, function: Callable[..., Tensor], call: Call, plain: Call, *, with_out: bool
) -> None:
    """The compiled call, without a break in the graph, gives the bits of the plain one, and updates what that does."""
    out = torch.full_like(call["v"], torch.nan) if with_out else None
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        o = compiled(**call, out=out, backend=target.backend)
        expected = function(**plain, backend=target.backend)
    assert_same_bits(o, expected, "o")
    for name, x in tensors_of(call).items():
        assert_same_bits(x, tensors_of(plain)[name], name)
    if out is not None:
        assert_same_bits(out, expected, "out")
