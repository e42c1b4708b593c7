"""A file mapped into memory, read-only: where every weight comes from.

Refuses anything but a regular, non-empty file. Invariant: a view never reaches past the end of the
mapping. Nothing is copied; `release` gives pages back to the page cache once they were packed.
(A file that somebody truncates while it is mapped ends the process; no reader can prevent that.)
"""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from octavo.errors import BadFile

Bytes = npt.NDArray[np.uint8]


class MappedFile:
    """`data` is the whole file as uint8; `buffer` the same bytes as a mmap, for parsing."""

    __slots__ = ("buffer", "data", "path", "size")

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise BadFile(f"{path}: {error.strerror or error}") from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise BadFile(f"{path}: not a regular file")
            if status.st_size == 0:
                raise BadFile(f"{path}: the file is empty")
            self.size = status.st_size
            self.buffer = mmap.mmap(fd, self.size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise BadFile(f"{path}: cannot be mapped: {error}") from None
        finally:
            os.close(fd)
        self.data: Bytes = np.frombuffer(self.buffer, np.uint8)

    def view(self, start: int, num_bytes: int) -> Bytes:
        """Bytes [start, start + num_bytes), not copied. The caller has checked the bounds."""
        assert 0 <= start <= start + num_bytes <= self.size
        return self.data[start : start + num_bytes]

    def release(self, start: int, num_bytes: int) -> None:
        """Unmap the pages of a range; reading them again brings them back from the file."""
        page = mmap.PAGESIZE
        first = start // page * page
        length = min(start + num_bytes, self.size) - first
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self.buffer.madvise(mmap.MADV_DONTNEED, first, length)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in its file. shape is (rows, cols) or (n,); bytes are row-major."""

    source: MappedFile
    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @property
    def data(self) -> Bytes:
        return self.source.view(self.start, self.num_bytes)
