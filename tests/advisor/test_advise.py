"""The advisor: a known network gives a known recommendation, and bad input one message."""

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from cases import case
from refusals import refuse
from states import assert_equal

from dgc.advisor.advice import (
    Work,
    advise,
    as_fast,
    crossing,
    describe_crossings,
    format_losses,
    format_table,
    over_the_limit,
    step_at,
    tabulate,
)
from dgc.advisor.candidates import Candidate, compute_of, measure_candidate
from dgc.advisor.cluster import cluster_on_paper, describe
from dgc.advisor.cost import AlikeRanks, Compute, Network, RecordedMessage, Traffic, collectives, message_of
from dgc.advisor.cost.collectives import SIZES, Sample, fit_network, levels, measure_network, misfit, requests_of
from dgc.advisor.cost.computing import last_level_cache
from dgc.advisor.methods import GOSSIP, UNCOMPRESSED, Loss, Method
from dgc.advisor.study import sentence
from dgc.advisor.verification import chosen, format_verification, order, verify
from dgc.advisor.workload import Workload
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.requests import Group
from dgc_training.config import ConfigError, load
from scripts.advise import (
    METHODS,
    builder,
    check_arguments,
    draw,
    main,
    measure_workload,
    parse_arguments,
    under_autocast,
    unfit,
)

pytestmark = pytest.mark.usefixtures("no_type_checks", "small_caches")
Patch = pytest.MonkeyPatch
Printed = pytest.CaptureFixture[str]
NETWORK, CPU = Network(latency=0.0, bandwidth=1e8), torch.device("cpu")
CNN, GPT = "configs/digits/cnn.py", "configs/pysource/gpt.py"


def workload_of(*words: str) -> Workload:
    return measure_workload(load([words[0]], words[1:]), CPU, AlikeRanks(1), None, 1)


@pytest.fixture(scope="module")
def cnn() -> Iterator[Workload]:
    """The work of the small network. No candidate changes its model."""
    found = workload_of(CNN)
    before = deepcopy([*found.model.parameters()])
    yield found
    assert_equal([*found.model.parameters()], before)


def measured(name: str, work: Workload, size: int, local_size: int = 1, experiment: str = CNN) -> Candidate:
    method = next(method for method in METHODS if method.name == name)
    build = builder(load([experiment, *method.usage]), work.gradients[0])
    return measure_candidate(method, build, work, size, local_size, 1)


def words(*more: str, rate: str = "10mbit", experiment: str = CNN) -> list[str]:
    return ["--configs", experiment, "--hosts", "4", "--rate", rate, "--repeats", "1", "--devices", "cpu", *more]


def candidate(name: str, nbytes: int, compute: float = 0.0, ready: float = 1.0) -> Candidate:
    """A method of two ranks that sends one message."""
    message = RecordedMessage("AllGather", 2, 1, nbytes, float(nbytes), float(nbytes), False, 0)
    method, traffic = Method(name, (f"configs/{name}.py",)), Traffic(2, 1, ((message,),), 0, 0)
    return Candidate(method, traffic, Compute(compute), (ready,))


def advised(methods: list[Candidate], work: Work, **options: Any) -> tuple[list[Any], Any]:
    rows = tabulate(methods, NETWORK, work, **options)
    return rows, advise(rows, work)


