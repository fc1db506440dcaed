"""Trains on handwritten digits with Lightning and 8 bits. Saves every epoch, and resumes from there.

torchrun --nproc-per-node 2 examples/train_lightning.py FOLDER [EPOCHS]
"""

import os
import sys
from pathlib import Path

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from dgc import TwoPhaseCompressor
from dgc.integrations.lightning import CompressionCallback
from digits import Digits, network


class Classifier(LightningModule):
    def configure_model(self) -> None:
        self.network = network()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        losses.append(float(self.trainer.callback_metrics["loss"]))
        self.print(f"epoch {self.current_epoch}: loss {losses[-1]:.4f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.003)


folder, epochs = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10
folder.mkdir(parents=True, exist_ok=True)
ranks = {"num_nodes": int(os.environ["GROUP_WORLD_SIZE"]), "devices": int(os.environ["LOCAL_WORLD_SIZE"])}
options = {"default_root_dir": folder, "logger": False, "enable_progress_bar": False}
compression = CompressionCallback(TwoPhaseCompressor(bits=8))  # saves beside last.ckpt too
callbacks = [compression, ModelCheckpoint(folder, save_last=True)]
trainer = Trainer(accelerator="cpu", strategy="ddp", max_epochs=epochs, callbacks=callbacks, **ranks, **options)
data, model, losses = Digits(trainer.global_rank, trainer.world_size), Classifier(), list[float]()
trainer.fit(model, data.loader, ckpt_path="last")
accuracy = data.accuracy(model.network)
model.print(f"test accuracy {accuracy:.1f} %")
