"""Gradient compression and gossip for distributed training over slow networks.

The rooms, from the ground up (an import only ever points down): `kernels`, `comm`, `wire`, `selection`,
`memory`, `compression`, `optim`.
"""

__version__ = "0.1.0"