def test_the_fastest_method_is_recommended_where_it_gains_a_tenth() -> None:
    sizes = ("dense", 10**8), ("fp16", 5 * 10**7), ("a", 10**6, 0.1), ("b", 10**7)
    rows, advice = advised([candidate(*of) for of in sizes], Work(0.4, 0.6))  # 1 s; 1 MB takes 10 ms
    assert [row.step for row in rows] == pytest.approx([2.0, 1.5, 1.11, 1.1])
    assert [row.faster for row in rows] == pytest.approx([0.75, 1.0, 1.5 / 1.11, 1.5 / 1.1])
    assert [row.exchange for row in rows] == pytest.approx([1.0, 0.5, 0.11, 0.1])
    assert (advice.method, advice.compress, advice.usage) == ("b", True, ("configs/b.py",))
    assert "1.10 s, 1.36 times faster than 1.50 s with fp16" in advice.reason and as_fast(rows, advice) == ["a"]
    assert "50.0 MB    500 ms    1.50 s   1.00\n" in format_table(rows)
    # what hides behind backward is not compressed
    _, advice = advised([candidate("fp16", 4 * 10**7, 0, 0.5), candidate("a", 10**6, 0.01)], Work(0.0, 1.0))
    assert (advice.method, advice.compress, advice.usage) == ("fp16", False, ("configs/fp16.py",))
    assert advice.reason == "fp16 all-reduce hides behind backward (400 ms of 400 ms)"
    # a step must be 1.1 times faster: 1.1 s against 1.0 s
    work, a = Work(0.0, 1.0), candidate("a", 10**6)
    for gained, compress in ((0.1001, True), (0.0999, False)):
        _, advice = advised([candidate("fp16", round(1e8 * gained)), candidate("a", 0)], work)
        assert advice.compress == compress, gained
    assert "the fastest method, a, needs 1.00 s" in advice.reason
    # bf16 is the best without compression here, and is no compression itself
    _, advice = advised([candidate("fp16", 10**8), candidate("bf16", 10**6), a], work)
    assert (advice.method, advice.compress) == ("bf16", False)
    assert "computing takes longer than it saves" in advice.reason
    assert "no method that compresses was compared" in advised([candidate("dense", 10**8)], work)[1].reason


def lossy(name: str, nbytes: int, *losses: tuple[float, float | None], family: str = "muon") -> Candidate:
    """A candidate that lost so many percent, with these standard errors, on a task each."""
    found = candidate(name, nbytes)
    measured = tuple(Loss(of, error, f"task {i}", "docs/methods.md") for i, (of, error) in enumerate(losses))
    return replace(found, method=replace(found.method, lost_with={family: measured} if losses else {}))


@pytest.mark.parametrize(
    ("losses", "limit", "recommended"),
    [
        ([(0.3, 0.1)], 0.5, True),  # the loss and two standard errors are the limit
        ([(0.3, 0.11)], 0.5, False),
        ([(0.3, 0.11)], 0.6, True),
        ([(0.5, None)], 0.5, True),  # a single run has no standard error
        ([(-1.0, 0.1), (0.6, 0.0)], 0.5, False),  # one task is enough
        ([], 0.5, False),  # not measured
    ],
)
def test_with_adam_and_muon_a_method_is_recommended_only_within_the_limit_of_its_loss(
    losses: list[tuple[float, float | None]], limit: float, recommended: bool
) -> None:
    methods = [candidate("fp16", 10**8), lossy("a", 10**5, *losses)]
    _, advice = advised(methods, Work(0.0, 1.0), family="muon", limit=limit)
    assert advice.method == ("a" if recommended else "fp16")
    assert recommended or advice.reason == "no method that compresses is within the limit of --loss"


def test_with_sgd_no_method_is_left_out_for_its_loss() -> None:
    methods = [candidate("fp16", 10**8), lossy("a", 10**5, (5.0, 0.1))]
    assert advised(methods, Work(0.0, 1.0), family="sgd", limit=0.5)[1].method == "a"


def test_faster_methods_over_the_limit_are_named_with_what_they_save_and_lost() -> None:
    methods = [candidate("fp16", 10**8), lossy("kept", 10**7, (0.2, 0.1)), lossy("slower", 2 * 10**7, (3.0, 0.1))]
    methods += [lossy("much", 10**5, (9.0, 0.5)), lossy("little", 5 * 10**5, (-1.0, 0.4), (0.4, 0.1))]
    methods += [lossy("unknown", 10**6)]
    rows, advice = advised(methods, Work(0.0, 0.1), family="muon", limit=0.5)
    assert advice.method == "kept" and as_fast(rows, advice) == []
    assert [row.name for row in over_the_limit(rows, advice)] == ["little", "much", "unknown"]
    assert sentence(advice, rows, " ".join, 0.5).endswith(
        "\nNext choice: little, a step takes 105 ms, 1.90 times faster than with kept, and sends 9.50 MB fewer.\n"
        "  It lost 0.40 % (0.10) task 1: with two standard errors 0.60 %, over the limit of 0.5 %.\n"
        "  configs/little.py\n"
        "  Also faster, with the most that they lost: much 101 ms (9.0 %), unknown 110 ms (not measured)"
    )
    assert [row.name for row in chosen(rows)] == ["fp16", "kept", "much", "little"]


