"""The command line: its options shared by all commands, and errors as one sentence with an exit code.

Exit codes: 0 done · 1 refused or failed · 2 wrong usage · 3 no gateway answers · 130 interrupted.
"""

from __future__ import annotations

import sys

import typer
from rich.text import Text

from kvgw.cli import (
    audit,
    bench,
    catalog,
    deletions,
    doctor,
    fsck,
    inspect,
    keys,
    namespaces,
    nodes,
    recount,
    replay,
    scrub,
    serve,
    tenants,
    tokens,
    upkeep,
    usage,
)
from kvgw.cli.output import error_console
from kvgw.errors import Code, KvgwError, Outage
from storage.errors import StorageError
from tenancy.errors import TenancyError

app = typer.Typer(
    name="kvgw",
    help="Multi-tenant KV-cache object storage gateway on S3 and NVMe.",
    epilog="Start with: kvgw serve   ·   then in another shell: kvgw status",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("serve")(serve.serve)
app.command("migrate")(catalog.migrate)
app.command("status")(inspect.status)
app.command("stats")(inspect.stats)
app.command("doctor")(doctor.doctor)
app.command("backup")(upkeep.backup)
app.command("restore")(upkeep.restore)
app.command("wipe")(upkeep.wipe)
app.command("usage")(usage.usage)
app.command("explain")(usage.explain)
app.command("recount")(recount.recount)
app.command("fsck")(fsck.fsck)
app.command("scrub")(scrub.scrub)
app.command("bench")(bench.bench)
app.command("replay")(replay.replay)
app.command("delete")(deletions.delete)
app.command("verify-receipt")(deletions.verify_receipt)
app.add_typer(deletions.deletions, name="deletions")
app.add_typer(tenants.tenants, name="tenant")
app.add_typer(namespaces.namespaces, name="namespace")
app.add_typer(tokens.tokens, name="token")
app.add_typer(keys.keys, name="keys")
app.add_typer(nodes.nodes, name="node")
app.add_typer(audit.audit, name="audit")


def main() -> None:
    """Entry point of the ``kvgw`` script."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except (KvgwError, StorageError, TenancyError) as error:
        error_console().print(Text.assemble(("kvgw:", "bold red"), " ", str(error)), soft_wrap=True)
        sys.exit(3 if isinstance(error, Outage) and error.code is Code.UNAVAILABLE else 1)
