"""A cost model: predicts bytes and seconds of an exchange for any compressor and number of ranks."""

from dgc.cost.computing import AlikeRanks as AlikeRanks
from dgc.cost.computing import fit_computing as fit_computing
from dgc.cost.computing import machine_of as machine_of
from dgc.cost.computing import message_of as message_of
from dgc.cost.computing import record_steps as record_steps
from dgc.cost.computing import typical as typical
from dgc.cost.model import BucketWork as BucketWork
from dgc.cost.model import Compute as Compute
from dgc.cost.model import Message as Message
from dgc.cost.model import Network as Network
from dgc.cost.model import Prediction as Prediction
from dgc.cost.model import Traffic as Traffic
from dgc.cost.model import overlapped as overlapped
from dgc.cost.model import predict as predict
