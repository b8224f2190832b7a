"""The KDA layer of Kimi Linear: projections, short convolutions, low-rank gates, the delta rule, a gated norm."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flash_kda.api import kda
from flash_kda.decode import kda_decode
from flash_kda.nn.conv import ShortConvolution
from flash_kda.nn.norm import GatedRMSNorm
from flash_kda.step import kda_decode_step
from flash_kda.types import LowerBoundGate, SoftplusGate


@dataclass(frozen=True, eq=False)
class LayerCache:
    """What a layer needs of the tokens it has seen; a call takes one and returns the next, and changes neither.

    Attributes:
        state: ``[N, HV, V, K]`` float32 recurrent state.
        q_conv, k_conv, v_conv: ``[N, W - 1, D]`` float32, the last inputs of the convolutions; None without them.

    N is the batch size, or the number of packed sequences. Its size does not depend on how much was seen.
    """

    state: Tensor
    q_conv: Tensor | None = None
    k_conv: Tensor | None = None
    v_conv: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.state, self.q_conv, self.k_conv, self.v_conv)
        return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def _decodes(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> bool:
    """Whether a call is of one token for each row of a state, without gradients. What does not fit is for ``kda``."""
    if torch.is_grad_enabled() or cu_seqlens is not None or state is None or q.shape[1] != 1:
        return False
    return state.shape == (q.shape[0], *v.shape[2:], k.shape[3])


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of our own kind, and nobody watches or changes what goes through it."""
    return type(module) is kind and not (module._forward_pre_hooks or module._forward_hooks)


