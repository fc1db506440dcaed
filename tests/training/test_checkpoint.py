"""Checkpoints on disk: which are kept, crashes while saving, and damaged files."""

import errno
import json
import os
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import case

from dgc.comm.lockstep import LockstepWorld
from dgc_training import atomic_write
from dgc_training.atomic_write import write_atomically
from dgc_training.checkpoint.files import Checkpoints, checkpoint_name
from dgc_training.checkpoint.reading import read_tensors
from dgc_training.faults.failure import UsageError


def save(directory: Any, names: Any, size: int = 2, best: Any = ()) -> None:
    def body(transport: Any) -> None:
        checkpoints = Checkpoints(directory, transport)
        for name in names:
            shared = {"name": name, "weight": torch.ones(3)}
            checkpoints.save(name, shared, {"rank": transport.rank}, best=name in best)

    LockstepWorld(size).run(body)


def load(directory: Any, *which: Any, size: int = 2) -> Any:
    def body(transport: Any) -> Any:
        checkpoints = Checkpoints(directory, transport)
        found = checkpoints.find(*which)
        return None if found is None else checkpoints.load(found)

    return LockstepWorld(size).run(body)


def test_round_trip(tmp_path: Path) -> None:
    """Evaluation needs only the shared file."""
    assert checkpoint_name(4) == "e0004" and checkpoint_name(4, 120) == "e0004s00120"
    assert load(tmp_path, "best", "latest") == [None, None]
    save(tmp_path, ["e0001"])
    for rank, loaded in enumerate(load(tmp_path, "latest")):
        assert (loaded.name, loaded.size) == ("e0001", 2)
        assert loaded.shared["name"] == "e0001" and torch.equal(loaded.shared["weight"], torch.ones(3))
        assert loaded.own == {"rank": rank}
    (tmp_path / "e0001" / "rank1.pt").unlink()

    def body(transport: Any) -> Any:
        return Checkpoints(tmp_path, transport).load("e0001", own_part=False)

    assert [part.own for part in LockstepWorld(3).run(body)] == [{}] * 3


