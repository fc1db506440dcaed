"""The parts of torchtitan 0.3.0 that its adapter reads."""

from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

Spec: Any = make_dataclass("Spec", ["parallelize_fn", ("post_optimizer_build_fn", Any, None)])  # of ModelSpec


def config_of(parallelize: Any) -> Any:
    training, parallelism = SimpleNamespace(disable_cuda_graphs=False), SimpleNamespace(spmd_backend="spmd_types")
    return SimpleNamespace(model_spec=Spec(parallelize), training=training, parallelism=parallelism)


def dims_of(**dims: Any) -> Any:
    off = dict.fromkeys(("pp_enabled", "tp_enabled", "cp_enabled", "ep_enabled"), False)
    return SimpleNamespace(**{"dp_replicate_enabled": True, "dp_replicate": 2, **off, **dims})


def parallelized(config: Any, model: Any, dims: Any, **options: Any) -> Any:
    parts = {"training": config.training, "parallelism": config.parallelism}
    return config.model_spec.parallelize_fn(model, parallel_dims=dims, **parts, **options)