class DeltaRule(nn.Module):
    """:func:`flash_kda.kda` as a module without parameters, so that a forward hook sees q, k, v, g and beta.

    Args:
        allow_neg_eigval, backend, recompute: as for :func:`flash_kda.kda`.
    """

    def __init__(self, allow_neg_eigval: bool = False, backend: str = "auto", recompute: bool = True) -> None:
        super().__init__()
        self.allow_neg_eigval, self.backend, self.recompute = allow_neg_eigval, backend, recompute

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        gate: LowerBoundGate | SoftplusGate,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Output ``[B, T, HV, V]`` and final state ``[N, HV, V, K]`` or None; shapes as for :func:`flash_kda.kda`.

        Single tokens that go on from a state, without gradients, take :func:`flash_kda.kda_decode`.
        """
        if _decodes(q, k, v, initial_state, cu_seqlens) and output_final_state and initial_state is not None:
            # Decoding works in place, and the state before must outlive the call.
            state = initial_state.clone(memory_format=torch.contiguous_format)
            neg = self.allow_neg_eigval
            o = kda_decode(q, k, v, g, beta, gate=gate, pool=state, allow_neg_eigval=neg, backend=self.backend)
            return o, state
        return kda(
            q,
            k,
            v,
            g,
            beta,
            gate=gate,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            allow_neg_eigval=self.allow_neg_eigval,
            recompute=self.recompute,
            backend=self.backend,
        )


def _whole(name: str, x: float) -> int:
    n = round(x)
    if n < 1 or not math.isclose(x, n, rel_tol=1e-5):
        raise ValueError(f"expand_v: got a {name} of {x}, expected a whole number of 1 or more")
    return n


def _initial_dt_bias(size: int) -> Tensor:
    """Inverse softplus of steps drawn log-uniformly from [0.001, 0.1]: memories of ten to a thousand tokens."""
    low, high = math.log(1e-3), math.log(1e-1)
    dt = torch.empty(size, dtype=torch.float32).uniform_(low, high).exp()
    return dt + torch.log(-torch.expm1(-dt))


class KimiDeltaAttention(nn.Module):
    """Kimi Delta Attention as a token mixer (arXiv:2510.26692); its state_dict is that of FLA's layer of this name.

    ``hidden_size`` D, heads H of size K, value heads HV of size V = K * expand_v, convolution width W. Parameters:
    q_proj, k_proj, v_proj, b_proj, o_proj without bias; q_conv1d, k_conv1d, v_conv1d; f_proj (decay) and g_proj
    (output gate) of rank V; ``A_log [HV]`` and ``dt_bias [HV * K]``, float32; ``o_norm.weight [V]``.

    Args:
        hidden_size: D.
        head_dim: K.
        num_heads: H.
        num_v_heads: HV, a multiple of H; None means H.
        expand_v: V / K; V must come out whole.
        lower_bound: None for :class:`flash_kda.SoftplusGate`, otherwise that of :class:`flash_kda.LowerBoundGate`.
        allow_neg_eigval: take ``2 * sigmoid`` of the beta logits.
        use_short_conv: whether q, k and v pass a convolution before their SiLU.
        conv_size: W.
        conv_bias: whether the convolutions have a bias.
        norm_eps: of ``o_norm``.
        recompute, backend: as for :func:`flash_kda.kda`.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        expand_v: float = 1.0,
        *,
        lower_bound: float | None = None,
        allow_neg_eigval: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        recompute: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        for name, n in (("hidden_size", hidden_size), ("head_dim", head_dim), ("num_heads", num_heads)):
            if n < 1:
                raise ValueError(f"{name}: got {n}, expected 1 or more")
        HV = num_heads if num_v_heads is None else num_v_heads
        if HV < 1 or HV % num_heads:
            raise ValueError(f"num_v_heads: got {HV}, expected a multiple of num_heads = {num_heads}")
        if lower_bound is not None and not -5.0 <= lower_bound < 0:
            raise ValueError(f"lower_bound: got {lower_bound}, expected None or a value in [-5.0, 0)")
        V = _whole("value head size", head_dim * expand_v)
        self.hidden_size, self.head_k_dim, self.head_v_dim = hidden_size, head_dim, V
        self.num_heads, self.num_v_heads = num_heads, HV
        self.lower_bound, self.use_short_conv = lower_bound, use_short_conv
        key_dim, value_dim, gate_dim = num_heads * head_dim, HV * V, HV * head_dim

        self.q_proj = nn.Linear(hidden_size, key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, value_dim, bias=False)
        if use_short_conv:
            self.q_conv1d = ShortConvolution(key_dim, conv_size, conv_bias)
            self.k_conv1d = ShortConvolution(key_dim, conv_size, conv_bias)
            self.v_conv1d = ShortConvolution(value_dim, conv_size, conv_bias)
        self.f_proj = nn.Sequential(nn.Linear(hidden_size, V, bias=False), nn.Linear(V, gate_dim, bias=False))
        self.b_proj = nn.Linear(hidden_size, HV, bias=False)
        self.g_proj = nn.Sequential(nn.Linear(hidden_size, V, bias=False), nn.Linear(V, value_dim, bias=True))
        # The bounded gate starts from unit amplitude, the softplus gate from one in [1, 16].
        A = torch.ones(HV) if lower_bound is not None else torch.empty(HV).uniform_(1, 16)
        self.A_log = nn.Parameter(A.log())
        self.dt_bias = nn.Parameter(_initial_dt_bias(gate_dim))
        self.delta_rule = DeltaRule(allow_neg_eigval, backend, recompute)
        self.o_norm = GatedRMSNorm(V, norm_eps)
        self.o_proj = nn.Linear(value_dim, hidden_size, bias=False)

    @property
    def gate(self) -> LowerBoundGate | SoftplusGate:
        """The decay gate with this layer's parameters, in float32 (float64 in a float64 layer)."""
        # A layer cast to bfloat16 as a whole has rounded parameters, but the gate still computes in float32.
        A_log, dt_bias = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (self.A_log, self.dt_bias))
        if self.lower_bound is None:
            return SoftplusGate(A_log, dt_bias)
        return LowerBoundGate(A_log, dt_bias, self.lower_bound)

    def forward(
        self,
        x: Tensor,
        cache: LayerCache | None = None,
        *,
        return_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, LayerCache | None]:
        """Mix tokens of whole sequences, of pieces of any length, or single tokens.

        Args:
            x: ``[B, T, D]``.
            cache: of the tokens before; None means that the sequences start here.
            return_cache: whether to return the cache after these tokens.
            cu_seqlens: ``[N + 1]`` boundaries of packed sequences (then B = 1), as for :func:`flash_kda.kda`.

        Returns:
            ``[B, T, D]`` in x's dtype (rows from ``cu_seqlens[-1]`` on are zero), and the cache or None.

        Raises:
            ValueError, TypeError: x, cache or cu_seqlens does not fit; the message names it.
        """
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x: got shape {tuple(x.shape)}, expected [B, T, D] with D = {self.hidden_size}")
        if cache is not None and (cache.q_conv is None) == self.use_short_conv:
            raise ValueError(f"cache: got one of a layer with use_short_conv={not self.use_short_conv}")
        if cache is not None and return_cache and cu_seqlens is None and self._steps(x, cache):
            return self._step(x, cache)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        conv: tuple[Tensor, ...] = ()
        if self.use_short_conv:
            q, q_conv = self.q_conv1d(q, cache.q_conv if cache else None, cu_seqlens)
            k, k_conv = self.k_conv1d(k, cache.k_conv if cache else None, cu_seqlens)
            v, v_conv = self.v_conv1d(v, cache.v_conv if cache else None, cu_seqlens)
            conv = (q_conv, k_conv, v_conv)
        else:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        o, state = self.delta_rule(
            q.unflatten(-1, (self.num_heads, self.head_k_dim)),
            k.unflatten(-1, (self.num_heads, self.head_k_dim)),
            v.unflatten(-1, (self.num_v_heads, self.head_v_dim)),
            self.f_proj(x).unflatten(-1, (self.num_v_heads, self.head_k_dim)),
            self.b_proj(x),
            gate=self.gate,
            initial_state=cache.state if cache else None,
            output_final_state=return_cache,
            cu_seqlens=cu_seqlens,
        )
        o = self.o_norm(o, self.g_proj(x).unflatten(-1, (self.num_v_heads, self.head_v_dim)))
        y = self.o_proj(o.flatten(-2))
        if cu_seqlens is not None:
            # A NaN in a padding row passes the output gate; it ends here.
            inside = torch.arange(x.shape[1], device=x.device) < cu_seqlens[-1]
            y = torch.where(inside[:, None], y, 0.0)
        if state is None:
            return y, None
        # The next call takes a state whose last dimension is dense, whatever layout the backend computed in.
        return y, LayerCache(state.contiguous(), *conv)

    @property
    def _convolutions(self) -> tuple[ShortConvolution, ShortConvolution, ShortConvolution]:
        return self.q_conv1d, self.k_conv1d, self.v_conv1d

    def _steps(self, x: Tensor, cache: LayerCache) -> bool:
        """Whether :meth:`_step` does it: a token for each row of a cache, no gradients, and nobody looks at the parts.

        What does not fit is for the parts, whose checks say what is wrong.
        """
        if x.shape[1] != 1 or torch.is_grad_enabled() or not self.use_short_conv:
            return False
        parts = [(self.delta_rule, DeltaRule), (self.o_norm, GatedRMSNorm)]
        if not all(_is_plain(*part) for part in (*parts, *((conv, ShortConvolution) for conv in self._convolutions))):
            return False
        states = (cache.q_conv, cache.k_conv, cache.v_conv)
        return cache.state.shape == (x.shape[0], self.num_v_heads, self.head_v_dim, self.head_k_dim) and all(
            state is not None and state.shape == (x.shape[0], conv.width - 1, conv.channels)
            for state, conv in zip(states, self._convolutions, strict=True)
        )

    def _step(self, x: Tensor, cache: LayerCache) -> tuple[Tensor, LayerCache]:
        """:meth:`forward` of single tokens, all between the projections by :func:`flash_kda.kda_decode_step`."""
        convolutions = self._convolutions
        # The step works in place, and the cache must outlive the call.
        state = cache.state.clone(memory_format=torch.contiguous_format)
        inputs = torch.cat([s for s in (cache.q_conv, cache.k_conv, cache.v_conv) if s is not None], -1)
        by_head = (self.num_v_heads, self.head_v_dim)
        o = kda_decode_step(
            self.q_proj(x).unflatten(-1, (self.num_heads, self.head_k_dim)),
            self.k_proj(x).unflatten(-1, (self.num_heads, self.head_k_dim)),
            self.v_proj(x).unflatten(-1, by_head),
            self.f_proj(x).unflatten(-1, (self.num_v_heads, self.head_k_dim)),
            self.b_proj(x),
            self.g_proj(x).unflatten(-1, by_head),
            gate=self.gate,
            pool=state,
            conv_pool=inputs,
            conv_weights=[conv.weight for conv in convolutions],
            conv_biases=[conv.bias for conv in convolutions if conv.bias is not None] or None,
            norm_weight=self.o_norm.weight,
            norm_eps=self.o_norm.eps,
            allow_neg_eigval=self.delta_rule.allow_neg_eigval,
            backend=self.delta_rule.backend,
        )
        return self.o_proj(o.flatten(-2)), LayerCache(state, *inputs.split([c.channels for c in convolutions], -1))
