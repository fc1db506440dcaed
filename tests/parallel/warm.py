"""Forks the ranks of groups from one process that has imported what they import, which takes each 3 s of a core.

    warm.py SOCKET           accepts ranks, until its standard input is closed
    warm.py SOCKET WORDS...  is started by a launcher in place of `python WORDS...`

What the launcher starts passes on its environment, its files and its signals, and ends as its rank does.
"""

import json
import os
import runpy
import selectors
import signal
import socket
import sys
from typing import Any

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGABRT)


def stand_for_a_rank(address: str, words: list[str]) -> int:
    """The exit status of a rank that another process forks."""
    message = json.dumps([dict(os.environ), words]).encode()
    with socket.socket(socket.AF_UNIX) as own:
        own.connect(address)
        socket.send_fds(own, [len(message).to_bytes(4, "big")], [0, 1, 2])
        own.sendall(message)
        for number in FORWARDED:
            signal.signal(number, lambda number, _: own.sendall(bytes([number])))
        status = own.recv(1)
        return status[0] if status else 1


class Warm:
    """The process that forks."""

    def __init__(self, address: str) -> None:
        self.selector, self.listener = selectors.DefaultSelector(), socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(sys.stdin, selectors.EVENT_READ)

    def serve(self) -> list[str]:
        """Returns in each rank, with its words, and without any at the end."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is sys.stdin:
                    return []
                if key.fileobj is self.listener:
                    if words := self.fork(self.listener.accept()[0]):
                        return words
                elif isinstance(key.fileobj, socket.socket):
                    self.pass_on(key.fileobj, key.data)
                else:
                    self.end(key.fileobj, *key.data)

    def fork(self, own: socket.socket) -> list[str]:
        """The words of the rank, in it."""
        size, files, _, _ = socket.recv_fds(own, 4, 3)
        message = own.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
        if pid := os.fork():
            for file in files:
                os.close(file)
            self.selector.register(own, selectors.EVENT_READ, pid)
            self.selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, own))
            return []
        variables, words = json.loads(message)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        for connection in (self.selector, self.listener, own):
            connection.close()
        os.environ.clear()
        os.environ.update(variables)
        found: list[str] = words
        return found

    def pass_on(self, own: socket.socket, pid: int) -> None:
        """A signal, or the end of what stands for the rank."""
        received = own.recv(1)
        os.kill(pid, received[0] if received else signal.SIGKILL)
        if not received:
            self.selector.unregister(own)

    def end(self, file: Any, pid: int, own: socket.socket) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.selector.unregister(file)
        os.close(file)
        if own in self.selector.get_map():
            self.selector.unregister(own)
            own.sendall(bytes([status if status >= 0 else 128 - status]))
        own.close()


if __name__ == "__main__":
    if sys.argv[2:]:
        sys.exit(stand_for_a_rank(sys.argv[1], sys.argv[2:]))
    import gc

    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.nn.parallel  # noqa: F401

    import dgc.comm.connect
    import dgc.compression
    import dgc.ddp
    import dgc.fsdp
    import dgc.gossip
    import dgc.optim  # noqa: F401

    warm = Warm(sys.argv[1])
    gc.freeze()
    print("ready", flush=True)
    if words := warm.serve():
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
