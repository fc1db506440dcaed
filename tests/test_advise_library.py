"""python -m dgc.advise and python -m dgc.doctor: for a model of one's own, on paper, and for any environment."""

import json
import sys
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import case
from refusals import refuse
from torch import nn

from dgc import doctor
from dgc.advise import loss_of_model, main, moved
from dgc.comm.lockstep import LockstepWorld
from dgc.cost import AlikeRanks, Network
from dgc.cost.candidates import measure_candidate
from dgc.cost.methods import METHODS, builder
from dgc.cost.paper import WIDEST, candidate_on_paper, shape_of, workload_on_paper
from dgc.cost.workload import Workload
from dgc.doctor import Facts, Probe
from dgc.units import RATES, TIMES, human_rate, human_time, quantity

pytestmark = pytest.mark.usefixtures("no_type_checks", "small_caches")
PAPER = ["--parameters", "350M", "--step", "1.2s"]
NETWORK = ["--hosts", "8", "--rate", "1gbit"]
CPU = torch.device("cpu")


def make() -> Any:
    """A model with its loss, and a batch, as a user's script has them."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    batch = {"x": torch.randn(8, 64), "y": torch.randint(10, (8,))}
    return model, batch, lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def nothing() -> Any:
    return nn.Linear(2, 2)


def test_on_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A GPT of 350 million parameters on 8 machines: fp16 sends 1.2 GB in 9.8 s, of which 0.8 s hide."""
    file = tmp_path / "advice.json"
    assert main([*PAPER, *NETWORK, "--optimizer", "adamw", "--json", str(file)]) == 0
    out, result = capsys.readouterr().out, json.loads(file.read_text())
    fp16 = result["methods"]["fp16"]
    assert fp16["wire_bytes"] == pytest.approx(2 * 350e6 * 2 * 7 / 8, rel=1e-3)
    assert fp16["exchange"] == pytest.approx(9.8, rel=1e-2) and fp16["step"] == pytest.approx(10.2, rel=1e-2)
    onebit = result["methods"]["onebit-adam"]
    assert onebit["wire_bytes"] == pytest.approx(350e6 / 8 * 2 * 7 / 8, rel=0.02)  # 1 bit there and 1 bit back
    steps = onebit["compressed_step"], onebit["step"], fp16["step"]
    assert steps[1] == pytest.approx(0.2 * steps[2] + 0.8 * steps[0]) and steps[0] == pytest.approx(1.23, rel=1e-2)
    bits = {name: result["methods"][name]["wire_bytes"] * 8 / (350e6 * 2 * 7 / 8) for name in ("int8", "int4")}
    assert bits == pytest.approx({"int8": 8 + 16 / 256, "int4": 4 + 16 / 128}, rel=2e-3)
    assert result["advice"]["method"] == "int4" and "8 machines of 1 rank" in out and "powersgd-4 1.2" in out
    assert "As fast within the error of the prediction: onebit-adam" in out and "TwoPhaseCompressor(bits=4)" in out
    assert "20 % of a run's steps are dense" in out and "Faster, but 17 % behind dense" in out
    assert "Transformer of 25 layers of width 1088, with adamw" in out
    dgc = {of.name for of in METHODS if of.name.startswith("dgc-")} - {"dgc-adam"}
    assert set(result["left_out"]) == {"2bit-adaptive", "scaled-sign"} | dgc and "UNRELIABLE" not in out
    words = f"--optimizer adamw --methods fp16 onebit-adam --dense-share 0.1 --json {file}"
    assert main([*PAPER, *NETWORK, *words.split()]) == 0
    onebit = json.loads(file.read_text())["methods"]["onebit-adam"]
    assert onebit["step"] == pytest.approx(0.1 * steps[2] + 0.9 * steps[0]) and onebit["dense_share"] == 0.1
    assert "Recommended: onebit-adam, the mean step takes 2.13 s" in capsys.readouterr().out
    assert main([*PAPER, *NETWORK, "--methods", "fp16", "int4", "powersgd-4", "--optimizer", "sgd"]) == 0
    assert "Recommended: powersgd-4" in capsys.readouterr().out


