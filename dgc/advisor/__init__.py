"""The advisor: does compression pay on a network, and is what is installed in order?

`dgc.advise` and `dgc.doctor` are its commands. `cost` is the cost model. This file imports nothing,
since the doctor also runs where torch is missing.
"""
