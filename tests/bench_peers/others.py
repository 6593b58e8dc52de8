"""The peers as contenders: server and client, each for as long as its bracket. Raise `BenchError`."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Final

from kvgw.bench.plan import MIB
from kvgw.bench.processes import Child
from kvgw.bench.protocol import Done
from kvgw.bench.redis import redis_server
from tests.bench_peers import client as client_module
from tests.bench_peers import servers
from tests.bench_peers.contenders import ANSWER_SECONDS, About, Contender, Peer
from tests.bench_peers.environments import Environment, Needs
from tests.bench_peers.places import BucketPlace
from tests.bench_peers.plan import CASES, Tier
from tests.bench_peers.protocol import OpenPeer, SegmentReady

MEMORY_MIB: Final = 2048
"""What a server may hold: several rounds' worth."""

NEEDS: Final = {
    "redis": Needs(
        "redis",
        program="redis-server",
        packages=("redis-server", "redis-tools", "libatomic1", "libjemalloc2", "liblzf1"),
    ),
    "memcached": Needs("memcached", program="memcached", packages=("memcached", "libevent-2.1-7")),
    "lmcache": Needs("lmcache"),
    "mooncake": Needs(
        "mooncake", library="ibverbs", packages=("libibverbs1", "libnl-3-200", "libnl-route-3-200", "libnuma1")
    ),
    "obstore": Needs("obstore"),
}


@asynccontextmanager
async def redis(subject: str, environment: Environment, folder: Path) -> AsyncIterator[Contender]:
    """Redis in memory only, on a Unix socket, through the raw client or redis-py."""
    program = _with_variables(environment, folder)
    async with redis_server(str(program), folder, "unix") as server:
        said = server.version if subject == "redis" else f"{server.version}, redis-py {_version(environment, 'redis')}"
        about = About(subject, said, "unix", "memory")
        async with _client(about, subject, str(server.endpoint), folder, environment) as one:
            yield Peer(about, one, (server.pid,))


@asynccontextmanager
async def memcached(environment: Environment, folder: Path) -> AsyncIterator[Contender]:
    """memcached on a Unix socket."""
    path = folder / "memcached.sock"
    command = [str(environment.program), "-s", str(path), "-a", "0700", "-I", "64m", "-m", str(MEMORY_MIB), "-t", "2"]
    if os.geteuid() == 0:
        command += ["-u", "root"]  # it asks for a user where root starts it; its socket is in a folder of root's own
    log = folder / "memcached.log"
    async with servers.server("memcached", command, environment.variables, log, servers.unix_answers(path)) as pid:
        said = f"{_server_version(environment)}, pymemcache {_version(environment, 'pymemcache')}"
        about = About("memcached", said, "unix", "memory")
        async with _client(about, "memcached", f"unix:{path}", folder, environment) as one:
            yield Peer(about, one, (pid,))


@asynccontextmanager
async def lmcache(environment: Environment, folder: Path) -> AsyncIterator[Contender]:
    """LMCache's remote server, which speaks TCP."""
    port = servers.free_port()
    command = [str(environment.python), "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"]
    log = folder / "lmcache.log"
    async with servers.server("lmcache_server", command, environment.variables, log, servers.tcp_answers(port)) as pid:
        about = About("lmcache_server", _version(environment, "lmcache"), "tcp", "memory")
        async with _client(about, "lmcache", f"127.0.0.1:{port}", folder, environment) as one:
            yield Peer(about, one, (pid,))


@asynccontextmanager
async def mooncake(environment: Environment, folder: Path) -> AsyncIterator[Contender]:
    """Mooncake's master, and the memory in a process of its own, over TCP."""
    (master_program,) = environment.python.parent.parent.glob("lib/python*/site-packages/mooncake/mooncake_master")
    master = servers.free_port()
    command = [str(master_program), "-rpc_address", "127.0.0.1", "-rpc_port", str(master)]
    command += ["-metrics_port", str(servers.free_port())]
    async with AsyncExitStack() as stack:
        log = folder / "master.log"
        answers = servers.tcp_answers(master)
        pid = await stack.enter_async_context(
            servers.server("mooncake_master", command, environment.variables, log, answers)
        )
        segment = await stack.enter_async_context(
            servers.client(
                "Mooncake's memory",
                "tests.bench_peers.peers.mooncake",
                *map(str, (master, servers.free_port(), MEMORY_MIB * MIB)),
                log=folder / "segment.log",
                python=environment.python,
                variables=environment.variables,
            )
        )
        await segment.hear(SegmentReady, servers.START_SECONDS)
        about = About("mooncake", _version(environment, "mooncake-transfer-engine-non-cuda"), "tcp", "memory")
        where = f"{master},{servers.free_port()}"
        one = await stack.enter_async_context(_client(about, "mooncake", where, folder, environment))
        yield Peer(about, one, (pid, segment.pid))


@asynccontextmanager
async def s3(subject: str, bucket: BucketPlace, folder: Path) -> AsyncIterator[Contender]:
    """aiobotocore of the developers' own environment, tuned or as it comes. The S3 server's CPU time is not counted."""
    about = About(f"aiobotocore {subject.removeprefix('s3-')}", version("aiobotocore"), "http", "s3")
    async with _client(about, subject, bucket.line(), folder, None) as one:
        yield Peer(about, one, ())


@asynccontextmanager
async def obstore(environment: Environment, bucket: BucketPlace, folder: Path) -> AsyncIterator[Contender]:
    """The same with obstore, in an environment of its own."""
    about = About("obstore", _version(environment, "obstore"), "http", "s3")
    async with _client(about, "s3-obstore", bucket.line(), folder, environment) as one:
        yield Peer(about, one, ())


@asynccontextmanager
async def _client(
    about: About, subject: str, where: str, folder: Path, environment: Environment | None
) -> AsyncIterator[Child]:
    tier: Tier = about.tier
    async with servers.client(
        f"client of {about.system}",
        client_module.__name__,
        log=folder / "client.log",
        python=environment.python if environment else None,
        variables=environment.variables if environment else None,
    ) as one:
        stored = max(case.stored_bytes for case in CASES[tier])
        call = max(case.call_bytes for case in CASES[tier])
        one.tell(OpenPeer(subject, where, stored, call))
        await one.hear(Done, ANSWER_SECONDS)
        yield one


def _version(environment: Environment, distribution: str) -> str:
    sites = [str(path) for path in environment.python.parent.parent.glob("lib/python*/site-packages")]
    return next(one.version for one in distributions(name=distribution, path=sites))


def _server_version(environment: Environment) -> str:
    run = subprocess.run(
        [str(environment.program), "-V"], env=_merged(environment.variables), capture_output=True, text=True, check=True
    )
    found = re.search(r"\d[\w.]*", run.stdout)
    return found[0] if found else "unknown"


def _with_variables(environment: Environment, folder: Path) -> Path:
    """The program, or a script that starts it with the environment's variables."""
    assert environment.program is not None
    if not environment.variables:
        return environment.program
    script = folder / environment.program.name
    exports = [f"export {name}='{value}'" for name, value in environment.variables.items()]
    script.write_text("\n".join(["#!/bin/sh", *exports, f"exec '{environment.program}' \"$@\"", ""]))
    script.chmod(0o700)
    return script


def _merged(variables: Mapping[str, str]) -> dict[str, str]:
    return os.environ | dict(variables)
