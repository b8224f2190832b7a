"""vLLM's and SGLang's calls: their shapes, strides and padding, against the definition token by token in float64."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Call, on_device, oracle
from compare import assert_close, assert_same_bits, bits
from decoding import assert_decoded
from torch import Tensor

import flash_kda
from flash_kda.compat import engines, sglang, vllm

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
on_devices = pytest.mark.parametrize("device", DEVICES)
gates = pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["lower_bound", "softplus"])
# Per head, beyond the rounding of results: decoding is float32 on every backend, prefill on a GPU has smaller products.
DECODE = {"cpu": 1e-5, "cuda": 3e-5}
PREFILL = {"cpu": 1e-5, "cuda": 6e-3}
H, HV, K, V = 2, 4, 20, 24
SLOTS = 12


@dataclass
class Tokens:
    """Tokens of a layer as an engine has them: parts of projections with NaN beside them, and the gate's values."""

    mixed: Tensor
    raw_g: Tensor
    raw_beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None
    projections: tuple[Tensor, Tensor]

    @property
    def rows(self) -> dict[str, Tensor]:
        """q, k, v, g and beta, packed: ``[1, T, heads, size]``, as views."""
        q, k, v = self.mixed[None].split([H * K, H * K, HV * V], -1)
        heads = {"q": q.unflatten(-1, (H, K)), "k": k.unflatten(-1, (H, K)), "v": v.unflatten(-1, (HV, V))}
        return heads | {"g": self.raw_g, "beta": self.raw_beta}

    @property
    def gate(self) -> flash_kda.Gate:
        A_log, dt_bias = self.A_log.flatten(), self.dt_bias.flatten()
        if self.lower_bound is None:
            return flash_kda.SoftplusGate(A_log, dt_bias)
        return flash_kda.LowerBoundGate(A_log, dt_bias, self.lower_bound)

    @property
    def parameters(self) -> dict[str, Any]:
        return {"A_log": self.A_log, "dt_bias": self.dt_bias, "lower_bound": self.lower_bound}


def tokens(T: int, device: str, lower_bound: float | None = -5.0, seed: int = 0) -> Tokens:
    rng = torch.Generator().manual_seed(seed)
    width = 2 * H * K + HV * V
    first, second = torch.full((T, width + HV + 11), torch.nan), torch.full((T, HV * K + 6), torch.nan)
    first[:, :width] = torch.randn(T, width, generator=rng)
    first[:, width + 5 : width + 5 + HV] = torch.randn(T, HV, generator=rng) + 0.5
    second[:, 2 : 2 + HV * K] = torch.randn(T, HV * K, generator=rng) + 0.5
    A_log, dt_bias = 0.4 * torch.randn(1, 1, HV, 1, generator=rng), torch.randn(HV * K, generator=rng)
    first, second = first.to(device), second.to(device)
    return Tokens(
        mixed=first[:, :width],
        raw_g=second[:, 2 : 2 + HV * K].unflatten(-1, (HV, K))[None],
        raw_beta=first[None, :, width + 5 : width + 5 + HV],
        A_log=A_log.to(device),
        dt_bias=dt_bias.to(device),
        lower_bound=lower_bound,
        projections=(first, second),
    )


def states(*shape: int, device: str, seed: int = 1) -> Tensor:
    return torch.randn(*shape, HV, V, K, generator=torch.Generator().manual_seed(seed)).to(device)


def ints(*values: Any, device: str, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def ends_of(lengths: tuple[int, ...], device: str, dtype: torch.dtype = torch.int32) -> Tensor:
    return ints(*accumulate(lengths, initial=0), device=device, dtype=dtype)


def meaning(x: Tokens, pool: Tensor, indices: Tensor, cu_seqlens: Tensor | None, pad: int, **changes: Any) -> Call:
    """What a decode call of an engine means, in this library's arguments."""
    return {
        **x.rows,
        "gate": x.gate,
        "pool": pool,
        "indices": indices,
        "cu_seqlens": cu_seqlens,
        "pad_index": pad,
        "num_accepted": None,
        "has_initial_state": None,
        "scale": None,
        "qk_l2norm": True,
        "beta_is_logit": True,
        "allow_neg_eigval": False,
        "state_layout": "vk",
        "write_states": True,
    } | changes


def on_cpu(call: Call) -> Call:
    moved = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in call.items()}
    return moved | {"gate": on_device(call["gate"], "cpu")}


def run_here(x: Tokens, device: str, call: Callable[[], Any]) -> Any:
    """The call's result: this library ran it, once, and the projections kept their bits."""
    kept = [bits(p).clone() for p in x.projections]
    with torch.inference_mode(), flash_kda.record_backends() as ran:
        result = call()
    assert len(ran) == 1
    assert ran[0] == "cpu" if device == "cpu" else ran[0] in ("triton", "hopper")
    assert all(torch.equal(bits(p), old) for p, old in zip(x.projections, kept, strict=True))
    return result


