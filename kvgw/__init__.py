"""kvgw: a multi-tenant KV-cache object storage gateway on S3 and NVMe.

The SDK, which is what an engine imports:

    async with kvgw.connect("unix:/path/to/kvgw.sock") as client:
        registered = await client.register(kv_format)
        keys = registered.keys(tokens)
        report = await client.get(registered, keys, buffers)
"""

from kvgw.client import Client, ClientOptions, connect
from kvgw.errors import Code, FormatError, KvgwError, Outage, RequestRefused
from kvgw.keys import MultimodalItem, prefix_keys
from kvgw.kvformat import KVFormat, LayerGroup
from kvgw.model import Durability, Hit, Label, Outcome, PutOutcome
from kvgw.reports import GetReport, Match, PutReport, Registered, Touched

__version__ = "0.1.0"

__all__ = [
    "Client",
    "ClientOptions",
    "Code",
    "Durability",
    "FormatError",
    "GetReport",
    "Hit",
    "KVFormat",
    "KvgwError",
    "Label",
    "LayerGroup",
    "Match",
    "MultimodalItem",
    "Outage",
    "Outcome",
    "PutOutcome",
    "PutReport",
    "Registered",
    "RequestRefused",
    "Touched",
    "connect",
    "prefix_keys",
]
