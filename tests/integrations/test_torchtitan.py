"""The config that dgc.integrations.torchtitan makes: what it sets, and what its parallelize_fn refuses."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from dgc.compression import DenseCompressor
from dgc.integrations.torchtitan import compressed


@dataclass
class Spec:
    parallelize_fn: Any
    post_optimizer_build_fn: Any = None


def parallelized(config: Any, **dims: bool) -> Any:
    """What the config's parallelize_fn returns. That of the model returns its ParallelDims."""
    off = dict.fromkeys(("pp_enabled", "tp_enabled", "cp_enabled", "ep_enabled"), False)
    own = SimpleNamespace(**{"dp_replicate_enabled": True, "dp_replicate": 2, **off, **dims})
    parts = {"training": config.training, "parallelism": config.parallelism}
    return config.model_spec.parallelize_fn("model", parallel_dims=own, **parts)


def made() -> Any:
    def parallelize(model: str, *, parallel_dims: Any, training: Any, parallelism: Any) -> Any:
        return parallel_dims

    training, parallelism = SimpleNamespace(disable_cuda_graphs=False), SimpleNamespace(spmd_backend="spmd_types")
    config = SimpleNamespace(model_spec=Spec(parallelize), training=training, parallelism=parallelism)
    assert compressed(config, DenseCompressor()) is config
    return config


def test_the_model_is_sharded_without_replicas_and_other_parallelism_is_refused() -> None:
    dims = parallelized(made())
    assert not dims.dp_replicate_enabled and dims.dp_replicate == 2
    for kind, name in {"pp": "pipeline", "tp": "tensor", "cp": "context", "ep": "expert"}.items():
        with pytest.raises(ValueError, match=f"does not support {name} parallelism"):
            parallelized(made(), **{f"{kind}_enabled": True})
    # settings that a command line has changed
    graphs, backend = made(), made()
    graphs.training.disable_cuda_graphs = False
    backend.parallelism.spmd_backend = "full_dtensor"
    for config, message in ((graphs, "CUDA graphs"), (backend, "--parallelism.spmd_backend other")):
        with pytest.raises(ValueError, match=f"does not support {message}"):
            parallelized(config)