def after(x: Tokens, first: int, end: int, state: Tensor | None, **changes: Any) -> tuple[Tensor, Tensor]:
    """Output ``[T, HV, V]`` and state ``[HV, V, K]`` of tokens ``first`` to ``end - 1``, by the definition."""
    rows = {name: part[:, first:end] for name, part in x.rows.items()}
    start = None if state is None else state[None]
    options = {"qk_l2norm": True, "beta_is_logit": True, "allow_neg_eigval": False, "state_layout": "vk"}
    call = rows | options | {"gate": x.gate, "scale": None, "initial_state": start, "cu_seqlens": None} | changes
    o, final = oracle(call)
    return o[0], final[0]


def assert_state(got: Tensor, want: Tensor, tolerance: float, label: str) -> None:
    assert_close(got.transpose(0, 1), want.transpose(0, 1), tolerance, label)


# vLLM: decoding


LENGTHS = (1, 3, 0, 2, 4, 1, 2)
TABLE = (
    (5, 1, 3, 4),  # starts from slot 1
    (2, 6, 0, 7),  # no slot for the state after its last token
    (0, 0, 0, 0),
    (0, 0, 0, 0),  # padding, as CUDA graphs have it
    (8, 9, 10, 11),
    (-1, -1, -1, -1),
    (SLOTS, SLOTS, SLOTS, SLOTS),  # beyond the cache
    (5, 5, 5, 5),  # beyond the rows of the call
    (5, 5, 5, 5),
)


@on_devices
@gates
@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_vllm_drafts(device: str, lower_bound: float | None, accepted: bool, state: torch.dtype) -> None:
    """A slot per token, counts, padding by 0 and by negatives, and tables with more rows than the call."""
    x = tokens(15, device, lower_bound)
    pool = states(SLOTS, device=device).to(state)
    table, ends = ints(*TABLE, device=device), ends_of(LENGTHS, device)
    counts = ints(2, 1, 1, 1, 4, 1, 1, 9, 9, device=device) if accepted else None
    arguments = {"initial_state": pool, "cu_seqlens": ends, "ssm_state_indices": table, "num_accepted_tokens": counts}
    q, k, v, g, beta = x.rows.values()
    before = pool.clone()
    o, same = run_here(x, device, lambda: vllm.fused_recurrent_kda(q, k, v, g, beta, **x.parameters, **arguments))
    assert same is pool
    call = meaning(x, pool, table[:7], ends, 0, num_accepted=None if counts is None else counts[:7])
    assert_decoded(on_cpu(call), before.cpu(), o.cpu(), DECODE[device])
    written = {1, 5, 2, 6, 8, 9, 10, 11}
    assert_same_bits(pool[[0, 3, 4, 7]], before[[0, 3, 4, 7]], "slots of nobody")
    assert all(not torch.equal(pool[i], before[i]) for i in written - {1}), "a slot was not written"
    # Into the engine's tensor, and with the gate that vLLM may apply before: the same function.
    again, out = before.clone(), torch.full((1, 15, HV, V + 3), torch.nan, device=device)[..., :V]
    arguments |= {"initial_state": again, "out": out, "fuse_gate": False}
    with torch.inference_mode():
        o2, _ = vllm.fused_recurrent_kda(q, k, v, g, beta, **x.parameters, **arguments)
    assert o2 is out
    assert_same_bits(o2, o, "out")
    assert_same_bits(again, pool, "pool")


@on_devices
@gates
def test_vllm_one_slot_a_row(device: str, lower_bound: float | None) -> None:
    x = tokens(5, device, lower_bound)
    pool, ends = states(SLOTS, device=device), ends_of((1, 1, 1, 1), device)
    indices = ints([4, 0, 7, -3], [1, 1, 1, 1], device=device).T[:, 0]
    before = pool.clone()
    o, _ = run_here(
        x, device,
        lambda: vllm.fused_recurrent_kda(
            *x.rows.values(), **x.parameters, initial_state=pool, cu_seqlens=ends, ssm_state_indices=indices
        ),
    )  # fmt: skip
    assert_decoded(on_cpu(meaning(x, pool, indices, ends, 0)), before.cpu(), o.cpu(), DECODE[device])
    assert not o[0, 4].any()


