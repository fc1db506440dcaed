"""Preparation of a run: checks of the config, the device, threads, seeds, and kernels."""

import os

import torch
from omegaconf import DictConfig

import dgc.kernels as kernels
from dgc.comm import Transport
from dgc_training.config import ConfigError
from dgc_training.data import check_workers
from dgc_training.random_state import seed_everything
from dgc_training.startup.build import config_errors

REQUIRED = {
    "dataset": "a data set",
    "model": "a model",
    "train.num_epochs": "the number of epochs",
    "train.batch_size": "samples per rank and backward pass",
}


def require_complete(tree: DictConfig, devices: str) -> None:
    """Raises ConfigError if a required setting is missing or settings contradict. Nothing is started before."""
    values = {"dataset": tree.dataset, "model": tree.model}
    values |= {f"train.{key}": tree.train[key] for key in ("num_epochs", "batch_size")}
    for key, meaning in REQUIRED.items():
        if values[key] is None:
            raise ConfigError(
                f"{key} ({meaning}) is not set. Begin with an experiment, such as configs/digits/cnn.py."
            )
    if tree.train.hierarchical not in ("auto", "on", "off", True, False):
        raise ConfigError(f"train.hierarchical is {tree.train.hierarchical!r}, not auto, on or off")
    if tree.train.gossip is not None and tree.train.gossip._target_.startswith("dgc.local."):
        raise ConfigError(
            f"train.gossip is {tree.train.gossip._target_}, which belongs to train.local: stack a file of "
            "configs/local"
        )
    if tree.train.groups is not None and tree.train.local is None:
        raise ConfigError("train.groups meet in the outer steps of train.local: stack a file of configs/local")
    if models := next((key for key in ("local", "gossip") if tree.train[key] is not None), None):
        if tree.train.hierarchical in ("on", True):
            raise ConfigError(
                "train.hierarchical compresses gradients between machines; for models set it to auto or off and "
                f"stack configs/{models}/machines.py"
            )
        if tree.train.compression._target_ != "dgc.compression.DenseCompressor":
            raise ConfigError(
                f"train.{models} exchanges models, so train.compression ({tree.train.compression._target_}) has "
                "no gradients to compress; remove one of the two from the stack"
            )
        if tree.train.check_replicas_every:
            raise ConfigError(
                f"train.check_replicas_every compares models, which differ with train.{models}: set it to 0"
            )
    if tree.train.dgc and tree.train.clip_norm is not None:
        raise ConfigError(
            "train.clip_norm limits averages, and DGC's contain gradients of many steps: leave it null and set "
            "train.compression.memory.gradient_clipping, for example to dgc.memory.ClipByNorm"
        )
    if not -(2**62) < tree.seed < 2**62:
        raise ConfigError(f"seed is {tree.seed}; its magnitude must be less than 2**62")
    if devices == "gpu" and not torch.cuda.is_available():
        raise ConfigError("--devices gpu: torch finds no GPU here. Use --devices cpu or auto.")


def prepare_device(tree: DictConfig, devices: str, transport: Transport) -> torch.device:
    """Sets torch's threads and determinism, seeds all ranks alike, and returns the rank's device."""
    # The ranks of a machine share its cores. More threads than cores only make them slower.
    all_cores = len(os.sched_getaffinity(0))
    cores = max(1, all_cores // transport.local_size)
    with config_errors():
        check_workers(tree.data.num_workers, transport.local_size, all_cores)
    torch.set_num_threads(max(1, min(tree.data.num_threads_per_worker, cores)))
    if tree.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    seed_everything(tree.seed)
    if devices == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    torch.backends.cudnn.benchmark = not tree.deterministic
    device = torch.device("cuda", transport.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def choose_kernels(name: str, device: torch.device) -> str:
    """Selects a backend of `dgc.kernels` and returns its description. Raises ValueError if it is not available.

    "auto" selects by device, or by the environment variable DGC_KERNELS.
    """
    if name != "auto":
        kernels.use(name)
    return kernels.describe(device)
