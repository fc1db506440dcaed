"""SIGTERM as an exception, so that a context removes what it has made."""

import signal
import sys
import threading
from types import FrameType


class RaisedSigterm:
    """Raises SystemExit(143) on SIGTERM, between `install` and `restore`.

    Only the main thread can set a handler, and one that the user has set is kept.
    """

    def __init__(self) -> None:
        self._installed = self._held = self._late = False

    def install(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
            self._installed = True

    def hold(self) -> None:
        """Let a later SIGTERM wait until `restore`, since the removal must not end halfway."""
        self._held = True

    def restore(self) -> None:
        """Set the default handler again. Raises SystemExit if a SIGTERM was held."""
        if self._installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        late, self._installed, self._held, self._late = self._late, False, False, False
        if late:
            sys.exit(128 + signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self._late = True
        else:
            sys.exit(128 + number)