def test_methods_over_the_limit_are_named_where_no_other_one_pays() -> None:
    rows, advice = advised(
        [candidate("fp16", 10**8), lossy("a", 10**5, (1.0, None))], Work(0.0, 1.0), family="muon"
    )
    said = sentence(advice, rows, " ".join, 0.5)
    assert said.startswith(
        "Do not compress: no method that compresses is within the limit of --loss.\n  configs/fp16.py"
    )
    assert "\nNext choice: a, a step takes 1.00 s, 2.00 times faster than with fp16, and" in said
    assert "\n  It lost 1.0 % task 0, over the limit of 0.5 %.\n" in said


def test_each_loss_is_printed_with_its_error_task_and_page() -> None:
    methods = [candidate("fp16", 10**8), lossy("a", 10**5, (-0.5, 0.25), (1.25, None)), lossy("b", 10**5)]
    rows, _ = advised(methods, Work(0.0, 1.0), family="muon", limit=0.5)
    heading, a, b, note = format_losses(rows, 0.5).splitlines()
    assert re.split("  +", a) == ["a", "1.2 % task 1", "-0.50 % (0.25) task 0", "docs/methods.md"]
    assert b == "b                   not measured with this optimizer"
    assert "most lost (standard error)" in heading and "at most 0.5 %, two standard errors added" in note
    assert format_losses([row for row in rows if row.name == "fp16"], 0.5) == ""


def test_the_losses_are_those_of_the_pages_that_are_named() -> None:
    """In the named section, with the digits that are printed."""
    losses = [of for method in METHODS for found in method.lost_with.values() for of in found]
    assert len(losses) > 10
    for loss in losses:
        page, _, anchor = loss.source.partition("#")
        sections = re.split(r"\n(?=##+ )", Path(page).read_text())
        (section,) = (of for of in sections if slug(of.partition("\n")[0]) == anchor)
        assert re.search(rf"(?<![\d.]){re.escape(str(loss).split()[0].lstrip('-'))}\b", section), loss


def slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w -]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def test_dense_steps_count_with_their_share() -> None:
    """Method a is the fastest of those that compress once it does so, and loses with its dense steps."""
    work, dense = Work(0.0, 1.0), candidate("a", 10**8)  # 2 s
    a = replace(candidate("a", 0), method=replace(dense.method, dense_share=0.25), dense=dense)
    rows, advice = advised([candidate("fp16", 10**8), a, candidate("b", 10**7)], work)
    assert [(row.compressed_step, row.step) for row in rows] == pytest.approx([(2, 2), (1, 1.25), (1.1, 1.1)])
    assert rows[1].faster == pytest.approx(1.6) and advice.method == "b"
    text = format_table(rows)
    assert "1.00 s     1.25 s   1.60  25 % of a run's steps are dense" in text and "that compresses" in text
    assert "the mean step takes 1.25 s" in advise(rows[:2], work).reason
    assert step_at(a, NETWORK, work)(1e8) == pytest.approx(1.25)
    assert order(rows, {"fp16": 2.0, "a": 1.0, "b": 1.5}) == (3, 3, [])  # measured steps compress


def test_the_crossing_point(tmp_path: Path) -> None:
    """fp16 sends 10 MB, the method 1 MB and computes 1 s: equal where 9 MB take 1 s."""
    work, method, plain = Work(0.0, 5.0), candidate("a", 10**6, 1.0), candidate("fp16", 10**7)
    a, b = (step_at(of, NETWORK, work) for of in (method, plain))
    assert a(1e6) == pytest.approx(7.0) and b(1e6) == pytest.approx(15.0)
    assert [crossing(a, b, (1e5, 1e10)), crossing(a, b)] == pytest.approx([9e6] * 2, rel=2e-3)
    assert crossing(a, b, (1e7, 1e10)) is crossing(a, b, (1e5, 1e6)) is None  # fp16 is always faster, and never
    # on a single machine the rate is that between its ranks
    message = RecordedMessage("AllGather", 2, 2, 10**6, 1e6, 0.0, False, 0)
    inside = replace(candidate("a", 10**6), traffic=Traffic(2, 2, ((message,),), 0, 0))
    assert step_at(inside, Network(1e-3, 1e9, 2, 0.0, 1e9), Work(0.0, 1.0))(1e6) == pytest.approx(2.0)
    methods = [method, candidate("b", 10**6), candidate("c", 10**8)]
    line = "Faster than fp16, from 10 Mbit/s to 100 Gbit/s: a below 72 Mbit/s, b at all rates, c never"
    assert describe_crossings(methods, plain, NETWORK, work) == line
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        file = tmp_path / f"figure{suffix}"
        draw(methods, plain, NETWORK, work, "a title", file)
        assert file.read_bytes().startswith(start)
    assert "72 Mbit/s" in file.read_text() and "this network" in file.read_text()


