"""HTTP API options of `forebay up` and `forebay ingress`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from forebay.cli.common.credentials import (
    AdminTokenFileOption,
    ApiKeyFileOption,
    ApiKeysOption,
    api_keys,
    required_token,
)
from forebay.cli.common.options import Option
from forebay.ingress.body_limits import MEDIA_BYTES_MAX, TEXT_BYTES_MAX
from forebay.ingress.media.tokens import MediaSettings
from forebay.processes.names import names
from forebay.runtime.errors import ConfigError

if TYPE_CHECKING:
    from forebay.ingress.http.endpoint import Endpoint
    from forebay.ingress.settings import IngressSettings


def _bytes_max(media: str) -> Any:
    text = f"Maximum bytes of a request body {media} images and videos. Larger bodies get 413."
    return Option(min=1_024, max=1 << 30, help=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    PANEL: ClassVar = "HTTP API"

    api_key: ApiKeysOption = field(default=None, repr=False)
    api_key_file: ApiKeyFileOption = None
    allow_anonymous: Annotated[
        bool, Option("--allow-anonymous", help="Serve other machines without an API key, if there is none.")
    ] = False
    ssl_certfile: Annotated[Path | None, Option(help="Serve HTTPS with this certificate, a PEM file.")] = None
    ssl_keyfile: Annotated[
        Path | None, Option(help="Private key of the certificate. Default: the key in --ssl-certfile.")
    ] = None
    cors_allow_origin: Annotated[
        list[str] | None,
        Option(
            metavar="ORIGIN", help="Origin whose web pages may use the API, as https://app.example, or *. Repeatable."
        ),
    ] = None
    routing_hints: Annotated[
        bool, Option("--routing-hints", help="Accept worker, priority, session and policy class from clients.")
    ] = False
    ignore_unknown_fields: Annotated[
        bool, Option("--ignore-unknown-fields", help="Ignore unknown fields of request bodies. Default: reject them.")
    ] = False
    admin_api: Annotated[
        bool,
        Option(
            "--admin-api", help="Serve the admin API: commands, busy thresholds and disaggregation. Requires a token."
        ),
    ] = False
    admin_token_file: AdminTokenFileOption = None
    allow_host: Annotated[list[str] | None, Option(help="Additional allowed value of the Host header. Repeatable.")] = (
        None
    )
    tool_call_parser: Annotated[
        str, Option(help="Tool call parser: auto (by chat template), none, or a parser name.")
    ] = "auto"
    reasoning_parser: Annotated[
        str, Option(help="Reasoning parser: auto (by chat template), none, or a parser name.")
    ] = "auto"
    media_allow_host: Annotated[
        list[str] | None,
        Option(help="Private host from which images may be fetched, or * for all, in tests. Repeatable."),
    ] = None
    body_bytes_max: Annotated[int, _bytes_max("without")] = TEXT_BYTES_MAX
    media_body_bytes_max: Annotated[int, _bytes_max("with")] = MEDIA_BYTES_MAX
    timeout_s: Annotated[float, Option(min=0.001, max=86_400, help="Timeout of a request in seconds.")] = 600.0

    def settings(self, **others: Any) -> "IngressSettings":
        """Return the settings of an ingress, with `others` by field. Raises ConfigError if an option is invalid."""
        # Imported here, so that other commands do not wait for an HTTP server to load.
        from forebay.ingress.http.guards import allowed_origins  # noqa: PLC0415
        from forebay.ingress.settings import IngressSettings  # noqa: PLC0415

        hosts = names("--media-allow-host", self.media_allow_host)
        return IngressSettings(
            routing_hints=self.routing_hints,
            ignore_unknown_fields=self.ignore_unknown_fields,
            api_keys=api_keys(self.api_key, self.api_key_file),
            cors_origins=allowed_origins(tuple(self.cors_allow_origin or ())),
            admin_token=required_token(self.admin_token_file, admin_api=self.admin_api),
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            media=MediaSettings(tuple(one for one in hosts if one != "*"), allow_private="*" in hosts),
            body_bytes_max=self.body_bytes_max,
            media_body_bytes_max=self.media_body_bytes_max,
            timeout_s=self.timeout_s,
            **others,
        )

    def endpoint(self, host: str, port: int) -> "Endpoint":
        """Return the address at which an ingress serves HTTP. Raises ConfigError if the certificate cannot be used."""
        from forebay.ingress.http.endpoint import Endpoint, TlsFiles  # noqa: PLC0415

        if self.ssl_certfile is None and self.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile requires --ssl-certfile")
        return Endpoint(
            host=host,
            port=port,
            allow_hosts=tuple(self.allow_host or ()),
            allow_anonymous=self.allow_anonymous,
            tls=None if self.ssl_certfile is None else TlsFiles(self.ssl_certfile, self.ssl_keyfile),
        )
