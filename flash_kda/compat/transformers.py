"""Transformers' interface: :func:`register` makes its KDA layers compute here.

These are the layers of Kimi Linear and of the models that are built like it.

The layers of Transformers call two functions of their module, ``chunk_kimi_delta_attention`` for many tokens and
``recurrent_kimi_delta_attention`` for one: FLA's kernels where FLA is installed, plain torch otherwise. This module has
both by these names. They take any device that a backend here takes, and give gradients where it does.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from flash_kda.api import kda
from flash_kda.compat.engines import refuse
from flash_kda.types import LogGate

# The models of Transformers whose layers are KDA. A version has some of them.
MODELS = ("kimi_linear", "glm5_next", "bailing_hybrid")
FUNCTIONS = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")

# What a module had before: one of its functions by the names of both.
_before: dict[tuple[str, str], Any] = {}


def chunk_kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """KDA as the layers of Transformers call it.

    Args:
        query, key: ``[B, T, H, K]``. value: ``[B, T, H, V]``. A last dimension that is not dense, as the layers'
            convolution leaves it, is copied.
        g: ``[B, T, H, K]``, the log decay. beta: ``[B, T, H]``, between 0 and 1.
        chunk_size: without effect: the result does not depend on it.
        initial_state: ``[N, H, K, V]``.
        cu_seqlens: ``[N + 1]`` boundaries of packed sequences.
        seq_idx: the other form of ``cu_seqlens``; refused without that.
        others: what a model passes through all of its layers; Transformers' own functions drop it too.

    Returns:
        The output, and the final state in float32 (that of ``initial_state``, if there is one) or None.
    """
    refuse(seq_idx=seq_idx if cu_seqlens is None else None)
    return kda(
        _dense(query),
        _dense(key),
        _dense(value),
        _dense(g),
        beta,
        gate=LogGate(),
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        qk_l2norm=use_qk_l2norm_in_kernel,
        beta_is_logit=False,
        state_layout="kv",
    )


def recurrent_kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same function of its arguments as :func:`chunk_kimi_delta_attention`, and run the same way."""
    return chunk_kimi_delta_attention(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        **others,
    )


def register(*models: str) -> tuple[str, ...]:
    """Make the KDA layers of Transformers compute here: in all models of this process, those made before too.

    Calling it again changes nothing. :func:`flash_kda.record_backends` around a model's call tells what ran.

    Args:
        models: of which kinds of models, by Transformers' names; all of :data:`MODELS` if none is given.

    Returns:
        Those that this version of Transformers has.

    Raises:
        ValueError: a name is not one of :data:`MODELS`.
        ImportError: Transformers cannot be imported, or has no such layers.
    """
    for model in models:
        if model not in MODELS:
            raise ValueError(f"models: got {model!r}, expected some of {', '.join(map(repr, MODELS))}")
    try:
        importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(f"register: needs transformers, which cannot be imported ({error})") from error
    found = []
    for model in models or MODELS:
        name = f"transformers.models.{model}.modeling_{model}"
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        if not all(hasattr(module, function) for function in FUNCTIONS):
            continue
        found.append(model)
        for function in FUNCTIONS:
            if getattr(module, function) is not globals()[function]:
                _before[name, function] = getattr(module, function)
                setattr(module, function, globals()[function])
    if not found:
        raise ImportError(f"register: this version of transformers has no KDA layers of {', '.join(models or MODELS)}")
    return tuple(found)


def unregister() -> None:
    """Undo :func:`register`; harmless where nothing is registered."""
    for (name, function), before in _before.items():
        setattr(importlib.import_module(name), function, before)
    _before.clear()


def _dense(x: Tensor) -> Tensor:
    return x.contiguous() if x.ndim and x.stride(-1) != 1 else x
