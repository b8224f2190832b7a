"""Device helpers of the Hopper kernels, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def pair(x):
    """float32 as two bfloat16 whose sum keeps 16 bits. The first is cut off: a mask costs less than rounding twice."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)


@gluon.jit
def launch_dependents():
    """Let the next kernel of the stream start once every program of this one has come here."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_prerequisites():
    """Wait until the kernel before in the stream has ended."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def fence_gpu():
    """Order this thread's accesses before and after, as seen by the whole GPU."""
    gl.inline_asm_elementwise("fence.acq_rel.gpu; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def fence_copies():
    """Order earlier accesses of this thread before its later asynchronous copies from global memory."""
    gl.inline_asm_elementwise("fence.proxy.async.global; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_copies():
    """Wait until this thread's copies to global memory have been written, and order what follows after them."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; // $0", "=r", [], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_relaxed(p):
    """int32 at the addresses ``p``, as other multiprocessors have written it; a fence must follow before their data."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b32 $0, [$1];", "=r,l", [p.to(gl.int64)], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def sleep():
    """Leave the multiprocessor to others for about half a microsecond."""
    gl.inline_asm_elementwise("nanosleep.u32 500; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
