"""Numbers that match point-to-point messages in place of their names."""

from zlib import crc32


class MessageTags:
    """A tag for each name of a message.

    Args:
        max_tag: Largest tag of the network.
    """

    def __init__(self, max_tag: int):
        self._max_tag = max_tag
        self._names: dict[int, str] = {}

    def of(self, name: str) -> int:
        """Return the tag of a name. It is the same on every rank.

        Raises:
            ValueError: Another name has the same tag.
        """
        tag = crc32(name.encode()) % self._max_tag
        if self._names.setdefault(tag, name) != name:
            raise ValueError(f"messages {name!r} and {self._names[tag]!r} have the same tag: rename one of them")
        return tag
