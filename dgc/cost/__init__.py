"""A cost model: predicts bytes and seconds of an exchange for any compressor and number of ranks."""

from dgc.cost.model import Compute as Compute
from dgc.cost.model import Message as Message
from dgc.cost.model import Network as Network
from dgc.cost.model import Prediction as Prediction
from dgc.cost.model import Traffic as Traffic
from dgc.cost.model import predict as predict
from dgc.cost.recording import record as record
