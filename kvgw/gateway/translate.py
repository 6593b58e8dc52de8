"""Errors of the lower rooms as the errors that a client sees: one table."""

from __future__ import annotations

from types import TracebackType
from typing import Final

from kvgw.errors import Code, KvgwError, from_code
from storage import errors as storage_errors
from storage.errors import StorageError
from tenancy import errors as tenancy_errors
from tenancy.errors import TenancyError

_CODES: Final[tuple[tuple[type[Exception], Code], ...]] = (
    (tenancy_errors.AccessDenied, Code.NOT_FOUND),
    (tenancy_errors.NamespaceUnknown, Code.NOT_FOUND),
    (tenancy_errors.FormatUnknown, Code.FORMAT_UNKNOWN),
    (tenancy_errors.RegistryRefused, Code.BAD_REQUEST),
    (tenancy_errors.DeletionUnsupported, Code.BAD_REQUEST),
    (tenancy_errors.ReservationExpired, Code.RESERVATION_EXPIRED),
    (tenancy_errors.KeyGone, Code.NOT_FOUND),
    (storage_errors.StagingBusy, Code.BUSY),
    (TenancyError, Code.UNAVAILABLE),
    (StorageError, Code.UNAVAILABLE),
)


def translate(error: StorageError | TenancyError) -> KvgwError:
    """The client's error for one of the rooms'."""
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    return from_code(code, str(error))


class translated:  # noqa: N801  # reads as ``with translated():``
    """Turn the rooms' errors into the client's at the gateway's door."""

    __slots__ = ()

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, StorageError | TenancyError):
            raise translate(error) from error
