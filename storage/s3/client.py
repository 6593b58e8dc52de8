"""Making an S3 client: it talks to its endpoint and nothing else, and takes no setting from the environment unasked."""

from __future__ import annotations

import copy
import errno
import functools
import ipaddress
import os
import socket
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace
from typing import Final

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from aiohttp.abc import ResolveResult
from botocore.awsrequest import AWSPreparedRequest, AWSRequest, AWSResponse

from storage.s3.api import S3Client
from storage.s3.options import S3Options
from storage.s3.upload import UploadBody

_NO_FILES: Final = {
    # name: (key in the file, environment variable, default, conversion)
    "profile": (None, None, None, None),
    "config_file": (None, None, os.devnull, None),
    "credentials_file": (None, None, os.devnull, None),
}


class DirectHttp(AIOHTTPSession):  # type: ignore[misc]  # aiobotocore has no types
    """HTTP that follows no redirect: a signed request, its token and its body go to the endpoint or nowhere."""

    async def send(self, request: AWSPreparedRequest) -> AWSResponse:
        mark_redirected(request)
        return await super().send(request)

    async def _get_session(self, proxy_url: str | None) -> SimpleNamespace:
        session = await super()._get_session(proxy_url)
        return SimpleNamespace(request=functools.partial(session.request, allow_redirects=False))


def mark_redirected(request: AWSPreparedRequest) -> None:
    """botocore goes to another region's endpoint once: let it think that it did."""
    region = request.context.get("s3_redirect")
    if region is not None:
        region["redirected"] = True


class GuardedResolver(aiohttp.ThreadedResolver):
    """Names that resolve to a link-local address are refused: metadata services live there, S3 does not."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await super().resolve(host, port, family)
        for result in found:
            if ipaddress.ip_address(result["host"].partition("%")[0]).is_link_local:
                raise OSError(errno.EACCES, f"{host} resolves to the link-local address {result['host']}")
        return found


def make_session(*, instance_credentials: bool) -> AioSession:
    """A session that looks for credentials, in files and elsewhere, only if it is to use this machine's own."""
    return AioSession() if instance_credentials else AioSession(session_vars=_NO_FILES)


def make_client(options: S3Options, http: type[DirectHttp] = DirectHttp) -> AbstractAsyncContextManager[S3Client]:
    """A client for `options`, closed by its context manager, that sends through `http`.

    No request is made. Only `instance_credentials` makes entering it read the environment, shared files or the
    metadata service.
    """
    session = make_session(instance_credentials=options.instance_credentials)
    session.register("before-sign.s3.PutObject", _leave_blob_unsigned)
    client: AbstractAsyncContextManager[S3Client] = session.create_client(
        "s3",
        region_name=options.region,
        endpoint_url=options.endpoint_url,
        aws_access_key_id=options.access_key_id,
        aws_secret_access_key=options.secret_access_key,
        aws_session_token=options.session_token,
        verify=str(options.ca_file) if options.ca_file and options.verify_tls else options.verify_tls,
        config=_config(options, http),
    )
    return client


def _leave_blob_unsigned(request: AWSRequest, **_: object) -> None:
    """Sign a blob's headers and not its bytes: a SHA-256 of them costs more than to seal them, and they are sealed.

    What else travels, deletions among it, is signed whole where there is no TLS.
    """
    if isinstance(request.data, UploadBody):
        config = copy.copy(request.context["client_config"])
        config.s3 = {**config.s3, "payload_signing_enabled": False}
        request.context["client_config"] = config


def _config(options: S3Options, http: type[DirectHttp]) -> AioConfig:
    return AioConfig(
        http_session_cls=http,
        connector_args={"resolver": GuardedResolver()},
        # An empty mapping means none; without a mapping botocore takes those that the environment names.
        proxies=None if options.use_proxy else {},
        signature_version="s3v4",
        s3={"addressing_style": options.addressing_style, "payload_signing_enabled": not options.encrypted},
        request_checksum_calculation=options.checksums,
        response_checksum_validation=options.checksums,
        retries={"mode": "standard", "total_max_attempts": options.attempts_max},
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.request_timeout_s,
        max_pool_connections=options.connections_max,
        defaults_mode="legacy",
        ignore_configured_endpoint_urls=True,
    )
