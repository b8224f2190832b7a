"""Device helpers of the Hopper kernels, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def pair(x):
    """float32 as two bfloat16 whose sum keeps 16 bits. The first is cut off: a mask costs less than rounding twice."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)
