"""Figures of FlashKDA that were measured before: its wheel does not load here, so it is in no run of this package.

Every table that shows them says so. Speed: medians in ms of the prefill forward with bf16 q, k, v, g, lower bound -5,
initial and final state, K = V = 128. Accuracy: RMSE of the error over RMSE of the value, output and final state, for
the settings of ``flash_kda.bench.accuracy`` (T = 8192, H = 2, one sequence | six).
"""

from __future__ import annotations

SOURCE = "FlashKDA, source of 2026-07, measured 2026-11 on an NVIDIA H200; not of this run"
# Its gate is the lower-bound one, and its speed does not depend on the values.
GATES = ("strong", "slow")

PREFILL_MS = {
    "1x8192-h8": 0.820,
    "1x8192-h12": 0.855,
    "1x8192-h16": 0.870,
    "1x8192-h32": 0.980,
    "1x8192-h64": 1.198,
    "1x8192-h96": 1.399,
    "mixed6-8192-h64": 1.022,
    "mixed6-8192-h96": 1.397,
    "8x1024-h64": 0.811,
    "8x1024-h96": 1.196,
    "1x65536-h8": 6.329,
    "1x32768-h32": 3.827,
    "1x512-h64": 0.109,
    "32x256-h32": 0.470,
    "512x16-h12": 0.736,
}

# (setting, layout) -> output, final state; all with this many tokens and bfloat16 inputs.
TOKENS = 8192
ACCURACY = {
    ("gate -8", "one"): (0.00431, 0.00974),
    ("gate -4", "one"): (0.00335, 0.00384),
    ("gate 0", "one"): (0.00430, 0.00363),
    ("gate 8", "one"): (0.00424, 0.00450),
    ("gate U(-8,8)", "one"): (0.00352, 0.00407),
    ("gate N(0,8)", "one"): (0.00349, 0.00408),
    ("bias +-4", "one"): (0.00314, 0.00285),
    ("bias +-8", "one"): (0.00339, 0.00827),
    ("bias U(-8,8)", "one"): (0.00291, 0.00499),
    ("bias N(0,8)", "one"): (0.00321, 0.00943),
    ("gate -8", "six"): (0.00517, 0.00887),
    ("gate -4", "six"): (0.00341, 0.00402),
    ("gate 0", "six"): (0.00431, 0.00480),
    ("gate 8", "six"): (0.00423, 0.00499),
    ("gate U(-8,8)", "six"): (0.00353, 0.00451),
    ("gate N(0,8)", "six"): (0.00351, 0.00427),
    ("bias +-4", "six"): (0.00317, 0.00338),
    ("bias +-8", "six"): (0.00395, 0.00834),
    ("bias U(-8,8)", "six"): (0.00299, 0.00520),
    ("bias N(0,8)", "six"): (0.00361, 0.00896),
}


def prefill_ms(case: str, gates: str) -> float | None:
    """FlashKDA's time for a case, where it was measured and can run the gate."""
    return PREFILL_MS.get(case) if gates in GATES else None


def accuracy(setting: str, layout: str, dtype: str, tokens: int | None) -> tuple[float, float] | None:
    """FlashKDA's RMSE ratios of output and final state for a setting, where they were measured."""
    return ACCURACY.get((setting, layout)) if dtype == "bfloat16" and tokens == TOKENS else None
