"""A network laboratory: several hosts on one Linux machine, with links of a limited rate.

    python -m benchmarks.netlab --hosts 4 --rate 1gbit -- train.py --configs configs/digits/cnn.py

Each host is a network namespace with one interface, `lab0`. A bridge connects it with those of the other hosts. A
token bucket limits each interface in both directions. The rate that a TCP connection reaches is measured and
printed before the command starts. The hosts share the cores and the memory of the machine. See docs/netlab.md.
"""

from benchmarks.netlab.laboratory import Laboratory as Laboratory
from benchmarks.netlab.laboratory import LaboratoryError as LaboratoryError
