"""Expert parallelism over two processes, each with half of the experts; run by test_two_ranks.py.

RANK=0 python two_ranks.py torchtitan STORE & RANK=1 python two_ranks.py torchtitan STORE
"""

from __future__ import annotations

import os
import sys
import warnings

import torch
from torch import distributed


def torchtitan() -> None:
    """torchtitan's all-to-all dispatcher, with the same tokens on both ranks."""
    import test_torchtitan as titan

    titan.distributed._spmd_backend = "default"
    expected = titan.run(titan.build(None).routed_experts.bfloat16())
    mesh = titan.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    for target in titan.TARGETS:
        routed = titan.build(target).routed_experts.bfloat16()
        routed.token_dispatcher.wire_meshes(ep_mesh=mesh)
        experts = routed.inner_experts
        for name, parameter in list(experts.named_parameters()):
            sharded = titan.distribute_tensor(parameter.detach(), mesh, [titan.Shard(0)])
            experts.register_parameter(name, torch.nn.Parameter(sharded))
        for name, got in titan.run(routed).items():
            if hasattr(got, "full_tensor"):  # a sum over both ranks' tokens
                got = got.full_tensor() / 2
            assert titan.error(got, expected[name].double()) < 0.02, (target, name)


def megatron() -> None:
    """Megatron-Core's all-gather dispatcher, beside SequentialMLP."""
    import test_megatron as mcore

    torch.cuda.current_device = lambda: "cpu"
    mcore.moe_utils.te_general_gemm = None
    mcore.parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    plain, ours = mcore.layers(expert_model_parallel_size=2)
    out, dx = mcore.run(plain)
    our_out, our_dx = mcore.run(ours)
    mcore.same(our_out, out)
    mcore.same(our_dx, dx)
    for name, parameter in mcore.experts_of(plain).items():
        mcore.same(mcore.experts_of(ours)[name].grad, parameter.grad)
    wanted, got = (mcore.shards(layer.experts, None) for layer in (plain, ours))
    assert got.keys() == wanted.keys()
    mcore.parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    store = distributed.FileStore(sys.argv[2], 2)
    distributed.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    {"torchtitan": torchtitan, "megatron": megatron}[sys.argv[1]]()
    distributed.destroy_process_group()
