"""Two peers in each round for 30 epochs, then the graph stacked before this file."""

from dgc.gossip import n_peer_exponential
from dgc_training.config import Config, configs

configs.train.gossip.graph_from_epoch = {"30": configs.train.gossip.graph}
configs.train.gossip.graph = Config(n_peer_exponential, _partial_=True, peers=2)
