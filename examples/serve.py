"""Serving in one file: continuous batching of a byte model whose only memory is a pool of KDA states.

    python examples/serve.py

trains a small model on the source of the Python standard library, then completes held-out files for requests that
arrive one after the other, and compares every completion with the model's own, made alone and byte by byte.

What an engine for a model with KDA layers does, in small:

- A request's memory has a fixed size: one slot of the pool. There are no pages.
- Prompts are read in pieces, those of several requests packed into one call, between the decoding steps of others.
- All requests that decode share one :func:`flash_kda.kda_decode` call per layer, which works in the pool.
- The state after a piece is copied into a prefix cache. A prompt that starts with the same bytes goes on from there.
- Drafts (here: what followed the last time that the text went like this) are verified with one slot per token, and the
  next call starts after the last one that the model agreed with.
"""

from __future__ import annotations

import argparse
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import flash_kda
from flash_kda.nn import ByteLM, ByteLMConfig, KimiDeltaAttention, LayerCache, LMCache


@dataclass(frozen=True)
class LayerPool:
    """Memory of one layer: ``state [slots, HV, V, K]``, and the convolutions' last inputs ``[slots, W - 1, D]``."""

    state: Tensor
    q_conv: Tensor
    k_conv: Tensor
    v_conv: Tensor

    @staticmethod
    def of(attn: KimiDeltaAttention, slots: int) -> LayerPool:
        new = attn.A_log.new_zeros
        convs = [new(slots, c.width - 1, c.channels) for c in (attn.q_conv1d, attn.k_conv1d, attn.v_conv1d)]
        return LayerPool(new(slots, attn.num_v_heads, attn.head_v_dim, attn.head_k_dim), *convs)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.state, self.q_conv, self.k_conv, self.v_conv


class Pool:
    """Slots for a model's memory; all layers have the same slots."""

    def __init__(self, model: ByteLM, slots: int) -> None:
        self.layers = [LayerPool.of(block.attn, slots) for block in model.blocks]
        self.free = list(range(slots))

    def take(self, n: int) -> list[int]:
        taken, self.free = self.free[:n], self.free[n:]
        return taken

    def clear(self, slot: int) -> None:
        """As before the first byte."""
        for layer in self.layers:
            for x in layer.tensors:
                x[slot] = 0.0

    def copy(self, source: int, target: int) -> None:
        for layer in self.layers:
            for x in layer.tensors:
                x[target] = x[source]


def prefill(model: ByteLM, pool: Pool, slots: Sequence[int], pieces: Sequence[bytes]) -> None:
    """Read a piece of each of several texts, packed, and leave in its slot what the model then knows."""
    tokens = torch.tensor([list(b"".join(pieces))])
    ends = torch.tensor([0, *map(len, pieces)]).cumsum(0)
    before = LMCache(tuple(LayerCache(*(x[slots] for x in layer.tensors)) for layer in pool.layers), 0)
    _, after = model(tokens, before, return_cache=True, cu_seqlens=ends)
    for layer, cache in zip(pool.layers, after.layers, strict=True):
        for x, new in zip(layer.tensors, (cache.state, cache.q_conv, cache.k_conv, cache.v_conv), strict=True):
            x[slots] = new


def attention(attn: KimiDeltaAttention, x: Tensor, pool: LayerPool, table: Tensor, accepted: Tensor) -> Tensor:
    """A layer's forward for ``x [N, T, D]`` that works in the pool; table and accepted as for ``verify``."""
    T = x.shape[1]
    current = table.gather(1, accepted[:, None] - 1)[:, 0]
    rows = []
    for projection, conv, inputs in (
        (attn.q_proj, attn.q_conv1d, pool.q_conv),
        (attn.k_proj, attn.k_conv1d, pool.k_conv),
        (attn.v_proj, attn.v_conv1d, pool.v_conv),
    ):
        y, before = projection(x), inputs[current]
        rows.append(conv(y, before)[0])
        seen = torch.cat([before, y], 1)
        # What the convolution needs after each of the tokens goes to the slot of that token, as the states do.
        inputs[table[:, :T]] = torch.stack([seen[:, t + 1 : t + conv.width] for t in range(T)], 1)
    q, k, v = rows
    o = flash_kda.kda_decode(
        q.unflatten(-1, (attn.num_heads, attn.head_k_dim)),
        k.unflatten(-1, (attn.num_heads, attn.head_k_dim)),
        v.unflatten(-1, (attn.num_v_heads, attn.head_v_dim)),
        attn.f_proj(x).unflatten(-1, (attn.num_v_heads, attn.head_k_dim)),
        attn.b_proj(x),
        gate=attn.gate,
        pool=pool.state,
        indices=table,
        num_accepted=accepted,
    )
    o = attn.o_norm(o, attn.g_proj(x).unflatten(-1, (attn.num_v_heads, attn.head_v_dim)))
    return attn.o_proj(o.flatten(-2))


