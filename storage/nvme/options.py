"""What the operator sets for an NVMe tier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from storage.errors import TierMisconfigured

_FREE_PART: Final = 20  # one twentieth: 5 %
_FREE_BYTES_MOST: Final = 10 * 1024**3


@dataclass(frozen=True, slots=True)
class NvmeOptions:
    """Settings of one NVMe tier.

    `root` is created if it is missing. Blobs never take more than `capacity_bytes`, nor leave less than
    `free_bytes_min` on the file system (default: 5 % of it, at most 10 GiB), whichever is tighter. After the disk
    was found full, one put in `full_retry_s` seconds tries again. `owner` is told to a second process that opens the
    folder. Raises `TierMisconfigured` on values that cannot work.
    """

    root: Path
    capacity_bytes: int
    free_bytes_min: int | None = None
    full_retry_s: float = 5.0
    owner: str = ""

    def __post_init__(self) -> None:
        if not self.root.is_absolute():
            raise TierMisconfigured(f"the NVMe folder {self.root} is not an absolute path; give the full path")
        if self.capacity_bytes < 1:
            raise TierMisconfigured(f"the NVMe capacity is {self.capacity_bytes} bytes; give at least 1")
        if self.free_bytes_min is not None and self.free_bytes_min < 0:
            raise TierMisconfigured(
                f"the free space to leave on {self.root} is {self.free_bytes_min} bytes; give 0 or more"
            )
        if self.full_retry_s < 0:
            raise TierMisconfigured(f"the retry time of a full NVMe tier is {self.full_retry_s} s; give 0 or more")

    def free_bytes(self, total_bytes: int) -> int:
        """Bytes to leave free on a file system of `total_bytes`."""
        if self.free_bytes_min is not None:
            return self.free_bytes_min
        return min(total_bytes // _FREE_PART, _FREE_BYTES_MOST)
