"""Errors of the control plane: one closed tree.

    TenancyError
    ├─ SealBroken          a sealed blob is not the one that its catalog row describes: quarantine it, then a miss
    ├─ KeyGone             the key was destroyed on purpose: a permanent miss
    ├─ KeyUnavailable      the key cannot be had now; says nothing about whether it exists: degrade and report
    ├─ KeyRefused          a key is there and must not be used; an operator has to act, retrying changes nothing
    │  ├─ KeyMismatch      it is another key, or the wrapped key belongs to another place
    │  ├─ KeyDamaged       the key file or wrapped-key record is not well-formed
    │  └─ KeyExposed       others than this process's user may read or replace it
    ├─ AccessDenied        the caller may not do this
    │  └─ PermissionMissing  its credential lacks the permission, whatever it is about
    ├─ NamespaceUnknown    there is no such namespace, or the caller may not know that there is
    ├─ FormatUnknown       the namespace has no such KV format
    ├─ RegistryRefused     a tenant, namespace, node or policy cannot be as it was asked for
    ├─ DeletionUnsupported what a deletion selects by is not known well enough to promise that nothing is left
    ├─ QuotaExceeded       the claim does not fit into the quota of its tenant or namespace
    ├─ ReservationExpired  a PUT came back after its reservation had ended
    └─ CatalogUnavailable  the catalog did not answer, or not in time
       ├─ CatalogLocked    another process owns this catalog
       ├─ CatalogOutdated  an older copy of the catalog was put back: it lists what was deleted since
       ├─ NodeTaken        another process runs the gateway of this node
       ├─ CatalogMisconfigured  its URL, role or second gateway cannot work; the sentence names the setting
       └─ CatalogTooNew    the catalog's schema is newer than this release reads

No sentence ever holds a key, a salt, a token or plaintext.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

SealFault: TypeAlias = Literal["length", "header", "commitment", "tag", "root"]
"""Which check refused a blob, in the order in which they are made; also the label of the metric."""


class TenancyError(Exception):
    """Root of the control plane's errors."""


class SealBroken(TenancyError):
    """A sealed blob is not the one that its catalog row describes; `reason` is the check that refused it."""

    def __init__(self, reason: SealFault, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason: SealFault = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"sealed blob refused by its {self.reason} check: {self.detail}"


class KeyGone(TenancyError):
    """The key was destroyed on purpose: whatever it sealed is noise for good."""


class KeyUnavailable(TenancyError):
    """The key cannot be had now; says nothing about whether it exists."""


class KeyRefused(TenancyError):
    """A key is there and must not be used; the sentence says what an operator has to do."""


class KeyMismatch(KeyRefused):
    """It is another key than the one that is needed, or the wrapped key belongs to another place."""


class KeyDamaged(KeyRefused):
    """The key file or wrapped-key record is not well-formed."""


class KeyExposed(KeyRefused):
    """Others than this process's user may read or replace the key file."""


class AccessDenied(TenancyError):
    """The caller may not do this."""


class PermissionMissing(AccessDenied):
    """The credential lacks the permission for this kind of act, whatever it is about."""


class NamespaceUnknown(TenancyError):
    """There is no such namespace, or the caller may not know that there is: both look alike."""


class FormatUnknown(TenancyError):
    """The namespace has no such KV format."""


class RegistryRefused(TenancyError):
    """A tenant, namespace, node or policy cannot be as it was asked for; the sentence says which value and why."""


class DeletionUnsupported(TenancyError):
    """What a deletion selects by is not known well enough to promise that nothing is left."""


class QuotaExceeded(TenancyError):
    """The claim does not fit into the quota of its tenant or namespace."""


class ReservationExpired(TenancyError):
    """A PUT came back after its reservation had ended; what it uploaded is being deleted."""


class AuditBroken(TenancyError):
    """The audit log is not what it was: it is not signed any more."""


class CheckpointNotKept(TenancyError):
    """A checkpoint of the audit log could not be written outside the database."""


class CatalogUnavailable(TenancyError):
    """The catalog did not answer, or not in time."""


class CatalogLocked(CatalogUnavailable):
    """Another process owns this catalog."""


class CatalogTooNew(CatalogUnavailable):
    """The catalog's schema is newer than this release reads."""


class CatalogMisconfigured(CatalogUnavailable):
    """The catalog's URL, role or second gateway cannot work; the sentence names the setting and the remedy."""


class NodeTaken(CatalogUnavailable):
    """Another process runs the gateway of this node."""


class CatalogOutdated(CatalogUnavailable):
    """An older copy of the catalog was put back: it lists what was deleted since."""
