"""The root base, applied before all other files: every key there is.

A key that is not here is an error, except a constructor's keywords (its signature decides) and meters' names.
"""

import torch

from dgc.compression import Dense
from dgc_training.config import Config, configs
from dgc_training.meters import TopKClassMeter

configs.seed = 42  # of weights, shuffling and sampling; the same on every rank
configs.deterministic = False  # True: deterministic kernels only, which may be slower

configs.data = Config()
configs.data.num_threads_per_worker = 4  # PyTorch's CPU threads per rank
configs.data.num_workers = 0  # processes per rank that load data; 0: the rank loads itself

configs.dataset = None  # an experiment's: a constructor of {split: torch.utils.data.Dataset}
configs.model = None  # an experiment's: a constructor of a torch.nn.Module

configs.train = Config()
configs.train.num_epochs = None  # an experiment's
configs.train.batch_size = None  # an experiment's: samples per rank and backward pass
configs.train.num_batches_per_step = 1  # backward passes per optimizer step

configs.train.dgc = False  # True once a file of configs/dgc is stacked
configs.train.compression = Config(Dense)  # what travels for a gradient; Dense: all of it
configs.train.gossip = None  # once a file of configs/gossip is stacked: ranks average models with a few others

configs.train.criterion = Config(torch.nn.CrossEntropyLoss)
# An experiment sets lr for one rank and one batch: it is multiplied by the ranks and num_batches_per_step.
configs.train.optimizer = Config(torch.optim.SGD)
configs.train.optimizer.momentum = 0.9
configs.train.optimize_bn_separately = False  # True: batch norm's parameters get no weight decay

configs.train.scheduler = None  # a constructor from torch.optim.lr_scheduler; None: constant after warm-up
configs.train.schedule_lr_per_epoch = True  # False: the scheduler steps, and counts, in optimizer steps
configs.train.warmup_lr_epochs = 5  # epochs in which lr climbs from one rank's to all ranks'; 0: none

configs.train.meters = Config()  # names are free; {} stands for the split's name
configs.train.meters["acc/{}_top1"] = Config(TopKClassMeter, k=1)
configs.train.meters["acc/{}_top5"] = Config(TopKClassMeter, k=5)
configs.train.metric = "acc/test_top1"  # which meter decides on the best checkpoint; None: no meter

configs.train.bucket_mb = 25.0  # gradients travel together in buckets of this many MB
configs.train.nonfinite = "skip"  # NaN or inf in a gradient: "skip" drops the step and counts it, "raise" ends
configs.train.kernels = "auto"  # who does the hot loops: "native" (CPU), "triton" (GPU), "reference" (plain torch)
configs.train.timeout = 300  # seconds without an answer from another rank until a run gives up
configs.train.log_every = 10  # optimizer steps between two points in TensorBoard
configs.train.csv = False  # True: a CSV file of steps per rank, csv/out_r<rank>_n<ranks>.csv in the run directory
configs.train.trace = False  # True: a timeline of every exchange, trace/rank<N>.json in the run directory
configs.train.checkpoint_every = None  # optimizer steps between checkpoints; None: after each epoch only
configs.train.check_replicas_every = 0  # optimizer steps between comparisons of the ranks' weights; 0: never

configs.requires = Config()  # {dotted key: value} that stacked bases insist on; checked in the finished tree