@on_devices
@gates
@pytest.mark.parametrize("scale", [None, 0.3])
def test_vllm_packed_decode(device: str, lower_bound: float | None, scale: float | None) -> None:
    x = tokens(6, device, lower_bound)
    layers = states(SLOTS, 3, device=device)
    pool, indices = layers[:, 1], ints(3, 0, 5, -1, 0, SLOTS, device=device)
    before = layers.clone()
    o, same = run_here(
        x, device,
        lambda: vllm.fused_recurrent_kda_packed_decode(
            x.mixed, x.raw_g, x.raw_beta, **x.parameters, initial_state=pool, state_indices=indices, scale=scale
        ),
    )  # fmt: skip
    assert same is pool
    assert o.shape == (1, 6, HV, V)
    assert o.is_contiguous()
    rows = {name: part.transpose(0, 1) for name, part in x.rows.items()}
    call = meaning(x, pool, indices, None, 0, scale=scale, **rows)
    assert_decoded(on_cpu(call), before[:, 1].cpu(), o.transpose(0, 1).cpu(), DECODE[device])
    assert_same_bits(layers[:, ::2], before[:, ::2], "the other layers' slots")


# vLLM: prefill


@on_devices
@gates
@pytest.mark.parametrize(("l2norm", "scale"), [(True, None), (True, 0.4), (False, None)])
def test_vllm_chunk(device: str, lower_bound: float | None, l2norm: bool, scale: float | None) -> None:
    x, lengths = tokens(75, device, lower_bound), (1, 33, 0, 40)
    if not l2norm:
        x.mixed.mul_(0.2)
    start = states(4, device=device)
    o, final = run_here(
        x, device,
        lambda: vllm.chunk_kda_with_fused_gate(
            *x.rows.values(), A_log=x.A_log, g_bias=x.dt_bias, lower_bound=lower_bound, scale=scale,
            initial_state=start, output_final_state=True, use_qk_l2norm_in_kernel=l2norm,
            cu_seqlens=ends_of(lengths, device),
        ),
    )  # fmt: skip
    check_sequences(x, lengths, o, final, start, device, qk_l2norm=l2norm, scale=scale)
    assert vllm.chunk_kda_with_fused_gate(*x.rows.values(), A_log=x.A_log, g_bias=x.dt_bias)[1] is None


def check_sequences(
    x: Tokens,
    lengths: tuple[int, ...],
    o: Tensor,
    final: Tensor | None,
    start: Tensor | None,
    device: str,
    **changes: Any,
) -> None:
    """Output and final states of packed sequences against the definition."""
    for n, (first, end) in enumerate(pairwise(accumulate(lengths, initial=0))):
        right, state = after(x, first, end, None if start is None else start[n], **changes)
        assert_close(o[0, first:end], right, PREFILL[device], f"o of sequence {n}")
        if final is not None:
            assert_state(final[n], state, PREFILL[device], f"state {n}")
    assert not o[0, sum(lengths) :].any()


@dataclass(frozen=True)
class Kept:
    """Checkpoints of a call: offsets as the engine passes them, and what each sequence's are."""

    offsets: Any
    indptr: tuple[int, ...] | None = None

    def places(self, n: int) -> list[tuple[Any, int]]:
        """Index into the states, and offset, of each entry of sequence n."""
        if self.indptr is not None:
            return [(i, self.offsets[i]) for i in range(self.indptr[n], self.indptr[n + 1])]
        if isinstance(self.offsets[n], int):
            return [(n, self.offsets[n])]
        return [((n, i), offset) for i, offset in enumerate(self.offsets[n])]


KEPT = (
    Kept((0, 32, 0, 16)),
    Kept(((0, 0), (16, 32), (0, 0), (7, 40))),
    Kept((16, 32, 33, 5, 6, 7, 8), (0, 0, 3, 3, 7)),
)
INTO = ("its own", "another", "from nothing", "nowhere")


@on_devices
@pytest.mark.parametrize("kept", KEPT, ids=["one", "two", "ragged"])
@pytest.mark.parametrize("into", INTO)
def test_vllm_fwd_with_checkpoints(device: str, kept: Kept, into: str) -> None:
    """int32 boundaries, parts of projections, one workspace for all calls, states on the way."""
    x, lengths = tokens(77, device), (1, 33, 0, 41)
    start = None if into == "from nothing" else states(4, device=device)
    final = {"its own": start, "nowhere": None}.get(into, torch.full((4, HV, V, K), torch.nan, device=device))
    given = None if start is None else start.clone()
    shape = torch.tensor(kept.offsets).shape
    saved = torch.full((*shape, HV, V, K), torch.nan, device=device)
    workspace = torch.arange(1000, dtype=torch.uint8, device=device)
    out = torch.full((1, 77, HV, V), torch.nan, device=device)
    options = {"initial_state": start, "final_state": final, "cu_seqlens": ends_of(lengths, device)}
    options |= {"checkpoint_state": saved, "checkpoint_offsets": ints(*kept.offsets, device=device)}
    if kept.indptr is not None:
        options["checkpoint_indptr"] = ints(*kept.indptr, device=device)
    place = (0.3, out, workspace, x.A_log.flatten(), x.dt_bias, -5.0)
    run_here(x, device, lambda: vllm.fwd(*x.rows.values(), *place, **options))
    check_sequences(x, lengths, out, final, given, device, scale=0.3)
    if start is not None and given is not None and into != "its own":
        assert_same_bits(start, given, "initial_state")
    assert torch.equal(workspace, torch.arange(1000, dtype=torch.uint8, device=device))
    firsts = list(accumulate(lengths, initial=0))
    for n, length in enumerate(lengths):
        for index, offset in kept.places(n):
            if 1 <= offset <= length:
                state = after(x, firsts[n], firsts[n] + offset, None if given is None else given[n])[1]
                assert_state(saved[index], state, PREFILL[device], f"state of sequence {n} after {offset}")
            else:
                assert saved[index].isnan().all(), f"sequence {n} has no state after {offset}"