def test_one_narrow_layer_stands_for_the_model() -> None:
    """The bytes of each method are those of the layers themselves."""
    shape, methods = shape_of(4_000_000), {method.name: method for method in METHODS}
    assert (shape.width, shape.layers) == (256, 5)
    d = 2 * WIDEST
    wide = replace(shape, width=d, layers=1, parameters=12 * d**2)
    factors = sum(n + m for n, m in ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d)))
    for name, of, nbytes, rel in (
        ("powersgd-2", wide, 2 * 4 * factors, 0.01),
        ("dense", shape, 4 * 4e6, 0.02),
        ("dgc-fp32-int64", shape, 12 * 0.001 * 4e6, 0.02),
    ):
        with case(name):
            found = candidate_on_paper(methods[name], "sgd", of, workload_on_paper(of, 1.0, CPU), 4, 1)
            assert found.traffic.total("payload") == pytest.approx(nbytes, rel=rel)
            assert len(found.ready) == len(found.traffic.buckets) and found.ready[-1] == 1.0


def test_a_model_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, names = tmp_path / "advice.json", ["fp16", "dgc-fp16-packed", "powersgd-1", "sgp", "onebit-adam"]
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    words = f"--model test_advise_library:make --repeats 1 --device cpu --json {file}"
    assert main([*words.split(), *NETWORK, "--methods", *names]) == 0
    out, result = capsys.readouterr().out, json.loads(file.read_text())
    assert set(result["methods"]) == set(names) - {"onebit-adam"} and result["work"]["forward"] > 0
    count = 64 * 256 + 256 + 256 * 10 + 10
    assert "onebit-adam         left out: it is for Adam and AdamW, and the optimizer is sgd" in out
    assert f"model      {count:,} parameters on cpu" in out
    assert result["methods"]["fp16"]["wire_bytes"] == pytest.approx(2 * count * 2 * 7 / 8, rel=0.02)


def test_every_row_is_built_from_its_words() -> None:
    for method in METHODS:
        with case(method.name):
            model = nn.Linear(64, 64)
            gradients = {name: torch.ones_like(p) for name, p in model.named_parameters() if method.for_adam}
            optimizer = builder(method, "adamw" if method.for_adam else "sgd", gradients)(model, AlikeRanks(4))
            # vectors are sent by another compressor
            made = [optimizer.method] if method.averages_models else [of.compressor for of in optimizer.planned]
            assert method.usage[0].partition("(")[0] in {type(of).__name__ for of in made}
            optimizer.close()


def sent(build: Any, model: Any, gradients: Any, steps: int, transport: Any) -> list[float]:
    """The bytes that a rank sends to other machines in each step after the first, which may have more rounds."""
    own = deepcopy(model)
    optimizer, found = build(own, transport), []
    for _ in range(steps):
        optimizer.zero_grad()
        torch.stack([(p * gradients[name]).sum() for name, p in own.named_parameters()]).sum().backward()
        optimizer.step()
        found.append(optimizer.meter.cross_wire_bytes)
    optimizer.zero_grad()
    optimizer.close()
    return [after - before for before, after in pairwise(found)]


def test_a_machine_sends_what_its_ranks_send() -> None:
    """2 machines of 8 ranks. Shares of local ranks differ or are empty; SGP's peers depend on rank and round."""
    # like those of VGG-16: one tensor has three quarters of all elements
    shapes = [(128, 196), (4096,), (16, 16, 3, 3), (128, 32), (100,)]
    names = ("dgc-fp32-int64", "scaled-sign", "powersgd-2", "sgp")
    for method, some in product([of for of in METHODS if of.name in names], (shapes, shapes[:1])):
        with case(method.name, len(some)):
            steps = 5 if method.averages_models else 2  # the graph of 16 ranks has 4 rounds
            torch.manual_seed(0)
            model, build = nn.ParameterList(map(torch.randn, some)), builder(method, "sgd", {})
            gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
            ranks = LockstepWorld(16, 8).run(partial(sent, build, model, gradients, steps))[8:]
            workload = Workload(model, loss_of_model, "", 1.0, 1.0, dict.fromkeys(gradients, 1.0), [], [gradients])
            found = measure_candidate(method, build, workload, 16, 8, 1).predict(Network(0.0, 1e6, 8, 0.0, 1e12))
            assert found.machine_wire_bytes == pytest.approx(sum(map(sum, ranks)) / (steps - 1))
            assert found.communication >= found.machine_wire_bytes / 1e6 and len({tuple(of) for of in ranks}) > 1


