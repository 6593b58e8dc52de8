"""The wire: versioned, length-bounded frames. No I/O here; `kvgw.stream` moves the bytes.

A frame is a fixed prefix, a msgpack header, and a raw payload that is received straight into its destination:

    offset  length
    0       2       magic "KG"
    2       1       wire version
    3       1       kind of frame
    4       4       request id, echoed in every frame of the exchange
    8       4       header bytes, at most `HEADER_BYTES_MAX`
    12      4       index of the chunk that the payload belongs to
    16      8       offset of the payload inside its chunk
    24      8       payload bytes, at most the largest chunk

All integers are big-endian. An exchange begins with a request frame of the client; one exchange at a time on a
connection, so that a cancelled one can only cost its connection and never leave an answer for the next:

    HELLO → WELCOME                                      first, once
    PUT   → WANTED, DATA for each wanted chunk → DONE    payloads travel only when the gateway asked for them
    GET   → DATA for each verified piece …, DONE         only chunks that DONE lists are hits
    other requests → DONE
    ERROR may come in place of any frame of the gateway

Over a Unix socket a gateway may lend a window of its memory, whose descriptor comes with the frame that gives it. Then
payloads need not travel: PLACES says where in the window they lie, or shall lie, from the first chunk on; those that it
does not name travel as before. A window belongs to its connection and ends with it, or with the next WINDOW:

    WINDOW → WINDOW                                      between exchanges
    PUT    → WANTED, PLACES …, DATA … → DONE             the bytes are in their places when PLACES is sent
    PLACES, GET → OPENED for verified chunks …, DATA …, DONE

Until the answer of such a PUT the client leaves its bytes as they are and says nothing more. One that gives up ends the
connection before it uses the memory again: the gateway commits nothing whose client had left when all was read.
"""

from __future__ import annotations

import math
import struct
from enum import IntEnum
from functools import cache
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvgw.errors import Code, KvgwError, Outage, RequestRefused, from_code
from kvgw.kvformat import CHUNK_BYTES_MAX
from kvgw.model import KEYS_MAX, Request

VERSION: Final = 1
VERSIONS: Final = (1, 1)
"""Lowest and highest wire version that this release speaks."""

PREFIX: Final = struct.Struct(">2sBBIIIQQ")
HEADER_BYTES_MAX: Final = 1024 * 1024
WINDOW_BYTES_MAX: Final = 2**40
_MAGIC: Final = b"KG"

Message = TypeVar("Message")


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    WELCOME = 2
    REQUEST = 3
    WANTED = 4
    DATA = 5
    DONE = 6
    ERROR = 7
    WINDOW = 8
    PLACES = 9
    OPENED = 10


class Hello(Struct, frozen=True):
    """The client's first words."""

    versions: tuple[int, int]
    client: str
    token: str | None = None
    """None: the Unix socket's peer credentials speak for the client."""

    def __repr__(self) -> str:
        return f"Hello(versions={self.versions}, client={self.client!r}, token={'…' if self.token else None})"


class Welcome(Struct, frozen=True):
    """The gateway's answer: who it is and what the client is to it."""

    version: int
    server: str
    node: str
    tenant: str
    default_namespace: str
    lends: bool = False
    """WINDOW may be asked for on this connection."""


class WindowAsked(Struct, frozen=True):
    """The client asks for a window, in bytes; the one that it has ends with this."""

    least: Annotated[int, Meta(ge=1, le=WINDOW_BYTES_MAX)]
    most: Annotated[int, Meta(ge=1, le=WINDOW_BYTES_MAX)]


class WindowGiven(Struct, frozen=True):
    """The window's length; its descriptor comes along. 0, and none: there is no room for `least` bytes."""

    nbytes: int


class Places(Struct, frozen=True):
    """Offsets in the window: of the next wanted chunks of a PUT, or of the first chunks of the GET that follows."""

    offsets: Annotated[list[Annotated[int, Meta(ge=0, le=WINDOW_BYTES_MAX)]], Meta(min_length=1, max_length=KEYS_MAX)]


class Opened(Struct, frozen=True):
    """Batch indices of chunks that lie whole and verified in their places."""

    indices: list[int]


class Wanted(Struct, frozen=True):
    """Batch indices, ascending, whose payloads the gateway wants; the client sends DATA for each, in this order."""

    indices: list[int]


