"""Exact and fast Kimi Delta Attention (KDA).

>>> import flash_kda
>>> gate = flash_kda.LowerBoundGate(A_log, dt_bias, lower_bound=-5.0)
>>> o, state = flash_kda.kda(q, k, v, g, beta, gate=gate, output_final_state=True)

Importing this package touches neither a GPU nor Triton and reads no environment variable.
"""

from flash_kda.api import kda
from flash_kda.compat.flashkda import fwd, get_workspace_size
from flash_kda.decode import kda_decode
from flash_kda.dispatch import BACKENDS, Explanation, explain, record_backends
from flash_kda.prefill import kda_prefill
from flash_kda.step import kda_decode_step
from flash_kda.types import Checkpoints, Gate, LogGate, LowerBoundGate, Problem, SoftplusGate
from flash_kda.warming import warmup

__version__ = "0.1.0"

__all__ = [
    "BACKENDS",
    "Checkpoints",
    "Explanation",
    "Gate",
    "LogGate",
    "LowerBoundGate",
    "Problem",
    "SoftplusGate",
    "__version__",
    "explain",
    "fwd",
    "get_workspace_size",
    "kda",
    "kda_decode",
    "kda_decode_step",
    "kda_prefill",
    "record_backends",
    "warmup",
]
