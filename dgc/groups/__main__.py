"""`python -m dgc.groups serve`: see dgc.groups.serve."""

from dgc.groups.serve import main

if __name__ == "__main__":
    main()
