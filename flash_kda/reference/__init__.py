"""The exact answers: the recurrence, and the chunk form with every matrix by its name. Plain torch, any device."""

from flash_kda.reference.chunk import Chunk, kda_chunk
from flash_kda.reference.gate import activate, decay, l2norm, sigmoid
from flash_kda.reference.recurrent import kda_recurrent

__all__ = ["Chunk", "activate", "decay", "kda_chunk", "kda_recurrent", "l2norm", "sigmoid"]
