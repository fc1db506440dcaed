"""The private and young names of torch that dgc.fsdp reads, and the versions of torch that have them.

Importing this module raises ImportError for a torch without them.
"""

import torch.distributed.fsdp as fsdp

from dgc.versions import TorchRange

TORCH = TorchRange(
    "fsdp",
    oldest="2.13",
    newest="2.15",
    since={  # of FSDPModule
        "_get_fsdp_state": "2.6",
        "set_all_reduce_hook": "2.9",
        "set_custom_all_gather": "2.9",
        "set_custom_reduce_scatter": "2.9",
        "set_reduce_scatter_unused_params": "2.13",
    },
)
STATE = ("_fsdp_param_groups", "_state_ctx")  # since 2.13: 2.9 has one group
CONTEXT = ("all_states", "post_backward_final_callback_queued")
GROUP = (
    "_all_gather_comm",
    "_all_reduce_hook",
    "_reduce_scatter_comm",
    "all_reduce_grads",
    "force_sum_reduction_for_comms",
    "fsdp_params",
    "gradient_divide_factor",
    "reduce_grads",
    "reduce_scatter_unused_params",
)
PARAMETER = ("_param_fqn", "sharded_param")

TORCH.check_version()
TORCH.check(fsdp, ["FSDPModule"])
TORCH.check(fsdp.FSDPModule, TORCH.since)
