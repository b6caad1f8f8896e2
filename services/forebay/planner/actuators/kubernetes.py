"""Actuator that sets the number of replicas of Deployments and StatefulSets of Kubernetes.

Theory of operation. Kubernetes starts and ends the pods. It sends SIGTERM to the pods that it removes, the workers in
them drain, and `terminationGracePeriodSeconds` of the pod is the limit. The actuator reads all workloads of a decision
before it changes one, so a missing workload or permission changes nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import msgspec
from kubernetes import client, config
from urllib3.exceptions import HTTPError

from forebay import runtime
from forebay.core.scaling.state import PoolKey
from forebay.live.planner.actuator import ActuatorError, Reached
from forebay.runtime.errors import ConfigError

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
READ_S = 10.0  # the API server answers within milliseconds, unless it is overloaded
TRIES = 4
PAUSE_S = 0.5  # before the second try, doubled for each further one
RETRIED = frozenset(
    {
        HTTPStatus.CONFLICT,
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.INTERNAL_SERVER_ERROR,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)
MESSAGE_CHARS_MAX = 300  # of an error of the API server
MERGE_PATCH = "application/merge-patch+json"


@dataclass(frozen=True, slots=True)
class PodSet:
    kind: Literal["deployment", "statefulset"]
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


def connect(kubeconfig: str | None) -> client.AppsV1Api:
    """Return a client of the API server, which connects later. Without a kubeconfig, the pod's service account is used.

    Raises ConfigError if there is no valid configuration.
    """
    settings = client.Configuration()
    try:
        if kubeconfig is None:
            config.load_incluster_config(client_configuration=settings)
        else:
            config.load_kube_config(config_file=kubeconfig, client_configuration=settings, persist_config=False)
    except Exception as error:  # a malformed file raises errors of many kinds
        where = "the service account of this pod" if kubeconfig is None else kubeconfig
        text = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"cannot connect to Kubernetes with {where}: {text}") from error
    settings.retries = False  # the actuator retries, within limits
    return client.AppsV1Api(client.ApiClient(settings))


class KubernetesActuator:
    def __init__(self, pod_sets: Mapping[PoolKey, PodSet], api: client.AppsV1Api) -> None:
        self.name = "kubernetes"
        self.pools = frozenset(pod_sets)
        self._pod_sets = pod_sets
        self._api = api

    async def scale(self, sizes: Mapping[PoolKey, int]) -> Reached:
        """Set the replicas of pools. Pods start and drain later.

        Raises ActuatorError if a pool cannot be read, or none can be changed.
        """
        reached = {pool: await self._read(self._pod_sets[pool]) for pool in sizes}
        problems, failures = [], 0
        for pool, size in sizes.items():
            if reached[pool] == size:
                continue
            pod_set = self._pod_sets[pool]
            try:
                was, reached[pool] = reached[pool], await self._write(pod_set, size)
            except ActuatorError as error:
                problems.append(str(error))
                failures += 1
                continue
            logger.info("%s: %d replicas, before %d", pod_set, reached[pool], was)
            if reached[pool] != size:
                problems.append(f"{pod_set} has {reached[pool]} replicas instead of {size}; the API server changed it")
        if failures == len(sizes):
            raise ActuatorError("; ".join(problems))
        return Reached(reached, "; ".join(problems))

    async def _read(self, pod_set: PodSet) -> int:
        methods = {
            "deployment": self._api.read_namespaced_deployment_scale,
            "statefulset": self._api.read_namespaced_stateful_set_scale,
        }
        return await self._request(pod_set, methods[pod_set.kind])

    async def _write(self, pod_set: PodSet, size: int) -> int:
        methods = {
            "deployment": self._api.patch_namespaced_deployment_scale,
            "statefulset": self._api.patch_namespaced_stateful_set_scale,
        }
        body = {"spec": {"replicas": size}}
        return await self._request(pod_set, methods[pod_set.kind], body=body, _content_type=MERGE_PATCH)

    async def _request(self, pod_set: PodSet, method: Callable[..., Any], **arguments: Any) -> int:
        """Call a method of the client, with retries, and return the replicas in its response. Raises ActuatorError."""
        arguments["_request_timeout"] = (CONNECT_S, READ_S)
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(PAUSE_S * 2.0 ** (attempt - 1))
            try:
                scale = await runtime.offload(method, pod_set.name, pod_set.namespace, **arguments)
                return int(scale.spec.replicas or 0)
            except client.ApiException as error:
                problem = f"{pod_set}: {_text(error)}"
                if error.status not in RETRIED:
                    break
            except HTTPError as error:
                problem = f"{pod_set}: the API server does not respond: {error}"[:MESSAGE_CHARS_MAX]
            except (AttributeError, ValueError) as error:
                problem = f"{pod_set}: unexpected response of the API server: {error}"[:MESSAGE_CHARS_MAX]
                break
        raise ActuatorError(problem)


class _Status(msgspec.Struct):
    message: str = ""


def _text(error: client.ApiException) -> str:
    """Return status and message of an error of the API server, and what to do."""
    try:
        message = msgspec.json.decode(error.body or "", type=_Status).message
    except msgspec.MsgspecError:
        message = ""
    text = f"HTTP {error.status} {message or error.reason}"[:MESSAGE_CHARS_MAX]
    match error.status:
        case HTTPStatus.FORBIDDEN:
            return f"{text}; allow `get` and `patch` on its scale subresource"
        case HTTPStatus.NOT_FOUND:
            return f"{text}; check its namespace and name"
        case _:
            return text
