"""Replica groups that come and go between outer steps."""

from dgc.groups.connection import Groups as Groups
from dgc.groups.connection import connect as connect
