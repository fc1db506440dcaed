"""The shape of GPT-2 small (Radford et al. 2019), 124,439,808 parameters, in bf16. Stack it after gpt.py.

The model has GPT-2's 50257 tokens. Characters are the first 128 of them.
"""

from dgc_training.config import configs

configs.model.vocabulary_size = 50257
configs.model.width = 768
configs.model.layers = 12
configs.model.heads = 12

configs.task.context = 1024
configs.task.steps_per_epoch = 200
configs.train.num_epochs = 5
configs.train.batch_size = 4
configs.train.precision = "bf16"
configs.train.optimizer.lr = 1.5e-4  # for one rank; 4 ranks train at 6e-4
configs.train.scheduler.warmup_steps = 100
