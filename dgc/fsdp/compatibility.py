"""The private and young names of torch that dgc.fsdp reads, and the versions of torch that have them.

Importing this module raises ImportError for a torch without them.
"""

import torch.distributed.fsdp as fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_common

from dgc.versions import TorchRange

TORCH = TorchRange(
    "fsdp",
    oldest="2.13",
    newest="2.15",
    since={"_get_fsdp_state": "2.6"},  # of FSDPModule
)
MESHES = ("DataParallelMeshInfo", "DDPMeshInfo", "FSDPMeshInfo")  # since 2.6
STATE = ("_fsdp_param_groups", "_state_ctx")  # since 2.13: 2.9 has one group
CONTEXT = ("all_states", "post_backward_final_callback_queued")
GROUP = (
    "_all_gather_comm",
    "_all_reduce_hook",  # since 2.9, as the next one
    "_all_reduce_hook_stream",
    "_partial_reduce_output",
    "_reduce_scatter_comm",
    "all_reduce_grads",
    "force_sum_reduction_for_comms",
    "fsdp_params",
    "gradient_divide_factor",
    "mesh_info",
    "post_forward_mesh_info",
    "reduce_grads",
    "reduce_scatter_unused_params",
)
SHARDED_MESH, REPLICATED_MESH = ("shard_process_group",), ("replicate_process_group",)
PARAMETER = ("_orig_size", "_param_fqn", "fsdp_placement", "sharded_param")

TORCH.check_version()
TORCH.check(fsdp, ["FSDPModule"])
TORCH.check(_fsdp_common, MESHES)
TORCH.check(fsdp.FSDPModule, TORCH.since)