def test_the_files_of_all_methods_exist() -> None:
    assert [method.name for method in METHODS][: len(UNCOMPRESSED)] == list(UNCOMPRESSED)
    for_adam, not_with_adam = {"onebit-adam", "dgc-adam"}, {"2bit-adaptive", "scaled-sign"}
    for optimizer, names in (
        ("torch.optim.SGD", for_adam),
        ("torch.optim.AdamW", not_with_adam),
        ("dgc.optim.MuonWithAdamW", for_adam | not_with_adam),
    ):
        assert {of.name for of in METHODS if unfit(of, optimizer)} == names
    plain = load([CNN]).train
    for method in METHODS:
        train = load([CNN, *method.usage]).train
        assert (train.gossip is not None) == (method.name in GOSSIP), method.name
        changed = train.compression != plain.compression or train.gossip is not None
        assert changed == (method.name != "dense"), method.name


def test_the_work_is_that_of_the_task() -> None:
    """A language model that carries its state from batch to batch, in two passes per step."""
    two = ["--configs.train.batch_size", "2"]
    workload = workload_of("configs/pysource/lstm.py", *two, "--configs.train.num_batches_per_step", "2")
    assert len(workload.batches[0]) == 2 and set(workload.ready) == set(workload.gradients[0])
    loss = workload.loss(workload.model, workload.batches[0][0]).item()
    assert loss == pytest.approx(4.6, abs=0.5)  # about the logarithm of the number of characters
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        assert under_autocast(lambda m, b: m(b), x.device, precision)(model, x).dtype == dtype
    # random inputs, where the data are missing
    tree = load(["configs/cifar/resnet20.py"], ["--configs.dataset.root", "/no/such/folder", *two])
    workload = measure_workload(tree, CPU, AlikeRanks(1), (3, 32, 32), 1)
    assert workload.inputs == "random inputs of shape (3, 32, 32), no data set"
    assert workload.forward > 0 and len(workload.gradients) == 3
    refuse("does not fit the model", measure_workload, tree, CPU, AlikeRanks(1), (1, 2), 1)


def test_a_candidate_has_the_traffic_of_its_optimizer(cnn: Workload) -> None:
    """With 2 machines of 2 ranks, DGC has two levels; with 32 machines computing is a fitted line."""
    assert cnn.inputs == "the data set, batches of 32"
    first, *_, last = ready = list(cnn.ready.values())  # the last layer's gradients come first
    assert all(0 <= share <= 1 for share in ready) and max(ready) > 0.5 and first >= last
    elements = sum(p.numel() for p in cnn.model.parameters())
    dense, dgc = measured("dense", cnn, 4, 2).traffic, measured("dgc-fp32-int64", cnn, 4, 2)
    assert dense.total("payload") == 4 * elements and dense.total("wire") == 6 * elements
    assert {of.kind for of in sum(dgc.traffic.buckets, ())} == {"AllToAll", "AllGather", "AllReduce", "Broadcast"}
    assert 0 < dgc.traffic.total("cross") < 0.02 * dense.total("wire")
    assert dgc.compute.encode > 0 and len(dgc.ready) == len(dgc.traffic.buckets)
    messages = sum(measured("dgc-fp32-int64", cnn, 32).traffic.buckets, ())
    assert {of.kind for of in messages} == {"AllGather", "AllReduce"}
    assert all(of.wire == 31 * of.payload for of in messages if of.kind == "AllGather")
    # gossip sends a model to one neighbour
    for name, size, local_size, width in (("sgp", 4, 1, 4), ("sgp-fp16", 6, 2, 2)):
        with case(name):
            found = measured(name, cnn, size, local_size)
            ((model,),) = found.traffic.buckets
            assert (model.kind, model.peers, model.awaited, found.ready) == ("Exchange", 1, model.payload, (1.0,))
            assert 0 <= model.payload - width * elements <= 40
            assert found.compute.encode > 0 and found.compute.decode > 0
    # methods with dense steps at first are predicted after these
    workload = workload_of(GPT)
    before = deepcopy([*workload.model.parameters()])
    elements = sum(p.numel() for p in workload.model.parameters())
    for name, bits in (("onebit-adam", 1.3), ("dgc-adam", 2.0)):  # of 4 ranks, per element; headers and vectors
        with case(name):
            found = measured(name, workload, 4, experiment=GPT)
            assert elements / 64 < found.traffic.total("payload") < elements * bits / 8 * 2
            assert found.dense is not None and found.dense.traffic.total("payload") == 4 * elements
    assert_equal([*workload.model.parameters()], before)


