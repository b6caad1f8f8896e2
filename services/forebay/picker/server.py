"""gRPC server of the external processor: one stream per request of the gateway."""

import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc.aio

from forebay.ingress.errors import ApiError, internal_error
from forebay.picker.exchange import Exchange
from forebay.picker.messages import METHOD, ProcessingRequest, ProcessingResponse, header_mutation
from forebay.picker.servers import Fallback
from forebay.runtime.errors import ConfigError

logger = logging.getLogger(__name__)


async def process(fallback: Fallback, messages: AsyncIterator[Any], context: Any) -> None:
    """Answer the messages of the gateway about one request, until the gateway ends the stream."""
    exchange = None
    try:
        exchange = Exchange(fallback)
        async for message in messages:
            for response in await exchange.respond(message):
                await context.write(response)
    except ApiError as error:
        await context.write(_rejection(fallback, error, exchange))
    except Exception:
        logger.exception("a request of the gateway failed")
        await context.write(_rejection(fallback, internal_error(), exchange))
    finally:
        if exchange is not None:
            exchange.close()


def _rejection(fallback: Fallback, error: ApiError, exchange: Exchange | None) -> Any:
    fallback.models.front.metrics.reject(error.code)
    fallback.count("rejected")
    headers = header_mutation({"content-type": "application/json", **error.headers()})
    body = error.encoded("" if exchange is None else exchange.path)
    return ProcessingResponse(immediate_response={"status": {"code": error.status}, "headers": headers, "body": body})


def build_server(fallback: Fallback, host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """Return a server that is not started yet, and its port. Raises ConfigError if it cannot listen."""
    service, method = METHOD
    rpc = grpc.stream_stream_rpc_method_handler(
        partial(process, fallback),
        request_deserializer=ProcessingRequest.FromString,
        response_serializer=ProcessingResponse.SerializeToString,
    )
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])  # a second process on the port fails
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: rpc}),))
    try:
        bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error}); choose another --port") from error
    return server, bound
