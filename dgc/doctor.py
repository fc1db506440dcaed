"""The command `python -m dgc.doctor`, which dgc/advisor/doctor.py describes."""

import sys

from dgc.advisor.doctor import main
from dgc.terminal import escape_unprintable

if __name__ == "__main__":
    escape_unprintable()
    sys.exit(main())
