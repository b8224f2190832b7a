"""Layers and a small language model around :func:`flash_kda.kda`. Not imported by ``import flash_kda``."""

from flash_kda.nn.attention import DeltaRule, KimiDeltaAttention, LayerCache
from flash_kda.nn.conv import ShortConvolution
from flash_kda.nn.lm import ByteLM, ByteLMConfig, GatedMLP, LMCache
from flash_kda.nn.norm import GatedRMSNorm, RMSNorm

__all__ = [
    "ByteLM",
    "ByteLMConfig",
    "DeltaRule",
    "GatedMLP",
    "GatedRMSNorm",
    "KimiDeltaAttention",
    "LMCache",
    "LayerCache",
    "RMSNorm",
    "ShortConvolution",
]
