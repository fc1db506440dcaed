"""The store through which torchrun's agents find each other, in a process of its own.

    python -m scripts.rendezvous            # or another port: python -m scripts.rendezvous 29400

By default the store is part of one machine's torchrun, and the run ends if that machine is lost. Run this on a
machine that stays up, such as a login node, and start the others with RENDEZVOUS=that-machine:29400
scripts/torchrun.sh. It serves runs until it is stopped.
"""

import signal
import sys

from torch.distributed import TCPStore

PORT = 29400


def main(words: list[str]) -> None:
    if len(words) > 1 or not all(word.isdecimal() and int(word) < 2**16 for word in words):
        raise SystemExit("usage: python -m scripts.rendezvous [PORT]")
    try:
        store = TCPStore("0.0.0.0", int(words[0]) if words else PORT, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise SystemExit(f"rendezvous: {error}") from None
    print(f"store on port {store.port}; Ctrl-C stops it", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main(sys.argv[1:])
