"""Collective operations that algorithms request (`requests`), and transports that carry them out."""

from dgc.comm.collectives import all_gather_object as all_gather_object
from dgc.comm.collectives import all_reduce as all_reduce
from dgc.comm.collectives import barrier as barrier
from dgc.comm.collectives import broadcast_object as broadcast_object
from dgc.comm.conversation import RunningConversation as RunningConversation
from dgc.comm.meter import TrafficMeter as TrafficMeter
from dgc.comm.requests import AllGather as AllGather
from dgc.comm.requests import AllReduce as AllReduce
from dgc.comm.requests import AllToAll as AllToAll
from dgc.comm.requests import Broadcast as Broadcast
from dgc.comm.requests import Conversation as Conversation
from dgc.comm.requests import Exchange as Exchange
from dgc.comm.requests import ReduceScatter as ReduceScatter
from dgc.comm.requests import Request as Request
from dgc.comm.transport import Transport as Transport
