"""The kernels of ``kda_prefill``: in the interpreter, compiled for four architectures, launched; graphs on a GPU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import compiling
import interpreted_prefill
import on_a_gpu
import prefilling
import pytest
import torch
from cases import Call, Case, Target, parameters, tensors_of, variants
from compare import assert_close, assert_same_bits
from compiling import DEVICES, H200, Build, Built, Dtypes, every, meta
from decoding import ROWS, row_call
from interpreting import interpreted_cases
from jitted import Jitted, assert_no_shared_launch, launch_on_the_cpu, launched_directly
from prefilling import BATCH, CASES, PACKED, PrefillCase, assert_large_pools_are_reached, check, run
from test_triton import ForwardBuild, assert_fetches_ahead, assert_uses_wgmma, shared_bytes
from test_triton import budget as forward_budget

import flash_kda
from flash_kda import Checkpoints, forms
from flash_kda.backends.triton.config import Config, configure
from flash_kda.types import PrefillInputs, Problem, gate_parameters

if TYPE_CHECKING:
    from flash_kda.backends.triton.launch import Launch

# The interpreter.


@interpreted_cases(interpreted_prefill)
def test_interpreter(went_wrong: str | None) -> None:
    """The kernels' arithmetic against the definition in float64."""
    assert went_wrong is None, went_wrong


# Compilation for each architecture.


@dataclass(frozen=True)
class PrefillBuild(Build):
    """The kernel with a pool. ``kept``: the checkpoints' dtype."""

    layout: str = "vk"
    kept: torch.dtype = torch.float32

    @property
    def config(self) -> Config:
        return configure(self.problem, self.device)

    def __str__(self) -> str:
        c, p = self.config, self.problem
        parts = [f"sm_{self.capability}", "bf16" if c.split else "fp32", f"K{p.K}", f"V{p.V}", f"{c.stages}stages"]
        parts += ["packed"] * p.packed + ["checkpoints"] * p.checkpoints + [self.layout] * (self.layout != "vk")
        parts += ["limited"] * (c.recurrence_registers is not None)
        return "-".join([*parts, *(["kept16"] if self.kept != torch.float32 else [])])

    def call(self) -> PrefillInputs:
        """The arguments as tensors without data."""
        p, i32 = self.problem, torch.int32
        inputs = compiling.meta_rows(p, self.layout)
        N, *shape = inputs.state_shape
        states = meta(128, *shape, dtype=self.kept)
        checkpoints = Checkpoints(meta(128, dtype=i32), meta(N + 1, dtype=i32), states, meta(128, dtype=i32))
        return PrefillInputs(
            inputs=inputs,
            pool=compiling.meta_pool(inputs, p.state_dtype),
            indices=meta(N, dtype=i32),
            has_initial_state=meta(N, dtype=torch.bool),
            checkpoints=checkpoints if p.checkpoints else None,
            pad_index=-1,
            write_states=True,
            out=None,
        )

    def launches(self) -> tuple[Dtypes, list[Launch]]:
        """Those of the call, and the dtypes of all that they are passed, by name."""
        from flash_kda.backends.triton import prefill_launch

        call = self.call()
        out = torch.empty_like(call.inputs.v)
        plan = prefill_launch.plan(call, self.config, out)
        tensors = [*call.tensors[:-1], out, *gate_parameters(call.inputs.gate), call.pool]
        tensors[prefill_launch.TENSORS.index("kept")] = call.kept
        dtypes = compiling.dtypes_of(prefill_launch.TENSORS, tensors, call.inputs.q.dtype)
        return dtypes | {name: dtype for name, (_, dtype) in plan.scratch.items()}, list(plan.launches)

    def launch(self) -> tuple[Dtypes, Launch]:
        dtypes, launches = self.launches()
        return dtypes, launches[-1]


# Bytes that a thread may spill with checkpoints, by whether tiles are bfloat16: addresses of their states wait outside
# of registers for their turn. Without checkpoints the budget is that of a forward call.
CHECKPOINT_BUDGETS = {True: {90: 288, 100: 384}, False: {90: 384}}
MOST = 640


def budget(build: PrefillBuild) -> int:
    if build.problem.checkpoints:
        return CHECKPOINT_BUDGETS[build.config.split].get(build.capability, MOST)
    # The slot and its mask are two registers more than a forward call has.
    return forward_budget(ForwardBuild(build.capability, build.problem, "recurrence")) + 16


