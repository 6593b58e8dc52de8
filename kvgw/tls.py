"""TLS contexts: version 1.2 or later, certificates checked, and a server certificate that can be renewed in place."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from kvgw.errors import FormatError

log = logging.getLogger("kvgw.tls")


def client_context(ca_file: str | None) -> ssl.SSLContext:
    """A context that checks the gateway's certificate and name, against the system's authorities or `ca_file`."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise FormatError(f"the certificate authority file {ca_file!r} cannot be used: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


class ServerCertificate:
    """The gateway's certificate and key in files; renewed files are taken up by the next connection."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises `FormatError` when the files are no usable pair."""
        self._files = (certificate, key)
        self._seen = self._versions()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """The context for a new connection. Files that are broken while they are being replaced are not taken up."""
        seen = self._versions()
        if seen != self._seen:
            try:
                self._context = self._load()
            except FormatError as error:
                log.warning("the renewed certificate is not used, the one before stays: %s", error)
            else:
                log.info("the renewed certificate %s is in use", self._files[0])
            self._seen = seen
        return self._context

    def _versions(self) -> tuple[tuple[int, int], ...]:
        try:
            return tuple((status.st_mtime_ns, status.st_ino) for status in (file.stat() for file in self._files))
        except OSError:
            return ()

    def _load(self) -> ssl.SSLContext:
        certificate, key = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # Without a password of its own OpenSSL would ask the terminal for one, and wait.
            context.load_cert_chain(certificate, key, password="")
        except (OSError, ssl.SSLError) as error:
            raise FormatError(
                f"{certificate} and {key} are no usable certificate and key (server.tls_cert_file, "
                f"server.tls_key_file): {error}"
            ) from error
        return context
