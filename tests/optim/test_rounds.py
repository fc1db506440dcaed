"""The order in which the rounds of several buckets are launched and waited for."""

from typing import Any

import torch
from optim.nets import alone, dgc_sgd, loss_of, net, wrap

from dgc.comm import AllReduce
from dgc.compression.protocol import DenseResult, Reduced, StatelessCompressor


class ThreeRounds(StatelessCompressor):
    def reduce(self, bucket: Any, state: Any) -> Any:
        for _ in range(3):
            (mean,) = yield (AllReduce(bucket.flat.clone()),)
        bucket.flat.copy_(mean)
        return Reduced(DenseResult(), state)


class Recorder:
    """A transport that records its calls. is_prompt: replies are there at once, or never before `wait`."""

    def __init__(self, is_prompt: bool) -> None:
        self._transport, self.is_prompt = alone(), is_prompt
        self.events: list[Any] = []

    def __getattr__(self, name: Any) -> Any:
        return getattr(self._transport, name)

    def launch(self, name: Any, requests: Any, communicator: Any = "") -> Any:
        self.events.append(("launch", name))
        return name, self._transport.launch(name, requests, communicator)

    def poll(self, work: Any) -> Any:
        return self.is_prompt

    def wait(self, work: Any) -> Any:
        self.events.append(("wait", work[0]))
        return self._transport.wait(work[1])


def wrapped(is_prompt: bool) -> Any:
    model, transport = net(), Recorder(is_prompt)
    optimizer = wrap(model, transport, dgc_sgd, compression=ThreeRounds(), bucket_mb=2e-4)
    names = [plan.bucket.name for plan in optimizer.planned]
    assert len(names) > 2
    transport.events.clear()
    return model, optimizer, names, transport.events


def test_while_one_bucket_waits_rounds_of_the_others_are_in_flight() -> None:
    """One round of each bucket in turn: all second rounds are launched before a third one is waited for."""
    model, optimizer, names, events = wrapped(is_prompt=False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.synchronize()
    for name, other in zip(names, names[1:], strict=False):
        assert events.index(("launch", f"{other}.1")) < events.index(("wait", f"{name}.2"))


def test_available_replies_are_used_during_backward() -> None:
    model, optimizer, (first, *_), events = wrapped(is_prompt=True)
    loss_of(model, 0).backward()
    assert ("wait", f"{first}.1") in events
    optimizer.step()


def test_buckets_start_in_the_order_in_which_backward_fills_them() -> None:
    """From the second step on. In the first one it is the reverse order of registration."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in ("last", "first")})
    transport = Recorder(is_prompt=False)
    optimizer = wrap(model, transport, bucket_mb=1e-6)
    names = [plan.bucket.name for plan in optimizer.planned]
    for expected in (names, names[::-1]):
        optimizer.zero_grad()
        transport.events.clear()
        model["last"](model["first"](torch.ones(3, 4))).sum().backward()
        optimizer.step()
        launched = [name.rpartition(".")[0] for event, name in transport.events if event == "launch"]
        assert [name for name in launched if name in names] == expected
