"""The checker of annotations while tests run. An int is a float here, as it is for static checkers."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
