"""A key management service of three calls that speaks AWS KMS's protocol, and misbehaves on demand.

It refuses what the real one refuses: a ciphertext under another encryption context or another key, a key that is
disabled, about to be deleted or gone. `hang` answers nothing; `faults` are answers that come first.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

HEAD_END = b"\r\n\r\n"


def arn_of(number: int) -> str:
    return f"arn:aws:kms:eu-north-1:123456789012:key/00000000-0000-0000-0000-{number:012d}"


class Refused(Exception):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass
class FakeKms:
    """The service, on a free port of 127.0.0.1 while its context lasts."""

    states: dict[str, str] = field(default_factory=dict)
    """Keys by ARN with their `KeyState`."""
    faults: deque[tuple[int, str]] = field(default_factory=deque)
    """HTTP status and error type of the next answers."""
    hang: bool = False
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    _keys: dict[str, bytes] = field(default_factory=dict)
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    def add_key(self, number: int = 1) -> str:
        arn = arn_of(number)
        self.states[arn] = "Enabled"
        self._keys[arn] = os.urandom(32)
        return arn

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in list(self._open):
            writer.close()
        await self._server.wait_closed()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while True:
                head = (await reader.readuntil(HEAD_END)).decode("latin-1")
                lines = head.strip().split("\r\n")[1:]
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = json.loads(await reader.readexactly(int(headers.get("content-length", "0"))))
                call = headers["x-amz-target"].partition(".")[2]
                self.calls.append((call, body))
                while self.hang:
                    await asyncio.sleep(0.01)
                writer.write(self._answer(call, body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away
        finally:
            self._open.discard(writer)
            writer.close()

    def _answer(self, call: str, body: dict[str, Any]) -> bytes:
        if self.faults:
            status, kind = self.faults.popleft()
            return _reply(status, {"__type": kind, "message": f"planned, about {json.dumps(body)}"})
        try:
            return _reply(200, getattr(self, f"_{call.lower()}")(body))
        except Refused as refused:
            return _reply(400, {"__type": refused.kind, "message": f"about {json.dumps(body)}"})

    def _usable(self, arn: str) -> bytes:
        state = self.states.get(arn)
        if state is None:
            raise Refused("NotFoundException")
        if state == "Disabled":
            raise Refused("DisabledException")
        if state != "Enabled":
            raise Refused("KMSInvalidStateException")
        return self._keys[arn]

    def _encrypt(self, body: dict[str, Any]) -> dict[str, Any]:
        key, nonce = self._usable(body["KeyId"]), os.urandom(12)
        sealed = AESGCM(key).encrypt(nonce, base64.b64decode(body["Plaintext"]), _context(body))
        blob = body["KeyId"].encode().ljust(100) + nonce + sealed
        return {"CiphertextBlob": base64.b64encode(blob).decode(), "KeyId": body["KeyId"]}

    def _decrypt(self, body: dict[str, Any]) -> dict[str, Any]:
        blob = base64.b64decode(body["CiphertextBlob"])
        arn = blob[:100].decode("latin-1").strip()
        if arn != body["KeyId"]:
            raise Refused("IncorrectKeyException")
        try:
            plain = AESGCM(self._usable(arn)).decrypt(blob[100:112], blob[112:], _context(body))
        except InvalidTag:
            raise Refused("InvalidCiphertextException") from None
        return {"Plaintext": base64.b64encode(plain).decode(), "KeyId": arn}

    def _describekey(self, body: dict[str, Any]) -> dict[str, Any]:
        arn = body["KeyId"]
        if arn not in self.states:
            raise Refused("NotFoundException")
        return {"KeyMetadata": {"KeyId": arn.rpartition("/")[2], "Arn": arn, "KeyState": self.states[arn]}}


def _context(body: dict[str, Any]) -> bytes:
    return json.dumps(body.get("EncryptionContext", {}), sort_keys=True).encode()


def _reply(status: int, document: dict[str, Any]) -> bytes:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 {status} Whatever\r\nContent-Type: application/x-amz-json-1.1\r\nContent-Length: {len(body)}"
    return head.encode() + HEAD_END + body
