"""One process per machine prepares a data set while the others wait for a file lock. They do not communicate.

Each process that needs an unprepared data set acquires the lock in its folder. The first one prepares the data
set; the others then find it prepared. The system releases the lock when a process ends for any reason. A folder is
written under a temporary name and renamed in one step, so that a folder that exists is complete. A prepared data
set is only read, so its folder may be read-only.
"""

import errno
import fcntl
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

LOCK = ".preparing"
# Error codes of file systems without locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def prepare_once(root: Path, is_ready: Callable[[], bool], prepare: Callable[[], None]) -> None:
    """Calls `prepare` in one of the calling processes unless `is_ready`. All processes return when it is done.

    If `prepare` raises, the next process tries. Raises ValueError if `root` cannot be written to or locked.
    """
    if is_ready():
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = open(root / LOCK, "a")
    except OSError as error:
        raise ValueError(f"the data set cannot be prepared in {root}: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise ValueError(
                f"the file system of {root} knows no locks; prepare the data set there with one process first"
            ) from error
        if not is_ready():
            prepare()


def prepare_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Makes sure that `folder` exists. One process per machine calls `write` with an empty folder to fill."""

    def prepare() -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".writing-") as scratch:
            filled = Path(scratch, folder.name)
            filled.mkdir()
            write(filled)
            os.rename(filled, folder)

    prepare_once(folder.parent, folder.is_dir, prepare)


def unpack(archive: Path, folder: str) -> None:
    """Unpacks `folder` of a tar archive beside it, completely or not at all. ValueError if it is damaged."""
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".unpacking-") as scratch:
        try:
            with tarfile.open(archive) as tar:
                _extract(tar, scratch)
        except (tarfile.TarError, EOFError, OSError, ValueError) as error:
            raise ValueError(f"{archive} cannot be unpacked: {error}") from error
        if not Path(scratch, folder).is_dir():
            raise ValueError(f"{archive} holds no folder {folder}")
        place = archive.parent / folder
        if place.exists():  # left by an interrupted download of another program
            shutil.rmtree(place)
        os.rename(Path(scratch, folder), place)


def _extract(tar: tarfile.TarFile, place: str) -> None:
    """Extracts an archive. ValueError if something in it is a link or a device, or would be written elsewhere."""
    if hasattr(tarfile, "data_filter"):
        tar.extractall(place, filter="data")
        return
    # Python 3.10 before 3.10.12, and 3.11 before 3.11.4
    for member in tar.getmembers():
        inside = not os.path.isabs(member.name) and ".." not in Path(member.name).parts
        if not (inside and (member.isfile() or member.isdir())):
            raise ValueError(f"it holds {member.name!r}, which is not a file or folder below its own folder")
    tar.extractall(place)
