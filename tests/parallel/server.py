"""Runs on every rank of a group (`parallel.ranks.Group`): the functions that tests send, one after another.

server.py SOCKET
"""

import gc
import os
import socket
import sys
import traceback
import warnings
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from dgc.comm.connect import choose_transport, connect
from dgc.launch import started_by


class Horovod:
    """The transports of a process, which live as long as it does."""

    def __init__(self, hierarchical: Any) -> None:
        self.open = cache(connect)
        self.open(hierarchical=hierarchical)  # the first connection decides whether there can be groups later

    def close(self, transport: Any) -> None:
        """Nothing is left behind."""


class Torch:
    """Transports of which each lives as long as one function: hundreds of them would keep a core busy."""

    open = staticmethod(connect)

    def __init__(self) -> None:
        self._first = connect()  # keeps the default group

    def close(self, transport: Any) -> None:
        gc.collect()  # of models and optimizers that still use the groups
        if hasattr(transport, "close"):  # a wrapper for GPUs has none
            transport.close()


def serve(tests: Connection) -> None:
    started = started_by(os.environ)
    tests.send(0 if started is None else started.rank)
    transports: Any = None
    while (task := tests.recv()) is not None:
        function, arguments, options, is_last = task
        try:
            if transports is None:
                uses_torch = choose_transport().transport == "torch"
                transports = Torch() if uses_torch else Horovod(options.get("hierarchical") or True)
                gc.freeze()  # so that what functions leave behind is found soon
            transport = transports.open(**options)
            body = getattr(function, "__wrapped__", function)  # of a test of `each_rank_of`
            reply = True, body(transport, *arguments)
        except Exception:
            reply = False, traceback.format_exc()
        tests.send(reply)
        if is_last or not reply[0]:
            break
        transports.close(transport)
        del function, body, arguments, transport, reply, task


if __name__ == "__main__":
    warnings.simplefilter("error")
    with socket.socket(socket.AF_UNIX) as own:
        own.connect(sys.argv[1])
        serve(Connection(own.detach()))
