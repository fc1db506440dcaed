"""Seeds, saves and restores every random generator that training uses."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def derive_seed(*parts: int) -> int:
    """Hashes several numbers to a seed from 0 to 2**32 - 1, equal on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little")


def seed_everything(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """State of all generators of this process, as plain numbers and tensors (for `weights_only`)."""
    _, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device).cpu() if device.type == "cuda" else None,
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restores what `random_state` returned. A state saved without a GPU leaves the GPU's generator unchanged."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def temporary_seed(seed: int) -> Iterator[None]:
    """Context manager that seeds the host's generators with `seed`, and restores their state on exit."""
    before = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
