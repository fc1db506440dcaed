"""Trains with Accelerate or the Trainer of transformers, which shard the model with FSDP2, in 4 and 8 bits.

torchrun --nproc-per-node 2 tests/parallel/fsdp_trainers_worker.py OUT accelerate whole    # saves a checkpoint
torchrun --nproc-per-node 2 tests/parallel/fsdp_trainers_worker.py OUT accelerate resumed  # continues from it
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from parallel.found import digest, told
from torch import Tensor

import dgc_datasets.torchvision_compat  # noqa: F401  (transformers imports torchvision)

OUT, LIBRARY, PART, RANK = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(os.environ["RANK"])
warnings.filterwarnings("default", module=r"(torch|transformers|accelerate)\.")  # they warn of their own code


def choose_fsdp() -> None:
    """Accelerate leaves FSDP out on CPUs. What follows from this choice is the same on them."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def of_this_rank(model: Any) -> str:
    return digest(p.to_local() for p in model.parameters())


def with_accelerate() -> dict[str, Any]:
    from dgc.integrations.accelerate import quantize

    choose_fsdp()
    plugin = FullyShardedDataParallelPlugin(2, auto_wrap_policy="size_based_wrap", min_num_params=100)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 0.01))
    quantizer, losses = quantize(accelerator, model, gradients=4, weights=8), []
    if PART == "resumed":
        accelerator.load_state(str(OUT / "state"))
    for batch in range(0 if PART == "whole" else 12, 20):
        if batch == 12 and PART == "whole":
            accelerator.save_state(str(OUT / "state"))
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2 * batch + RANK))
        with accelerator.accumulate(model):
            loss = (model(x) - x[:, :8]).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    second = told(lambda: quantize(accelerator, model), ValueError)
    sent = quantizer.meter.payload_bytes
    return {"losses": losses, "model": of_this_rank(model), "sent": sent, "second": second}


def with_transformers() -> dict[str, Any]:
    import transformers as hf

    from dgc.compression import TwoPhaseCompressor
    from dgc.integrations.transformers import CompressionCallback, QuantizationCallback

    def trainer_of(callback: Any, steps: int) -> Any:
        torch.manual_seed(0)
        size = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 12, "vocab_size": 16}
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**size, bos_token_id=0, eos_token_id=0))
        first = torch.randint(0, 16, (160, 1))
        tokens: list[Tensor] = list((first + 5 * torch.arange(12)) % 16)
        args = hf.TrainingArguments(
            str(OUT / "trainer"),
            per_device_train_batch_size=8,
            max_steps=steps,
            learning_rate=0.01,
            save_steps=24,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            fsdp=True,
            fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
        )
        assert args.device.type == "cpu"  # which connects the ranks
        choose_fsdp()
        trainer = hf.Trainer(model, args, train_dataset=[{"input_ids": t, "labels": t} for t in tokens])
        callback.attach(trainer)
        return trainer

    quantization = QuantizationCallback(gradients=4, weights=8)
    trainer = trainer_of(quantization, 30)
    trainer.train(resume_from_checkpoint=str(OUT / "trainer/checkpoint-24") if PART == "resumed" else None)
    assert quantization.quantizer is not None
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    sent, model = quantization.quantizer.meter.payload_bytes, of_this_rank(trainer.model_wrapped)
    other = trainer_of(CompressionCallback(TwoPhaseCompressor()), 1)
    return {"losses": losses, "model": model, "sent": sent, "second": told(other.train, ValueError)}


found = {"accelerate": with_accelerate, "transformers": with_transformers}[LIBRARY]()
(OUT / f"{LIBRARY}-{PART}{RANK}.json").write_text(json.dumps(found))
