"""Stacks and settings that do not fit give one error, and nothing is written."""

from pathlib import Path
from typing import Any

import pytest
from cases import case
from pytest import MonkeyPatch
from simulated import CNN, train_in
from training.test_resuming import LSTM, NUMWORDS, write_wikitext

from dgc import kernels
from dgc_training.config import ConfigError

DIGITS, WIKITEXT, GPT = [CNN], ["configs/wikitext/lstm.py"], ["configs/pysource/gpt.py"]
TRANSLATION = ["configs/numwords/tiny.py"]
SGP, DPSGD, ADPSGD = (["configs/gossip/" + name] for name in ("sgp.py", "dpsgd.py", "adpsgd.py"))
WM0, WM5, QSGD = ["configs/dgc/wm0.py"], ["configs/dgc/wm5.py"], ["configs/quant/qsgd.py"]
ONEBIT_ADAM, ZERO_ONE_ADAM = ["configs/adam/onebit_adam.py"], ["configs/adam/zero_one_adam.py"]
LOCAL_SGD, DILOCO = ["configs/local/local_sgd.py"], ["configs/local/diloco.py"]
RING, STAR = ["configs/topology/ring.py"], ["configs/topology/star.py"]
LINEAR = ["configs/topology/bipartite_linear.py"]

ON_2_RANKS = [  # stack, setting, message
    (DIGITS + RING, "", "stack a file of configs/gossip before it"),
    (DIGITS + WM5 + SGP, "", "DGCCompressor; leave out the one or the other"),
    (DIGITS + SGP + WM5, "", "gossip/__init__.py needs dgc.compression.DenseCompressor; leave"),
    (DIGITS + LOCAL_SGD + WM5, "", "local/__init__.py needs dgc.comp"),
    (DIGITS + SGP, "train.check_replicas_every=4", "train.check_replicas_every is 4"),
    (DIGITS + SGP, "train.gossip.peers=2", "takes no keyword 'peers'"),
    (DIGITS + SGP, "train.hierarchical=on", "stack configs/gossip/machines.py"),
    (DIGITS + SGP + STAR, "train.gossip.graph.hub=7", "star with 2 ranks: hub"),
    (DIGITS + ADPSGD, "", r"connect\(point_to_point=True\)"),
    (DIGITS + ADPSGD, "train.checkpoint_every=5", "train.checkpoint_every null"),
    (GPT + SGP, "train.precision=fp16", "every rank would have a loss scale of its own: use bf16"),
    # 1-bit Adam, 0/1 Adam, DGC for Adam
    (DIGITS + ZERO_ONE_ADAM + QSGD, "", "train.compression._target_"),
    (DIGITS + ZERO_ONE_ADAM + DILOCO, "", "train.local._target_"),
    (DIGITS + WM0 + ONEBIT_ADAM, "", "train.dgc"),
    (DIGITS + ["configs/adam/dgc.py"] + WM0, "", "train.optimizer is torch.optim.AdamW"),
    (DIGITS + ONEBIT_ADAM + QSGD, "", "train.compression._target_"),
    (DIGITS + ONEBIT_ADAM + ["configs/adam/dgc.py"], "", "_target_"),
    (DIGITS + ["configs/adam/dgc_adam.py"] + QSGD, "", "train.compression._target_"),
    (
        DIGITS + ["configs/adam/dgc.py", "configs/adam/fp16.py"],
        "",
        "no steps that send gradients without compression",
    ),
    # values
    (DIGITS, "train.hierarchical=maybe", "train.hierarchical is 'maybe', not auto, on or off"),
    (DIGITS, "model.width=0", r"model \(dgc_models\.DigitsCNN\): width must be at least 1, not 0"),
    (DIGITS, "model.num_classes=-3", r"model \(dgc_models\.DigitsCNN\): num_classes must be at least 1, not -3"),
    (DIGITS, "train.optimizer.lr=5e307", "the learning rate is .*e[+]308, which is not a finite fp32 number"),
    (DIGITS, f"train.batch_size={2**70}", r"train\.batch_size is 1180\d+; it must .* most 2147483647"),
    (DIGITS, "train.num_batches_per_step=2000", r"the training set has 1437 samples, too few for one step"),
    (DIGITS, f"seed={10**21}", r"seed is 10{21}; its magnitude must be less than 2\*\*62"),
    (DIGITS, "train.metric=acc/val", "'acc/val' is not a result; there are: acc/test_top1, acc/test_top5"),
    (DIGITS, "train.kernels=triton", "run on a GPU"),
    (DIGITS, "train.kernels=fast", "auto, reference, native, triton"),
    # language models
    (WIKITEXT, "model.vocabulary_size=5", "the model's vocabulary has 5: set model.vocabulary_size"),
    (WIKITEXT, "task.context=0", "task.context is 0; it must be at least 1"),
    (WIKITEXT, "task.context=400", "too few for one step of 2 ranks x 4 rows"),
    (WIKITEXT, "train.clip_norm=0.0", "train.clip_norm is 0.0; it must be positive"),
    (WIKITEXT, "train.precision=fp8", "train.precision is 'fp8'; it must be one of fp32, bf16, fp16"),
    (WIKITEXT, "train.precision=fp16", "train.precision is fp16, which needs a GPU, and the device is cpu: use"),
    (WIKITEXT, "train.metric=perplexity/dev", "is not a result; there are: perplexity/val, loss/val"),
    (WIKITEXT, "dataset.root=/nowhere", "put the three files"),
    (WIKITEXT + WM5, "train.clip_norm=1.0", r"train\.clip_norm limits averages"),
    # translation
    (TRANSLATION, "model.max_length=12", "model.max_length is 12 tokens, fewer than the"),
    (TRANSLATION, "train.metric=acc/test_top1", "it must be one of translation/test_exact_match"),
    (TRANSLATION, "data.num_workers=2", "data.num_workers must be 0"),
    (TRANSLATION, "task.beams=0", "task.beams is 0"),
    (TRANSLATION, "model.vocabulary=50", "the model has 50 tokens .* set model.vocabulary to dataset.vocab"),
    (TRANSLATION, "train.criterion.ignore_index=-100", "ignore_index must be 0"),
    (TRANSLATION, "train.batch_size=10", "train.batch_size is 10 tokens, fewer than the"),
]
ON_OTHERS = [
    (3, DIGITS + SGP + LINEAR, "", "needs an even number of ranks, not 3"),
    (4, DIGITS + DPSGD + STAR, "", "the shares that rank 0 receives sum to"),
]
BASES = {CNN: ["model.width=8"], WIKITEXT[0]: LSTM, TRANSLATION[0]: NUMWORDS, GPT[0]: []}


@pytest.mark.parametrize("base", [CNN, *WIKITEXT, *TRANSLATION, *GPT])
def test_what_does_not_fit_is_one_error(base: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    data = write_wikitext(tmp_path / "data")
    monkeypatch.setattr("dgc_training.stepping.FP16_DEVICES", ("cuda", "cpu") if base in GPT else ("cuda",))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernels._backend.cache_clear()  # tests of the Triton backend fill it
    rows: list[Any] = [(2, *row) for row in ON_2_RANKS] + ON_OTHERS
    for size, stack, *words, message in (row for row in rows if row[1][0] == base):
        monkeypatch.setattr(kernels, "_asked", "auto")
        settings = [word.replace("ROOT", str(data)) for word in [*BASES[base], *filter(None, words)]]
        with case(stack, words), pytest.raises(ConfigError, match=message) as raised:
            train_in(tmp_path / "run", stack, settings, size)
        assert "\n" not in str(raised.value) and list(tmp_path.iterdir()) == [data]