def test_what_fails_with_adam_is_not_recommended(tmp_path: Path, capsys: Printed) -> None:
    """With Adam methods for it are compared in place of those that docs/language.md advises against."""
    file, given = tmp_path / "advice.json", "fp16 2bit-adaptive scaled-sign onebit-adam dgc-adam".split()
    assert main(words("--methods", *given, "--json", str(file), experiment=GPT)) == 0
    out, result = capsys.readouterr().out, json.loads(file.read_text())
    assert set(result["methods"]) == {"fp16", "onebit-adam", "dgc-adam"}
    assert result["advice"]["method"] == "fp16" and "\nNext choice: onebit-adam, " in out
    assert "2bit-adaptive       left out: with torch.optim.AdamW, its updates differ in size" in out
    assert set(result["left_out"]) == {"scaled-sign", "2bit-adaptive"}
    # without a method for Adam, nothing is left to compare
    adam = tmp_path / "adam.yaml"
    adam.write_text("train: {optimizer: {_target_: torch.optim.Adam, lr: 0.001}}")
    assert main(words("--configs", str(adam), "--methods", "dense", "dgc-fp32-int64")) == 0
    out = capsys.readouterr().out
    assert "dgc-fp32-int64      left out: configs/dgc/__init__.py" in out and "torch.optim.Adam" in out
    assert "Do not compress: no method that compresses was compared with dense" in out


def test_computing_is_the_median_after_a_warm_up() -> None:
    found = compute_of([Traffic(2, 1, (), 9.0, 9.0)] * 4 + [Traffic(2, 1, (), i / 10, i / 5) for i in (1, 5, 3)])
    assert (found.encode, found.decode) == pytest.approx((0.3, 0.6))


def test_the_last_level_cache_has_64_mib_where_the_system_does_not_say(tmp_path: Path) -> None:
    assert last_level_cache(tmp_path) == 2**26


def test_the_last_level_cache_is_the_largest_that_the_system_lists(tmp_path: Path) -> None:
    for index, size in enumerate(("48K", "2048K", "32M", "what")):
        (folder := tmp_path / f"index{index}").mkdir()
        (folder / "size").write_text(f"{size}\n")
    assert last_level_cache(tmp_path) == 2**25


