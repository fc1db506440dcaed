"""`python -m dgc_training.config FILES [--configs.KEY VALUE ...]` prints the config tree of this stack."""

import sys

from dgc_training.config import ConfigError, load, to_yaml


def main(words: list[str]) -> str:
    """The tree as YAML. Words up to the first that begins with `--` are files. Raises ConfigError."""
    cut = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    return to_yaml(load(words[:cut], words[cut:]), resolve=False)


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]), end="")
    except ConfigError as error:
        sys.exit(str(error))
