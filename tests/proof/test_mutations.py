"""600 damaged configs, command lines and run directories: each run trains, or ends with a message.

A case is good if the run trains because the change is valid (a tensor with NaN, inf, another dtype or shape is
never valid), or if it ends with exit status 2, a message, no traceback, and unchanged files in the run directory.
`PYTHONPATH=.:tests python -m proof.test_mutations METHOD KIND COUNT SEED` prints the bad cases of a method.
"""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from environment import REPOSITORY, python_path
from proof.small_runs import METHODS
from simulated import contents

import train
from dgc.comm.lockstep import LockstepWorld
from dgc_training.checkpoint.reading import fingerprint

SECONDS = 60  # time limit of a case
CASES = [("dgc", "config", 110), ("dgc", "words", 70), ("dgc", "checkpoint", 90), ("dgc", "saved_config", 30)]
OTHERS = [method for method in METHODS if method != "dgc"]
CASES += [(method, kind, n) for method in OTHERS for kind, n in (("config", 15), ("words", 5), ("checkpoint", 30))]
QUICK = "train.num_epochs 2 train.batch_size 400 train.timeout 50 train.warmup_lr_epochs 1 model.width 4 "
QUICK += "train.checkpoint_every 2 data.num_threads_per_worker 1"
VALUES: list[Any] = [None, True, -1, 0, 3, 0.5, 1e308, float("nan"), float("inf"), 10**30]
VALUES += ["", "abc", "${x}", "${", "1e-3", "\u00e9\u0000"]
VALUES += [[], [1, 2], {}, {"a": 1}, {"_target_": "os.system"}, {"_target_": "nowhere.Nothing"}]
Place = tuple[dict[Any, Any], Any, str]
Case = tuple[str, Path, list[str]]  # what is damaged, the directory, and the words of the command line


class TimeLimit(BaseException):
    """The case has reached its time limit."""


def stop(signum: int, frame: Any) -> None:
    raise TimeLimit


def call(words: list[str]) -> tuple[int, str]:
    output = io.StringIO()
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            status = train.main(words, connect=lambda **_: LockstepWorld(1).transports[0], leave=sys.exit)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        signal.alarm(0)
        torch.use_deterministic_algorithms(False)
    return status, output.getvalue()


