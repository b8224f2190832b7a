"""A small byte-level language model with KDA as its only token mixer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flash_kda.nn.attention import KimiDeltaAttention, LayerCache
from flash_kda.nn.norm import RMSNorm

VOCABULARY = 256


@dataclass(frozen=True)
class ByteLMConfig:
    """The shape of a :class:`ByteLM`.

    Args:
        hidden_size: width of the residual stream.
        num_layers: blocks.
        num_heads, head_dim, num_v_heads, expand_v, lower_bound, conv_size: as for :class:`KimiDeltaAttention`.
        mlp_size: inner width of the gated MLP.
        tie_embeddings: whether the head reuses the embedding matrix.
        norm_eps: of every norm.
        backend: as for :func:`flash_kda.kda`.
    """

    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    head_dim: int = 32
    num_v_heads: int | None = None
    expand_v: float = 1.0
    lower_bound: float | None = -5.0
    conv_size: int = 4
    mlp_size: int = 384
    tie_embeddings: bool = True
    norm_eps: float = 1e-5
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "head_dim", "conv_size", "mlp_size"):
            if (n := getattr(self, name)) < 1:
                raise ValueError(f"{name}: got {n}, expected 1 or more")


@dataclass(frozen=True, eq=False)
class LMCache:
    """One :class:`LayerCache` per block, and how many tokens they have seen."""

    layers: tuple[LayerCache, ...]
    tokens: int

    @property
    def nbytes(self) -> int:
        """Bytes of all layers: the same after one token and after a million."""
        return sum(layer.nbytes for layer in self.layers)


class GatedMLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``, without biases."""

    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.down_proj = nn.Linear(inner_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden_size]`` to the same shape."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nn.Module):
    """``x + attn(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: ByteLMConfig) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = KimiDeltaAttention(
            config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_v_heads,
            config.expand_v,
            lower_bound=config.lower_bound,
            conv_size=config.conv_size,
            norm_eps=config.norm_eps,
            backend=config.backend,
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.mlp_size)
        # Every block adds twice to the residual stream: start small, so that depth does not scale its variance.
        for out in (self.attn.o_proj, self.mlp.down_proj):
            nn.init.normal_(out.weight, std=0.02 * (2 * config.num_layers) ** -0.5)

    def forward(
        self, x: Tensor, cache: LayerCache | None, return_cache: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, LayerCache | None]:
        """``[B, T, hidden_size]`` to the same shape, and the attention's cache if asked for."""
        y, after = self.attn(self.attn_norm(x), cache, return_cache=return_cache, cu_seqlens=cu_seqlens)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), after


class ByteLM(nn.Module):
    """Embedding of the 256 bytes, blocks of KDA and a gated MLP, a norm, and a head; no positions are needed.

    Args:
        config: the shape.
    """

    def __init__(self, config: ByteLMConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = nn.Linear(config.hidden_size, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        cache: LMCache | None = None,
        *,
        return_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, LMCache | None]:
        """Logits of the byte that follows each byte.

        Args:
            tokens: ``[B, T]`` int64 bytes.
            cache: of the tokens before; None means that the sequences start here.
            return_cache: whether to return the cache after these tokens.
            cu_seqlens: ``[N + 1]`` boundaries of packed sequences (then B = 1).

        Returns:
            Logits ``[B, T, 256]`` in the model's dtype, and the cache or None.

        Raises:
            ValueError: tokens or cache has another shape. TypeError: tokens is not int64.
        """
        if tokens.ndim != 2:
            raise ValueError(f"tokens: got shape {tuple(tokens.shape)}, expected [B, T]")
        if tokens.dtype != torch.int64:
            raise TypeError(f"tokens: got {tokens.dtype}, expected torch.int64")
        if cache is not None and len(cache.layers) != len(self.blocks):
            raise ValueError(f"cache: got {len(cache.layers)} layers, expected {len(self.blocks)}")
        x = self.embedding(tokens)
        layers = []
        for i, block in enumerate(self.blocks):
            x, after = block(x, cache.layers[i] if cache else None, return_cache, cu_seqlens)
            layers.append(after)
        logits = self.head(self.norm(x))
        if not return_cache:
            return logits, None
        return logits, LMCache(tuple(layers), (cache.tokens if cache else 0) + tokens.shape[1])

    @torch.no_grad()
    def generate(
        self,
        prompt: bytes,
        max_new_bytes: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> bytes:
        """Continue ``prompt`` byte by byte: one prefill, then one-token calls that hand the cache on.

        Args:
            prompt: at least one byte.
            max_new_bytes: how many to add, 0 or more.
            temperature: divides the logits; 0 takes the most likely byte.
            top_k: draw among the k most likely bytes only.
            generator: source of randomness.

        Returns:
            The new bytes.

        Raises:
            ValueError: an argument is out of range.
        """
        if not prompt:
            raise ValueError("prompt: got no bytes, expected at least one")
        if max_new_bytes < 0:
            raise ValueError(f"max_new_bytes: got {max_new_bytes}, expected 0 or more")
        if temperature < 0:
            raise ValueError(f"temperature: got {temperature}, expected 0 or more")
        if top_k is not None and not 1 <= top_k <= VOCABULARY:
            raise ValueError(f"top_k: got {top_k}, expected 1 to {VOCABULARY}")
        device = self.embedding.weight.device
        tokens, cache, out = torch.tensor([list(prompt)], device=device), None, bytearray()
        while len(out) < max_new_bytes:
            logits, cache = self(tokens, cache, return_cache=True)
            tokens = _sample(logits[:, -1], temperature, top_k, generator)
            out.append(int(tokens))
        return bytes(out)


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Next tokens ``[B, 1]`` from logits ``[B, 256]``."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None:
        kept = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kept, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
