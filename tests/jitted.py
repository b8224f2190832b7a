"""In place of a jitted function of Triton: what it is launched with, and whether past Triton."""

from __future__ import annotations

from typing import Any
from unittest import mock

from torch import Tensor

STREAM = 7


class Compiled:
    """What a plan uses of a compiled kernel; ``direct`` gets its key and the arguments of every launch past Triton."""

    packed_metadata = ("packed",)

    def __init__(self, key: Any, direct: list[Any], *, scratch: int = 0) -> None:
        def run(*arguments: Any) -> None:
            direct.append((key, arguments))

        self.function = key
        self.run = mock.Mock(side_effect=run, global_scratch_size=scratch, profile_scratch_size=0)
        self.run.launch_cooperative_grid, self.run.launch_pdl = "cooperative", "pdl"
        self.run.launch.side_effect = run


class Jitted:
    """A jitted function that compiles by ``compile`` and records launches: through Triton, and past it.

    The key of a compiled kernel is all that Triton could compile for: values, options, and what tensors look like.
    """

    def __init__(self, *names: str, compile: Any = Compiled) -> None:
        self.arg_names = list(names)
        self.compile = compile
        self.by_triton: list[tuple[Any, ...]] = []
        self.keys: list[Any] = []
        self.direct: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.by_triton.append((grid, arguments, options))
            seen = [(x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else x for x in arguments]
            self.keys.append((tuple(seen), tuple(options.items())))
            return self.compile(self.keys[-1], self.direct)

        return call
