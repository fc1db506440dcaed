"""Checkpoints on disk: crashes, damaged files, other numbers of ranks; the code of docs/checkpoints.md."""

import json
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from cases import case
from documented import code, table
from optim.nets import dgc, dgc_sgd, wrap
from pytest import MonkeyPatch
from refusals import refuse
from simulated import train_on
from states import assert_equal, of_rank
from torch import nn

from dgc import atomic_write
from dgc.comm import all_gather_object
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DGCCompressor, ThresholdCompressor
from dgc.contrib import AccordionCompressor
from dgc.engine.redistribute import blend, merge, redistribute, select, shares
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import DGCSGD, DistributedOptimizer
from dgc_training.checkpoint.files import Checkpoints, checkpoint_name
from dgc_training.checkpoint.reading import read_tensors
from dgc_training.faults.failure import UsageError

INFERENCE, FROM_CONFIG, LOOP, _, _, OTHER_SIZE = code("checkpoints.md")
METHODS: dict[str, Any] = {
    "dgc": lambda: DGCCompressor(0.05, DGCSGDMemory(0.9)),
    "residual": lambda: DGCCompressor(0.05, ResidualMemory()),
    "dgc int8 vectors": lambda: DGCCompressor(0.05, DGCSGDMemory(0.9), dense_values="int8"),
    "powersgd": lambda: AccordionCompressor(2, 3),
    "2bit": lambda: ThresholdCompressor(threshold=0.1),
}
# (ranks, ranks of each machine; None: all ranks alike)
FLAT_4, FLAT_3, TWO_BY_TWO, THREE_BY_TWO, TWO_BY_THREE = (4, None), (3, None), (4, 2), (6, 2), (6, 3)
BETWEEN_RANKS = [((old, None), (new, None)) for old, new in ((3, 2), (4, 1), (2, 5))]
BETWEEN_MACHINES: list[Any] = [
    (TWO_BY_TWO, FLAT_4),
    (FLAT_4, TWO_BY_TWO),
    (FLAT_3, TWO_BY_THREE),
    (TWO_BY_TWO, THREE_BY_TWO),
    (THREE_BY_TWO, TWO_BY_THREE),
    (TWO_BY_THREE, FLAT_3),
]


def on_ranks(directory: Path, size: int, body: Callable[[Checkpoints, int], Any]) -> Any:
    return LockstepWorld(size).run(lambda transport: body(Checkpoints(directory, transport), transport.rank))


def save(at: Path, names: Any, size: int = 2, best: Any = (), own: Any = lambda rank: {"rank": rank}) -> None:
    def body(checkpoints: Checkpoints, rank: int) -> None:
        for name in names:
            checkpoints.save(name, {"name": name, "weight": torch.ones(3)}, own(rank), best=name in best)

    on_ranks(at, size, body)


def load(directory: Path, *which: str, size: int = 2) -> Any:
    return on_ranks(directory, size, lambda own, _: (found := own.find(*which)) and own.load(found))