def test_on_paper(tmp_path: Path, monkeypatch: Patch, capsys: Printed) -> None:
    file = tmp_path / "advice.json"
    given = ["--methods", "dense", "fp16", "dgc-fp16-packed", "--json", str(file)]
    assert main(words(*given, "--plot", str(tmp_path / "figure.svg"))) == 0
    out, err = capsys.readouterr()
    methods = [f"advise: measuring {name} ({i} of 3)" for i, name in enumerate(given[1:4], 1)]
    first, *lines = err.splitlines()
    assert [line for line in lines if line in methods] == methods and "the model" in first
    assert "226,794 parameters" in out and "4 machines of 1 rank: 10 Mbit/s and 50 us" in out
    assert "Recommended: dgc-fp16-packed" in out
    assert "--configs configs/digits/cnn.py configs/dgc/wm5.py configs/dgc/fp16.py configs/dgc/packed.py" in out
    assert "Not predicted: accuracy" in out and "Faster than fp16, from 10 Mbit/s" in out
    assert "this network" in (tmp_path / "figure.svg").read_text()
    result = json.loads(file.read_text())
    found, name = result["methods"], result["advice"]["method"]
    assert (result["ranks"], result["network"]["bandwidth"], name) == (4, 1.25e6, "dgc-fp16-packed")
    assert set(found) == {"dense", "fp16", "dgc-fp16-packed"} and found["fp16"]["faster"] == 1.0
    assert found["dense"]["wire_bytes"] == 4 * 226794 * 1.5
    # a busy machine is reported
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    line = "UNRELIABLE: load average 2.1 on 2 cores: other programs ran in the last minute. If they still do, "
    line += "computing is measured too long: repeat it"
    for load_average, printed in ((2.1, True), (1.0, False)):
        monkeypatch.setattr("os.getloadavg", lambda of=load_average: (of, 0.0, 0.0))
        assert main(words("--methods", "dense")) == 0
        said = capsys.readouterr()
        lines = said.out.splitlines()
        assert [lines[0] == line, lines[-1].startswith("UNRELIABLE: ")] == [printed] * 2, load_average
        assert "advise: measuring forward and backward (1 of " in said.err


def test_bad_input_is_one_message(capsys: Printed) -> None:
    for given, message in (
        (["--configs", CNN], "there is no network: start the advisor on several ranks"),
        (["--configs", CNN, "--hosts", "4"], "there is no network"),
        (words(rate="fast"), "--rate is 'fast': write a number and a unit"),
        (words(rate="0gbit"), "--rate is '0gbit'; it must be from 1kbit to 1000tbit"),
        (words("--latency", "1"), "--latency is '1'"),
        (words("--hosts", "1"), "one rank exchanges nothing"),
        (words("--hosts", "1", "--ranks-per-host", "2"), "no message leaves the machine: leave out --rate;"),
        (words("--inner-rate", "1tbit"), "add --ranks-per-host of 2 or more"),
        (words("--inner-rate", "0bit", "--ranks-per-host", "2"), "--inner-rate is '0bit'; it must be from 1kbit"),
        (words("--hosts", "0"), "--hosts is 0"),
        (words("--verify", "3"), "--verify needs the ranks"),
        (words("--repeats", "0"), "--repeats is 0"),
        (words("--loss", "1%"), "--loss is for Adam, AdamW and Muon, and the optimizer is torch.optim.SGD"),
        (words("--loss", "0.5"), "--loss is '0.5': write a number and a unit of %"),
        (words("--loss", "101%"), "--loss is '101%'; it must be from 0% to 100%"),
        (words("--methods", "powersgd-1"), "--methods needs one of dense, fp16, bf16"),
        (words("--json", "/no/such/folder/file.json"), "there is no folder /no/such/folder"),
        (words("--plot", "/no/such/folder/file.png"), "--plot: there is no folder /no/such/folder"),
        (words("--plot", "."), "--plot: . is a folder"),
        (words("--plot", "file.pdf"), "must end in .png or .svg"),
        (words("--configs", "configs/dgc/wm5.py"), "without files of a method, but train.compression is dgc"),
        (words("--configs", "configs/gossip/sgp.py"), "but train.gossip is set"),
        (words("--configs.train.batch", "3"), "train.batch"),
        (words("--configs.train.optimizer.lr", "-1"), "the experiment cannot be built: "),
        (words("--input-shape", "0"), "every length must be at least 1"),
        (words("--input-shape", "3", "1" + 30 * "0"), "every length must be at least 1 and below"),
        (["--configs", "configs/imagenet/resnet18.py", "--hosts", "2", "--rate", "1gbit"], "--input-shape"),
    ):
        assert main(given) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("advise: ") and message in printed.err
        assert "Traceback" not in printed.err and printed.out == "", message
    with pytest.raises(SystemExit, match="2"):
        main(words("--methods", "zip"))
    assert "invalid choice: 'zip'" in capsys.readouterr().err


