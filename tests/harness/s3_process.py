"""An S3 server (moto) in a process of its own, for tests with vLLM: its worker cannot start in a process with moto."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import boto3
import httpx

from infra.kafka.kafka import HOST
from tests.harness.local import free_ports

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}  # of clients of the server; boto3 and NIXL read them from the environment
READY_S = 60.0


@contextmanager
def s3_server(bucket: str) -> Iterator[str]:
    port = free_ports(1)
    command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://{HOST}:{port}"
    try:
        ends_s = time.monotonic() + READY_S
        while not _is_ready(url):
            assert process.poll() is None and time.monotonic() < ends_s, "moto has not started"
            time.sleep(0.1)
        s3_client(url).create_bucket(Bucket=bucket)
        yield url
    finally:
        process.terminate()
        process.wait()


def s3_client(url: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
    )


def use_credentials() -> None:
    """Set the credentials in the environment of this process, for engines that it starts."""
    os.environ.update(CREDENTIALS)


def _is_ready(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=1.0).is_success
    return False
