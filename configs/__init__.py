"""The root base, applied before all other files. It declares every key: its type, default and smallest value.

A key without a default is set by an experiment. A key that is not declared here is an error, except keywords of a
constructor (defined by its signature) and names of meters.
"""

import torch

from dgc.compression import DenseCompressor
from dgc_training.config import Config, Key, configs
from dgc_training.meters import TopKClassMeter
from dgc_training.tasks.classification import Classification

configs.seed = Key(int, 42, least=0)  # of weights, shuffling and sampling; the same on every rank
configs.deterministic = Key(bool, False)  # True: deterministic kernels only, which may be slower

configs.data = Config()
configs.data.num_threads_per_worker = Key(int, 4, least=1)  # PyTorch's CPU threads per rank
configs.data.num_workers = Key(int, 0, least=0)  # processes per rank that load data; 0: the rank loads itself

configs.dataset = Key(Config)  # a constructor of {split: torch.utils.data.Dataset}
configs.model = Key(Config)  # a constructor of a torch.nn.Module

# What a batch, a loss and an evaluation are; called by the trainer with dgc_training.tasks.protocol.Setup.
configs.task = Key(Config, Config(Classification))

configs.train = Config()
configs.train.num_epochs = Key(int, least=1)
configs.train.batch_size = Key(int, least=1)  # samples (of translation: tokens) per rank and backward pass
configs.train.num_batches_per_step = Key(int, 1, least=1)  # backward passes per optimizer step

configs.train.dgc = Key(bool, False)  # True if a file of configs/dgc is stacked
# How gradients are compressed. DenseCompressor: not at all.
configs.train.compression = Key(Config, Config(DenseCompressor))
# set by a file of configs/gossip: ranks average models with a few others
configs.train.gossip = Key(Config | None)
# set by a file of configs/local: ranks train alone or gossip, and all exchange models every so many steps
configs.train.local = Key(Config | None)
# set by configs/local/groups.py: this run is a group, which meets others in the outer steps of train.local
configs.train.groups = Key(Config | None)

configs.train.precision = Key(str, "fp32")  # of the forward pass: "bf16" or, on a GPU, "fp16"
configs.train.criterion = Key(Config, Config(torch.nn.CrossEntropyLoss))
# An experiment sets lr for one rank and one batch. The trainer multiplies it by the ranks and
# num_batches_per_step.
configs.train.optimizer = Key(Config, Config(torch.optim.SGD, momentum=0.9))
configs.train.optimize_bn_separately = Key(bool, False)  # True: batch norm's parameters get no weight decay
configs.train.parameter_groups = Key(Config | None)  # makes the optimizer's groups of the model; None: one group

# largest L2 norm of the averaged gradient of all parameters together; None: no limit
configs.train.clip_norm = Key(float | None)

configs.train.scheduler = Key(Config | None)  # a constructor from torch.optim.lr_scheduler; None: constant
configs.train.schedule_lr_per_epoch = Key(bool, True)  # False: the scheduler counts optimizer steps, not epochs
configs.train.warmup_lr_epochs = Key(int, 5, least=0)  # epochs in which lr rises from one rank's to the full rate

# Names of meters are free; {} stands for the split's name. `metric` selects the best checkpoint; None: no meter.
meters = {f"acc/{{}}_top{k}": Config(TopKClassMeter, k=k) for k in (1, 5)}
configs.train.meters = Key(dict | None, meters, items=Key(Config))
configs.train.metric = Key(str | None, "acc/test_top1")

# Average densely inside each machine, and compress only between machines: on, off, or auto (on if there are
# several machines of several ranks each)
configs.train.hierarchical = Key(str | bool, "auto")
configs.train.bucket_mb = Key(float | None, least=0.001)  # size of a bucket of gradients in MB; None: by device
# NaN or inf in a gradient: "skip" drops and counts the step, "raise" ends
configs.train.nonfinite = Key(str, "skip")
configs.train.kernels = Key(str, "auto")  # or "native" (CPU), "triton" (GPU), "reference" (plain torch)
# what connects the ranks: "horovod", "torch" (torch.distributed), or "auto": by the launcher
configs.train.transport = Key(str, "auto")
# seconds without an answer from another rank until a run gives up
configs.train.timeout = Key(float, 300, least=1)
configs.train.log_every = Key(int, 10, least=1)  # optimizer steps between two points in TensorBoard
# a recorder of each rank's steps, built with (run directory, config, optimizer); of CSV files in configs/gossip
configs.train.recorder = Key(Config | None)
configs.train.trace = Key(bool, False)  # True: a timeline of every exchange, trace/rank<N>.json
configs.train.checkpoint_every = Key(int | None, least=1)  # optimizer steps between checkpoints; None: epochs only
# optimizer steps between comparisons of weights; 0: never
configs.train.check_replicas_every = Key(int, 0, least=0)

configs.requires = Key(dict, {})  # {dotted key: value} that stacked bases require; checked in the finished tree