def test_machines_on_paper(monkeypatch: Patch, capsys: Printed) -> None:
    """The rate inside a machine is assumed where there is one, and the only one of a single machine."""
    between, inside = "1 Gbit/s and 50 us between machines, as given", "between the ranks of a machine"
    assumed = f"2 machines of 8 ranks: {between}; 80 Gbit/s {inside}, assumed (--inner-rate)"
    for given, line in {
        "--hosts 2 --rate 1gbit": f"2 machines of 1 rank: {between}",
        "--hosts 2 --rate 1gbit --ranks-per-host 8": assumed,
        "--hosts 1 --ranks-per-host 4 --inner-rate 2tbit": f"1 machine of 4 ranks: 2 Tbit/s {inside}, as given",
    }.items():
        args, _ = parse_arguments(["--configs", CNN, *given.split()])
        check_arguments(args, 1)
        assert describe(cluster_on_paper(args)) == line
    assert cluster_on_paper(args).network.inner_bandwidth == 2.5e11
    # one process stands for each rank of a machine, with its share of the cores
    used, few = Mock(), ["--configs.data.num_threads_per_worker", "8", "--configs.data.num_workers", "0"]
    monkeypatch.setattr("torch.set_num_threads", used)
    monkeypatch.setattr("scripts.advise.measure_workload", Mock(side_effect=ConfigError("enough")))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(6)))
    for ranks in ("1", "2", "12"):
        assert main(words("--ranks-per-host", ranks, *few)) == 2
    assert used.mock_calls == [call(6), call(3), call(1)] and "enough" in capsys.readouterr().err


def test_the_network_is_fitted_to_times_of_collectives() -> None:
    """The times of a known network, with 20 % of noise, give its numbers."""
    known = Network(8e-5, 1.25e8, 1, 8e-5, 1.25e8, reduction=2e-10, half_reduction=2e-9)
    messages = [message_of(of, AlikeRanks(4)) for nbytes in SIZES for of in requests_of(nbytes, "world", CPU)]
    noise = torch.rand(len(messages), generator=torch.Generator().manual_seed(0)).tolist()
    samples = [Sample(of, (1 + x / 5) * of.seconds(known, 1)) for of, x in zip(messages, noise, strict=True)]
    found = fit_network(samples, 1)
    assert found.latency == pytest.approx(1.1 * known.latency, rel=0.1)
    assert found.bandwidth == pytest.approx(known.bandwidth / 1.1, rel=0.1)
    assert found.half_reduction == pytest.approx(known.half_reduction, rel=0.3)
    assert 1 <= misfit(samples, found) < 1.1 and misfit(samples, known) == pytest.approx(1.1, abs=0.05)


class FirstRank(AlikeRanks):
    """The first of alike ranks, which prints."""

    def __init__(self, size: int):
        super().__init__(size)
        self.rank = self.local_rank = 0


@pytest.mark.parametrize(("local_size", "expected"), [(1, ["world"]), (4, ["world"]), (2, ["local", "cross"])])
def test_a_network_has_two_levels_on_several_machines_of_several_ranks(local_size: int, expected: Any) -> None:
    assert levels(AlikeRanks(4, local_size)) == expected


def test_collectives_between_machines_are_timed_in_every_size_of_every_kind() -> None:
    sizes = (1024, 4096)
    samples = collectives.time_collectives(AlikeRanks(4, 2), "cross", CPU, 2, sizes)
    kinds = ("AllReduce", False), ("AllReduce", True), ("AllGather", False)  # in half precision
    found = [(of.message.payload, of.message.kind, of.message.half) for of in samples]
    assert found == [(nbytes, *kind) for nbytes in sizes for kind in kinds]
    assert all(of.message.size == 2 and of.message.cross == of.message.wire for of in samples)


def test_collectives_inside_a_machine_send_nothing_to_others() -> None:
    inside = collectives.time_collectives(AlikeRanks(4, 2), "local", CPU, 2, (1024, 4096))
    assert all(of.message.cross == 0 for of in inside)


