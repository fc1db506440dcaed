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
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def after_caller(self) -> AbstractContextManager[Any]:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return self.concurrently()

    def concurrently(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
