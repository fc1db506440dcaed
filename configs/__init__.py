"""The root base, applied before all other files. It declares every key.

A key that is not declared here is an error, except keywords of a constructor (defined by its signature) and names
of meters.
"""

import torch

from dgc.compression import DenseCompressor
from dgc_training.config import Config, configs
from dgc_training.meters import TopKClassMeter

configs.seed = 42  # of weights, shuffling and sampling; the same on every rank
configs.deterministic = False  # True: deterministic kernels only, which may be slower

configs.data = Config()
configs.data.num_threads_per_worker = 4  # PyTorch's CPU threads per rank
configs.data.num_workers = 0  # processes per rank that load data; 0: the rank loads itself

configs.dataset = None  # set by an experiment: a constructor of {split: torch.utils.data.Dataset}
configs.model = None  # set by an experiment: a constructor of a torch.nn.Module

configs.train = Config()
configs.train.num_epochs = None  # set by an experiment
configs.train.batch_size = None  # set by an experiment: samples per rank and backward pass
configs.train.num_batches_per_step = 1  # backward passes per optimizer step

configs.train.dgc = False  # True if a file of configs/dgc is stacked
configs.train.compression = Config(DenseCompressor)  # how gradients are compressed; DenseCompressor: not at all
configs.train.gossip = None  # set by a file of configs/gossip: ranks average models with a few other ranks

configs.train.criterion = Config(torch.nn.CrossEntropyLoss)
# An experiment sets lr for one rank and one batch. The trainer multiplies it by the ranks and
# num_batches_per_step.
configs.train.optimizer = Config(torch.optim.SGD)
configs.train.optimizer.momentum = 0.9
configs.train.optimize_bn_separately = False  # True: batch norm's parameters get no weight decay

configs.train.scheduler = None  # a constructor from torch.optim.lr_scheduler; None: constant after warm-up
configs.train.schedule_lr_per_epoch = True  # False: the scheduler counts optimizer steps instead of epochs
configs.train.warmup_lr_epochs = 5  # epochs in which lr rises from the rate of one rank to the full rate; 0: none

configs.train.meters = Config()  # names are free; {} stands for the split's name
configs.train.meters["acc/{}_top1"] = Config(TopKClassMeter, k=1)
configs.train.meters["acc/{}_top5"] = Config(TopKClassMeter, k=5)
configs.train.metric = "acc/test_top1"  # the meter that selects the best checkpoint; None: no meter

configs.train.bucket_mb = 25.0  # size of a bucket of gradients, in MB
configs.train.nonfinite = "skip"  # NaN or inf in a gradient: "skip" drops the step and counts it, "raise" ends
configs.train.kernels = "auto"  # or "native" (CPU), "triton" (GPU), "reference" (plain torch)
configs.train.timeout = 300  # seconds without an answer from another rank until a run gives up
configs.train.log_every = 10  # optimizer steps between two points in TensorBoard
configs.train.csv = False  # True: a CSV file of steps per rank, csv/out_r<rank>_n<ranks>.csv in the run directory
configs.train.trace = False  # True: a timeline of every exchange, trace/rank<N>.json in the run directory
configs.train.checkpoint_every = None  # optimizer steps between checkpoints; None: after each epoch only
configs.train.check_replicas_every = 0  # optimizer steps between comparisons of the ranks' weights; 0: never

configs.requires = Config()  # {dotted key: value} that stacked bases require; checked in the finished tree
