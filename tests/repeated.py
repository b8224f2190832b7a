"""One key for all tokens: a call of it, and what the rounding of decayed keys makes of its state.

``python tests/repeated.py`` writes the errors that docs/numerics.md quotes to a file of results.
"""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import torch
from cases import Call, on_device, oracle
from torch import Tensor

import flash_kda
from flash_kda.backends.triton.config import CHUNK

RESULTS = Path(__file__).parents[1] / "benchmarks/results/repeated-key-cpu.json"

RAW, LOGIT = torch.tensor(-12.0).bfloat16(), torch.tensor(8.0).bfloat16()
LOWER_BOUND = -5.0
# What they make: a decay near 1 in every channel, and all of a value written.
DECAY, BETA = (LOWER_BOUND * RAW.double().sigmoid()).exp(), LOGIT.double().sigmoid()


def repeated_key(T: int, K: int, V: int, device: str, values: int = 16) -> Call:
    """One random key repeated for every q and k, some random values in turn, decay near 1, beta near 1."""
    rng = torch.Generator().manual_seed(7)
    key = torch.randn(1, 1, 1, K, generator=rng).bfloat16()
    v = torch.randn(1, values, 1, V, generator=rng).bfloat16().repeat(1, T // values, 1, 1)
    call: Call = {
        "q": key.expand(1, T, 1, K),
        "k": key.expand(1, T, 1, K),
        "v": v,
        "g": RAW.expand(1, T, 1, K).contiguous(),
        "beta": LOGIT.expand(1, T, 1).contiguous(),
        "gate": on_device(flash_kda.LowerBoundGate(torch.zeros(1), torch.zeros(1, K), LOWER_BOUND), device),
        "scale": None,
        "initial_state": torch.zeros(1, 1, V, K),
        "output_final_state": True,
        "cu_seqlens": None,
        "qk_l2norm": True,
        "beta_is_logit": True,
        "allow_neg_eigval": False,
        "state_layout": "vk",
    }
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.items()}


def state_of_rounded_keys(call: Call, chunk: int) -> Tensor:
    """The final state ``[1, 1, V, K]`` in float64, but for one rounding, of a call made by :func:`repeated_key`.

    Keys are written to the state as they have decayed at the end of their chunk, and so they are rounded to bfloat16:
    each otherwise, by its place. What that adds across the key no later token reads, so nothing takes it back.
    """
    k = call["k"][0, 0, 0].double()
    k = k / (k.square().sum() + 1e-6).sqrt()
    v = call["v"][0, :, 0].double().view(-1, chunk, call["v"].shape[-1])
    decay, beta = DECAY.to(k), BETA.to(k)
    i = torch.arange(chunk).to(k)
    L = (beta * k.square().sum() * decay ** (i[:, None] - i)).tril(-1)
    T = torch.linalg.solve_triangular(L, torch.eye(chunk).to(k), upper=False, unitriangular=True)
    read = k * decay ** (i[:, None] + 1)
    written = (k * decay ** (chunk - 1 - i[:, None])).bfloat16().double()
    S = torch.zeros(v.shape[-1], len(k)).to(k)
    for values in v:
        U = T @ (beta * (values - read @ S.T))
        S = decay**chunk * S + U.T @ written
    return S[None, None]


def error(tokens: int, values: int) -> float:
    """Of the final state with rounded keys, 128 channels: root mean square over root mean square."""
    call = repeated_key(tokens, 128, 128, "cpu", values)
    _, want = oracle(call)
    return float((state_of_rounded_keys(call, CHUNK) - want).norm() / want.norm())


def main() -> None:
    meta = {"command": "python tests/repeated.py", "date": f"{date.today()}", "torch": torch.__version__}
    rows = [
        {"values": values, "tokens": tokens, "state_error": error(tokens, tokens if values == "random" else values)}
        for values in (1, "random", 16)
        for tokens in (512, 4096, 16384)
    ]
    RESULTS.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