def folders(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


def test_round_trip(tmp_path: Path) -> None:
    assert checkpoint_name(4) == "e0004" and checkpoint_name(4, 120) == "e0004s00120"
    assert load(tmp_path, "best", "latest") == [None, None]
    save(tmp_path, ["e0001"])
    for rank, loaded in enumerate(load(tmp_path, "latest")):
        assert (loaded.name, loaded.size, loaded.own) == ("e0001", 2, {"rank": rank})
        assert loaded.shared["name"] == "e0001" and torch.equal(loaded.shared["weight"], torch.ones(3))
    (tmp_path / "e0001" / "rank1.pt").unlink()
    parts = on_ranks(tmp_path, 3, lambda checkpoints, rank: checkpoints.load("e0001", own_part=False))
    assert [part.own for part in parts] == [{}] * 3
    # a pointer cannot leave the directory
    save(tmp_path, ["e0002"], size=1)
    (tmp_path / "latest.json").write_text(json.dumps({"checkpoint": "../../e0002"}))
    assert load(tmp_path, "latest", size=1)[0].name == "e0002"

    # the manifest says which machine has which residual, by the parts of its ranks or by replica groups
    def body(checkpoints: Checkpoints, rank: int) -> None:
        checkpoints.save("e0001", {}, {"compression": {"part": {"machine": rank // 2, "machines": 2}}})
        checkpoints.save("e0002", {}, {}, replica_group=rank % 2)
        checkpoints.save("e0003", {}, {"compression": {"part": None}})

    on_ranks(tmp_path, 4, body)
    manifests = [json.loads((tmp_path / f"e000{n}/manifest.json").read_text()) for n in (1, 2, 3)]
    assert [manifest.get("machines") for manifest in manifests] == [[0, 0, 1, 1], [0, 1, 0, 1], None]


def test_which_checkpoints_are_kept(tmp_path: Path) -> None:
    """The last three, the latest and the best. The latest and the best are never overwritten."""
    names = [checkpoint_name(e, s) for e, s in [(0, 5), (1, 0), (1, 5), (2, 0), (9999, 3), (10000, 0)]]
    save(tmp_path, names, best=["e0001"])
    assert folders(tmp_path) == sorted(["e0001", *names[-3:]]) and not list(tmp_path.rglob("*.tmp"))
    assert load(tmp_path, "best", "latest")[1].name == "e0001"
    assert load(tmp_path, "latest")[1].name == "e10000"
    # another number of ranks can reach the same step again; a crash then must keep the latest checkpoint
    again, names = tmp_path / "again", ["e0001s00006", "e0001s00006-2", "e0001s00008"]
    save(again, names[:1], size=2, best=names)
    before = (again / names[0] / "shared.pt").stat().st_ino
    save(again, names[::2], size=3)
    assert (again / names[0] / "shared.pt").stat().st_ino == before
    assert load(again, "best", size=2)[0].size == 2 and folders(again) == names


def on_two_machines(*views: list[str | None], wait: float = 0.0) -> Any:
    """What `find` returns if each rank reads the next of its names at each attempt, and the last one again."""

    def body(transport: Any) -> Any:
        checkpoints, names = Checkpoints(Path("runs"), transport, wait=wait), [*views[transport.rank]]
        # it reads both files at each attempt
        read: Any = {"best": lambda: None, "latest": lambda: names.pop(0) if len(names) > 1 else names[0]}
        checkpoints._read_name = lambda which: read[which]()  # type: ignore[method-assign]
        return checkpoints.find("latest")

    return LockstepWorld(2).run(body)


def test_machines_that_see_different_checkpoints_are_refused() -> None:
    assert on_two_machines(["e0002"], [None]) == ["e0002"] * 2, "each machine has its own directory"
    with pytest.raises(UsageError, match="rank 0 is now, has the checkpoint e0001, and .* has e0002.*share"):
        on_two_machines(["e0001"], ["e0002"])
    with pytest.raises(UsageError, match="where rank 0 is now, has no checkpoint, and .* has e0002"):
        on_two_machines([None], ["e0002"])
    # a file system may show an old one for a moment
    assert on_two_machines(["e0001", "e0002"], ["e0002"], wait=30) == ["e0002"] * 2


def test_another_number_of_ranks_redistributes_the_residual(tmp_path: Path) -> None:
    def own(rank: int, size: int) -> Any:
        state = {"velocities": {"w": torch.full((4,), float(rank))}, "steps": 7}
        return {"compression": of_rank(state, rank, size)}

    for old, new in ((2, 3), (3, 2)):
        directory = tmp_path / f"{old} to {new}"
        save(directory, ["e0001"], old, own=partial(own, size=old))
        loaded = load(directory, "latest", size=new)
        assert all(part.size == old and part.shared["name"] == "e0001" for part in loaded)
        assert all(part.own["compression"]["steps"] == 7 for part in loaded)
        mean = sum(part.own["compression"]["velocities"]["w"] for part in loaded) / new
        torch.testing.assert_close(mean, torch.full((4,), (old - 1) / 2), rtol=1e-6, atol=0)
    (tmp_path / "3 to 2/e0001/rank2.pt").unlink()
    with pytest.raises(UsageError, match=r"rank2\.pt is missing on .* \(needed because 2 ranks resume 3\)"):
        load(tmp_path / "3 to 2", "latest", size=2)
    save(
        tmp_path, ["e0001s00004"], own=lambda rank: {"compression": of_rank({f"message from {rank}": 1}, rank, 2)}
    )
    with pytest.raises(UsageError, match="was saved by 2 ranks and cannot be resumed by 1: .*Start 2 ranks"):
        load(tmp_path, "latest", size=1)


def test_a_damaged_file_is_one_error_on_every_rank(tmp_path: Path) -> None:
    def assert_refused(file: str, content: bytes | None, message: str) -> None:
        def body(checkpoints: Checkpoints, rank: int) -> None:
            with case(file, content), pytest.raises(UsageError, match=message):
                checkpoints.load(checkpoints.find("latest") or "")

        whole = (tmp_path / file).read_bytes()
        (tmp_path / file).unlink()
        if content is not None:
            (tmp_path / file).write_bytes(content)
        on_ranks(tmp_path, 2, body)
        (tmp_path / file).write_bytes(whole)

    save(tmp_path, ["e0001"])
    for file in ("e0001/shared.pt", "e0001/rank1.pt"):
        content = (tmp_path / file).read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for damaged in (flipped, content[:50], b"x" * len(content)):
            assert_refused(file, damaged, f"damaged: .*{file} is not the file that was written")
        assert_refused(file, None, f"damaged: .*{file}")
    manifest = json.loads((tmp_path / "e0001/manifest.json").read_text())
    for size in ("3", 1, 0, None, 2.5, 10**30):
        changed = json.dumps({**manifest, "size": size}).encode()
        assert_refused("e0001/manifest.json", changed, r"manifest\.json cannot be read")
    for text in (b"", b"[]", b'{"other": 1}'):
        assert_refused("latest.json", text, "latest.json")


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "made"),))

    torch.save({"x": Evil()}, tmp_path / "evil.pt")
    refuse(r"evil\.pt cannot be read", read_tensors, tmp_path / "evil.pt")
    assert not (tmp_path / "made").exists()


def test_a_crash_keeps_the_previous_checkpoint(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Of rank0.pt, shared.pt, manifest.json, latest.json; a fifth rename does not happen."""
    for dies_at in range(5):
        directory, renames = tmp_path / str(dies_at), [DEFAULT] * dies_at + [KeyboardInterrupt]
        save(directory, ["e0001"], size=1)
        with monkeypatch.context() as patched, case(dies_at):
            patched.setattr(os, "replace", Mock(wraps=os.replace, side_effect=renames))
            with pytest.raises(KeyboardInterrupt) if dies_at < 4 else nullcontext():
                save(directory, ["e0002"], size=1)
        assert load(directory, "latest", size=1)[0].shared["name"] == ("e0001" if dies_at < 4 else "e0002")
        save(directory, ["e0002"], size=1)
        assert load(directory, "latest", size=1)[0].shared["name"] == "e0002"
    # a rank that cannot write
    save(tmp_path / "lock", ["e0001"])
    with pytest.raises(TypeError, match="pickle"):
        save(tmp_path / "lock", ["e0002"], own=lambda rank: {"lock": threading.Lock()} if rank else {})
    assert load(tmp_path / "lock", "latest")[0].name == "e0001"


def fill_the_disk_of(name: str, monkeypatch: MonkeyPatch) -> None:
    """Files whose names contain this are written to a disk without space."""
    monkeypatch.setattr(
        atomic_write, "open", lambda at, mode: open("/dev/full" if name in str(at) else at, mode), raising=False
    )


@pytest.mark.parametrize("file", ["rank1.pt", "shared.pt", "manifest.json", "latest.json"])
def test_a_full_disk_ends_all_ranks(file: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    save(tmp_path, ["e0001"])
    fill_the_disk_of(file, monkeypatch)

    def body(checkpoints: Checkpoints, rank: int) -> Any:
        with pytest.raises(UsageError, match=f"cannot be written: .*No space left on device: .*{file}'.*resumes"):
            checkpoints.save("e0002", {"w": 2}, {"compression": {}})
        return checkpoints.find("latest")

    assert on_ranks(tmp_path, 2, body) == ["e0001", "e0001"]


@pytest.fixture(scope="module")
def documented_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of the page."""
    folder = tmp_path_factory.mktemp("documented")
    run = folder / "runs/[digits.cnn+dgc.wm5].np4"
    words = ["--configs", "configs/digits/cnn.py", "configs/dgc/wm5.py", "--run-dir", str(run), "--devices", "cpu"]
    train_on(2, [*words, "--configs.train.num_epochs=1", "--configs.train.batch_size=180"])
    return folder


def checkpoints_of(folder: Path) -> Path:
    return folder / "runs/[digits.cnn+dgc.wm5].np4/checkpoints"


@pytest.mark.usefixtures("no_type_checks")
def test_a_run_has_the_documented_files(documented_run: Path) -> None:
    names = {path.name for path in checkpoints_of(documented_run).rglob("*")}
    assert names == {"latest.json", "best.json", "e0001", "shared.pt", "rank0.pt", "rank1.pt", "manifest.json"}


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(("file", "name"), [("shared", "shared"), ("rank1", "rankN")])
def test_a_file_has_the_documented_keys(documented_run: Path, file: str, name: str) -> None:
    state = read_tensors(checkpoints_of(documented_run) / "e0001" / f"{file}.pt")
    assert state.keys() == {row[0].strip("`") for row in table(f"key of `{name}.pt`", "checkpoints.md")}


@pytest.mark.usefixtures("no_type_checks")
def test_the_file_of_a_rank_has_the_tables_of_its_compressor(documented_run: Path) -> None:
    own = read_tensors(checkpoints_of(documented_run) / "e0001/rank1.pt")
    assert own["compression"]["DGCCompressor.0"].keys() >= {"momentums", "velocities", "steps"}


@pytest.mark.usefixtures("no_type_checks")
def test_the_model_of_a_run_is_loaded_as_documented(documented_run: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(documented_run)
    shared = read_tensors(checkpoints_of(documented_run) / "e0001/shared.pt")
    scope: dict[str, Any] = {}
    for block in (INFERENCE, FROM_CONFIG):
        exec(block, scope)
        for name, value in scope["model"].state_dict().items():
            assert torch.equal(value, shared["model"][name]), name


@pytest.mark.usefixtures("no_type_checks")
def test_your_own_loop(tmp_path: Path) -> None:
    scope: dict[str, Any] = {}
    exec(LOOP, scope)
    exec(OTHER_SIZE, scope)

    def made(transport: Any) -> tuple[nn.Module, DistributedOptimizer]:
        torch.manual_seed(0)
        model = nn.Linear(40, 30)
        return model, wrap(model, transport, dgc_sgd, compression=dgc(0.01))

    def three_steps(model: nn.Module, optimizer: DistributedOptimizer, first: int) -> Any:
        for seed in range(first, first + 3):
            generator = torch.Generator().manual_seed(100 * seed + optimizer.transport.rank)
            optimizer.zero_grad()
            model(torch.randn(8, 40, generator=generator)).square().mean().backward()
            optimizer.step()
        return model.state_dict()

    def velocity(optimizer: DistributedOptimizer) -> Any:
        return optimizer.compression_state_dict()["DGCCompressor.0"]["velocities"]["weight"]

    def whole(transport: Any) -> Any:
        model, optimizer = made(transport)
        three_steps(model, optimizer, 0)
        scope["save"](tmp_path, model, optimizer, 7)
        saved = velocity(optimizer)
        return three_steps(model, optimizer, 3), saved

    def resumed(transport: Any) -> Any:
        model, optimizer = made(transport)
        assert scope["resume"](tmp_path, model, optimizer) == 7
        optimizer.begin_epoch(7)
        return three_steps(model, optimizer, 3)

    def smaller(transport: Any) -> torch.Tensor:
        model, optimizer = made(transport)
        refuse("saved by 4 ranks, not 2", scope["resume"], tmp_path, model, optimizer)
        optimizer.load_compression_state_dict(scope["own_share"](tmp_path, 4, optimizer))
        return velocity(optimizer)

    states, velocities = zip(*LockstepWorld(4).run(whole), strict=True)
    assert_equal(list(states), LockstepWorld(4).run(resumed))
    assert not torch.equal(velocities[0], velocities[1])
    mean = torch.stack(LockstepWorld(2).run(smaller)).mean(0)
    torch.testing.assert_close(mean, torch.stack(velocities).mean(0))


@pytest.mark.parametrize("new", range(1, 9))
@pytest.mark.parametrize("old", range(1, 9))
def test_shares_keep_the_mean_of_the_old_ranks(old: int, new: int) -> None:
    """Rows of shares sum to one, and columns to new / old."""
    rows = [shares(old, new, rank) for rank in range(new)]
    assert all(sum(row.values()) == 1 and len(row) <= -(-old // new) + 1 for row in rows)
    for rank in range(old):
        assert sum(row.get(rank, Fraction(0)) for row in rows) == Fraction(new, old)
    assert old != new or rows == [{rank: 1} for rank in range(new)]


def test_a_blend_is_rounded_once() -> None:
    states = {rank: {"v": torch.randn(1000, generator=torch.Generator().manual_seed(rank))} for rank in range(8)}
    expected: Any = sum(state["v"].double() for state in states.values()) / 8
    assert torch.equal(blend(states, shares(8, 1, 0))["v"], expected.float())


def test_a_blend_keeps_what_is_equal_on_all_ranks_bit_for_bit() -> None:
    q = torch.rand(50)
    equal = {rank: {"q": q.clone(), "steps": 3, "order": [1, torch.tensor([5])]} for rank in range(3)}
    mixed = blend(equal, shares(3, 2, 0))
    assert torch.equal(mixed["q"], q) and mixed["steps"] == 3 and mixed["order"][1].item() == 5


def world(layout: Any, method: str, states: Any = None, steps: int = 4, **settings: Any) -> Any:
    """The residual of each rank after some steps, which begin with its share of these states of other ranks."""

    def run(transport: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 5))
        sgd = DGCSGD(model.parameters(), lr=0.05, momentum=0.0 if method == "residual" else 0.9)
        options: Any = {"transport": transport, "hierarchical": "on" if layout[1] else "off", **settings}
        optimizer = DistributedOptimizer(sgd, model.named_parameters(), METHODS[method](), **options)
        optimizer.begin_epoch(0)
        if states is not None:
            parts = all_gather_object(transport, optimizer.part, name="parts")
            optimizer.load_compression_state_dict(redistribute(states, transport.size, parts)[transport.rank])
        generator = torch.Generator().manual_seed(transport.rank)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(6, 12, generator=generator)).square().sum().backward()
            optimizer.step()
        return optimizer.compression_state_dict()

    return LockstepWorld(*layout).run(run)


def leaves(state: Any, where: str = "") -> Any:
    if isinstance(state, dict):
        return {name: leaf for key in state for name, leaf in leaves(state[key], f"{where}.{key}").items()}
    return {where: state}


def tensors(states: Any) -> dict[str, torch.Tensor]:
    found: dict[str, list[torch.Tensor]] = {}
    for state in states:
        for where, value in leaves({key: part for key, part in state.items() if key != "part"}).items():
            if isinstance(value, torch.Tensor):
                found.setdefault(where, []).append(value.double())
    return {where: torch.stack(parts) for where, parts in found.items()}


@pytest.mark.parametrize("method", METHODS)
def test_the_mean_over_ranks_or_machines_is_preserved_to_rounding(method: str) -> None:
    between_ranks = BETWEEN_RANKS if method in ("dgc", "residual") else []
    for old, new in between_ranks + (BETWEEN_MACHINES if method != "residual" else []):
        before = world(old, method)
        after = world(new, method, before, steps=0)
        expected, found = tensors(before), tensors(after)
        with case(old, new):
            assert expected.keys() == found.keys() and len(expected) >= 2
            for where, olds in expected.items():
                assert (found[where].mean(0) - olds.mean(0)).abs().max() <= 2**-24 * olds.abs().max(), where
                if (old, new) in BETWEEN_RANKS:
                    assert found[where].flatten(1).norm(dim=1).max() <= olds.flatten(1).norm(dim=1).max() + 1e-6
            steps = [value for state in after for where, value in leaves(state).items() if ".steps." in where]
            assert set(steps) == {4}
        if (old, new) in BETWEEN_RANKS:
            world(new, method, before)  # goes on


ZEROS, ONES = torch.zeros(2), torch.ones(2).long()


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, 2), (1, 1.0), ([1], [1, 2]), (ZEROS, torch.zeros(3)), (ONES, 2 * ONES)],
    ids=["numbers", "types", "lengths", "shapes", "integers"],
)
def test_values_that_cannot_be_blended_are_named(first: Any, second: Any) -> None:
    refuse(r"^state\.a", blend, {0: {"a": first}, 1: {"a": second}}, shares(2, 1, 0))


def test_states_with_different_keys_cannot_be_blended() -> None:
    refuse("^state has different keys", blend, {0: {"a": 1}, 1: {"b": 1}}, shares(2, 1, 0))


def test_the_parts_of_a_machine_are_merged() -> None:
    assert merge([{"steps": 0, "v": {}}, {"steps": 3, "v": {"w": 1.5}}]) == {"steps": 3, "v": {"w": 1.5}}
    assert merge([{"kind": "a"}, {"kind": "a"}]) == {"kind": "a"}


@pytest.mark.parametrize(
    ("first", "second"),
    [("a", "b"), (ZEROS, torch.ones(2)), (True, 1), (ZEROS, None)],
    ids=["texts", "tensors", "types", "nothing"],
)
def test_parts_of_a_machine_that_contradict_are_named(first: Any, second: Any) -> None:
    refuse(r"^state\.a differs between ranks of one machine", merge, [{"a": first}, {"a": second}])


def test_other_buckets_only_move_tensors_between_the_ranks_of_a_machine() -> None:
    part: Any = {"machine": 0, "machines": 1, "tensors": ["P"], "others": ["errors", "Q"]}
    state = {"P": {"P": 1, "Q": 2}, "errors": {"P": 3, "errors": 4}, "steps": 5}  # names may be alike
    assert select(state, part) == {"P": {"P": 1}, "errors": {"P": 3}, "steps": 5}
    before = world(TWO_BY_TWO, "dgc", bucket_mb=1e-4)
    after = world(TWO_BY_TWO, "dgc", before, steps=0)
    assert [state["part"]["tensors"] for state in before] != [state["part"]["tensors"] for state in after]
    for machine in (0, 2):  # one rank has each tensor
        expected, found = tensors(before[machine:][:2]), tensors(after[machine:][:2])
        assert len(expected) >= 4 and found.keys() == expected.keys()
        assert all(torch.equal(found[where], tensor) for where, tensor in expected.items())
