"""The coordinator of replica groups as a program: `python -m dgc.groups serve`.

Any machine that all groups reach will do; it needs no GPU, and a few kB of memory and of network for each group.
Its file has the decisions: keep it, and start the same command again after a failure. Groups train
alone meanwhile.
"""

import signal
import socket
import sys
import time
import uuid
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path

from dgc.comm.lines import LineServer
from dgc.groups.coordinator import Coordinator, Sent, Settings
from dgc.groups.decisions import Decisions
from dgc.groups.messages import Hello, Refused, decode, encode

PORT = 29444


class Server:
    """A coordinator behind a port. The file is written before a message that depends on it is sent."""

    def __init__(
        self,
        settings: Settings,
        file: Path,
        port: int = PORT,
        host: str = "",
        log: Callable[[str], None] | None = None,
    ):
        self._log = log or report
        self._decisions = Decisions(file)
        saved = self._decisions.load()
        self._lines = LineServer(port, host, min(settings.beat, settings.lost / 4))
        self.port = self._lines.port
        self._clients: dict[str, socket.socket] = {}
        self._names: dict[socket.socket, str] = {}
        self.coordinator = Coordinator(
            settings,
            self._decisions.save,
            self._decisions.add,
            saved,
            run=uuid.uuid4().hex[:12],
            epoch=int(time.time()),
            log=self._log,
        )

    def run(self) -> None:
        """Serve until `close`."""
        self._lines.run(self._line, self._gone, self._tick)
        self._decisions.close()

    def close(self) -> None:
        self._lines.close()

    def _line(self, client: socket.socket, line: bytes) -> None:
        now = time.monotonic()
        try:
            sender, _, content = line.partition(b" ")
            name, message = sender.decode(), decode(content)
        except ValueError as error:
            self._lines.send(client, encode(Refused(str(error))))
            self._lines.drop(client)
            return
        if isinstance(message, Hello):
            before = self._clients.get(name)
            self._clients[name], self._names[client] = client, name
            if before is not None and before is not client:
                self._names.pop(before, None)
                self._lines.drop(before)
        if self._names.get(client) == name:
            self._send(self.coordinator.handle(now, name, message))  # type: ignore[arg-type]

    def _gone(self, client: socket.socket) -> None:
        name = self._names.pop(client, None)
        if name is not None and self._clients.get(name) is client:
            del self._clients[name]
            self._log(f"the connection to {name} has ended")
            self._send(self.coordinator.gone(time.monotonic(), name))

    def _tick(self) -> None:
        self._send(self.coordinator.tick(time.monotonic()))

    def _send(self, sent: Sequence[Sent]) -> None:
        for name, message in sent:
            client = self._clients.get(name)
            if client is not None:
                self._lines.send(client, encode(message))
                if isinstance(message, Refused):
                    self._lines.drop(client)


def report(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    defaults = Settings()
    parser = ArgumentParser(
        "python -m dgc.groups", description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter
    )
    serve = parser.add_subparsers(dest="command", required=True).add_parser(
        "serve", help="lead the rounds of replica groups", formatter_class=ArgumentDefaultsHelpFormatter
    )
    serve.add_argument("--port", type=int, default=PORT, help="port to listen at")
    serve.add_argument("--host", default="", help="address to listen at; empty: all of this machine")
    serve.add_argument(
        "--state", type=Path, required=True, help="file of the decisions, on a disk of this machine"
    )
    serve.add_argument(
        "--quorum", type=int, default=defaults.quorum, help="groups without which there is no round"
    )
    serve.add_argument(
        "--grace",
        type=float,
        default=defaults.grace,
        help="seconds for the others after `quorum` groups are ready",
    )
    serve.add_argument(
        "--timeout",
        type=float,
        default=defaults.timeout,
        help="seconds; half of it to wait for a quorum, half of it for an exchange",
    )
    serve.add_argument(
        "--lost", type=float, default=defaults.lost, help="seconds of silence after which a group counts as dead"
    )
    serve.add_argument(
        "--beat", type=float, default=defaults.beat, help="seconds between two signs of this program"
    )
    serve.add_argument(
        "--loading",
        type=float,
        default=defaults.loading,
        help="seconds for which rounds are put off at most, while groups train on, for a group that takes longer "
        "than a round to load the state; 0: never",
    )
    own = parser.parse_args(arguments)
    try:
        settings = Settings(own.quorum, own.grace, own.timeout, own.lost, own.beat, own.loading)
        server = Server(settings, own.state, own.port, own.host)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: server.close())
    report(f"leads run {server.coordinator.run or '(new)'} at port {server.port}, {settings}")
    try:
        server.run()
    except KeyboardInterrupt:
        sys.exit(130)
