"""HTTP API options of `forebay up` and `forebay ingress`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli.common.admin_token import AdminTokenFileOption, required_token
from forebay.cli.processes.options import (
    AdminApiOption,
    AllowHostOption,
    BodyBytesMaxOption,
    MediaAllowHostOption,
    MediaAllowPrivateOption,
    MediaBodyBytesMaxOption,
    ReasoningParserOption,
    RoutingHintsOption,
    ToolCallParserOption,
    names,
)
from forebay.ingress.http.body_limits import MEDIA_BYTES_MAX, TEXT_BYTES_MAX
from forebay.ingress.media.refs import MediaSettings

if TYPE_CHECKING:
    from forebay.ingress.settings import IngressSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Options of the HTTP API. Each field is a command-line option."""

    routing_hints: RoutingHintsOption = False
    admin_api: AdminApiOption = False
    admin_token_file: AdminTokenFileOption = None
    allow_host: AllowHostOption = None
    tool_call_parser: ToolCallParserOption = "auto"
    reasoning_parser: ReasoningParserOption = "auto"
    media_allow_host: MediaAllowHostOption = None
    media_allow_private: MediaAllowPrivateOption = False
    body_bytes_max: BodyBytesMaxOption = TEXT_BYTES_MAX
    media_body_bytes_max: MediaBodyBytesMaxOption = MEDIA_BYTES_MAX
    timeout_s: Annotated[float, typer.Option(min=0.001, max=86_400, help="Timeout of a request in seconds.")] = 600.0

    def settings(self, **others: Any) -> "IngressSettings":
        """Return the settings of an ingress from these options.

        Args:
            others: Settings that no HTTP option sets, by the name of their field in `IngressSettings`.

        Raises:
            Unusable: The admin API has no token, or a host name is invalid.
        """
        # Imported here, so that other commands do not wait for an HTTP server to load.
        from forebay.ingress.settings import IngressSettings  # noqa: PLC0415

        return IngressSettings(
            routing_hints=self.routing_hints,
            admin_token=required_token(self.admin_token_file, admin_api=self.admin_api),
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            media=MediaSettings(names("--media-allow-host", self.media_allow_host), self.media_allow_private),
            body_bytes_max=self.body_bytes_max,
            media_body_bytes_max=self.media_body_bytes_max,
            timeout_s=self.timeout_s,
            **others,
        )