def builds() -> list[PrefillBuild]:
    """Long and short sequences, one program per multiprocessor and two, with and without checkpoints."""
    found: dict[str, PrefillBuild] = {}
    for capability, dtype, (T, H, packed), checkpoints in itertools.product(
        DEVICES, (torch.bfloat16, torch.float32), ((8192, 64, True), (8192, 200, True), (32, 8, False)), (False, True)
    ):
        problem = Problem(T=T, H=H, dtype=dtype, packed=packed, op="prefill", checkpoints=checkpoints)
        variants = [PrefillBuild(capability, problem)]
        if checkpoints and T == 8192:
            variants.append(PrefillBuild(capability, problem, layout="kv"))
        if capability == 90 and T == 8192:
            variants += [PrefillBuild(capability, replace(problem, K=K, V=V)) for K, V in ((64, 64), (256, 256))]
            variants.append(PrefillBuild(capability, replace(problem, state_dtype=torch.bfloat16), kept=torch.bfloat16))
        for build in variants:
            found.setdefault(str(build), build)
    return list(found.values())


@every(builds())
def test_compiles(build: PrefillBuild, built: Built) -> None:
    """It fits into the device, spills no more than its budget, and still fetches ahead and uses wgmma."""
    c = build.config
    compiling.assert_fits(built, build.capability, budget(build))
    assert_fetches_ahead(built, c, 4 * c.BV * c.BK if build.problem.checkpoints else 0)
    assert_uses_wgmma(built, build, c)


