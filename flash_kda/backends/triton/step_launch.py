"""Decode steps on the GPU: what a launch takes besides tensors, worked out once, and the launch."""

from __future__ import annotations

from torch import Tensor

from flash_kda.backends.triton import step as kernels
from flash_kda.backends.triton.config import StepConfig, configure_step, power_of_two
from flash_kda.backends.triton.decode_launch import launcher
from flash_kda.backends.triton.decode_launch import values as decode_values
from flash_kda.backends.triton.launch import Launch, Plan
from flash_kda.types import StepInputs, Stepper, gate_parameters

# What is passed to the kernel, by the names of its parameters without ``p_``: the tensors of a call in their order, and
# the gate's parameters.
TENSORS = (
    *("q", "k", "v", "g", "beta", "z", "S", "conv", "index", "known", "q_weight", "k_weight", "v_weight"),
    *("q_bias", "k_bias", "v_bias", "norm", "o", "A_log", "dt_bias"),
)


def values(call: StepInputs, config: StepConfig, out: Tensor) -> dict[str, object]:
    """What the kernel takes besides tensors, by the names of its parameters."""
    z, conv, W = call.z.stride(), call.conv_pool.stride(), call.width
    weights = zip("qkv", call.conv_weights, strict=True)
    return {
        **decode_values(call.decode, config, out),
        # As of the other rows, the stride of a batch of one is of no use.
        "z_b": 0 if call.z.shape[0] == 1 else z[0],
        "z_h": z[2],
        **{f"conv_{d}": step for d, step in zip("nwc", conv, strict=True)},
        **{f"{name}_weight_{d}": step for name, x in weights for d, step in zip("cw", x.stride(), strict=True)},
        "eps": call.norm_eps,
        "H": call.problem.H,
        "W": W,
        "ROWS": config.rows,
        "PIECE": config.piece,
        "THREADS": 32 * config.warps,
        "PARTS": power_of_two(-(-call.problem.V // config.BV)),
        "HAS_BIAS": call.conv_biases is not None,
        "HAS_INDEX": call.decode.indices is not None,
    }


def plan(call: StepInputs, config: StepConfig, out: Tensor) -> Plan:
    """The launch of all calls of this call's form. There are rows."""
    programs = call.decode.inputs.num_sequences * call.problem.H
    options = {"num_warps": config.warps, "maxnreg": config.registers}
    launch = Launch(kernels.step, programs, values(call, config, out), options)
    return Plan(call.decode.inputs.signature.device, TENSORS, {}, [launch])


def run_step(call: StepInputs) -> tuple[Tensor, Stepper]:
    """Output ``[N, 1, HV, V]``, into the call's tensor if it has one, and all calls of its form."""
    config = configure_step(call.problem, call.decode.inputs.state_layout)
    run = launcher(call.decode, lambda out: plan(call, config, out))
    return run(call.tensors, *gate_parameters(call.decode.inputs.gate)), run
