"""Requests to an S3 bucket by boto3, with the reasons of failures that stores report."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from forebay.workers.engine import EngineError, PackageMissing

URL = re.compile(r"s3://([A-Za-z0-9][A-Za-z0-9.\-]{1,61}[A-Za-z0-9])(?:/(.*))?")
CONNECT_S = 3.0
READ_S = 10.0  # without a byte of a response
TRIES = 2  # per request; the caller may compute instead of waiting
CONNECTIONS = 16
DELETE_MAX = 1000  # objects per request, a limit of S3

DENIED = frozenset(
    {"401", "403", "AccessDenied", "AllAccessDisabled", "ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
)
FULL = frozenset({"507", "EntityTooLarge", "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"})
MISSING = frozenset({"404", "NoSuchKey", "NotFound"})
UNSUPPORTED = frozenset({"501", "NotImplemented"})
EXISTS = frozenset({"409", "412", "ConditionalRequestConflict", "PreconditionFailed"})

DESCRIPTION_BYTES_MAX = 64 << 10  # of `store.json` and `identity.json`
NO_OPTIONS: Mapping[str, str] = {}


class BucketError(Exception):
    """A request failed. The message tells why.

    Attributes:
        reason: one of `READ_REASONS` or `WRITE_REASONS`, `exists`, or `unsupported`.
    """

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


class ListedObject(NamedTuple):
    """Object in a listing.

    Attributes:
        key: key of the object, without the prefix of the store.
        written_s: when it was written, seconds since 1970.
    """

    key: str
    bytes: int
    written_s: float


class Credentials(NamedTuple):
    """Credentials of requests, in the order of NIXL's parameters `access_key`, `secret_key` and `session_token`."""

    access_key: str
    secret_key: str
    session_token: str


class Bucket:
    """Objects below a prefix of a bucket. Thread-safe.

    Args:
        url: `s3://BUCKET/PREFIX`.
        endpoint: URL of the S3 endpoint; empty for that of boto3's configuration.

    Attributes:
        prefix: the prefix, empty or with a slash at its end.

    Raises:
        EngineError: the URL is invalid.
        PackageMissing: boto3 is not installed.
    """

    def __init__(self, url: str, endpoint: str = "") -> None:
        try:
            import boto3  # noqa: PLC0415 - a third of a second, and an extra
            from botocore.config import Config  # noqa: PLC0415
            from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415
        except ImportError as error:
            raise PackageMissing(
                f"a store in a bucket requires the package boto3 ({error}); install it with: pip install"
                " 'forebay[kv-tiers]'"
            ) from error
        found = URL.fullmatch(url)
        if found is None:
            raise EngineError(f"{url}: not a bucket; expected s3://BUCKET or s3://BUCKET/PREFIX")
        self.url = url
        self.name = found[1]
        prefix = (found[2] or "").strip("/")
        self.prefix = f"{prefix}/" if prefix else ""
        self._session = boto3.session.Session()
        config = Config(
            connect_timeout=CONNECT_S,
            read_timeout=READ_S,
            retries={"total_max_attempts": TRIES, "mode": "standard"},
            max_pool_connections=CONNECTIONS,
            # Blocks have checksums of their own, and not every server knows those of newer SDKs.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"} if endpoint else None,
        )
        self._errors = (BotoCoreError, ClientError)
        try:
            self._client = self._session.client("s3", endpoint_url=endpoint or None, config=config)
        except (*self._errors, ValueError) as error:
            raise EngineError(f"cannot use {url}: {error}") from error
        self.endpoint = str(self._client.meta.endpoint_url)
        self.region = str(self._client.meta.region_name)
        self.is_custom = bool(endpoint) or "amazonaws.com" not in self.endpoint

    def credentials(self) -> Credentials:
        """Return the current credentials. Raises BucketError if there are none."""
        found = self._call("find credentials for", "", self._session.get_credentials)
        if found is None:
            raise BucketError(
                f"there are no credentials for {self.url}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or"
                " configure a profile",
                "denied",
            )
        frozen = found.get_frozen_credentials()
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token or "")

    def get(self, key: str, limit: int = DESCRIPTION_BYTES_MAX) -> bytes:
        """Return the first `limit` bytes of an object. Raises BucketError."""

        def read() -> Any:  # two steps that may fail
            return self._client.get_object(**self._at(key))["Body"].read(limit)

        return bytes(self._call("read", key, read))

    def get_or_create(self, key: str, content: bytes) -> bytes:
        """Return the content of an object, which is created with `content` if it does not exist. Raises BucketError."""
        try:
            return self.get(key)
        except BucketError as error:
            if error.reason != "missing":
                raise
        try:
            self.put(key, content, {"IfNoneMatch": "*"})
        except BucketError as error:
            if error.reason == "unsupported":  # two processes that start at the same time may create different ones
                self.put(key, content)
            elif error.reason != "exists":
                raise
        return self.get(key)

    def put(self, key: str, content: bytes | memoryview, options: Mapping[str, str] = NO_OPTIONS) -> None:
        """Write an object. Raises BucketError.

        Args:
            options: further arguments of boto3's `put_object`.
        """
        self._call("write", key, lambda: self._client.put_object(**self._at(key), Body=bytes(content), **options))

    def move(self, key: str, to: str) -> None:
        """Move an object. Raises BucketError."""
        source = {"Bucket": self.name, "Key": self.prefix + key}
        self._call("copy", key, lambda: self._client.copy_object(**self._at(to), CopySource=source))
        self.delete([key])

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. Objects that do not exist are ignored. Raises BucketError."""
        for begin in range(0, len(keys), DELETE_MAX):
            objects = [{"Key": self.prefix + key} for key in keys[begin : begin + DELETE_MAX]]
            found = self._call(
                "delete",
                keys[begin],
                lambda: self._client.delete_objects(Bucket=self.name, Delete={"Objects": objects, "Quiet": True}),  # noqa: B023
            )
            for one in found.get("Errors", ()):
                code = one.get("Code", "")
                raise BucketError(f"cannot delete {one.get('Key')} from {self.name}: {code}", _reason(code))

    def pages(self, folder: str = "") -> Iterator[list[ListedObject]]:
        """Yield all objects below a folder, at most 1,000 per page. Raises BucketError."""
        start = self.prefix + folder
        pages = iter(self._client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=start))
        while (page := self._call("list", folder, lambda: next(pages, None))) is not None:
            yield [
                ListedObject(one["Key"][len(self.prefix) :], one["Size"], one["LastModified"].timestamp())
                for one in page.get("Contents", ())
            ]

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self.name, "Key": self.prefix + key}

    def _call(self, verb: str, key: str, act: Any) -> Any:
        try:
            return act()
        except self._errors as error:
            response = getattr(error, "response", None) or {}
            code = str(response.get("Error", {}).get("Code", ""))
            where = f"s3://{self.name}/{self.prefix}{key}"
            raise BucketError(f"cannot {verb} {where}: {error}", _reason(code or type(error).__name__)) from error
        except OSError as error:  # a connection that breaks while a body is read
            raise BucketError(f"cannot {verb} s3://{self.name}/{self.prefix}{key}: {error}", "failed") from error


def _reason(code: str) -> str:
    if code in MISSING:
        return "missing"
    if code in DENIED or code in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
        return "denied"
    if code in EXISTS:
        return "exists"
    if code in UNSUPPORTED:
        return "unsupported"
    return "full" if code in FULL else "failed"
