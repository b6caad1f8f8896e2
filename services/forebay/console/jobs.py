"""What-if jobs: comparisons of a recorded span with another configuration, each in a process of its own."""

import asyncio
from collections import OrderedDict
from typing import Literal

import msgspec

from forebay import runtime
from forebay.ingress.child_process import ChildProcess
from forebay.ingress.errors import ApiError

RUNNING_MAX = 1  # a comparison uses a whole core
KEPT_MAX = 32  # finished jobs whose results clients can still read

JobState = Literal["running", "done", "failed", "cancelled"]


class WhatIf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Alternative configuration to compare with the recorded one, on a span. `sets` are `[POOL:]PATH=VALUE`."""

    from_us: int | None = None
    to_us: int | None = None
    policy: str = ""
    sets: tuple[str, ...] = ()


class WhatIfFrame(msgspec.Struct, frozen=True, omit_defaults=True):
    """Message of the process of a job: progress, the report or an error. The last two end the job."""

    done: int = 0
    total: int = 0
    report: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: str = ""


class JobStatus(WhatIfFrame, frozen=True, kw_only=True):
    job: str
    state: JobState


class _Job:
    def __init__(self, job_id: str, child: ChildProcess) -> None:
        self.status = JobStatus(job=job_id, state="running")
        self.child = child
        self.task: asyncio.Task[None] | None = None

    async def run(self, message: bytes) -> None:
        try:
            await self.child.send(message)
            while self.status.state == "running":
                self._follow(msgspec.json.decode(await self.child.receive(), type=WhatIfFrame))
        except (OSError, EOFError):
            self._replace(state="failed", error="the process of the comparison ended; see the console's log")
        finally:
            await self.child.kill()

    def cancel(self) -> None:
        if self.status.state == "running" and self.task is not None:
            self._replace(state="cancelled")
            self.task.cancel()

    def _follow(self, frame: WhatIfFrame) -> None:
        if frame.error:
            self._replace(state="failed", error=frame.error)
        elif frame.report is not msgspec.UNSET:
            self._replace(state="done", report=frame.report)
        else:
            self._replace(done=frame.done, total=frame.total)

    def _replace(self, **changes: object) -> None:
        self.status = msgspec.structs.replace(self.status, **changes)


class WhatIfJobs:
    def __init__(self, module: str, setup: bytes) -> None:
        self._module = module
        self._setup = setup
        self._jobs: OrderedDict[str, _Job] = OrderedDict()

    def start(self, wanted: WhatIf) -> JobStatus:
        """Start a job. Raises ApiError (503) if another one runs."""
        running = [job for job in self._jobs.values() if job.status.state == "running"]
        if len(running) >= RUNNING_MAX:
            text = f"the comparison {running[0].status.job} is running; wait for it or cancel it"
            raise ApiError(503, "what_if_busy", text)
        job = _Job(runtime.random_id(), ChildProcess(self._module, self._setup))
        job.task = asyncio.create_task(job.run(msgspec.json.encode(wanted)), name="what-if")
        self._jobs[job.status.job] = job
        while len(self._jobs) > KEPT_MAX:
            self._jobs.popitem(last=False)
        return job.status

    def status(self, job_id: str) -> JobStatus:
        """Return the state of a job. Raises ApiError (404) for an unknown job."""
        return self._job(job_id).status

    def cancel(self, job_id: str) -> JobStatus:
        """Cancel a job if it runs, and return its state. Raises ApiError (404) for an unknown job."""
        job = self._job(job_id)
        job.cancel()
        return job.status

    async def close(self) -> None:
        for job in self._jobs.values():
            job.cancel()
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _job(self, job_id: str) -> _Job:
        if job_id not in self._jobs:
            text = f"unknown job {job_id!r}; the console keeps the last {KEPT_MAX} jobs while it runs"
            raise ApiError(404, "job_not_found", text)
        return self._jobs[job_id]
