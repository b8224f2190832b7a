"""Training with torch's own tools, through the layer and the language model: autocast, activation checkpointing, calls
that overlap, torch.compile, FSDP2, and the refusal of second derivatives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType

import decoding
import prefilling
import pytest
import torch
import torch.distributed as dist
from cases import Case, Target, leaves, run, targets
from compare import assert_same_bits, rms
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import flash_kda
from flash_kda.demo.train import TrainConfig, optimiser
from flash_kda.nn import ByteLM, ByteLMConfig, KimiDeltaAttention

every_target = pytest.mark.parametrize("target", targets())
not_the_reference = pytest.mark.parametrize("target", targets(gradients_of_its_own=True))
LAYERS = 2
SHAPE = ByteLMConfig(hidden_size=24, num_layers=LAYERS, num_heads=2, head_dim=16, mlp_size=40)
Grads = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _fresh_graphs() -> None:
    torch.compiler.reset()


def skip_if_untrainable(target: Target) -> None:
    """Skip with the backend's reason where it may decline."""
    problem = flash_kda.Problem(H=2, K=16, V=16, dtype=torch.float32, device=target.device, grad=True)
    why = flash_kda.explain(problem, target.backend)
    if target.partial and why.backend is None:
        pytest.skip(str(why))


def language_model(target: Target) -> ByteLM:
    skip_if_untrainable(target)
    torch.manual_seed(0)
    return ByteLM(replace(SHAPE, backend=target.backend)).to(target.device)


def text(target: Target, T: int = 40, seed: int = 0) -> Tensor:
    """``[2, T + 1]`` bytes."""
    return torch.randint(256, (2, T + 1), generator=torch.Generator().manual_seed(seed)).to(target.device)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits, _ = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> Grads:
    """Those that one backward leaves in the parameters."""
    model.zero_grad()
    torch.autograd.backward(loss())
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(got: Grads, want: Grads) -> None:
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert_same_bits(x, want[name], f"d{name}")


def assert_near(got: Grads, want: Grads, tolerance: float) -> None:
    """By the RMSE ratio of each tensor."""
    assert got.keys() == want.keys()
    for name, x in got.items():
        dims = tuple(range(x.ndim))
        error = float(rms(x.double() - want[name].double(), dims) / rms(want[name].double(), dims))
        assert error <= tolerance, f"d{name}: RMSE ratio {error:.3g}, allowed {tolerance:.3g}"


# Autocast.


@every_target
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_autocast_around_a_call_changes_nothing(target: Target, dtype: str) -> None:
    """Neither forward nor backward depends on it: a call computes in what its inputs ask for."""
    call = Case(lengths=(100, 0, 33), H=1, HV=2, K=64, V=32, dtype=dtype).build(target.device)
    results = []
    for enabled in (False, True):
        taped, found = leaves(call)
        with torch.autocast(target.device, dtype=torch.bfloat16, enabled=enabled):
            o, S = run(target, taped)
            assert S is not None
            results.append((o, S, *torch.autograd.grad(o.sum() + S.sum(), list(found.values()))))
    for name, a, b in zip(("o", "state", *found), *results, strict=True):
        assert_same_bits(b, a, name)


@every_target
@pytest.mark.parametrize(
    ("kind", "case"),
    [(decoding, decoding.DecodeCase()), (prefilling, prefilling.PrefillCase())],
    ids=["decode", "prefill"],
)
def test_autocast_around_a_call_with_a_pool_changes_nothing(
    target: Target, kind: ModuleType, case: decoding.DecodeCase | prefilling.PrefillCase
) -> None:
    results = []
    for enabled in (False, True):
        call = case.build(target.device)
        with torch.no_grad(), torch.autocast(target.device, dtype=torch.bfloat16, enabled=enabled):
            results.append((kind.run(target, call), call["pool"]))
    for name, a, b in zip(("o", "pool"), *results, strict=True):
        assert_same_bits(b, a, name)


@every_target
def test_autocast_around_a_model(target: Target) -> None:
    """q, k and v come in bfloat16; gradients are float32 like the parameters, and near those without autocast. Whether
    the backward is called inside or outside changes no bit."""
    model, tokens = language_model(target), text(target)
    single = gradients(model, lambda: loss_of(model, tokens))
    dtypes: set[torch.dtype] = set()
    hook = model.blocks[1].attn.delta_rule.register_forward_pre_hook(
        lambda _, arguments: dtypes.update(x.dtype for x in arguments)
    )

    def loss() -> Tensor:
        with torch.autocast(target.device, dtype=torch.bfloat16):
            return loss_of(model, tokens)

    outside = gradients(model, loss)
    hook.remove()
    assert dtypes == {torch.bfloat16}
    assert {x.dtype for x in outside.values()} == {torch.float32}
    assert_near(outside, single, 0.1)
    with torch.autocast(target.device, dtype=torch.bfloat16):
        assert_same_gradients(gradients(model, lambda: loss_of(model, tokens)), outside)


# Activation checkpointing.


@every_target
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_activation_checkpointing(target: Target, reentrant: bool, autocast: bool) -> None:
    """Blocks that are computed again in the backward give the same bits."""
    model, tokens = language_model(target), text(target)

    def loss() -> Tensor:
        with torch.autocast(target.device, dtype=torch.bfloat16, enabled=autocast):
            return loss_of(model, tokens)

    want = gradients(model, loss)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
    with flash_kda.record_backends() as ran:
        got = gradients(model, loss)
    assert_same_gradients(got, want)
    if target.device == "cpu":  # a GPU's backward has a thread of its own, whose calls are not recorded here
        assert ran == [target.backend] * 2 * LAYERS


