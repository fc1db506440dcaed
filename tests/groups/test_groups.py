"""Groups that meet over real connections: as local steps without faults, and with groups that come, go and lag."""

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import patient
from gossip import networks as nets
from groups.sites import Post, Site, all_step, momentum, post, together, until
from local.test_outer_steps import COMPRESSIONS
from optim.nets import loss_of, net

from dgc.comm.lockstep import LockstepWorld
from dgc.gossip import SGP, HierarchicalGossip
from dgc.groups import connect, connection
from dgc.groups import steps as group_steps
from dgc.groups.member import Outcome
from dgc.groups.messages import Commit
from dgc.groups.steps import GroupSteps
from dgc.local import Nesterov, OuterSteps, Ramp, SlowMo
from dgc.optim import LocalOptimizer

pytestmark = pytest.mark.usefixtures("no_type_checks")
METHODS: dict[str, Callable[[], OuterSteps]] = {
    **{name: partial(lambda make: OuterSteps(2, compression=make()), make) for name, make in COMPRESSIONS.items()},
    "diloco": lambda: OuterSteps(2, outer=Nesterov()),
    "fragments": lambda: OuterSteps(4, outer=Nesterov(), **nets.IN_TWO_PARTS),
    "ramp": lambda: OuterSteps(4, **nets.IN_TWO_PARTS, outer_schedule=Ramp(0.4, 1.0, 9)),
    "warm-up": lambda: OuterSteps(4, outer=Nesterov(), warmup_steps=3, **nets.IN_TWO_PARTS),
    "momentum": lambda: OuterSteps(2, outer=Nesterov(), compression=nets.top_k(), average_momentum=True),
}


@pytest.fixture
def led(tmp_path: Path) -> Iterator[Post]:
    with post(tmp_path) as own:
        yield own


def sites(led: Post, count: int, make: Callable[[], OuterSteps], first: int = 0, **options: Any) -> list[Site]:
    return [Site(led.address, first + i, make(), **options) for i in range(count)]


def close(*every: Site) -> None:
    for site in every:
        site.own.close()


def on_rank(transport: Any, make: Callable[[], OuterSteps], steps: int) -> Any:
    model = net()
    own = LocalOptimizer(momentum(model), model.named_parameters(), make(), transport=transport)
    for step in range(steps):
        own.zero_grad()
        loss_of(model, step, transport.rank).backward()
        own.step()
    return own.model.z.clone()


def trained_alone(number: int, steps: int) -> torch.Tensor:
    """The model after some steps with the data of a group."""
    model = net()
    optimizer = momentum(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, number).backward()
        optimizer.step()
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


@pytest.mark.parametrize("name", METHODS)
def test_without_faults_groups_have_the_bits_of_local_steps(name: str, led: Post) -> None:
    expected = LockstepWorld(2).run(partial(on_rank, make=METHODS[name], steps=9))
    every = sites(led, 2, METHODS[name])
    together(*(site.begin for site in every))
    assert nets.same(all_step(every, 9), expected)
    close(*every)


def digests(*every: Site) -> set[Any]:
    return {(site.groups.tag, site.groups.digest) for site in every}


@pytest.mark.parametrize("name", METHODS)
def test_the_digest_after_rounds_is_of_the_whole_state(name: str, led: Post) -> None:
    every = sites(led, 2, METHODS[name])
    together(*(site.begin for site in every))
    all_step(every, 9)
    late = Site(led.address, 2, METHODS[name](), seed=1)
    late.begin()
    for site in (*every, late):
        known = site.method.digest()
        site.method._digests.clear()
        assert site.method.digest() == known == every[0].groups.digest
    close(*every, late)


