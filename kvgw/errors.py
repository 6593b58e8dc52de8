"""Errors of the SDK and the gateway: one closed tree, and one closed list of codes that travel on the wire.

    KvgwError
    ├─ FormatError        a KV format, key or buffer that cannot be right; raised before anything is sent
    ├─ RequestRefused     the gateway understood and refused: code and sentence say why; retrying changes nothing
    └─ Outage             the answer could not be had in time: unreachable, busy, degraded, past its deadline

A miss is a value, never an error. Reads turn an `Outage` into a reported miss unless ``on_error="raise"``.
"""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """Why a request failed."""

    BAD_REQUEST = "bad_request"
    UNAUTHENTICATED = "unauthenticated"
    NOT_FOUND = "not_found"
    """The namespace or object does not exist, or the caller may not know that it does: both look alike."""
    FORMAT_UNKNOWN = "format_unknown"
    LENGTH_MISMATCH = "length_mismatch"
    TOO_MANY_KEYS = "too_many_keys"
    TOO_LARGE = "too_large"
    RESERVATION_EXPIRED = "reservation_expired"
    UNSUPPORTED_VERSION = "unsupported_version"
    """The other side speaks no wire version of this one: until one of them is rolled on or back, an outage."""
    UNAVAILABLE = "unavailable"
    BUSY = "busy"
    DEADLINE = "deadline"
    INTERNAL = "internal"

    @property
    def retryable(self) -> bool:
        return self in _RETRYABLE


_RETRYABLE = frozenset({Code.UNAVAILABLE, Code.BUSY, Code.DEADLINE, Code.INTERNAL, Code.UNSUPPORTED_VERSION})


class KvgwError(Exception):
    """Root of every error that kvgw raises on purpose."""

    code: Code = Code.INTERNAL
    answered = False
    """Whether a gateway said so: then it is there, however ill something behind it may be."""

    def __init__(self, message: str, code: Code | None = None, *, retry_after_s: float = 0.0) -> None:
        """`retry_after_s`: when coming again makes sense, where that is known; else 0."""
        super().__init__(message)
        if code is not None:
            self.code = code
        self.retry_after_s = retry_after_s

    @property
    def retryable(self) -> bool:
        return self.code.retryable


class FormatError(KvgwError):
    """A KV format, prefix key or buffer that cannot be right; the sentence names the field and the value."""

    code = Code.BAD_REQUEST


class RequestRefused(KvgwError):
    """The gateway refused the request for a reason that a retry does not change."""

    code = Code.BAD_REQUEST


class Outage(KvgwError):
    """No answer in time: the gateway or something behind it is unreachable, busy or degraded."""

    code = Code.UNAVAILABLE


def from_code(code: Code, message: str, retry_after_s: float = 0.0) -> KvgwError:
    """The error that stands for a code and sentence that came over the wire."""
    kind = Outage if code.retryable else RequestRefused
    return kind(message, code, retry_after_s=retry_after_s)