# Calls that overlap.


@every_target
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "reversed"])
def test_two_forwards_then_both_backwards(target: Target, order: tuple[int, int]) -> None:
    """Each gets the gradients that it has alone; the calls differ in length."""
    model = language_model(target)
    tokens = [text(target), text(target, T=70, seed=1)]
    want = [gradients(model, partial(loss_of, model, x)) for x in tokens]
    losses = [loss_of(model, x) for x in tokens]
    for i in order:
        assert_same_gradients(gradients(model, lambda i=i: losses[i]), want[i])


@every_target
def test_backward_of_a_model_twice(target: Target) -> None:
    """With ``retain_graph`` the second gives the bits of the first, and is added to it; a third is refused."""
    model, tokens = language_model(target), text(target)
    want = gradients(model, lambda: loss_of(model, tokens))
    loss = loss_of(model, tokens)
    model.zero_grad()
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)
    for name, p in model.named_parameters():
        assert_same_bits(p.grad, want[name] + want[name], f"d{name}")
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.backward(loss)


# Second derivatives.


@not_the_reference
def test_second_derivatives_of_a_layer_are_refused(target: Target) -> None:
    """Aloud and with the backend's name, as soon as a gradient penalty is differentiated."""
    skip_if_untrainable(target)
    layer = KimiDeltaAttention(24, 16, 2, backend=target.backend).to(target.device)
    x = torch.randn(1, 9, 24, device=target.device, requires_grad=True)
    (d,) = torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"the {target.backend} backend has no second derivatives"):
        torch.autograd.backward(d.square().sum())


@every_target
@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("eager", "flash_kda::backward has no second derivatives"),
        ("aot_eager", "torch.compile with aot_autograd does not currently support double backward"),
    ],
)
def test_second_derivatives_of_a_compiled_layer_are_refused(target: Target, compiler: str, message: str) -> None:
    """By this library, or by torch where it differentiates the whole graph."""
    skip_if_untrainable(target)
    layer = KimiDeltaAttention(24, 16, 2, backend=target.backend).to(target.device)
    x = torch.randn(1, 9, 24, device=target.device, requires_grad=True)
    y, _ = torch.compile(layer, fullgraph=True, backend=compiler)(x)
    (d,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match=message):
        torch.autograd.backward(d.square().sum())


# torch.compile.


@every_target
@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11), reason="torch before 2.11 adds in another order there"
)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_compiled_model(target: Target, autocast: bool) -> None:
    """Forward and backward of the whole model, without a break in the graph, give the bits of the plain one."""
    model, tokens = language_model(target), text(target)

    def loss(module: Callable[[Tensor], tuple[Tensor, None]]) -> Tensor:
        with torch.autocast(target.device, dtype=torch.bfloat16, enabled=autocast):
            return loss_of(module, tokens)

    want = gradients(model, lambda: loss(model))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_gradients(gradients(model, lambda: loss(compiled)), want)


# FSDP2.


@pytest.fixture
def mesh(target: Target) -> Iterator[dist.DeviceMesh]:
    """One process that is a world of its own."""
    skip_if_untrainable(target)
    if target.device == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("FSDP2 of this torch needs a GPU")
    backend = "nccl" if target.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh(target.device, (1,))
    dist.destroy_process_group()


def shard(module: nn.Module, mesh: dist.DeviceMesh, dtype: torch.dtype | None) -> None:
    """Blocks one by one, then what is left, as training scripts do."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in getattr(module, "blocks", ()):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def whole(module: nn.Module, of: Callable[[Tensor], Tensor | None]) -> Grads:
    found = {name: of(p) for name, p in module.named_parameters()}
    return {name: x.full_tensor() for name, x in found.items() if x is not None}


@pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")
@every_target
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "mixed"])
@pytest.mark.parametrize("what", ["layer", "model"])
def test_fsdp(target: Target, mesh: dist.DeviceMesh, what: str, dtype: torch.dtype | None, checkpointed: bool) -> None:
    """Gradients of the plain module (of its bfloat16 copy, in mixed precision), and the plain optimizer's step.

    Its parameters are freed after the forward and gathered again for the backward.
    """
    plain: nn.Module = language_model(target)
    tokens = text(target)
    if what == "layer":
        plain = plain.blocks[0].attn
    x = torch.randn(2, 40, SHAPE.hidden_size, generator=torch.Generator().manual_seed(1)).to(target.device)

    def loss(module: nn.Module, cast: torch.dtype | None = None) -> Tensor:
        if what == "model":
            return loss_of(module, tokens)
        rows = x if cast is None else x.to(cast)
        mixed: Tensor = module(rows)[0]
        return mixed.float().square().sum()

    sharded = copy.deepcopy(plain)
    if checkpointed:
        for part in getattr(sharded, "blocks", [sharded]):
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)
    shard(sharded, mesh, dtype)
    lower = copy.deepcopy(plain) if dtype is None else copy.deepcopy(plain).to(dtype)
    want = gradients(lower, lambda: loss(lower, dtype))
    torch.autograd.backward(loss(sharded))
    got = whole(sharded, lambda p: p.grad)
    assert {d.dtype for d in got.values()} == {torch.float32}
    # Gathered parameters are aligned in another way, which may change the order of a product's sums.
    assert_near(got, want, 1e-5 if dtype is None else 3e-2)

    config = TrainConfig(steps=1, lr=1e-2)
    optimiser(sharded, config).step()
    for name, p in plain.named_parameters():
        p.grad = got[name]
    optimiser(plain, config).step()
    for name, x in whole(sharded, lambda p: p).items():
        assert_same_bits(x, plain.get_parameter(name), name)
