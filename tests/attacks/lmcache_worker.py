"""One engine's LMCache, without the engine: keys by its token database, bytes through one of its storage backends.

Run by the interpreter of an environment with LMCache, not by kvgw's own; it imports nothing of kvgw.

    python lmcache_worker.py '{"remote_url": "lm://127.0.0.1:65432", "dtype": "bfloat16", …}'

Each line on standard input is a request, each on standard output its answer, both JSON objects. `op` is one of put,
get, delete, overwrite and path. What LMCache itself prints goes to standard error.
"""

import asyncio
import importlib.metadata
import json
import os
import sys
import threading
import time

import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend
from lmcache.v1.token_database import ChunkedTokenDatabase

TOKENS, LAYERS, HEADS, SIZE = 16, 2, 2, 8
STORED_S = 10.0


class Engine:
    """What LMCache's cache engine holds, for one process of an inference engine."""

    def __init__(self, wanted):
        settings = {name: wanted[name] for name in ("remote_url", "local_disk", "extra_config") if name in wanted}
        if "local_disk" in settings:
            settings["max_local_disk_size"] = 0.1
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS, local_cpu=False, max_local_cpu_size=0.1, remote_serde="naive", **settings
        )
        self.metadata = LMCacheMetadata(
            model_name="test/model",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=getattr(torch, wanted["dtype"]),
            kv_shape=(LAYERS, 2, TOKENS, HEADS, SIZE),
            chunk_size=TOKENS,
        )
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        self.memory = LocalCPUBackend(config, self.metadata, "cpu")
        if "local_disk" in settings:
            self.backend = LocalDiskBackend(config, loop, self.memory, "cpu", None, self.metadata)
        else:
            self.backend = RemoteBackend(config, self.metadata, loop, self.memory, "cpu")
        self.loop = loop
        self.database = ChunkedTokenDatabase(config, self.metadata)

    def key(self, asked):
        # As its cache engine does: from the tokens, and from what a request may say of itself. There is no place for an
        # adapter or a revision of the weights.
        said = {"lmcache.tag.salt": asked["salt"]} if asked["salt"] else None
        ((_, _, key),) = self.database.process_tokens(tokens=asked["tokens"], request_configs=said)
        return key

    def filled(self, payload):
        made = self.memory.allocate(self.metadata.get_shapes(), self.metadata.get_dtypes(), MemoryFormat.KV_2LTD)
        memoryview(made.byte_array).cast("B")[:] = payload
        return made

    def put(self, asked):
        key, made = self.key(asked), self.filled(bytes.fromhex(asked["payload"]))
        self.backend.submit_put_task(key, made)
        until = time.monotonic() + STORED_S
        while not self.backend.contains(key):
            if time.monotonic() > until:
                raise RuntimeError("it was not stored")
            time.sleep(0.02)

    def get(self, asked):
        key = self.key(asked)
        if not self.backend.contains(key):
            return None
        (found,) = self.backend.batched_get_blocking([key])  # the one way that every connector has
        return None if found is None else bytes(memoryview(found.byte_array).cast("B")).hex()

    def delete(self, asked):
        return bool(self.backend.remove(self.key(asked)))

    def overwrite(self, asked):
        """As any client of the same store may: put other bytes under the key."""
        made = self.filled(bytes.fromhex(asked["payload"]))
        connection = self.backend.connection
        inner = getattr(connection, "_connector", connection)
        if hasattr(inner, "store"):
            return inner.store.upsert(self.key(asked).to_string(), bytes.fromhex(asked["payload"]))
        asyncio.run_coroutine_threadsafe(connection.put(self.key(asked), made), self.loop).result(STORED_S)
        return 0

    def path(self, asked):
        """What the store calls the chunk."""
        key = self.key(asked)
        return self.backend._key_to_path(key) if isinstance(self.backend, LocalDiskBackend) else key.to_string()


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = Engine(json.loads(sys.argv[1]))
    print(json.dumps({"version": importlib.metadata.version("lmcache")}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"result": getattr(engine, asked["op"])(asked)}
        except Exception as error:  # the attack says what it makes of it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    os._exit(0)  # its threads do not end by themselves


if __name__ == "__main__":
    main()