def verify(model: ByteLM, pool: Pool, tokens: Tensor, table: Tensor, accepted: Tensor) -> Tensor:
    """The model's choice ``[N, T]`` for the byte after each of ``tokens [N, T]``.

    Args:
        table: ``[N, W]`` each row's slots; the state after token t goes to slot t.
        accepted: ``[N]`` how many tokens of a row's last call were kept: it goes on from the slot of the last of them.
    """
    x = model.embedding(tokens)
    for block, layer in zip(model.blocks, pool.layers, strict=True):
        x = x + attention(block.attn, block.attn_norm(x), layer, table, accepted)
        x = x + block.mlp(block.mlp_norm(x))
    return model.head(model.norm(x)).argmax(-1)


def draft(text: bytes, most: int) -> bytes:
    """What followed the last earlier place where the text went as it goes now: a guess that costs nothing."""
    for n in (6, 4, 2):
        at = text.rfind(text[-n:], 0, len(text) - 1)
        if at >= 0:
            return text[at + n : at + n + most]
    return b""


@dataclass(eq=False)
class Request:
    """A prompt of at least one byte to continue by ``new`` bytes.

    Attributes:
        text: the prompt and what was generated.
        slots: one for each token of a decoding call. The first ``seen`` bytes of the text are in slot ``accepted - 1``.
    """

    prompt: bytes
    new: int
    text: bytearray = field(default_factory=bytearray)
    slots: list[int] = field(default_factory=list)
    accepted: int = 1
    seen: int = 0

    def __post_init__(self) -> None:
        self.text[:] = self.prompt

    @property
    def slot(self) -> int:
        return self.slots[self.accepted - 1]

    @property
    def to_read(self) -> int:
        """Bytes before the last one, which decoding reads."""
        return len(self.text) - 1 - self.seen

    @property
    def done(self) -> bool:
        return len(self.text) >= len(self.prompt) + self.new

    @property
    def result(self) -> bytes:
        return bytes(self.text[len(self.prompt) : len(self.prompt) + self.new])