def test_a_round_reads_only_its_own_fragments_for_the_digest(led: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()
    own = group_steps._digest_of_fragment
    monkeypatch.setattr(
        group_steps,
        "_digest_of_fragment",
        lambda of: read.append(of.named[0][0]) or own(of),  # type: ignore[func-returns-value]
    )
    every = sites(led, 2, METHODS["fragments"])
    together(*(site.begin for site in every))
    read.clear()
    all_step(every, 5)
    rounds = sum(site.groups.outcomes[Outcome.COMMITTED] for site in every)
    assert len(every[0].method.fragments) > 1 and len(read) == rounds > 2
    close(*every)


@pytest.mark.parametrize("name", ["dense", "2 bits", "rank 1", "4 bits", "fragments"])
def test_a_group_that_joins_takes_part_in_the_next_round(name: str, tmp_path: Path) -> None:
    """It begins with other weights."""
    with post(tmp_path, quorum=1, grace=patient(5)) as led:
        every = sites(led, 2, METHODS[name])
        together(*(site.begin for site in every))
        all_step(every, 4)
        late = Site(led.address, 7, METHODS[name](), seed=3)
        late.begin()
        assert late.groups.tag == every[0].groups.tag and late.groups.healed is not None
        assert len(digests(*every, late)) == 1
        assert torch.equal(z0(late), z0(every[0]))
        all_step([*every, late], 4)
        assert len(digests(*every, late)) == 1 and len(late.groups.members) == 3
        close(*every, late)


def z0(site: Site) -> torch.Tensor:
    found = site.method.committed_state()["z0"]
    return torch.cat([found[s.name].view(-1) for s in site.own.model.segments])


@pytest.mark.parametrize("name", ["dense", "2 bits", "rank 1", "signs"])
def test_the_others_go_on_with_their_residuals_if_a_group_leaves(name: str, led: Post) -> None:
    every = sites(led, 3, METHODS[name])
    together(*(site.begin for site in every))
    all_step(every, 4)
    residuals = [[error.clone() for error in site.method.errors()] for site in every]
    close(every.pop())
    until(lambda: len(led.server.coordinator.members) == 2)
    all_step(every, 1)
    for site, before in zip(every, residuals, strict=False):
        assert nets.same(list(site.method.errors()), before)
    all_step(every, 1)
    assert len(digests(*every)) == 1 and len(every[0].groups.members) == 2
    close(*every)


def test_a_group_that_missed_rounds_keeps_its_young_progress(tmp_path: Path) -> None:
    with post(tmp_path, quorum=1, grace=0.0) as led:
        early, late = sites(led, 2, lambda: OuterSteps(2))
        together(early.begin, late.begin)
        start = late.z
        late.steps(1)
        early.steps(4)
        before = z0(early)
        late.steps(1)
        assert any("2 rounds were missed: its own steps are kept" in text for text in late.told)
        assert late.groups.tag.round == early.groups.tag.round + 1
        alone = trained_alone(1, 2) - start
        torch.testing.assert_close(z0(late), before + alone, rtol=0, atol=1e-6)
        close(early, late)


def test_a_group_whose_loading_takes_longer_than_a_round_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, ends = connection.Groups._load, threading.Event()

    def slowly(groups: connection.Groups, source: str, addresses: Any) -> Any:
        found, loaded = load(groups, source, addresses), groups.tag
        if late.groups is groups:
            before, end = early.groups.tag.round, time.monotonic() + 1.0
            until(lambda: early.groups.tag.round > before + 2 or time.monotonic() > end)
        assert groups.tag == loaded
        return found

    def goes_on() -> None:
        while not ends.is_set():
            early.steps(1)

    monkeypatch.setattr(connection.Groups, "_load", slowly)
    with post(tmp_path, quorum=1, grace=0.2) as led:
        early, late = sites(led, 2, METHODS["diloco"])
        early.steps(2)
        trains = threading.Thread(target=goes_on)
        trains.start()
        try:
            late.steps(2)
            until(lambda: bool(late.steps(2).numel()) and len(late.groups.members) == 2)
        finally:
            ends.set()
            trains.join()
        close(early, late)


def test_old_progress_is_dropped_and_said(tmp_path: Path) -> None:
    with post(tmp_path, quorum=1, grace=0.0) as led:
        early, late = sites(led, 2, lambda: OuterSteps(2), max_staleness=1)
        together(early.begin, late.begin)
        late.steps(1)
        early.steps(8)
        late.steps(1)
        assert any("4 rounds were missed: its own steps since then are dropped" in text for text in late.told)
        assert torch.equal(late.z, z0(late))
        close(early, late)


def test_without_a_coordinator_a_group_trains_alone_and_meets_the_others_later(tmp_path: Path) -> None:
    with post(tmp_path, timeout=patient(2)) as led:
        every = sites(led, 2, lambda: OuterSteps(2))
        together(*(site.begin for site in every))
        all_step(every, 2)
        led.stop()
        start = time.monotonic()
        alone = all_step(every, 4)
        assert time.monotonic() - start < patient(4) and not torch.equal(*alone)
        led.start()
        # a group that is back before the other one is told to go on
        until(lambda: bool(all_step(every, 2)) and led.round == 2)
        assert len(digests(*every)) == 1 and nets.same([every[0].z], [every[1].z])
        close(*every)


def test_a_group_begins_again_with_the_state_on_its_disk(tmp_path: Path) -> None:
    make, folders = METHODS["diloco"], [tmp_path / "0", tmp_path / "1"]
    with post(tmp_path) as led:
        every = [Site(led.address, i, make(), folder=folder) for i, folder in enumerate(folders)]
        together(*(site.begin for site in every))
        all_step(every, 4)
        before, tag = z0(every[0]), every[0].groups.tag
        close(*every)
        led.stop()
        led.start()
        again = [Site(led.address, i, make(), folder=folder, seed=5) for i, folder in enumerate(folders)]
        together(*(site.begin for site in again))
        assert again[0].groups.tag == tag and again[0].groups.healed is None
        assert nets.same([z0(site) for site in again], [before, before])
        all_step(again, 2)
        assert led.round == tag.round + 1 and len(digests(*again)) == 1
        close(*again)


def lose_the_file(led: Post) -> None:
    """Stop the coordinator, and start another one without its file, whose number is the second of its start."""
    led.stop()
    led.file.unlink()
    second = int(time.time())
    until(lambda: int(time.time()) > second)
    led.start()


def test_a_decision_that_was_lost_with_its_file_is_learned_from_a_group_that_knows_it(tmp_path: Path) -> None:
    with post(tmp_path, timeout=patient(2)) as led:
        every = sites(led, 2, METHODS["2 bits"])
        together(*(site.begin for site in every))
        all_step(every, 2)
        server, send = led.server, led.server._send

        def tell_one(sent: Any) -> None:
            decides = any(isinstance(message, Commit) for _, message in sent)
            send([(name, message) for name, message in sent if not decides or name == every[0].groups.name])
            if decides:
                server.close()

        server._send = tell_one  # type: ignore[method-assign]
        all_step(every, 2)
        assert [site.groups.tag.round for site in every] == [2, 1]
        lose_the_file(led)
        every[1].steps(2)  # alone, it does not learn the decision
        assert every[1].groups.outcomes[Outcome.IN_DOUBT] == 2
        until(lambda: bool(all_step(every, 2)) and led.round > 2)
        assert len(digests(*every)) == 1
        assert not any("goes on without round" in text for site in every for text in site.told)
        close(*every)


def test_a_group_says_which_of_its_rounds_the_run_goes_on_without(tmp_path: Path) -> None:
    """The coordinator has lost its file, and nobody else knows the round of the state on the group's disk."""
    folders = [tmp_path / "0", tmp_path / "1"]
    with post(tmp_path, quorum=1) as led:
        every = [Site(led.address, i, OuterSteps(2), folder=folder) for i, folder in enumerate(folders)]
        together(*(site.begin for site in every))
        all_step(every, 2)
        close(every[1])
        until(lambda: len(led.server.coordinator.members) == 1)
        every[0].steps(2)
        close(every[0])
        lose_the_file(led)
        again = [Site(led.address, i, OuterSteps(2), folder=folder) for i, folder in enumerate(folders)]
        again[1].begin()
        again[1].steps(4)
        again[0].begin()
        assert len(digests(*again)) == 1 and led.round == 3
        assert "the run goes on without round 2 of this group: the steps in it are lost" in again[0].told
        close(*again)


def test_a_damaged_file_is_not_used(tmp_path: Path) -> None:
    with post(tmp_path) as led:
        every = [Site(led.address, i, OuterSteps(2), folder=tmp_path / str(i)) for i in range(2)]
        together(*(site.begin for site in every))
        all_step(every, 2)
        close(every[1])
        file = tmp_path / "1" / "rank0.pt"
        content = bytearray(file.read_bytes())
        content[-9] ^= 1
        file.write_bytes(content)
        again = Site(led.address, 1, OuterSteps(2), folder=tmp_path / "1", seed=4)
        again.begin()
        assert any("is damaged" in text for text in again.told)
        assert again.groups.healed is not None and len(digests(every[0], again)) == 1
        close(every[0], again)


def test_a_checkpoint_continues_from_the_common_model_and_without_a_residual(led: Post) -> None:
    every = sites(led, 2, METHODS["2 bits"])
    together(*(site.begin for site in every))
    all_step(every, 3)
    state = every[0].own.compression_state_dict()
    close(every[0])
    again = Site(led.address, 0, METHODS["2 bits"]())
    again.own.load_compression_state_dict(state)
    again.begin()
    assert len(digests(every[1], again)) == 1 and torch.equal(again.z, z0(every[1]))
    assert not any(bool(error.any()) for error in again.method.errors())
    close(every[1], again)


def test_a_checkpoint_is_loaded_when_the_state_for_the_disk_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, done, take = threading.Event(), threading.Event(), GroupSteps.committed_state

    def slowly(steps: GroupSteps) -> dict[str, Any]:
        copies.wait(patient(10))
        return take(steps)

    with post(tmp_path, quorum=1) as led:
        site = Site(led.address, 0, METHODS["diloco"](), folder=tmp_path / "0")
        site.steps(2)
        state = site.own.compression_state_dict()
        monkeypatch.setattr(GroupSteps, "committed_state", slowly)
        site.groups.wait_for_disk()  # while it writes, no other round is saved
        site.steps(2)

        def load() -> None:
            site.own.load_compression_state_dict(state)
            done.set()

        loads = threading.Thread(target=load)
        loads.start()
        assert not done.wait(0.1)
        copies.set()
        assert done.wait(patient(5))
        loads.join()
        close(site)


def test_bytes_of_rounds_are_counted(led: Post) -> None:
    every = sites(led, 2, METHODS["dense"])
    together(*(site.begin for site in every))
    all_step(every, 8)
    of_model = 4 * every[0].own.model.numel
    for site in every:
        meter, found = site.own.meter, site.method.metrics()
        assert found["rounds"] == 4 and found["members"] == 2
        assert found["round_bytes"] == of_model and meter.wire_bytes == 4 * of_model
        # a dense all-reduce in every step after the first round
        assert meter.dense_wire_bytes == 6 * of_model
    close(*every)


def test_a_group_of_several_ranks_remembers_the_run(led: Post) -> None:
    """Without it a rank but the first would wait for other seconds, and save a state of no run."""

    def group(number: int) -> Any:
        def on(transport: Any) -> tuple[str, float, float]:
            own = connect(led.address, name=f"g{number}", log=lambda text: None)
            on_group(transport, own)
            return own.run, own._grace, own._timeout

        return LockstepWorld(2).run(on)

    found = together(partial(group, 0), partial(group, 1))
    expected = led.server.coordinator.run, led.settings.grace, led.settings.timeout
    assert found == [[expected] * 2] * 2


def test_ranks_that_have_saved_other_rounds_begin_with_one_that_all_have(tmp_path: Path) -> None:
    folder, told = tmp_path / "state", list[str]()
    with post(tmp_path, quorum=1, grace=0.0, timeout=patient(2)) as led:

        def group(steps: int) -> None:
            options: Any = {"address": led.address, "group": 0, "folder": folder, "log": told.append}
            LockstepWorld(2).run(partial(on_place, steps=steps, groups=True, **options))

        group(2)
        first = (folder / "rank1.pt").read_bytes()
        group(2)
        assert led.round == 2
        (folder / "rank1.pt").write_bytes(first)  # it was killed before it had written round 2
        (folder / "rank1.before.pt").unlink()
        told.clear()
        group(0)
        assert any("begins with round 1 from" in text for text in told)


def test_a_source_that_is_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be stopped: its machine still takes connections."""
    with post(tmp_path, quorum=1, grace=0.0, timeout=patient(60)) as led:
        early = sites(led, 1, METHODS["diloco"])[0]
        early.begin()
        early.steps(2)
        monkeypatch.setattr(connection, "LOST", 1.0)
        monkeypatch.setattr(connection.Groups, "_packed_state", lambda self: time.sleep(patient(10)))
        monkeypatch.setattr(connection, "BEAT", patient(20))
        late, start = Site(led.address, 1, METHODS["diloco"]()), time.monotonic()
        late.begin()
        assert time.monotonic() - start < patient(5) and late.groups.healed is None
        assert any("could not be loaded" in text for text in late.told)
        close(early, late)


def test_a_group_with_other_settings_is_refused(led: Post) -> None:
    one, other = Site(led.address, 0, OuterSteps(2)), Site(led.address, 1, OuterSteps(3))
    one.begin()
    with pytest.raises(ValueError, match="other settings of its outer steps"):
        other.begin()
    close(one, other)


def test_a_gradient_with_nan_drops_the_round_on_all_groups(led: Post) -> None:
    every = sites(led, 2, METHODS["top-k"])
    together(*(site.begin for site in every))
    before = all_step(every, 2)[0]
    with torch.no_grad():
        next(every[0].model.parameters()).fill_(float("nan"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        all_step(every, 2)
    assert nets.same([site.z for site in every], [before, before]) and len(digests(*every)) == 1
    assert all(site.method.metrics()["dropped_outer_steps"] == 1 for site in every)
    close(*every)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "gossip": (SGP, "groups meet in outer steps"),
    "gossip between": (lambda: HierarchicalGossip(SGP()), "groups meet in outer steps"),
    "base": (lambda: OuterSteps(2, SGP()), "gossip between exchanges needs ranks that stay"),
    "delay": (lambda: OuterSteps(4, delay=1), "use delay=0"),
    "alpha": (lambda: OuterSteps(4, alpha=0.5), "would count them again"),
    "slowmo": (lambda: OuterSteps(4, outer=SlowMo()), "SlowMo reads the learning rate"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_cannot_meet_are_refused(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        Site("127.0.0.1:1", 0, make())


@pytest.mark.parametrize(
    "arguments",
    [{"address": "host:x"}, {"address": ":1"}, {"name": "a b"}, {"max_staleness": -1}, {"weighted": 1}],
)
def test_arguments_that_cannot_work_are_refused(arguments: Any) -> None:
    with pytest.raises(ValueError):
        connect(**{"address": "127.0.0.1:1", **arguments})


def on_group(transport: Any, groups: Any) -> None:
    """A rank of a group that begins and ends."""
    model = net()
    method = HierarchicalGossip(OuterSteps(2))
    named = model.named_parameters()
    optimizer = LocalOptimizer(momentum(model), named, method, transport=transport, groups=groups)
    optimizer.zero_grad()
    optimizer.close()


def on_place(
    transport: Any,
    address: str,
    group: int,
    steps: int,
    groups: bool,
    folder: Path | None = None,
    log: Callable[[str], None] = lambda text: None,
    begins: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """A rank of a group of two. Without groups: of two machines of two ranks. begins: called before the steps."""
    model = net()
    own: Any = connect(address, folder, name=f"g{group}", log=log) if groups else None
    method = HierarchicalGossip(OuterSteps(2, outer=Nesterov(), compression=nets.top_k()))
    named = model.named_parameters()
    optimizer = LocalOptimizer(momentum(model), named, method, transport=transport, groups=own)
    number = 2 * group + transport.rank if groups else transport.rank
    optimizer.zero_grad()
    begins()
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, number).backward()
        optimizer.step()
    optimizer.zero_grad()  # the slices of a machine are gathered here
    z = optimizer.model.z.clone()
    optimizer.close()
    return z


def weighted(led: Post, make: Callable[[], OuterSteps], *items: int | None) -> list[Site]:
    every = [Site(led.address, i, make(), items=of, weighted=True) for i, of in enumerate(items)]
    together(*(site.begin for site in every))
    return every


def test_the_progress_of_groups_is_weighted_by_what_they_have_counted(led: Post) -> None:
    every = weighted(led, METHODS["dense"], 10, 30)
    start = every[0].z
    all_step(every, 2)
    own = [trained_alone(number, 2) - start for number in (0, 1)]
    torch.testing.assert_close(every[0].z, start + (own[0] + 3 * own[1]) / 4, rtol=0, atol=1e-6)
    assert len(digests(*every)) == 1
    close(*every)


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_groups_that_count_alike_have_the_bits_of_groups_without_weights(name: str, led: Post) -> None:
    expected = LockstepWorld(2).run(partial(on_rank, make=METHODS[name], steps=5))
    every = weighted(led, METHODS[name], 7, 7)
    assert nets.same(all_step(every, 5), expected)
    close(*every)


def unsent(site: Site) -> torch.Tensor:
    """The residual, in the order of the model."""
    found = torch.zeros_like(site.z)
    for states in site.method.exchange.states:
        state = states.state_dict()
        for segment in site.own.model.segments:
            for table in ("errors", "residuals"):
                if segment.name in state.get(table, {}):
                    segment.of(found).add_(state[table][segment.name])
    return found


@pytest.mark.parametrize("name", ["top-k", "2 bits", "rank 1", "signs"])
def test_what_weighted_groups_have_not_sent_stays_in_their_residuals(name: str, led: Post) -> None:
    every = weighted(led, METHODS[name], 10, 30)
    start = every[0].z
    all_step(every, 2)
    done = [start - trained_alone(number, 2) for number in (0, 1)]
    kept = unsent(every[0]) + unsent(every[1])
    assert bool(kept.any())
    sent = 2 * (start - z0(every[0]))
    torch.testing.assert_close(sent + kept, 0.5 * done[0] + 1.5 * done[1], rtol=0, atol=1e-5)
    close(*every)


def test_a_group_that_missed_rounds_counts_by_all_that_it_has_done_since(tmp_path: Path) -> None:
    with post(tmp_path, quorum=1, grace=0.0) as led:
        early, late = weighted(led, METHODS["dense"], 10, 30)
        late.steps(1)
        early.steps(4)
        late.steps(1)
        assert late.groups.tag.round == early.groups.tag.round + 1 and late.method.weight(4) == 0
        late.steps(1)
        assert late.method.weight(4) == 30 and early.method.weight(4) == 0
        close(early, late)


def test_fragments_count_by_what_was_done_since_their_own_rounds(led: Post) -> None:
    every = weighted(led, METHODS["fragments"], 10, 30)
    all_step(every, 4)
    # rounds 1, 2 and 3 were of fragments 1, 2 and 0, after steps 1, 2 and 4
    assert [[site.method.weight(round) for round in (4, 5, 6)] for site in every] == [[30, 20, 0], [90, 60, 0]]
    close(*every)


def test_a_weighted_group_that_counts_nothing_is_told_to(tmp_path: Path) -> None:
    with post(tmp_path, quorum=1) as led:
        (own,) = weighted(led, METHODS["dense"], None)
        with pytest.raises(ValueError, match="this one has counted nothing"):
            own.steps(2)
        close(own)


def test_groups_with_and_without_weights_are_not_in_one_run(led: Post) -> None:
    one, other = Site(led.address, 0, OuterSteps(2)), Site(led.address, 1, OuterSteps(2), weighted=True)
    one.begin()
    with pytest.raises(ValueError, match="other settings of its outer steps"):
        other.begin()
    close(one, other)


def test_a_group_counts_by_the_items_of_all_its_ranks(led: Post) -> None:
    def group(number: int) -> Any:
        def on(transport: Any) -> int:
            own = connect(led.address, name=f"g{number}", weighted=True, log=lambda text: None)
            model = net()
            method = HierarchicalGossip(OuterSteps(2))
            named = model.named_parameters()
            optimizer = LocalOptimizer(momentum(model), named, method, transport=transport, groups=own)
            optimizer.zero_grad()
            own.count(5 + transport.rank)
            weight = own.weight(1)
            optimizer.close()
            return weight

        return LockstepWorld(2).run(on)

    assert together(partial(group, 0), partial(group, 1)) == [[11, 11]] * 2


def test_groups_of_several_ranks_have_the_bits_of_machines(led: Post) -> None:
    expected = LockstepWorld(4, local_size=2).run(partial(on_place, address="", group=0, steps=7, groups=False))

    def all_are_there() -> None:
        until(lambda: len(led.server.coordinator.members) == 2)

    def group(number: int) -> Any:
        body = partial(on_place, address=led.address, group=number, steps=7, groups=True, begins=all_are_there)
        return LockstepWorld(2).run(body)

    found = together(partial(group, 0), partial(group, 1))
    assert nets.same([*found[0], *found[1]], expected)
