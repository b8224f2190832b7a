"""Launching a kernel with little work on the host.

Triton's own launch looks up the compiled kernel from every argument anew, which costs more than some of our kernels
run. Here the lookup has a key that holds all that can select another kernel, and no more.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

# Compiled kernels with the constants that complete their arguments, in the order of the signature.
_compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}


def run(
    kernel: Any,
    programs: int,
    tensors: tuple[Tensor, ...],
    strides: tuple[int, ...],
    numbers: tuple[int | float, ...],
    constants: dict[str, object],
    num_warps: int,
    maxnreg: int | None = None,
) -> None:
    """Launch ``programs`` programs of a jitted kernel whose signature is tensors, strides, numbers, constants.

    Args:
        numbers: values that Triton does not specialise on.
    """
    key = (
        kernel,
        tensors[0].device.index,
        *(x.dtype for x in tensors),
        *(x.data_ptr() % 16 == 0 for x in tensors),
        *strides,
        *constants.values(),
        num_warps,
        maxnreg,
    )
    known = _compiled.get(key)
    if known is None:
        compiled = kernel[(programs,)](
            *tensors,
            *strides,
            *numbers,
            **constants,
            num_warps=num_warps,
            **({} if maxnreg is None else {"maxnreg": maxnreg}),
        )
        if compiled is not None:  # the interpreter compiles nothing
            names = kernel.arg_names[len(tensors) + len(strides) + len(numbers) :]
            _compiled[key] = compiled, tuple(constants[name] for name in names)
        return
    compiled, tail = known
    compiled[(programs, 1, 1)](*tensors, *strides, *numbers, *tail)
