"""What a compiled decode kernel computes, as expressions: whether all value columns and all calls have the same one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256

# Instructions whose two first operands may change places.
COMMUTES = ("add", "mul", "fma")


class Kernel:
    """The float32 instructions of a kernel in PTX.

    Attributes:
        made: by register, where each instruction that writes it stands, its name and its operands.
        stores: where each store of 16 bytes stands, and its four registers.
    """

    def __init__(self, ptx: str) -> None:
        self.made: dict[str, list[tuple[int, str, list[str]]]] = {}
        self.stores: list[tuple[int, list[str]]] = []
        self.names: dict[str, str] = {}
        self.known: dict[tuple[str, int], str] = {}
        for at, line in enumerate(ptx.splitlines()):
            found = re.match(r"\s*(?:@!?%p\d+ )?([a-z][\w.:]*)\s+(.*);", line)
            if not found:
                continue
            kind, text = found.groups()
            registers = re.findall(r"%r\d+", text)
            if kind.startswith("st.global") and ".v4" in kind:
                self.stores.append((at, re.findall(r"%r\d+", text.partition("{")[2])))
            elif registers and text.startswith(registers[0]):
                operands = [x.strip() for x in text.split(",")[1:]]
                self.made.setdefault(registers[0], []).append((at, kind.partition(".")[0], operands))

    def last(self, register: str, before: int) -> tuple[int, str, list[str]] | None:
        """What wrote a register last, of the instructions that stand before a place; in a loop, of any."""
        made = self.made.get(register, [])
        return ([x for x in made if x[0] < before] or made or [None])[-1]

    def expression(self, register: str, before: int) -> str:
        """A value as an expression of what was loaded in float32 or converted, which ``names`` may call something else.

        A short word stands for each, the same in every kernel, since parts come in it many times.
        """
        if register in self.names or not register.startswith("%r"):
            return self.names.get(register, register)
        found = self.last(register, before)
        if found is None or found[1] in ("ld", "mov", "cvt"):
            return "loaded" if found is None or found[1] != "cvt" else "converted"
        at, kind, operands = found
        if (register, at) not in self.known:
            if kind == "shfl":  # a value and by how much the lane's number differs
                operands = operands[:2]
            parts = ["predicate" if x.startswith("%p") else self.expression(x, at) for x in operands]
            if kind in COMMUTES:
                parts[:2] = sorted(parts[:2])
            self.known[register, at] = sha256(f"{kind}({', '.join(parts)})".encode()).hexdigest()[:16]
        return self.known[register, at]

    def writes(self) -> Iterator[tuple[int, str, str, str]]:
        """Of each state that is stored, ``fma(u, k, S decay)``: where, u, k and ``S decay``."""
        for at, registers in self.stores:
            for found in (self.last(register, at) for register in registers):
                assert found is not None
                pair = [self.last(x, found[0]) for x in found[2]] if found[1] == "cvt" else [found]  # of bfloat16
                for made in pair:
                    assert made is not None
                    assert made[1] == "fma", f"a state is made by {made[1]}"
                    yield made[0], *made[2]


def of_a_column(ptx: str) -> set[str]:
    """What is written of each value column, the u of ``S + u k``: its expression, with keys and decays by channel."""
    kernel = Kernel(ptx)
    writes = list(kernel.writes())
    products = [kernel.last(decayed, at) for at, _, _, decayed in writes]
    uses = Counter(x for found in products if found is not None for x in found[2])
    names: dict[str, str] = {}
    for (_, _, k, _), found in zip(writes, products, strict=True):
        assert found is not None
        assert found[1] == "mul"
        # All columns share a decay, and none a state; of one column alone, what was converted is the state.
        rank = {x: (-uses[x], kernel.expression(x, found[0]) == "converted") for x in found[2]}
        decay, state = sorted(rank, key=lambda x: rank[x])
        assert rank[decay] < rank[state]
        names.setdefault(k, f"k{len(names) // 2}")
        names.setdefault(decay, f"decay{names[k][1:]}")
    kernel.names, kernel.known = names, {}
    return {kernel.expression(u, at) for at, u, _, _ in writes}


def of_powers(ptx: str) -> set[str]:
    """What powers of two are taken of, as expressions: those of the gate are among them."""
    kernel = Kernel(ptx)
    made = [(register, at) for register, found in kernel.made.items() for at, kind, _ in found if kind == "ex2"]
    return {kernel.expression(register, at + 1) for register, at in made}