class Engine:
    """Requests in any number, of which some are under way.

    Args:
        rows: requests under way at once.
        piece: bytes of a prompt that are read in a step.
        drafts: most bytes that are guessed ahead, up to 15.
        prefixes: states in the prefix cache.
    """

    def __init__(self, model: ByteLM, rows: int = 4, piece: int = 64, drafts: int = 4, prefixes: int = 8) -> None:
        self.model, self.rows, self.piece, self.drafts = model, rows, piece, drafts
        self.pool = Pool(model, rows * (1 + drafts) + prefixes)
        # Slots by the bytes that were read, the least used first. All are as long as some number of whole pieces.
        self.prefixes: OrderedDict[bytes, int] = OrderedDict()
        self.unused = self.pool.take(prefixes)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counts = {"steps": 0, "bytes read": 0, "bytes found in the cache": 0, "bytes decoded": 0, "row calls": 0}

    def add(self, prompt: bytes, new: int) -> Request:
        if not prompt:
            raise ValueError("prompt: got no bytes, expected at least one")
        request = Request(prompt, new)
        self.waiting.append(request)
        return request

    @torch.inference_mode()
    def step(self) -> bool:
        """Admit what there is room for, read a piece of every prompt, decode the others; False if nothing is left."""
        while self.waiting and len(self.running) < self.rows:
            self._admit(self.waiting.popleft())
        self.counts["steps"] += 1
        if reading := [r for r in self.running if r.to_read]:
            self._read(reading)
        if decoding := [r for r in self.running if not r.to_read and not r.done]:
            self._decode(decoding)
        for r in [r for r in self.running if r.done]:
            self.running.remove(r)
            self.pool.free += r.slots
        return bool(self.running or self.waiting)

    def _admit(self, r: Request) -> None:
        r.slots = self.pool.take(1 + self.drafts)
        self.running.append(r)
        for n in range((len(r.prompt) - 1) // self.piece * self.piece, 0, -self.piece):
            if (slot := self.prefixes.get(r.prompt[:n])) is not None:
                self.prefixes.move_to_end(r.prompt[:n])
                self.pool.copy(slot, r.slot)
                self.counts["bytes found in the cache"] += n
                r.seen = n
                return
        self.pool.clear(r.slot)

    def _read(self, requests: list[Request]) -> None:
        pieces = [bytes(r.text[r.seen : r.seen + min(r.to_read, self.piece)]) for r in requests]
        prefill(self.model, self.pool, [r.slot for r in requests], pieces)
        for r, piece in zip(requests, pieces, strict=True):
            r.seen += len(piece)
            self.counts["bytes read"] += len(piece)
            if len(piece) == self.piece:
                self._remember(r)

    def _remember(self, r: Request) -> None:
        prefix = bytes(r.text[: r.seen])
        if prefix in self.prefixes or not (self.unused or self.prefixes):
            return
        slot = self.unused.pop() if self.unused else self.prefixes.popitem(last=False)[1]
        self.pool.copy(r.slot, slot)
        self.prefixes[prefix] = slot

    def _decode(self, requests: list[Request]) -> None:
        guesses = [draft(bytes(r.text), self.drafts) for r in requests]
        T = 1 + max(map(len, guesses))
        # A row that guessed less than others has zeros at its end, which are not compared.
        tokens = [[r.text[-1], *guess, *bytes(T - 1 - len(guess))] for r, guess in zip(requests, guesses, strict=True)]
        table = torch.tensor([r.slots for r in requests])
        accepted = torch.tensor([r.accepted for r in requests])
        chosen = verify(self.model, self.pool, torch.tensor(tokens), table, accepted).tolist()
        for r, guess, choice in zip(requests, guesses, chosen, strict=True):
            kept = next((i for i, byte in enumerate(guess) if byte != choice[i]), len(guess))
            # The guesses that the model agreed with, and its own choice after them.
            r.text += bytes(choice[: kept + 1])
            r.accepted = kept + 1
            r.seen += kept + 1
            self.counts["bytes decoded"] += kept + 1
            self.counts["row calls"] += 1


def main() -> None:
    from flash_kda.demo import data
    from flash_kda.demo.train import TrainConfig, threads, train

    parser = argparse.ArgumentParser(description="Continuous batching of a small byte model with KDA.")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training at most")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--new", type=int, default=120, help="bytes to generate per request")
    options = parser.parse_args()
    with threads(1):
        corpus = data.load()
        print(f"training for at most {options.seconds:.0f} s on {len(corpus.train):,} bytes of the standard library")
        shape = ByteLMConfig(hidden_size=96, num_heads=3)
        model, history = train(shape, corpus, TrainConfig(steps=1000, seconds=options.seconds, evaluations=1))
        print(f"{history.held_out[-1][1]:.2f} bits per byte of held-out text")
        engine = Engine(model)
        texts = [text for _, text in corpus.held_out]
        start, requests = time.perf_counter(), []
        for i in range(options.requests):
            # Two requests in turn ask about one text, as the turns of a conversation do.
            text = texts[i // 2 % len(texts)]
            requests.append(engine.add(data.START + text[: 300 + 40 * (i % 2)], options.new))
            engine.step()
        while engine.step():
            pass
        seconds = time.perf_counter() - start
        for r in requests[:4]:
            print("-" * 80, (r.prompt[-120:] + b" >>> " + r.result).decode(errors="replace"), sep="\n")
        print("-" * 80)
        print(", ".join(f"{n} {name}" for name, n in engine.counts.items()), f"in {seconds:.1f} s")
        print(f"{engine.counts['bytes decoded'] / engine.counts['row calls']:.2f} bytes a row and decoding call")
        same = sum(r.result == model.generate(r.prompt, r.new, temperature=0) for r in requests)
        print(f"{same} of {len(requests)} completions are those of the model alone, byte by byte")


if __name__ == "__main__":
    main()
