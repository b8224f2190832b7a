"""A backward call on Hopper in Python: the launches that the backend describes, by their kernels' own source.

What the first of them prepares is made here from the definition in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import emulated_gluon
import torch
from cases import Call, inputs_of, spans_of
from compiling import H200
from interpreted_backward import NAMES, Found
from torch import Tensor

from flash_kda.backends.triton.config import CHUNK, Device, configure, slots
from flash_kda.reference import Chunk, kda_chunk
from flash_kda.types import gate_parameters

Tensors = dict[str, Tensor | None]


def slot_of(call: Call, sequence: int, token: int) -> int:
    """The slot of the chunk of a sequence that starts at a token of its batch row."""
    if call["cu_seqlens"] is None:
        return int(sequence * math.ceil(call["q"].shape[1] / CHUNK) + token // CHUNK)
    first = spans_of(call)[sequence][1]
    return first // CHUNK + sequence + (token - first) // CHUNK


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """As bfloat16, and what the rounding lost."""
    high = x.bfloat16()
    return high, (x - high.double()).bfloat16()


def is_hard(chunk: Chunk) -> Tensor:
    """``[HV]``: whether a half of the chunk decays by 2^-120 or more."""
    middle = chunk.G[:, min(CHUNK // 2, chunk.G.shape[1]) - 1]
    early, late = middle, torch.where(middle.isinf(), -math.inf, chunk.G[:, -1] - middle)
    return (torch.minimum(early, late) / math.log(2) <= -120).any(-1)


@dataclass
class Backward:
    """One call.

    Attributes:
        device: what the launches are configured for.
        last_first: see ``emulated_hardware.Program``.
    """

    call: Call
    device: Device = H200
    last_first: bool = True

    def __post_init__(self) -> None:
        self.inputs = inputs_of(self.call)
        self.signature = self.inputs.signature
        self.problem = self.signature.problem
        self.config = configure(self.problem, self.device)
        self.heads = self.problem.HV or self.problem.H
        # Chunks, used or not.
        self.slots = slots(self.problem, CHUNK) * self.heads
        with torch.no_grad():
            self.chunks = kda_chunk(self.inputs, CHUNK)[2]
        self.slot = {id(c): slot_of(self.call, c.sequence, c.start) for c in self.chunks}
        self.prepared = self.prepare()

    def new(self, elements: int, dtype: torch.dtype) -> Tensor | None:
        """Memory that holds nothing."""
        return torch.full((elements,), math.nan if dtype.is_floating_point else -1, dtype=dtype) if elements else None

    def launches(self, dS: Tensor | None) -> tuple[dict[str, tuple[int, torch.dtype]], dict[str, object]]:
        """Scratch memory, and the launches by the names of their kernels."""
        from flash_kda.backends.hopper.backward import describe
        from flash_kda.backends.triton.backward import left_for_chunks

        of_dS = None if dS is None else (dS.dtype, dS.stride())
        (tiles, first), (_, second) = describe(self.signature, self.config, self.device, of_dS)
        found = {x.kernel.__name__: x for x in (*first, *second)}
        return {**tiles, **left_for_chunks(self.problem, self.config)}, found

    def prepare(self) -> Tensors:
        """The tiles, squares and decays of every chunk, and which of them no anchor serves."""
        scratch, _ = self.launches(None)
        found = {name: self.new(*scratch[name]) for name in ("tiles", "squares", "decay", "hard")}
        tiles, squares, decay, hard = found.values()
        assert tiles is not None
        assert squares is not None
        assert decay is not None
        C, K = CHUNK, self.problem.K
        tiles, squares = tiles.view(-1, self.heads, 3, C, K), squares.view(-1, self.heads, 2, C, 2, C)
        decay = decay.view(-1, self.heads, K)
        if hard is not None:
            hard.zero_()
        beta = self.inputs.beta.double().sigmoid() * (2 if self.inputs.allow_neg_eigval else 1)
        for c in self.chunks:
            slot, n, b = self.slot[id(c)], c.G.shape[1], spans_of(self.call)[c.sequence][0]
            of_chunk = torch.zeros(self.heads, 3, C, K, dtype=torch.float64)
            of_chunk[:, :, :n] = torch.stack((-c.K_plus, c.Q_plus, c.K_end), 1)
            tiles[slot] = of_chunk.bfloat16()
            T_beta = c.T * beta[b, c.start : c.start + n].T[:, None]
            square = torch.zeros(self.heads, 2, C, C, dtype=torch.float64)
            square[:, :, :n, :n] = torch.stack((T_beta, c.Mqk @ T_beta), 1)
            squares[slot] = torch.stack(halves(square), 3)
            decay[slot] = c.G[:, -1].exp().float()
            if hard is not None:
                hard.view(-1, self.heads)[slot] = is_hard(c).to(torch.int8)
        return found

    def tensors(self, do: Tensor, dS: Tensor | None) -> Tensors:
        """All that the kernels are passed, by name."""
        x, scratch = self.inputs, self.launches(dS)[0]
        A_log, dt_bias = (None if y is None else y.detach().float().contiguous() for y in gate_parameters(x.gate))
        given = {name: getattr(x, name) for name in ("q", "k", "v", "g", "beta")}
        dv, S0 = torch.full_like(x.v, math.nan), x.initial_state
        left = {name: self.new(*scratch[name]) for name in ("states", "dstates", "U", "U_bits", "dR_bits")}
        by_row = {f"d{name}": torch.full_like(y, math.nan) for name, y in given.items() if name != "v"}
        parts = scratch["decay"][0]
        return {
            **given,
            **{"A_log": A_log, "dt_bias": dt_bias, "cu": x.cu_seqlens, "S0": S0, "do": do.contiguous(), "dS": dS},
            **self.prepared,
            **left,
            **by_row,
            **{"dv": dv, "dR": dv, "dS0": None if S0 is None else torch.full_like(S0, math.nan)},
            "dA_part": None if A_log is None else self.new(parts, torch.float32),
            "dbias_part": None if dt_bias is None else self.new(parts, torch.float32),
        }

    def run(self, names: tuple[str, ...], do: Tensor, dS: Tensor | None) -> Tensors:
        """Some of the launches, and all tensors after them."""
        dS = None if dS is None else dS.contiguous()
        tensors, launches = self.tensors(do, dS), self.launches(dS)[1]
        for name in names:
            emulated_gluon.run(launches[name], tensors, last_first=self.last_first)
        return tensors

    def outside(self) -> Tensor:
        """``[B, T]``: rows that belong to no sequence."""
        found = torch.ones(self.call["q"].shape[:2], dtype=torch.bool)
        for b, first, end in spans_of(self.call):
            found[b, first:end] = False
        return found

    def gradients(self, do: Tensor, dS: Tensor | None, without: int | None = None) -> Found:
        """Of all inputs. Nothing is to be written where no sequence is; there they are zero.

        Those of A_log and dt_bias are sums of all chunks, but for those of the sequence that they are to be without.
        """
        found = self.run(("walks", "gradient"), do, dS)
        gradients: Found = {}
        for name in ("q", "k", "v", "g", "beta"):
            d = found[f"d{name}"]
            assert d is not None
            outside = self.outside()
            assert bool(d[outside].isnan().all()), f"d{name}: rows of no sequence were written"
            d[outside] = 0
            gradients[name] = d
        left_out = [self.slot[id(c)] for c in self.chunks if c.sequence == without]
        for name, part, dims in (("A_log", "dA_part", (0, 2)), ("dt_bias", "dbias_part", (0,))):
            if (parts := found[part]) is not None:
                parts = parts.view(-1, self.heads, self.problem.K)
                parts[left_out] = 0
                gradients[name] = parts.sum(dims)
        if found["dS0"] is not None:
            gradients["initial_state"] = found["dS0"]
        assert all(name in NAMES for name in gradients)
        return gradients
