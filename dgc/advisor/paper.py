"""The advisor on paper: of the model only the number of parameters and the time of a step are known.

It is taken for a Transformer. A layer of width d has 12 d^2 parameters in four matrices, and there are d / 43
layers, as in models of a few hundred million parameters. The exchange of one layer of width WIDEST is recorded. It
stands for each layer:

    bytes of all elements, of their codes, of a selection   grow with the number of parameters
    bytes of PowerSGD, r (n + m) for a matrix of n x m       grow with its root

Forward takes a third of the step and backward two thirds, as their operations do. The gradients of the layers are
complete one after another. What the methods compute is left out: it depends on the device.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn

from dgc.advisor.candidates import Candidate, Recorder
from dgc.advisor.cost.model import Compute, RecordedMessage
from dgc.advisor.methods import Method, builder
from dgc.advisor.workload import Workload

WIDEST = 256
LAYERS_OF_WIDTH = 1 / 43
FORWARD = 1 / 3  # of the time of a step
VALID_PARAMETERS = "100k", "10t"  # no network needs to compress fewer
VALID_STEP = "1us", "1e6s"


@dataclass(frozen=True)
class Shape:
    """The Transformer that a number of parameters stands for.

    Attributes:
        parameters: Their number.
        width: Of a layer.
        layers: How many there are.
    """

    parameters: int
    width: int
    layers: int


def shape_of(parameters: int) -> Shape:
    """The shape. parameters: within VALID_PARAMETERS."""
    width = max(64, 64 * round((parameters / (12 * LAYERS_OF_WIDTH)) ** (1 / 3) / 64))
    return Shape(parameters, width, max(1, round(parameters / (12 * width**2))))


def workload_on_paper(shape: Shape, seconds: float, device: torch.device) -> Workload:
    """One layer with normally distributed gradients, and the given seconds of a step."""
    d = min(shape.width, WIDEST)
    sizes = {"attention": (3 * d, d), "projection": (d, d), "up": (4 * d, d), "down": (d, 4 * d)}
    generator = torch.Generator().manual_seed(0)
    layer = nn.ParameterDict(
        {name: torch.zeros(size, dtype=torch.float32, device=device) for name, size in sizes.items()}
    )
    gradients = {
        name: torch.randn(size, generator=generator, dtype=torch.float32).to(device)
        for name, size in sizes.items()
    }
    return Workload(
        layer,
        lambda model, batch: torch.zeros((), dtype=torch.float32),
        f"a Transformer of width {shape.width}",
        FORWARD * seconds,
        (1 - FORWARD) * seconds,
        dict.fromkeys(sizes, 1.0),
        [],
        [gradients],
    )


def candidate_on_paper(
    method: Method, optimizer: str, shape: Shape, workload: Workload, size: int, local_size: int
) -> Candidate:
    """A method with the traffic of all layers. Raises the ValueError of `measure_candidate`."""
    build = builder(method, optimizer, workload.gradients[0])
    found = steps_on_paper(Recorder(method, build, workload, local_size, is_timed=False), shape, size)
    if not method.dense_share:
        return found
    first = Recorder(method, build, workload, local_size, dense=True, is_timed=False)
    return replace(found, dense=steps_on_paper(first, shape, size))


def steps_on_paper(recorder: Recorder, shape: Shape, size: int) -> Candidate:
    """A recorder's method with the traffic of all layers, in one of the steps that it records."""
    method, workload = recorder.method, recorder.workload
    steps = recorder.record(size, 2)
    layer = steps[-1]
    count = 1 if method.averages_models else shape.layers
    times = shape.parameters / count / sum(p.numel() for p in workload.model.parameters())
    times *= sum(of.total("payload") for of in steps) / (len(steps) * layer.total("payload"))
    times *= min(1.0, WIDEST / shape.width) if method.is_low_rank else 1.0
    buckets = tuple(tuple(grown(of, times) for of in bucket) for bucket in layer.buckets)
    ready = tuple((i + 1) / count for i in range(count) for _ in buckets)
    traffic = replace(layer, buckets=buckets * count, elements=layer.elements * count)
    return Candidate(method, traffic, Compute(), ready)


def grown(message: RecordedMessage, times: float) -> RecordedMessage:
    """The same message with more bytes."""
    return replace(
        message,
        payload=round(message.payload * times),
        wire=message.wire * times,
        cross=message.cross * times,
        awaited=round(message.awaited * times),
        machine=None if message.machine is None else message.machine * times,
    )