def test_the_manifest_says_which_machine_has_which_residual(tmp_path: Path) -> None:
    """By the parts of its ranks, or by islands; ranks with residuals of their own need no list."""

    def body(transport: Any) -> None:
        checkpoints, rank = Checkpoints(tmp_path, transport), transport.rank
        checkpoints.save("e0001", {}, {"compression": {"part": {"machine": rank // 2, "machines": 2}}})
        checkpoints.save("e0002", {}, {}, island=rank % 2)
        checkpoints.save("e0003", {}, {"compression": {"part": None}})

    LockstepWorld(4).run(body)
    manifests = [json.loads((tmp_path / f"e000{n}/manifest.json").read_text()) for n in (1, 2, 3)]
    assert [manifest.get("machines") for manifest in manifests] == [[0, 0, 1, 1], [0, 1, 0, 1], None]


def test_the_last_three_the_latest_and_the_best_are_kept(tmp_path: Path) -> None:
    names = [checkpoint_name(e, s) for e, s in [(0, 5), (1, 0), (1, 5), (2, 0), (9999, 3), (10000, 0)]]
    save(tmp_path, names, best=["e0001"])
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == sorted(["e0001", *names[-3:]])
    assert load(tmp_path, "best", "latest")[1].name == "e0001"
    assert load(tmp_path, "latest")[1].name == "e10000"
    assert not [file for _, _, files in os.walk(tmp_path) for file in files if file.endswith(".tmp")]


def on_two_machines(monkeypatch: pytest.MonkeyPatch, views: Any, wait: float = 0.0) -> Any:
    """What `find` returns if each rank reads the next of its names at each attempt."""
    reads = [iter(names) for names in views]

    def body(transport: Any) -> Any:
        checkpoints = Checkpoints(Path("runs"), transport, wait=wait)
        names: Any = [None]

        def read(which: str) -> Any:
            if which == "latest":
                names[0] = next(reads[transport.rank], names[0])
            return names[0]

        monkeypatch.setattr(checkpoints, "_read_name", read)
        return checkpoints.find("latest")

    return LockstepWorld(2).run(body)


def test_machines_that_see_different_checkpoints_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_two_machines(monkeypatch, [["e0002"], [None]]) == ["e0002"] * 2, "each machine has its own directory"
    for views, words in (
        ([["e0001"], ["e0002"]], "where rank 0 is now, has the checkpoint e0001, and .* has e0002.*share"),
        ([[None], ["e0002"]], "where rank 0 is now, has no checkpoint, and .* has e0002"),
    ):
        with pytest.raises(UsageError, match=words):
            on_two_machines(monkeypatch, views)
    # a file system may show an old one for a moment
    assert on_two_machines(monkeypatch, [["e0001", "e0002"], ["e0002"]], wait=30) == ["e0002"] * 2


def save_errors(directory: Any, size: Any) -> None:
    """Saves a checkpoint. The residual of rank r is filled with r."""

    def body(transport: Any) -> None:
        own = {"compression": {"velocities": {"w": torch.full((4,), float(transport.rank))}, "steps": 7}}
        Checkpoints(directory, transport).save("e0001", {"name": "e0001"}, own)

    LockstepWorld(size).run(body)


def test_another_number_of_ranks_redistributes_the_residual(tmp_path: Path) -> None:
    for old, new in ((2, 3), (3, 2), (4, 1), (1, 4)):
        directory = tmp_path / f"{old} to {new}"
        save_errors(directory, old)
        loaded = load(directory, "latest", size=new)
        assert all(part.size == old and part.shared["name"] == "e0001" for part in loaded)
        assert all(part.own["compression"]["steps"] == 7 for part in loaded)
        mean = sum(part.own["compression"]["velocities"]["w"] for part in loaded) / new
        torch.testing.assert_close(mean, torch.full((4,), (old - 1) / 2), rtol=1e-6, atol=0)


def test_another_number_of_ranks_reports_what_is_missing_or_cannot_be_redistributed(tmp_path: Path) -> None:
    save_errors(tmp_path, 3)
    (tmp_path / "e0001" / "rank2.pt").unlink()
    with pytest.raises(UsageError, match=r"rank2\.pt is missing on .* \(needed because 2 ranks resume 3\)"):
        load(tmp_path, "latest", size=2)

    def body(transport: Any) -> None:
        own = {"compression": {f"message from {transport.rank}": 1}}
        Checkpoints(tmp_path, transport).save("e0001s00004", {}, own)

    LockstepWorld(2).run(body)
    with pytest.raises(UsageError, match="was saved by 2 ranks and cannot be resumed by 1: .*Start 2 ranks"):
        load(tmp_path, "latest", size=1)


def flipped(content: bytes) -> bytes:
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES = {
    "flip": flipped,
    "truncate": lambda content: content[:50],
    "foreign": lambda content: b"x" * len(content),
}


@pytest.mark.parametrize("file", ["shared.pt", "rank1.pt"])
def test_a_damaged_file_is_one_error_on_every_rank(tmp_path: Path, file: str) -> None:
    save(tmp_path, ["e0001"])
    path = tmp_path / "e0001" / file
    content = path.read_bytes()
    for name, damage in DAMAGES.items():
        path.write_bytes(damage(content))
        with case(name):
            assert_refused(tmp_path, f"damaged: .*{file} is not the file that was written")
    path.unlink()
    assert_refused(tmp_path, f"damaged: .*{file}")


def assert_refused(directory: Path, message: str) -> None:
    """On every rank."""

    def body(transport: Any) -> None:
        checkpoints = Checkpoints(directory, transport)
        with pytest.raises(UsageError, match=message):
            checkpoints.load(checkpoints.find("latest") or "")

    LockstepWorld(2).run(body)


def test_a_damaged_manifest_or_pointer_is_one_error_on_every_rank(tmp_path: Path) -> None:
    save(tmp_path, ["e0001"])
    path = tmp_path / "e0001" / "manifest.json"
    whole = path.read_text()
    for size in ("3", 1, 0, -1, "two", None, 2.5, 10**30):
        path.write_text(json.dumps({**json.loads(whole), "size": size}))
        with case(size):
            assert_refused(tmp_path, r"manifest\.json cannot be read")
    path.write_text(whole)
    for text in ("", "{", "[]", '{"other": 1}'):
        (tmp_path / "latest.json").write_text(text)
        with case(text):
            assert_refused(tmp_path, "latest.json")


def test_the_latest_and_the_best_are_never_overwritten(tmp_path: Path) -> None:
    """Another number of ranks can reach the same step again. A crash then must keep the latest checkpoint."""
    save(tmp_path, ["e0001s00006"], size=2, best=["e0001s00006"])
    before = (tmp_path / "e0001s00006" / "shared.pt").stat().st_ino
    save(tmp_path, ["e0001s00006", "e0001s00008"], size=3)
    assert (tmp_path / "e0001s00006" / "shared.pt").stat().st_ino == before
    assert load(tmp_path, "best", size=2)[0].size == 2
    names = ["e0001s00006", "e0001s00006-2", "e0001s00008"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == names


@pytest.mark.parametrize("dies_at", range(5))
def test_a_crash_while_saving_keeps_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    save(tmp_path, ["e0001"], size=1)
    calls = iter(range(100))
    replace = os.replace

    def dying_replace(source: Any, target: Any) -> None:
        if next(calls) == dies_at:
            raise KeyboardInterrupt
        replace(source, target)

    # rank0.pt, shared.pt, manifest.json, latest.json; a fifth rename does not happen.
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", dying_replace)
        with pytest.raises(KeyboardInterrupt) if dies_at < 4 else nullcontext():
            save(tmp_path, ["e0002"], size=1)
    assert load(tmp_path, "latest", size=1)[0].shared["name"] == ("e0001" if dies_at < 4 else "e0002")
    save(tmp_path, ["e0002"], size=1)
    assert load(tmp_path, "latest", size=1)[0].shared["name"] == "e0002"


def test_a_rank_that_cannot_write_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, ["e0001"])

    def body(transport: Any) -> None:
        own = {"rank": transport.rank} if transport.rank == 0 else {"lock": threading.Lock()}
        Checkpoints(tmp_path, transport).save("e0002", {}, own)

    with pytest.raises(TypeError, match="pickle"):
        LockstepWorld(2).run(body)
    assert load(tmp_path, "latest")[0].name == "e0001"


def test_a_pointer_cannot_leave_the_directory(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", ["e0001"], size=1)
    (tmp_path / "checkpoints" / "latest.json").write_text(json.dumps({"checkpoint": "../../e0001"}))
    assert load(tmp_path / "checkpoints", "latest", size=1)[0].name == "e0001"


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "made"),))

    torch.save({"x": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match=r"evil\.pt cannot be read"):
        read_tensors(tmp_path / "evil.pt")
    assert not (tmp_path / "made").exists()


def fill_the_disk_of(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files whose names contain this are written to a disk without space."""

    def open_(path: Path, mode: str) -> Any:
        return open("/dev/full" if name in str(path) else path, mode)

    monkeypatch.setattr(atomic_write, "open", open_, raising=False)


def test_an_interrupted_write_or_a_full_disk_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.save alone reports an unexpected position."""
    path = tmp_path / "file"
    path.write_text("old")

    def write(file: Any) -> None:
        file.write(b"ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, write)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    fill_the_disk_of("file", monkeypatch)
    for content in ({"x": torch.zeros(100_000)}, {"x": 1}):
        with pytest.raises(OSError, match=f"No space left on device: '{path}'") as caught:
            write_atomically(path, partial(torch.save, content))
        assert caught.value.errno == errno.ENOSPC
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("file", ["rank1.pt", "shared.pt", "manifest.json", "latest.json"])
def test_a_full_disk_ends_all_ranks(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with status 2. The checkpoint before remains the latest."""

    def body(transport: Any) -> Any:
        checkpoints = Checkpoints(tmp_path, transport)
        checkpoints.save("e0001", {"w": 1}, {"compression": {}})
        if transport.rank == 0:
            fill_the_disk_of(file, monkeypatch)
        with pytest.raises(UsageError, match=f"cannot be written: .*No space left on device: .*{file}'.*resumes"):
            checkpoints.save("e0002", {"w": 2}, {"compression": {}})
        return checkpoints.find("latest")

    assert LockstepWorld(2).run(body) == ["e0001", "e0001"]
