"""Routes that compare a span of the log with another configuration."""

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from forebay.console.console import Console
from forebay.console.jobs import WhatIf
from forebay.console.routes_derived import json_response
from forebay.ingress.errors import invalid
from forebay.ingress.http.body import read_body

BODY_BYTES_MAX = 1 << 16


def add_what_if_routes(app: FastAPI, console: Console) -> None:
    """Add the routes to `app`."""

    @app.post("/v1/console/what-if")
    async def start(request: Request) -> Response:
        """Start a comparison, and return its job."""
        try:
            wanted = msgspec.json.decode(await read_body(request, BODY_BYTES_MAX), type=WhatIf)
        except msgspec.DecodeError as error:
            raise invalid(f"the body is invalid: {error}") from error
        if not wanted.policy and not wanted.sets:
            raise invalid("nothing is changed; give another policy, or at least one setting in sets", "policy")
        console.require_policy(wanted.policy, wanted.sets)
        return json_response(msgspec.json.encode(console.jobs.start(wanted)))

    @app.get("/v1/console/what-if/{job}")
    async def status(job: str) -> Response:
        """Return the state of a job, with the report once it is done."""
        return json_response(msgspec.json.encode(console.jobs.status(job)))

    @app.delete("/v1/console/what-if/{job}")
    async def cancel(job: str) -> Response:
        """Cancel a job."""
        return json_response(msgspec.json.encode(console.jobs.cancel(job)))
