"""Tables outside tenants: gateway processes, who does which shared job, and the catalog's clock."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, CheckConstraint, Column, Integer, String, Table, false

from tenancy.schema.base import metadata

gateway_process = Table(
    "gateway_process",
    metadata,
    Column("boot_id", String(32), primary_key=True),
    Column("node", String(64), nullable=False),
    Column("version", String(32), nullable=False),
    Column("started_ms", BigInteger, nullable=False),
    Column("heartbeat_ms", BigInteger, nullable=False),
    Column("left_ms", BigInteger),
    Column("alone", String(64)),
    Column("coherent", Boolean, nullable=False, server_default=false()),
)

maintenance_lease = Table(
    "maintenance_lease",
    metadata,
    Column("job", String(32), primary_key=True),
    Column("owner", String(32), nullable=False),
    Column("until_ms", BigInteger, nullable=False),
)

clock_mark = Table(
    "clock_mark",
    metadata,
    Column("mark_id", Integer, primary_key=True),
    Column("high_water_ms", BigInteger, nullable=False),
    Column("generation", BigInteger, nullable=False, server_default="0"),
    CheckConstraint("mark_id = 1", name="single"),
)
