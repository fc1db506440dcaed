"""A cost model: predicts bytes and seconds of an exchange for any compressor and number of ranks."""

from dgc.advisor.cost.computing import AlikeRanks as AlikeRanks
from dgc.advisor.cost.computing import fit_computing as fit_computing
from dgc.advisor.cost.computing import machine_of as machine_of
from dgc.advisor.cost.computing import message_of as message_of
from dgc.advisor.cost.computing import record_steps as record_steps
from dgc.advisor.cost.computing import typical as typical
from dgc.advisor.cost.model import BucketWork as BucketWork
from dgc.advisor.cost.model import Compute as Compute
from dgc.advisor.cost.model import Network as Network
from dgc.advisor.cost.model import Prediction as Prediction
from dgc.advisor.cost.model import RecordedMessage as RecordedMessage
from dgc.advisor.cost.model import Traffic as Traffic
from dgc.advisor.cost.model import overlapped as overlapped
from dgc.advisor.cost.model import predict as predict
