"""A separate CUDA stream for compression, so that it overlaps with backward."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class SideStream:
    """A stream next to the caller's current stream.

    Work inside `after_caller` waits for the work that the caller has queued so far. Work inside `concurrently`
    does not. After `join`, the caller's stream waits for the side stream. The host never waits. On a CPU all three
    do nothing.

    Args:
        device: Device of the stream.

    Attributes:
        stream: The stream; None on a CPU.
    """

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def after_caller(self) -> AbstractContextManager[Any]:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        return self.concurrently()

    def concurrently(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def join(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