@on_devices
def test_checkpoints_of_a_batch_in_bfloat16(device: str) -> None:
    """Plain batches, states of three dtypes, and ``flash_kda.fwd`` itself."""
    x = tokens(60, device)
    rows = {name: part.view(3, 20, *part.shape[2:]) for name, part in x.rows.items()}
    start = states(3, device=device)
    final, saved = (torch.zeros(3, HV, V, K, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty(3, 20, HV, V, device=device)
    flash_kda.fwd(
        *rows.values(), None, out, x.A_log.flatten(), x.dt_bias, -5.0, start, final,
        checkpoint_state=saved, checkpoint_offsets=ints(8, 20, 16, device=device),
    )  # fmt: skip
    for n, offset in enumerate((8, 20, 16)):
        right, state = after(x, 20 * n, 20 * n + 20, start[n])
        assert_close(out[n], right, PREFILL[device], f"o of row {n}")
        assert_state(final[n], state, PREFILL[device], f"state {n}")
        assert_state(saved[n], after(x, 20 * n, 20 * n + offset, start[n])[1], PREFILL[device], f"state {n} inside")


@on_devices
def test_one_initial_state_of_all_sequences(device: str) -> None:
    """A state with stride 0 between sequences is a right initial state, with checkpoints too."""
    x, start = tokens(40, device), states(1, device=device)
    out, saved = torch.empty(1, 40, HV, V, device=device), torch.empty(2, HV, V, K, device=device)
    options = {"cu_seqlens": ends_of((15, 25), device), "checkpoint_state": saved}
    options |= {"checkpoint_offsets": ints(15, 16, device=device), "initial_state": start.expand(2, -1, -1, -1)}
    run_here(
        x, device, lambda: flash_kda.fwd(*x.rows.values(), None, out, x.A_log.flatten(), x.dt_bias, -5.0, **options)
    )
    check_sequences(x, (15, 25), out, None, start.expand(2, -1, -1, -1), device)
    for n, (first, end) in enumerate(((0, 15), (15, 31))):
        assert_state(saved[n], after(x, first, end, start[0])[1], PREFILL[device], f"state {n}")


def test_fwd_checks_its_workspace() -> None:
    x, out = tokens(4, "cpu"), torch.empty(1, 4, HV, V)
    for workspace in (7, torch.empty(8, 8, dtype=torch.uint8)[:, 1]):
        with pytest.raises((TypeError, ValueError), match=r"^workspace:"):
            vllm.fwd(*x.rows.values(), None, out, workspace, x.A_log.flatten(), x.dt_bias, -5.0)


def test_fwd_is_flash_kdas_fwd() -> None:
    x, ends = tokens(40, "cpu"), ends_of((15, 25), "cpu")
    start = states(2, device="cpu")
    results = []
    for call, place in ((vllm.fwd, "position"), (flash_kda.fwd, "name")):
        out, state = torch.empty(1, 40, HV, V), start.clone()
        workspace = torch.empty(vllm.get_workspace_size(40, HV, 2) + 64, dtype=torch.uint8)
        where = (out, workspace) if place == "position" else (out,)
        more = {} if place == "position" else {"workspace": workspace}
        call(*x.rows.values(), 0.2, *where, x.A_log.flatten(), x.dt_bias, -4.0, state, state, ends, **more)
        results.append((out, state))
    assert_same_bits(*(out for out, _ in results), "out")
    assert_same_bits(*(state for _, state in results), "state")


# SGLang


@on_devices
@gates
@pytest.mark.parametrize("shape", ["flat", "heads", "one token"])
def test_sglang_packed_decode(device: str, lower_bound: float | None, shape: str) -> None:
    x = tokens(6, device, lower_bound)
    pool, indices = states(SLOTS, device=device), ints(3, -1, 0, 5, -1, SLOTS, device=device)
    a, b = {
        "flat": (x.raw_g[0].flatten(1), x.raw_beta[0]),
        "heads": (x.raw_g[0], x.raw_beta[0]),
        "one token": (x.raw_g[0].flatten(1)[:, None], x.raw_beta[0][:, None]),
    }[shape]
    before = pool.clone()
    o = run_here(
        x, device,
        lambda: sglang.packed_decode(
            x.mixed, a, b, **x.parameters, scale=0.25, ssm_states=pool, cache_indices=indices, num_v_heads=HV,
            head_v_dim=V,
        ),
    )  # fmt: skip
    assert o.shape == (1, 6, HV, V)
    rows = {name: part.transpose(0, 1) for name, part in x.rows.items()}
    call = meaning(x, pool, indices, None, -1, scale=0.25, **rows)
    assert_decoded(on_cpu(call), before.cpu(), o.transpose(0, 1).cpu(), DECODE[device])
    assert not torch.equal(pool[0], before[0]), "slot 0 is a slot"


@on_devices
@gates
@pytest.mark.parametrize("flat", [True, False])
def test_sglang_decode(device: str, lower_bound: float | None, flat: bool) -> None:
    x = tokens(7, device, lower_bound)
    pool, ends = states(SLOTS, device=device), ends_of((1, 1, 1, 3), device)
    indices = ints(0, -1, 7, 2, 2, device=device)
    a, b = (x.raw_g[0].flatten(1), x.raw_beta[0]) if flat else (x.raw_g, x.raw_beta)
    before = pool.clone()
    q, k, v, *_ = x.rows.values()
    places = {"ssm_states": pool, "cache_indices": indices, "query_start_loc": ends}
    o = run_here(x, device, lambda: sglang.decode(q, k, v, a, b, **x.parameters, **places))
    assert_decoded(on_cpu(meaning(x, pool, indices[:4], ends, -1)), before.cpu(), o.cpu(), DECODE[device])


@on_devices
@gates
@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("raw", [True, False])
def test_sglang_extend(device: str, lower_bound: float | None, track: bool, raw: bool) -> None:
    """Long prompts and rows of one token in one call, into the pool; snapshots counted in chunks of 64."""
    lengths = (130, 1, 0, 70, 5, 64)
    x = tokens(sum(lengths) + 3, device, lower_bound)
    if not raw:
        x.raw_beta.sigmoid_()
    pool, indices = states(SLOTS, device=device), ints(0, 7, 3, 4, -1, 9, 1, device=device)
    chunks = ints(2, -1, 1, 1, 0, 1, 1, device=device)
    snapshots = torch.full((6, HV, V, K), torch.nan, device=device)
    before = pool.clone()
    options: dict[str, Any] = {"extend_seq_lens_cpu": list(lengths), "is_spec_decode": False, "beta_is_raw": raw}
    if track:
        options |= {"track_state": snapshots, "track_chunk_idx": chunks, "return_intermediate_states": True}
    places = {"ssm_states": pool, "cache_indices": indices, "query_start_loc": ends_of(lengths, device)}
    q, k, v, g, beta = x.rows.values()
    o = run_here(x, device, lambda: sglang.extend(q, k, v, g.flatten(2), beta, **x.parameters, **places, **options))
    if track:
        o, nothing = o
        assert nothing is None
    firsts = list(accumulate(lengths, initial=0))
    live = {0: (0, 128), 1: (7, None), 3: (4, 64), 5: (9, 64)}
    for n, (slot, offset) in live.items():
        first, end = firsts[n], firsts[n + 1]
        right, state = after(x, first, end, before[slot], beta_is_logit=raw)
        assert_close(o[0, first:end], right, PREFILL[device], f"o of sequence {n}")
        assert_state(pool[slot], state, PREFILL[device], f"state of sequence {n}")
        if track and offset is not None:
            inside = after(x, first, first + offset, before[slot], beta_is_logit=raw)[1]
            assert_state(snapshots[n], inside, PREFILL[device], f"snapshot of sequence {n}")
    assert not o[0, firsts[4] : firsts[5]].any()
    assert not o[0, firsts[6] :].any()
    others = [slot for slot in range(SLOTS) if slot not in (0, 7, 4, 9)]
    assert_same_bits(pool[others], before[others], "slots of nobody")
    assert snapshots[[1, 2, 4] if track else slice(None)].isnan().all()


def test_sglang_extend_takes_log_decays() -> None:
    """Without parameters the gate was applied before."""
    x = tokens(40, "cpu")
    x.raw_g.copy_(-x.raw_g.exp())
    pool, before = states(3, device="cpu"), states(3, device="cpu")
    places = {"ssm_states": pool, "cache_indices": ints(1, device="cpu"), "query_start_loc": ends_of((40,), "cpu")}
    o = sglang.extend(*x.rows.values(), **places, beta_is_raw=True)
    right, state = after(x, 0, 40, before[1], gate=flash_kda.LogGate())
    assert_close(o[0], right, 1e-5, "o")
    assert_state(pool[1], state, 1e-5, "state")


@on_devices
@gates
@pytest.mark.parametrize("steps", [4, 3, None])
def test_sglang_target_verify(device: str, lower_bound: float | None, steps: int | None) -> None:
    """The pool is read alone; the buffer has the state after every draft, and nothing of padding rows."""
    x = tokens(21, device, lower_bound)
    pool, indices = states(SLOTS, device=device), ints(6, -1, 0, 2, 5, device=device)
    buffer = torch.full((5, 4, HV, V, K), torch.nan, device=device)
    rows = ints(3, 0, 1, -1, 5, 4, device=device)
    before = pool.clone()
    arguments = {"ssm_states": pool, "cache_indices": indices, "query_start_loc": ends_of((4,) * 5, device)}
    arguments |= {"intermediate_states_buffer": buffer, "intermediate_state_indices": rows, "cache_steps": steps}
    q, k, v, g, beta = x.rows.values()
    a, b = g[0].flatten(1), beta[0]

    def verify(**changes: Any) -> Tensor:
        options = {"retrieve_parent_token": None, "lower_bound": lower_bound} | arguments | changes
        return run_here(x, device, lambda: sglang.target_verify(x.A_log, x.dt_bias, q, k, v, a, b, **options))

    o = verify()
    assert_same_bits(pool, before, "pool")
    kept = 4 if steps is None else steps
    for n, slot in ((0, 6), (2, 0), (3, 2), (4, 5)):
        right, _ = after(x, 4 * n, 4 * n + 4, before[slot])
        assert_close(o[0, 4 * n : 4 * n + 4], right, PREFILL[device], f"o of row {n}")
    for n, slot, row in ((0, 6, 3), (2, 0, 1)):
        for t in range(kept):
            state = after(x, 4 * n, 4 * n + t + 1, before[slot])[1]
            assert_state(buffer[row, t], state, PREFILL[device], f"state {t} of row {n}")
    assert not o[0, 4:8].any()
    assert not o[0, 20:].any()
    assert buffer[[0, 2, 4]].isnan().all()
    assert buffer[:, kept:].isnan().all()
    alone = verify(intermediate_states_buffer=None, intermediate_state_indices=None)
    assert_same_bits(pool, before, "pool")
    assert_decoded(
        on_cpu(meaning(x, pool, indices, arguments["query_start_loc"], -1, write_states=False)), before.cpu(),
        alone.cpu(), DECODE[device],
    )  # fmt: skip


# What is refused, and by which name


def arguments_of(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A right call of an engine's function, by names."""
    x, pool = tokens(4, "cpu"), states(4, device="cpu")
    q, k, v, g, beta = x.rows.values()
    ends, indices = ends_of((1, 1, 2), "cpu"), ints(1, 2, 3, device="cpu")
    rows = {"q": q, "k": k, "v": v}
    engine = {"ssm_states": pool, "cache_indices": indices, "query_start_loc": ends}
    buffer = {"intermediate_states_buffer": torch.zeros(3, 2, HV, V, K), "intermediate_state_indices": indices - 1}
    function, arguments = {
        "recurrent": (
            vllm.fused_recurrent_kda,
            rows
            | {"raw_g": g, "raw_beta": beta, "initial_state": pool, "cu_seqlens": ends, "ssm_state_indices": indices},
        ),
        "packed": (
            vllm.fused_recurrent_kda_packed_decode,
            {"mixed_qkv": x.mixed[:3], "raw_g": g[:, :3], "raw_beta": beta[:, :3], "initial_state": pool}
            | {"state_indices": indices},
        ),
        "sglang packed": (
            sglang.packed_decode,
            {"mixed_qkv": x.mixed[:3], "a": g[0, :3], "b": beta[0, :3], "ssm_states": pool, "cache_indices": indices}
            | {"scale": None, "num_v_heads": HV, "head_v_dim": V},
        ),
        "decode": (sglang.decode, rows | engine | {"a": g, "b": beta}),
        "extend": (sglang.extend, rows | engine | {"g": g, "beta": beta}),
        "track": (
            sglang.extend,
            rows | engine | {"g": g, "beta": beta, "track_state": pool[:3].clone(), "track_chunk_idx": indices},
        ),
        "verify": (sglang.target_verify, rows | engine | buffer | {"a": g, "b": beta, "cache_steps": 2}),
    }[name]
    return function, arguments | x.parameters


SOME = torch.zeros(3, 2)
WRONG: tuple[tuple[str, str, Any, type[Exception]], ...] = (
    *(("verify", name, SOME, NotImplementedError) for name in ("retrieve_parent_token", "replayssm_rawv")),
    *(("verify", name, SOME, NotImplementedError) for name in ("replayssm_rawk", "replayssm_g", "replayssm_beta")),
    ("verify", "cache_ring", True, NotImplementedError),
    ("verify", "cache_steps", 3, ValueError),
    ("verify", "cache_steps", 2.0, TypeError),
    ("verify", "cache_steps", True, TypeError),
    ("verify", "intermediate_states_buffer", torch.zeros(3, 2, HV, V), ValueError),
    ("verify", "intermediate_states_buffer", torch.zeros(2, 3, HV, V, K).transpose(0, 1), ValueError),
    ("verify", "intermediate_state_indices", None, TypeError),
    ("verify", "intermediate_state_indices", ints(0, 1, device="cpu"), ValueError),
    ("extend", "is_spec_decode", True, NotImplementedError),
    ("extend", "return_intermediate_states", True, NotImplementedError),
    ("track", "track_state", torch.zeros(3, HV, K, V), ValueError),
    ("track", "track_chunk_idx", ints(0.5, 1, 2, device="cpu", dtype=torch.float32), TypeError),
    ("track", "track_chunk_idx", None, TypeError),  # beside track_state
    ("extend", "g", torch.zeros(1, 4, HV), ValueError),
    ("extend", "cache_indices", ints(1, 2, device="cpu"), ValueError),
    ("extend", "ssm_states", torch.zeros(4, HV, K, V), ValueError),
    ("decode", "cache_indices", None, TypeError),
    ("decode", "cache_indices", torch.zeros(3), TypeError),
    ("decode", "query_start_loc", None, TypeError),
    ("decode", "query_start_loc", ints(0, 2, 1, 3, device="cpu"), ValueError),
    ("decode", "a", torch.zeros(2, 3, HV * K)[:, :2], ValueError),  # not four rows without a copy
    ("decode", "a", torch.zeros(HV * K, 4).T, ValueError),
    ("decode", "b", torch.zeros(4, HV + 1), ValueError),
    ("decode", "ssm_states", torch.zeros(4, HV, K, V), ValueError),
    ("decode", "A_log", torch.zeros(HV + 1), ValueError),
    ("decode", "dt_bias", torch.zeros(HV), ValueError),
    ("decode", "lower_bound", -6.0, ValueError),
    ("sglang packed", "replayssm_d", SOME, NotImplementedError),
    ("sglang packed", "replayssm_write_pos", SOME, NotImplementedError),
    ("sglang packed", "num_v_heads", H, ValueError),
    ("sglang packed", "mixed_qkv", torch.zeros(3, HV * V + K), ValueError),
    ("sglang packed", "cache_indices", None, TypeError),
    ("recurrent", "ssm_state_indices", None, TypeError),
    ("recurrent", "ssm_state_indices", ints([1], [2], device="cpu"), ValueError),
    ("recurrent", "num_accepted_tokens", ints(1, 1, 1, device="cpu"), ValueError),  # one slot a row
    ("recurrent", "initial_state", torch.zeros(4, HV, K, V), ValueError),
    ("recurrent", "raw_g", torch.zeros(1, 4, HV, V), ValueError),
    ("recurrent", "out", torch.zeros(1, 4, HV, K), ValueError),
    ("packed", "mixed_qkv", torch.zeros(2 * H * K + HV * V, 3).T, ValueError),
    ("packed", "initial_state", torch.zeros(4, HV, V), ValueError),
    ("packed", "raw_g", torch.zeros(3, 1, HV, K), ValueError),
    ("packed", "raw_g", torch.zeros(3, HV, K), ValueError),
    ("packed", "raw_beta", torch.zeros(3, HV), ValueError),
    ("packed", "state_indices", ints(1, 2, device="cpu"), ValueError),
)


@pytest.mark.parametrize(("function", "name", "value", "error"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_errors_name_the_engines_argument(function: str, name: str, value: Any, error: type[Exception]) -> None:
    call, arguments = arguments_of(function)
    with torch.inference_mode():
        call(**arguments)
    pools = [x for key, x in arguments_of(function)[1].items() if key in ("ssm_states", "initial_state")]
    arguments = arguments_of(function)[1] | {name: value}
    with torch.inference_mode(), pytest.raises(error, match=f"^{name}(:|, )|, {name}:"):
        call(**arguments)
    kept = [x for key, x in arguments.items() if key in ("ssm_states", "initial_state") and key != name]
    assert all(torch.equal(x, y) for x, y in zip(kept, pools, strict=False)), "something was written"


CHECKPOINTS: tuple[tuple[dict[str, Any], str, type[Exception]], ...] = (
    ({"checkpoint_offsets": None}, "checkpoint_offsets", TypeError),
    ({"checkpoint_state": None}, "checkpoint_state", TypeError),
    ({"checkpoint_offsets": ints(1, 2, device="cpu")}, "checkpoint_offsets", ValueError),
    ({"checkpoint_offsets": ints([[1]], [[2]], [[3]], device="cpu")}, "checkpoint_offsets", ValueError),
    ({"checkpoint_state": torch.zeros(2, HV, V, K)}, "checkpoint_state", ValueError),
    ({"checkpoint_state": torch.zeros(3, 1, HV, V, K)}, "checkpoint_state", ValueError),
    ({"checkpoint_state": torch.zeros(3, HV, K, V)}, "checkpoint_state", ValueError),
    ({"checkpoint_state": torch.zeros(3, HV, V, K, dtype=torch.float16)}, "checkpoint_state", TypeError),
    ({"checkpoint_offsets": torch.ones(3)}, "checkpoint_offsets", TypeError),
    ({"checkpoint_indptr": ints(0, 1, 2, device="cpu")}, "checkpoint_indptr", ValueError),
    ({"checkpoint_indptr": ints(0, 1, 2, 4, device="cpu")}, "checkpoint_indptr", ValueError),
    (
        {
            "checkpoint_offsets": ints([1, 2], [1, 2], [1, 2], device="cpu"),
            "checkpoint_state": torch.zeros(3, 3, HV, V, K)[:, :2],
        },
        "checkpoint_state",
        ValueError,
    ),
)


@pytest.mark.parametrize(("changes", "name", "error"), CHECKPOINTS)
def test_wrong_checkpoints(changes: dict[str, Any], name: str, error: type[Exception]) -> None:
    """Refused by name before anything is written."""
    x = tokens(6, "cpu")
    out, state = torch.full((1, 6, HV, V), torch.nan), states(3, device="cpu")
    options = {
        "checkpoint_state": torch.zeros(3, HV, V, K),
        "checkpoint_offsets": ints(1, 2, 3, device="cpu"),
    } | changes
    place = (None, out, x.A_log.flatten(), x.dt_bias, -5.0, state, state, ends_of((1, 2, 3), "cpu"))
    with pytest.raises(error, match=f"^{name}:"):
        flash_kda.fwd(*x.rows.values(), *place, **options)
    assert out.isnan().all()
    assert_same_bits(state, states(3, device="cpu"), "state")


FUNCTIONS = ("recurrent", "packed", "sglang packed", "decode", "extend", "track", "verify")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_of_a_token_or_a_state_is_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives at this library are views of what the engine passed."""
    function, arguments = arguments_of(name)
    seen: list[Tensor] = []

    def watch(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            kept = kwargs.get("checkpoints")
            kept = None if kept is None else kept.states
            gate = kwargs["gate"]
            seen.extend(x for x in (*args, kwargs["pool"], kept, gate.A_log, gate.dt_bias) if x is not None)
            return real(*args, **kwargs)

        return call

    for module in (vllm, sglang):
        for inner in ("kda_decode", "kda_prefill"):
            if hasattr(module, inner):
                monkeypatch.setattr(module, inner, watch(getattr(module, inner)))
    with torch.inference_mode():
        function(**arguments)
    own = {x.untyped_storage().data_ptr() for x in arguments.values() if isinstance(x, Tensor)}
    assert len(seen) >= 8
    assert all(x.untyped_storage().data_ptr() in own for x in seen)


def test_parameters_of_any_shape() -> None:
    A_log, dt_bias = torch.zeros(1, 1, HV, 1), torch.zeros(HV, K)
    gate = engines.gate_of(A_log, dt_bias, -5.0)
    assert isinstance(gate, flash_kda.LowerBoundGate)
    assert gate.A_log is not None
    assert gate.dt_bias is not None
    assert (gate.A_log.shape, gate.dt_bias.shape) == ((HV,), (HV * K,))
    assert gate.A_log.data_ptr() == A_log.data_ptr()
    assert isinstance(engines.gate_of(None, None, None), flash_kda.SoftplusGate)


def test_no_engine_is_imported() -> None:
    code = """
import sys
import flash_kda.compat.sglang, flash_kda.compat.transformers, flash_kda.compat.vllm
found = {name.split(".")[0] for name in sys.modules} & {"vllm", "sglang", "transformers", "fla", "triton"}
if found: raise SystemExit(f"imported {found}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_guide_runs() -> None:
    """The code of docs/drop-in.md from vLLM on, in its order, but for Transformers'."""
    text = (Path(__file__).parents[1] / "docs" / "drop-in.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "compat import vllm" in blocks[3]
    names: dict[str, Any] = {}
    exec(blocks[3], names)
    assert names["cache"].flatten(1).any(1).nonzero().flatten().tolist() == [2, 5, 6]
    before = names["cache"].clone()
    exec(blocks[4], names)
    assert (names["cache"] != before).flatten(1).any(1).nonzero().flatten().tolist() == [0]
    assert names["o"].count_nonzero((2, 3)).bool().tolist() == [[True, True, False]]
    assert names["drafts"].flatten(2).any(2).tolist() == [[True, True], [False, False]]
