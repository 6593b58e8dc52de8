"""Errors of the data plane. A missing blob is an error here and becomes a miss (a value) in the gateway.

StorageError
├─ BlobMissing        the tier answered: there is no such blob
├─ BlobDamaged        the blob is there but cannot be the one asked for (wrong length, broken off)
├─ TierUnavailable    the tier did not answer, or not in time; says nothing about the blob
│  └─ TierFull        no room for a new blob; reads and deletes still work
├─ TierMisconfigured  the tier cannot work as configured (no bucket, wrong credentials, folder not writable)
└─ StagingBusy        no staging memory was free before the deadline
"""

from __future__ import annotations


class StorageError(Exception):
    """Root of the data plane's errors."""


class BlobMissing(StorageError):
    """The tier answered that it has no such blob."""


class BlobDamaged(StorageError):
    """The tier's bytes cannot be the blob that was asked for."""


class TierUnavailable(StorageError):
    """The tier did not answer, or not in time."""


class TierFull(TierUnavailable):
    """The tier takes no new blob until space is freed."""


class TierMisconfigured(StorageError):
    """The tier cannot work with its settings; the sentence names the setting and the remedy."""


class StagingBusy(StorageError):
    """No staging memory was free before the deadline."""
