"""Host operations of a step: kernels launched, and waits for the device."""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).parents[1]
MESSAGE = "called a synchronizing CUDA operation"
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@dataclass(frozen=True)
class Counts:
    """Counts of a step.

    waits: waits that PyTorch reports, by place. launches: of PyTorch's and Triton's kernels; 0 if the profiler
    cannot see the GPU. driver_waits: all waits in the profile, from any caller.
    """

    waits: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    driver_waits: int = 0


def count(step: Callable[[], object], device: torch.device) -> Counts:
    """Count in two calls, the first under PyTorch's check for waits, the second under its profiler."""
    if device.type != "cuda":
        step()
        return Counts()
    waits = waits_of(step)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
    events = {event.key: event.count for event in profiler.key_averages()}
    return Counts(waits, sum(events.get(name, 0) for name in LAUNCHES), sum(events.get(name, 0) for name in WAITS))


def waits_of(step: Callable[[], object]) -> Counter[str]:
    """Return file and line of each operation that waits, and its count."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return Counter(f"{place(w.filename)}:{w.lineno}" for w in seen if MESSAGE in str(w.message))


def place(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(ROOT)) if ROOT in path.parents else path.name