def flip(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def places(node: Any, path: str = "") -> Iterator[Place]:
    """Every key below a node: the mapping, the key and its path."""
    for key, value in node.items() if isinstance(node, dict) else ():
        yield node, key, f"{path}.{key}"
        yield from places(value, f"{path}.{key}")


def mutate_tree(tree: Any, draw: random.Random) -> str:
    """Renames a key, changes a value or drops one. Returns a description."""
    node, key, path = draw.choice(list(places(tree)))
    how = draw.choice(["renamed", "value", "value", "value", "dropped"])
    if how == "value":
        node[key] = draw.choice(VALUES)
        return f"{path} = {node[key]!r}"
    value, name = node.pop(key), str(key)
    if how == "renamed":
        node[draw.choice([name[:-1] or "x", name + "s", name.upper(), 7, ""])] = value
    return f"{path} {how}"


def mutate_text(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Truncates, flips a bit, repeats, drops or indents a line, or replaces all."""
    lines = content.splitlines(keepends=True)
    where = draw.randrange(len(lines))
    line, before, after = lines[where], b"".join(lines[:where]), b"".join(lines[where + 1 :])
    foreign = [b"", b"\x00" * 40, b"[]", b"{}", b"null", b"- a\n", b"&a [*a]", os.urandom(80)]
    changes = [
        (content[: draw.randrange(len(content))], "truncated"),
        (flip(content, draw), "a bit flipped"),
        (before + 2 * line + after, f"line {where} repeated"),
        (before + after, f"line {where} dropped"),
        (before + b"  " + line + after, f"line {where} indented"),
        (draw.choice(foreign), "foreign"),
    ]
    return draw.choice(changes)


class Reference:
    def __init__(self, folder: Path, method: str) -> None:
        files, words = METHODS[method]
        quick = [f"--configs.{word}" if "." in word else word for word in QUICK.split()]
        self.folder, self.words = folder, ["configs/digits/cnn.py", *files, *quick, *words]
        self.good = folder / "good"
        status, output = call(["--configs", *self.words, "--devices", "cpu", "--run-dir", str(self.good)])
        assert status == 0, output
        self.text = (self.good / "config.yaml").read_bytes()

    def copy(self) -> Path:
        """Copies the run, as it was in mid-epoch."""
        directory = self.folder / "run"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(self.good, directory)
        (directory / "checkpoints/latest.json").write_text('{"checkpoint": "e0001s00002"}')
        return directory

    def new(self, draw: random.Random) -> Path:
        return self.copy() if draw.random() < 0.3 else self.folder / "new"

    def resume(self, directory: Path, config: Path | None = None) -> list[str]:
        configs = self.words if config is None else [str(config)]
        return ["--configs", *configs, "--devices", "cpu", "--run-dir", str(directory)]


def config(reference: Reference, draw: random.Random) -> Case:
    path = reference.folder / "mutated.yaml"
    content, what = mutate_text(reference.text, draw)
    if draw.random() < 0.7:
        tree = yaml.safe_load(reference.text)
        what = mutate_tree(tree, draw)
        content = yaml.safe_dump(tree).encode()
    path.write_bytes(content)
    directory = reference.new(draw)
    return what, directory, reference.resume(directory, path)


def words(reference: Reference, draw: random.Random) -> Case:
    directory = reference.new(draw)
    good = reference.resume(directory)
    where = draw.randrange(len(good))
    value = str(draw.choice(VALUES)).replace("\0", "")
    of_train = "optimizer.lr batch_size compression.compress_ratio compression.memory.momentum scheduler.T_max "
    keys = [f"train.{key}" for key in f"{of_train} meters.x bucket_mb metric log_every timeout".split()]
    key = draw.choice([*keys, "seed", "model", "train", "dataset.fold", "x.y", "data.num_workers", ""])
    strays = ["--evaluat", "-x", "--", "", "--devices", "--suffix", "--configs", "é", "="]
    longer = [good[where] + draw.choice("xs./=[-")]
    more = draw.choice([[f"--configs.{key}={value}"], [f"--configs.{key}", value], [draw.choice(strays)]])
    kinds = [good[:where] + good[where + 1 :], good[:where] + longer + good[where + 1 :], *3 * [good + more]]
    changed = draw.choice(kinds)
    if "--run-dir" not in changed or str(directory) not in changed:
        changed = [*changed, "--run-dir", str(directory)]  # no case may write elsewhere
    return f"words {[word for word in changed if word not in good] or ['one word removed']}", directory, changed


def checkpoint(reference: Reference, draw: random.Random) -> Case:
    """A damaged file below checkpoints/. The manifest may contain its new length and checksum."""
    directory = reference.copy()
    folder = directory / "checkpoints" / "e0001s00002"
    name = draw.choice([*2 * ["shared.pt", "rank0.pt"], "manifest.json", "../latest.json"])
    path = folder / name
    content = path.read_bytes()
    if name.endswith(".json"):
        changed, what = mutate_text(content, draw)
        if draw.random() < 0.5:
            tree = json.loads(content)
            what = mutate_tree(tree, draw)
            changed = json.dumps(tree).encode()
        path.write_bytes(changed)
        return f"{name}: {what}", directory, reference.resume(directory)
    kinds = ["truncated", "flipped", "foreign", "missing", "other size", *4 * ["bad tensor"], *3 * ["mutated"]]
    kind = draw.choice(kinds)
    if kind in ("truncated", "flipped"):
        path.write_bytes(content[: draw.randrange(len(content))] if kind == "truncated" else flip(content, draw))
    elif kind == "foreign":
        foreign: list[Any] = [{"model": {}}, [1, 2], 7, {"state_dict": {"w": torch.zeros(3)}}, None]
        torch.save(draw.choice(foreign), path)
    elif kind == "missing":
        path.unlink()
    else:
        tree = torch.load(path, weights_only=True)
        if kind == "other size":
            tree = wider(tree)
        else:
            kind = (damage_tensor if kind == "bad tensor" else mutate_tree)(tree, draw)
        torch.save(tree, path)
    if path.exists() and draw.random() < 0.8:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][name] = fingerprint(path)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        kind += ", in the manifest"
    return f"{name}: {kind}", directory, reference.resume(directory)


def wider(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: wider(value) for key, value in node.items()}
    return torch.cat([node, node]) if isinstance(node, torch.Tensor) and node.dim() else node


def damage_tensor(tree: Any, draw: random.Random) -> str:
    """Writes NaN or inf into one tensor, or changes its dtype or shape. Returns a description."""
    tensors = [place for place in places(tree) if isinstance(place[0][place[1]], torch.Tensor)]
    if not tensors:
        return "no tensor to change"
    node, key, path = draw.choice(tensors)
    tensor = node[key]
    what = draw.choice(["nan", "inf", "another dtype", "transposed"])
    if what == "transposed":
        node[key] = tensor.reshape(-1)[None]
    elif what in ("nan", "inf") and tensor.is_floating_point() and tensor.numel():
        tensor.view(-1)[draw.randrange(tensor.numel())] = float(what)
    else:
        other = torch.float32 if tensor.dtype == torch.float64 else torch.float64
        node[key], what = tensor.to(other), str(other)
    return f"{path} bad tensor: {what}"


def saved_config(reference: Reference, draw: random.Random) -> Case:
    directory = reference.copy()
    content, what = mutate_text(reference.text, draw)
    (directory / "config.yaml").write_bytes(content)
    return f"config.yaml: {what}", directory, reference.resume(directory)


KINDS: dict[str, Callable[[Reference, random.Random], Case]] = {
    kind.__name__: kind for kind in (config, words, checkpoint, saved_config)
}


def run_case(reference: Reference, draw: random.Random, make: Callable[..., Any]) -> tuple[str, str]:
    """Returns a description of the case, and the problem, if there is one."""
    shutil.rmtree(reference.folder / "new", ignore_errors=True)
    what, directory, line = make(reference, draw)
    before = contents(directory)
    try:
        status, output = call(line)
    except BaseException as error:
        return what, f"exception: {type(error).__name__}: {error}"
    if status == 0:
        return what, "a bad tensor was loaded" if "bad tensor" in what else ""
    after = contents(directory)
    if lost := [file for file in before if after.get(file) != before[file]]:
        return what, f"changed {lost}"
    is_good = status == 2 and "Traceback" not in output and output.strip()
    return what, "" if is_good else f"status {status}: {output.strip()[-1500:]}"


def main(method: str, kind: str, count: str, seed: str) -> int:
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        reference = Reference(Path(folder), method)
        for number in range(int(count)):
            what, problem = run_case(reference, random.Random(f"{kind} {seed} {number}"), KINDS[kind])
            if problem:
                bad += 1
                print(f"--- {kind} {seed} {number}: {what}\n{problem}", flush=True)
    return min(100, bad)


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("method", "kind", "count"), CASES)
def test_mutated(method: str, kind: str, count: int) -> None:
    command = [sys.executable, "-m", "proof.test_mutations", method, kind, str(count), "0"]
    variables = {**os.environ, "PYTHONPATH": python_path(REPOSITORY / "tests"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