@pytest.mark.parametrize("device", compiling.devices())
def test_a_state_on_its_way_fits_too(device: Any) -> None:
    """Checkpoints leave room for it, with one program per multiprocessor and with two."""
    for H, K, dtype in itertools.product((8, 64, 200), (64, 128, 256), (torch.bfloat16, torch.float32)):
        plain = Problem(T=8192, H=H, K=K, dtype=dtype, op="prefill")
        c = configure(replace(plain, checkpoints=True), device)
        assert replace(c, stages=1, recurrence_registers=None) == replace(
            configure(plain, device), stages=1, recurrence_registers=None
        ), "bits would depend on whether there are checkpoints"
        if c.stages > 1:
            programs = H * -(-128 // c.BV)
            needed = shared_bytes(c) + 4 * c.BV * c.BK
            assert needed <= device.shared_memory
            if programs > device.multiprocessors and device.capability != 100:
                assert 2 * (needed + 1024) <= device.shared_memory_per_multiprocessor


def test_a_prompt_beside_single_tokens_has_chunks_in_flight() -> None:
    """However many they are; rows of a single token alone need none."""
    alone = Problem(T=8192, H=8, packed=True, N=1, op="prefill")
    mixed = replace(alone, T=8192 + 500, N=501)
    assert configure(mixed, H200).stages == configure(replace(alone, H=8 * 501), H200).stages > 1
    assert configure(replace(mixed, T=501), H200).stages == 1


# Launches.


@pytest.mark.parametrize("build", builds()[:4], ids=str)
def test_every_parameter_has_what_it_needs(build: PrefillBuild) -> None:
    pytest.importorskip("triton")
    dtypes, launches = build.launches()
    assert len(launches) == 2
    for launch in launches:
        compiling.assert_nothing_is_missing(launch, dtypes)


@pytest.fixture
def jitted(monkeypatch: pytest.MonkeyPatch) -> Jitted:
    """In place of the kernel with a pool, and of the preparation."""
    launch_on_the_cpu(monkeypatch)
    from flash_kda.backends.triton import forward, prefill_launch

    Jitted.in_place(monkeypatch, forward, "prepare")
    return Jitted.in_place(monkeypatch, prefill_launch, "pooled_recurrence")


@torch.no_grad()
@pytest.mark.parametrize("checkpoints", ["own", "pool"])
def test_a_known_form_is_launched_directly(jitted: Jitted, checkpoints: str) -> None:
    """With its own tensors; output and scratch memory are all that is allocated."""
    case = PrefillCase(PACKED, known=True, checkpoints=checkpoints)
    calls = [case.build() for _ in range(3)]
    o, pointers = launched_directly(jitted, flash_kda.kda_prefill, calls, allocations=2)
    x = calls[-1]
    c, q = x["checkpoints"], x["q"]
    kept = x["pool"] if c.states is None else c.states
    head = [*(x[name] for name in ROWS), x["gate"].A_log, x["gate"].dt_bias, x["cu_seqlens"]]
    tail = [x["pool"], x["pool"], o, x["indices"], x["has_initial_state"], c.offsets, c.cu_offsets]
    tail += [q if c.indices is None else c.indices, kept]
    # Between them are tiles, squares and decays, which are scratch memory.
    assert len(pointers) == len(head) + 3 + len(tail)
    assert pointers[: len(head)] == [t.data_ptr() for t in head]
    assert pointers[-len(tail) :] == [t.data_ptr() for t in tail]


def other_forms() -> list[Any]:
    """Calls that differ from the first one in one thing each."""
    base = PrefillCase(known=True, checkpoints="placed")
    call = base.build()
    c, pool = call["checkpoints"], call["pool"]

    def places(**changes: Any) -> dict[str, Any]:
        return {"checkpoints": replace(c, **changes)}

    changes: dict[str, Any] = {
        "no checkpoints": {"checkpoints": None},
        "places in order": places(indices=None),
        "checkpoints in the pool": places(states=None),
        "offsets of 64 bits": places(offsets=c.offsets.long()),
        "boundaries of 64 bits": places(cu_offsets=c.cu_offsets.long()),
        "places of 64 bits": places(indices=c.indices.long()),
        "checkpoints in bfloat16": places(states=c.states.bfloat16()),
        "more places": places(states=torch.cat([c.states, c.states])),
        "fewer offsets": places(offsets=c.offsets[:-1], indices=c.indices[:-1]),
        "strided offsets": places(offsets=c.offsets.repeat_interleave(2)[::2]),
        "no indices": {"indices": None},
        "no mask": {"has_initial_state": None},
        "indices of 64 bits": {"indices": call["indices"].long()},
        "pad index": {"pad_index": 0},
        "no states written": {"write_states": False},
        "pool in bfloat16": {"pool": pool.bfloat16()},
        "more slots": {"pool": torch.cat([pool, pool])},
        "strided pool": {"pool": torch.stack([pool, pool], 1)[:, 0]},
        "layout": replace(base, rows=PACKED.but(layout="kv")).build(),
        "scale": 0.5,
        "packed differently": replace(base, rows=PACKED.but(tail=4)).build(),
    }
    return variants(call, changes)


@pytest.mark.parametrize("other", other_forms())
@torch.no_grad()
def test_what_differs_shares_no_launch(other: Call, jitted: Jitted) -> None:
    first = PrefillCase(known=True, checkpoints="placed")
    assert_no_shared_launch(jitted, flash_kda.kda_prefill, first.build, other)


@pytest.mark.parametrize("rows", [BATCH.but(B=0), BATCH.but(T=0)], ids=str)
@torch.no_grad()
def test_nothing_is_launched_for_nothing(rows: Case, jitted: Jitted) -> None:
    for _ in range(2):
        assert not run(Target("triton"), PrefillCase(rows).build()).numel()
    assert not jitted.by_triton


# On a GPU.

gpu = pytest.mark.gpu
TRITON = Target("triton", "cuda", tolerance=6e-3, partial=True)


@gpu
@pytest.mark.parametrize(
    "case",
    [
        PrefillCase(PACKED.but(K=128, V=128, dtype="bfloat16"), known=True),
        PrefillCase(PACKED.but(K=128, V=128, dtype="bfloat16"), every=64, checkpoints="pool", pad=0),
        PrefillCase(PACKED.but(K=64, V=64, cu_dtype="int32"), checkpoints="placed", every=48, index_dtype="int64"),
        PrefillCase(PACKED.but(layout="kv", state_dtype="bfloat16", gate="softplus"), index=False, known=True),
        PrefillCase(PACKED, checkpoints="none"),
        PrefillCase(BATCH.but(K=128, V=128), checkpoints="pool", every=20),
    ],
    ids=str,
)
def test_replay_is_eager(case: PrefillCase) -> None:
    """A captured call, replayed with other rows, states, boundaries, indices and offsets, gives a plain one's bits."""
    others = [on_a_gpu.turned(case, seed).build("cuda") for seed in range(1, 6)]
    on_a_gpu.assert_replays_are_eager(TRITON, run, flash_kda.kda_prefill, case.build("cuda"), others)


@gpu
@pytest.mark.parametrize("case", parameters(CASES[::2]))
@torch.no_grad()
def test_a_known_form_gives_the_bits_of_a_checked_call(case: PrefillCase) -> None:
    first, second, other = (case.build("cuda"), case.build("cuda"), on_a_gpu.turned(case, 1).build("cuda"))
    forms.forget()
    o = run(TRITON, first)
    run(TRITON, other)
    assert_same_bits(run(TRITON, second), o, "o")
    for name, x in tensors_of(second).items():
        assert_same_bits(x, tensors_of(first)[name], name)


@gpu
@pytest.mark.parametrize("checkpoints", ["none", "own", "pool"])
@pytest.mark.parametrize("gate", ["lower_bound", "softplus"])
def test_no_wait_no_compilation(checkpoints: str, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first call: other lengths, values, offsets and pad indices; output and scratch are allocated alone."""
    rows = Case(lengths=(300, 1, 0, 77, 130, 1), H=4, HV=8, K=128, V=128, dtype="bfloat16", gate=gate)
    case = PrefillCase(rows, known=True, checkpoints=checkpoints, every=48)
    calls = [
        replace(on_a_gpu.turned(case, seed), pad=pad).build("cuda") for seed, pad in ((0, -1), (1, -1), (2, 0), (3, 0))
    ]
    outs = [torch.empty_like(call["v"]) for call in calls]
    run(TRITON, calls[0], out=outs[0])
    compiled = on_a_gpu.compilations(monkeypatch)
    with on_a_gpu.no_wait(allocations=8):
        for call, out in zip(calls * 2, outs * 2, strict=True):
            flash_kda.kda_prefill(**call, out=out, backend="triton")
    assert not compiled


@gpu
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("gate", ["lower_bound", "softplus", "log"])
def test_model_shapes(gate: str, layout: str, state_dtype: str) -> None:
    """K = V = 128 in bfloat16, prompts beside rows of one token, against the definition."""
    rows = Case(lengths=(1, 600, 1, 130, 33, 1), H=2, HV=4, K=128, V=128, dtype="bfloat16", gate=gate)
    rows = rows.but(layout=layout, state_dtype=state_dtype)
    check(TRITON, PrefillCase(rows, every=64, known=True, kept_dtype=state_dtype))
    check(TRITON, PrefillCase(rows, ragged=True, checkpoints="pool"))


@gpu
@torch.no_grad()
def test_a_long_prompt_beside_single_tokens() -> None:
    """8192 tokens and rows of one token in one call: each has the bits of its own call, and so do checkpoints."""
    lengths = (1, 8192, 1, 1, 1000, 1)
    case = PrefillCase(Case(lengths=lengths, H=8, K=128, V=128, dtype="bfloat16"), every=1024, padding=False)
    call = case.build("cuda")
    first = call["pool"][call["indices"].long()].clone()
    o = run(TRITON, call)
    kept = prefilling.kept_by(call)
    assert kept is not None
    ends = call["checkpoints"].cu_offsets.tolist()
    for n, (_, start, end) in enumerate(prefilling.spans_of(call)):
        alone = row_call(call, n, end - start, first[n : n + 1])
        want, state = flash_kda.kda(**alone, backend="triton")
        assert_same_bits(o[:, start:end], want, f"o of sequence {n}")
        assert state is not None
        assert_same_bits(call["pool"][int(call["indices"][n])], state[0], f"state {n}")
        for i in range(ends[n], ends[n + 1]):
            offset = int(call["checkpoints"].offsets[i])
            _, state = flash_kda.kda(**row_call(call, n, offset, first[n : n + 1]), backend="triton")
            assert state is not None
            assert_same_bits(kept[i], state[0], f"state of sequence {n} after {offset}")
    assert ends[-1] == 8, "there are no checkpoints"


@gpu
@pytest.mark.parametrize("every", [16, 24])
def test_checkpoints_inside_of_chunks(every: int) -> None:
    """They are computed in float32: as close as the states of shorter calls."""
    rows = Case(lengths=(200, 90), H=2, K=128, V=128, dtype="bfloat16", strength="slow")
    case = PrefillCase(rows, every=every, padding=False)
    call = case.build("cuda")
    before = prefilling.on_cpu(call)
    run(TRITON, call)
    _, _, kept = prefilling.expected(before)
    got = prefilling.kept_by(call)
    assert got is not None
    assert len(kept) == 200 // every + 90 // every
    for place, state in kept.items():
        assert_close(got[place].cpu().transpose(0, 1), state.transpose(0, 1), TRITON.tolerance, f"checkpoint {place}")


@gpu
def test_pools_of_more_than_two_to_the_31_elements() -> None:
    assert_large_pools_are_reached(TRITON, Case(lengths=(70,), H=2, K=128, V=128))