def test_bad_input_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--model", "test_advise_library:nothing", *NETWORK]
    for given, message in (
        (NETWORK, "give --parameters and --step for a prediction on paper, or --model"),
        ([*PAPER, *own], "give --parameters and --step"),
        (["--parameters", "350M", *NETWORK], "--parameters and --step go together"),
        (["--parameters", "many", "--step", "1s", *NETWORK], "--parameters is 'many': write a number and a unit"),
        (["--parameters", "12", "--step", "1s", *NETWORK], "must be from 100 thousand to 10 trillion"),
        (["--parameters", "1B", "--step", "fast", *NETWORK], "--step is 'fast'"),
        (PAPER, "there is no network"),
        (["--model", "no_colon", *NETWORK], "write MODULE:FUNCTION"),
        (["--model", "no.such:thing", *NETWORK], "--model no.such:thing: No module named"),
        (["--model", "json:nothing", *NETWORK], "has no attribute 'nothing'"),
        (["--model", "json:__doc__", *NETWORK], "__doc__ is not a function"),
        (own, "the function must return (model, batch)"),
        ([*own, "--device", "abacus"], "--device abacus"),
        ([*PAPER, *NETWORK, "--dense-share", "1"], "--dense-share is 1.0; it must be at least 0 and below 1"),
    ):
        sys.path.insert(0, str(Path(__file__).parent))
        assert main(given) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("advise: ") and message in printed.err and printed.out == "", message


def test_quantities() -> None:
    rates = {"1gbit": 1e9, "2.5 Gbit/s": 2.5e9, "100mbit": 1e8, "1e3kbit": 1e6}
    assert {text: quantity(text, RATES, "--rate") for text in rates} == rates
    assert quantity("50us", TIMES, "--latency") == pytest.approx(5e-5)
    refuse("--rate is '10MB': write a number and a unit of bit, kbit", quantity, "10MB", RATES, "--rate")
    for text in ("50", "us", "1.2.3us", "-1us", ""):
        refuse(f"--latency is '{text}': write a number and a unit", quantity, text, TIMES, "--latency")
    assert [human_rate(of) for of in (1.25e10, 1.25e5, 12.0)] == ["100 Gbit/s", "1 Mbit/s", "96 bit/s"]
    assert [human_time(seconds) for seconds in (0.0, 5e-5, 9.996e-4)] == ["0.00 us", "50.0 us", "1.00 ms"]
    assert [human_time(seconds) for seconds in (0.6319, 0.9996, 19.6)] == ["632 ms", "1.00 s", "19.6 s"]


def test_the_loss_may_be_what_the_model_returns() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return scale * x.sum()

    x = torch.ones(2)
    for batch, loss in (((x,), 2), ([x, 3.0], 6), ({"x": x, "scale": 2.0}, 4), (x, 2)):
        with case(batch):
            assert loss_of_model(Model(), batch).item() == loss and type(moved(batch, CPU)) is type(batch)
    refuse("the model returns no loss; return", loss_of_model, nn.Identity(), x)


def test_the_doctor_names_each_problem_with_its_cure() -> None:
    versions = dict.fromkeys(("torch", "numpy", "jaxtyping", "horovod", "mpi4py", "triton"), "1.0")
    loads, kernels = Probe({"cuda": None, "gpus": [], "backends": ["gloo"]}), Probe({"native": "native (avx2)"})
    others = Probe({"ddp": "works", "fsdp": "works"}), Probe({"mpi": True}), Probe({"size": 2, "sum": 3.0})
    healthy = Facts(versions, loads, False, kernels, *others)
    assert list(doctor.problems(healthy)) == []
    assert dict(doctor.describe(healthy))["native kernels"] == "native (avx2)"
    cases: dict[str, dict[str, Any]] = {
        "another project of the name dgc": {"other_project": True},
        "PyTorch does not load: no": {"torch": Probe(error="no")},
        "plain PyTorch takes their place: not built": {"kernels": Probe(error="a\nnot built")},
        "dgc.fsdp does not load: too old": {"adapters": Probe({"ddp": "works", "fsdp": "too old"})},
        "Horovod does not load: undefined": {"horovod": Probe(error="undefined")},
        "two ranks under torchrun failed: no route": {"two_ranks": Probe(error="no route")},
        "{'size': 1, 'sum': 1.0}": {"two_ranks": Probe({"size": 1, "sum": 1.0})},
    }
    for problem, change in cases.items():
        with case(problem):
            ((said, cure),) = doctor.problems(replace(healthy, **change))
            assert problem in said and cure


@pytest.mark.proof  # ten seconds of processes
def test_the_doctor_examines_this_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main() == 0
    out = capsys.readouterr().out
    assert "2 ranks over torch  work" in out and "dgc.fsdp            works" in out and "no problems found" in out