class Failure(Struct, frozen=True):
    """An error as it travels."""

    code: Code
    message: str
    retry_after_ms: int = 0

    def error(self) -> KvgwError:
        error = from_code(self.code, self.message, self.retry_after_ms / 1000)
        error.answered = True
        return error


class Frame(Struct, frozen=True):
    """A frame's prefix, taken apart."""

    kind: Kind
    request_id: int
    header_bytes: int
    index: int = 0
    offset: int = 0
    payload_bytes: int = 0


def encode_prefix(frame: Frame) -> bytes:
    """The 32 bytes before header and payload."""
    return PREFIX.pack(
        _MAGIC,
        VERSION,
        frame.kind,
        frame.request_id,
        frame.header_bytes,
        frame.index,
        frame.offset,
        frame.payload_bytes,
    )


def decode_prefix(data: bytes | bytearray | memoryview) -> Frame:
    """Take a prefix apart. Raises `RequestRefused` for what cannot be a frame of this protocol."""
    magic, version, kind, request_id, header_bytes, index, offset, payload_bytes = PREFIX.unpack(data)
    if magic != _MAGIC:
        raise RequestRefused("not a frame of the kvgw protocol: wrong magic")
    if version != VERSION:
        raise RequestRefused(
            f"frame of wire version {version}; this side speaks {VERSIONS[0]} to {VERSIONS[1]}",
            Code.UNSUPPORTED_VERSION,
        )
    known = _KINDS.get(kind)
    if known is None:
        raise RequestRefused(f"unknown kind of frame {kind}")
    if header_bytes > HEADER_BYTES_MAX:
        raise RequestRefused(f"frame header of {header_bytes} bytes is over the limit of {HEADER_BYTES_MAX}")
    if offset + payload_bytes > CHUNK_BYTES_MAX:
        raise RequestRefused(f"frame payload ends at byte {offset + payload_bytes}, over {CHUNK_BYTES_MAX}")
    return Frame(known, request_id, header_bytes, index, offset, payload_bytes)


def encode(message: Struct) -> bytes:
    """Encode a header. Raises `RequestRefused` for a value that no header can hold."""
    try:
        return _ENCODER.encode(message)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise RequestRefused(f"{type(message).__name__} cannot be sent: {error}") from error


def decode(data: bytes | bytearray | memoryview, kind: type[Message]) -> Message:
    """Decode a header that must be `kind`. Raises `RequestRefused` naming the field that is wrong.

    Fields that this release does not know are ignored, so that a newer peer of the same wire version is understood.
    """
    try:
        found: Message = _decoder(kind).decode(data)  # type: ignore[arg-type]  # a class is hashable
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise RequestRefused(f"malformed {kind.__name__}: {error}") from error
    return found


@cache
def _decoder(kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def decode_request(data: bytes | bytearray | memoryview) -> Request:
    """Decode the header of a request frame."""
    try:
        return _REQUESTS.decode(data)
    except msgspec.ValidationError as error:
        code = Code.TOO_MANY_KEYS if "$.keys" in str(error) and "length <=" in str(error) else Code.BAD_REQUEST
        raise RequestRefused(f"malformed request: {error}", code) from error
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise RequestRefused(f"malformed request: {error}") from error


def agree_version(offered: tuple[int, int]) -> int:
    """The highest version both sides speak. Raises `RequestRefused` naming both ranges."""
    low, high = max(offered[0], VERSIONS[0]), min(offered[1], VERSIONS[1])
    if low > high:
        raise RequestRefused(
            f"the client speaks wire versions {offered[0]} to {offered[1]}, the gateway {VERSIONS[0]} to "
            f"{VERSIONS[1]}; bring both to releases that share one",
            Code.UNSUPPORTED_VERSION,
        )
    return high


def failure(error: KvgwError) -> Failure:
    """An error as it travels."""
    return Failure(error.code, str(error), math.ceil(error.retry_after_s * 1000))


def broken(what: str) -> Outage:
    """The error of a connection that ended or went out of step."""
    return Outage(f"the connection to the gateway {what}", Code.UNAVAILABLE)


_KINDS: Final = {int(kind): kind for kind in Kind}
_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
