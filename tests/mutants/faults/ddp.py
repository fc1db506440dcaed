"""Faults of dgc.ddp and of the order in which collectives are launched."""

from ..fault import Fault

LOOP = ["tests/engine/test_loop.py"]
PARALLEL, ONE_PROCESS = ["tests/parallel/test_ddp.py"], ["tests/ddp/test_exceptions.py"]

DDP = [
    Fault(
        "all-rounds-on-one-communicator",
        "dgc/comm/conversation.py",
        "communicator = self._communicators[self.rounds if self.rounds < len(self._communicators) else 0]",
        "communicator = self._communicators[0]",
        LOOP,
    ),
    Fault(
        "a-conversation-overtakes-those-that-started-before",
        "dgc/engine/loop.py",
        "conversation.advance(limit)",
        "conversation.advance(COMMUNICATORS)",
        LOOP,
    ),
    Fault(
        "rounds-without-a-communicator-launched-as-replies-arrive",
        "dgc/engine/loop.py",
        "limit = COMMUNICATORS\n",
        "limit = 99\n",
        LOOP,
    ),
    Fault(
        "a-bucket-starts-before-its-last-gradient",
        "dgc/engine/loop.py",
        "if only_full and self._missing[group]:",
        "if only_full and self._missing[group] > 1:",
        LOOP,
    ),
    Fault(
        "each-rank-starts-buckets-in-its-own-order",
        "dgc/engine/loop.py",
        'filled = broadcast_object(self._transport, self._filled, name=f"{self._name}.order")',
        "filled = list(self._filled)",
        LOOP,
    ),
    Fault(
        "gradients-by-place-in-ddps-buckets",
        "dgc/ddp.py",
        "b, i = self._slots[p]",
        "b, i = list(self._slots.values())[len(self._views)]",
        PARALLEL,
    ),
    Fault(
        "residual-of-unused-parameters-not-delivered",
        "dgc/ddp.py",
        "after_ddp(partial(deliver_unused, self._planned))",
        "pass",
        PARALLEL,
    ),
    Fault(
        "error-raised-before-ddp-has-finished",
        "dgc/ddp.py",
        "after_ddp(partial(drop_gradients, self._slots, NonFiniteGradientError(reason)))",
        "raise NonFiniteGradientError(reason)",
        PARALLEL,
    ),
    Fault(
        "order-of-ddps-only-bucket-learned",
        "dgc/ddp.py",
        "learn=len(self._buffers) > 1",
        "learn=True",
        ONE_PROCESS,
    ),
    Fault(
        "gradients-of-a-pass-that-failed-stay",
        "dgc/engine/loop.py",
        "if self.in_flight:\n            self.intact.fail",
        "if False:\n            self.intact.fail",
        ONE_PROCESS,
    ),
    Fault(
        "an-exchange-goes-on-after-an-exception",
        "dgc/comm/conversation.py",
        "self._reason = self._reason or reason",
        "pass",
        ["tests/optim/test_exceptions.py"],
    ),
    Fault(
        "residual-with-the-loss-scale-of-its-step",
        "dgc/engine/loop.py",
        "self.loss_scale.divide_(plan.bucket.flat)",
        "pass",
        PARALLEL,
    ),
]
