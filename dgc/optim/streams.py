"""On a GPU compression has a stream of its own, so that backward's kernels go on beside it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class SideStream:
    """Work inside `behind_caller` waits for what the caller has queued so far, inside `beside_caller` it does not.

    After `join` the caller's work waits for it. The host never waits. On a CPU all three do nothing.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def behind_caller(self) -> AbstractContextManager[Any]:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return self.beside_caller()

    def beside_caller(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
