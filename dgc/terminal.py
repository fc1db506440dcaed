"""Standard output of the command lines."""

import sys
from io import TextIOWrapper


def escape_unprintable() -> None:
    """Prints characters that the encoding of standard output lacks as escapes, in place of an error.

    Names of files and machines may have any character, and bytes that are no character.
    """
    if isinstance(sys.stdout, TextIOWrapper):  # not where a test or a notebook has replaced it
        sys.stdout.reconfigure(errors="backslashreplace")
