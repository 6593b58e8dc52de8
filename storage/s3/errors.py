"""Foreign errors become the data plane's, with a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, SSLError

from storage.errors import BlobMissing, StorageError, TierFull, TierMisconfigured, TierUnavailable
from storage.s3.options import S3Options

_MISSING: Final = frozenset({"NoSuchKey", "NoSuchVersion", "404"})
_FULL: Final = frozenset({"XMinioStorageFull", "InsufficientStorage", "QuotaExceeded", "507"})
_CREDENTIALS: Final = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "TokenRefreshRequired"}
)
_DENIED: Final = frozenset({"AccessDenied", "AllAccessDisabled", "AccountProblem", "403", "401"})
_ELSEWHERE: Final = frozenset({"PermanentRedirect", "TemporaryRedirect", "Redirect", "301", "302", "303", "307", "308"})
_REGION: Final = frozenset({"AuthorizationHeaderMalformed", "IllegalLocationConstraintException"})
_SKEWED: Final = frozenset({"RequestTimeTooSkewed"})
_SENTENCE_MAX: Final = 200


def code_of(error: ClientError) -> str:
    """The S3 error code, or the HTTP status where an answer has no body."""
    return str(_details(error).get("Code", ""))


def translated(error: Exception, options: S3Options, act: str) -> StorageError:
    """The data plane's error for a botocore, aiohttp or time-out error met while trying to `act`."""
    if isinstance(error, ClientError):
        return _refused(error, options, act)
    if isinstance(error, NoCredentialsError):
        return TierMisconfigured(
            f"this machine has no S3 credentials for {options.place}; give it a role, or set access_key_id and "
            "secret_access_key"
        )
    cause = _cause(error)
    if isinstance(error, SSLError) and "certificate" in cause.lower():
        return TierMisconfigured(
            f"the certificate of {options.place} is not trusted: {cause}; set ca_file to the authority that signed it"
        )
    if isinstance(error, TimeoutError):
        return TierUnavailable(f"could not {act} in {options.place} within {options.request_timeout_s} s")
    return TierUnavailable(f"could not {act} in {options.place}: {cause}")


def plain(text: str) -> str:
    """Text of a server as one short printable line."""
    line = " ".join(text.split())
    return "".join(character for character in line if character.isprintable())[:_SENTENCE_MAX]


def _refused(error: ClientError, options: S3Options, act: str) -> StorageError:
    code = code_of(error)
    place = options.place
    if code in _MISSING:
        return BlobMissing(f"could not {act}: there is none in {place}")
    if code == "NoSuchBucket":
        return TierMisconfigured(f"there is no {place}; make the bucket or name another")
    if code in _CREDENTIALS:
        return TierMisconfigured(
            f"{place} does not accept the access key ({code}); check both its halves and the token"
        )
    if code in _DENIED:
        return TierMisconfigured(
            f"{place} denied to {act} ({code}); allow this access key to list the bucket and to get, put and delete "
            f"below {options.prefix or 'it'}"
        )
    if code in _SKEWED:
        return TierMisconfigured(_skew(_details(error), place))
    if code in _ELSEWHERE or code in _REGION:
        return TierMisconfigured(_elsewhere(error, options))
    if code in _FULL:
        return TierFull(f"could not {act} in {place}: it is full ({code})")
    return TierUnavailable(f"could not {act} in {place}: {code} {plain(str(_details(error).get('Message', '')))}")


def _skew(details: Mapping[str, object], place: str) -> str:
    ours, theirs = details.get("RequestTime", "unknown"), details.get("ServerTime", "unknown")
    return (
        f"the clocks of this machine ({plain(str(ours))}) and of {place} ({plain(str(theirs))}) are too far apart; "
        "synchronise them"
    )


def _elsewhere(error: ClientError, options: S3Options) -> str:
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = headers.get("x-amz-bucket-region") or _details(error).get("Region")
    target = plain(str(region or headers.get("location") or _details(error).get("Endpoint") or "another place"))
    return f"{options.place} sends requests on to {target}, which is not followed; set region and endpoint_url to it"


def _details(error: ClientError) -> Mapping[str, object]:
    details: Mapping[str, object] = error.response.get("Error", {})
    return details


def _cause(error: Exception) -> str:
    """What went wrong below botocore where it says so, else botocore's own sentence."""
    inner = error.kwargs.get("error") if isinstance(error, BotoCoreError) else None
    return plain(str(inner or error) or type(error).__name__)
