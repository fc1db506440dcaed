"""The command `python -m dgc.advise`, which dgc/advisor/command.py describes."""

import sys

from dgc.advisor.command import main
from dgc.terminal import escape_unprintable

if __name__ == "__main__":
    escape_unprintable()
    sys.exit(main())