def test_each_level_of_a_network_is_fitted_to_its_own_times(monkeypatch: Patch) -> None:
    fast, slow = Network(1e-5, 1e9, 2, 1e-5, 1e9), Network(1e-3, 1e7, 2, 1e-3, 1e7)

    def timed(ranks: AlikeRanks, group: Group, device: torch.device, repeats: int, sizes: Any) -> list[Sample]:
        known = fast if group == "local" else slow
        messages = [message_of(of, ranks) for nbytes in SIZES for of in requests_of(nbytes, group, device)]
        return [Sample(message, message.seconds(known, 2)) for message in messages]

    monkeypatch.setattr(collectives, "time_collectives", timed)
    network, factor = measure_network(AlikeRanks(4, 2), CPU, 1)
    assert network.ranks_per_machine == 2 and factor == pytest.approx(1, abs=0.05)
    assert [network.bandwidth, network.inner_bandwidth] == pytest.approx([1e7, 1e9], rel=0.1)
    assert [network.latency, network.inner_latency] == pytest.approx([1e-3, 1e-5], rel=0.1)


def test_machines_with_different_numbers_of_ranks_are_refused() -> None:
    def on_uneven_machines(transport: Any) -> None:
        transport.local_size += 6 * transport.rank
        refuse(r"as many ranks on each machine, not \[1, 7\]", levels, transport)

    LockstepWorld(2, 1).run(on_uneven_machines)


def test_a_launcher_s_network_is_measured(tmp_path: Path, monkeypatch: Patch, capsys: Printed) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in {**torchrun, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert main(words()) == 2
    assert "under a launcher the network is measured: leave out --hosts, --rate" in capsys.readouterr().err
    given = ["--configs", CNN, "--methods", "fp16", "powersgd-1", "--repeats", "1", "--devices", "cpu"]
    file = tmp_path / "advice.json"
    assert main([*given, "--verify", "1", "--json", str(file)], connect=lambda *of, **options: FirstRank(2)) == 0
    out = capsys.readouterr().out
    assert "predicted    measured\nwork  " in out and "\nfp16  " in out and "\npowersgd-1  " in out
    assert set(json.loads(file.read_text())["measured"]) == {"work", "fp16", "powersgd-1"}
    assert "2 machines of 1 rank" in out and "between machines, fitted to times of collectives within" in out
    wrong, leave = [*given, "--configs.train.num_batches_per_step", "1000"], Mock()
    main(wrong, connect=lambda *of, **options: FirstRank(2), leave=leave)
    assert leave.mock_calls == [call(2)] and "too few for one step" in capsys.readouterr().err


def test_the_best_methods_are_verified(monkeypatch: Patch, cnn: Workload) -> None:
    """Beside the best without compression."""
    sizes = {"dense": 80, "fp16": 40, "a": 9, "b": 1, "c": 30, "d": 50}
    rows = tabulate([candidate(name, n * 10**6) for name, n in sizes.items()], NETWORK, Work(0.1, 0.1))
    assert [row.name for row in chosen(rows)] == ["fp16", "b", "a", "c"]
    assert [row.name for row in chosen(rows, every=True)] == ["fp16", "b", "a", "c", "d", "dense"]
    text = format_verification(rows[:1], Work(0.1, 0.1), {"work": 0.3, "dense": 0.5})
    assert "\nwork                     200 ms      300 ms\ndense                    1.00 s      500 ms" in text
    # a and b are less than 15 % apart; c is predicted faster than fp16
    times = {"work": 0.3, "dense": 2.0, "fp16": 1.0, "a": 0.31, "b": 0.30, "c": 1.5, "d": 1.9}
    assert order(rows, times) == (12, 13, [("fp16", "c")])
    text = format_verification(rows, Work(0.1, 0.1), times)
    assert "c was measured slower than fp16, and predicted faster" in text
    # on a GPU without the update: the meter has the host's time of it, which ends long before the device's
    monkeypatch.setattr("torch.optim.SGD.step", Mock(side_effect=AssertionError("the parameters are updated")))
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    rows, gpu = tabulate([candidate("dense", 80)], NETWORK, Work(0.1, 0.1)), torch.device("cuda")
    found = verify(rows, lambda row: builder(load([CNN]), cnn.gradients[0]), cnn, FirstRank(2), gpu, 1)
    assert set(found) == {"work", "dense"}
