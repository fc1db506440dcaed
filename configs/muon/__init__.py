"""Muon for matrices, AdamW for embeddings, vectors and the output layer. By itself nothing is compressed.

An experiment that has Adam or AdamW keeps the settings that it names, except for weight decay. The others are
MuonWithAdamW's own. Matrices get `muon_lr_ratio` times the learning rate. The log shows which parameters are
Muon's: an output layer among them needs its name in `parameter_groups.head`. It also has the type of Newton-Schulz
iterations, which `ns_precision` "auto" chooses by the processor: ranks with different ones need "bf16" or "fp32".
"""

from dgc.optim import MuonWithAdamW, muon_groups
from dgc_training.config import Config, ConfigError, configs

if configs.model is None or configs.train.optimizer is None:
    raise ConfigError("no file before has a model and an optimizer: stack an experiment before configs/muon")
if configs.train.optimizer._target_ not in ("torch.optim.Adam", "torch.optim.AdamW"):
    configs.train.optimizer = Config(MuonWithAdamW)
    configs.train.optimizer.lr = 0.001  # for one rank
configs.train.optimizer._target_ = MuonWithAdamW
configs.train.optimizer.muon_lr_ratio = 2.0
configs.train.optimizer.weight_decay = 0.1  # of the weights themselves, not of the gradients

configs.train.parameter_groups = Config(muon_groups)
configs.train.parameter_groups.show = False  # the log has the table
if configs.model._target_ == "dgc_models.GPT":
    configs.train.parameter_groups.split = {"*queries_keys_values*": 3}
configs.train.optimize_bn_separately = False

configs.requires["train.dgc"] = False  # momentum before compression is not for Muon
configs.requires["train.optimizer._target_"] = configs.train.optimizer._target_
