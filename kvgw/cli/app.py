"""The command line: its options shared by all commands, and errors as one sentence with an exit code.

Exit codes: 0 done · 1 refused or failed · 2 wrong usage · 3 no gateway answers · 130 interrupted.
"""

from __future__ import annotations

import sys

import typer
from rich.text import Text

from kvgw.cli.ondemand import OPTIONS, OnDemand
from kvgw.cli.output import error_console
from kvgw.errors import Code, KvgwError, Outage
from storage.errors import StorageError
from tenancy.errors import TenancyError

app = typer.Typer(
    name="kvgw",
    cls=OnDemand,
    epilog="Start with: kvgw serve   ·   then in another shell: kvgw status",
    no_args_is_help=True,
    **OPTIONS,
)


@app.callback()
def kvgw() -> None:
    """Multi-tenant KV-cache object storage gateway on S3 and NVMe."""


def main() -> None:
    """Entry point of the ``kvgw`` script."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except (KvgwError, StorageError, TenancyError) as error:
        error_console().print(Text.assemble(("kvgw:", "bold red"), " ", str(error)), soft_wrap=True)
        sys.exit(3 if isinstance(error, Outage) and error.code is Code.UNAVAILABLE else 1)
