"""Tables of the catalog (SQLAlchemy Core), the same on SQLite and PostgreSQL.

Every table of a tenant leads its keys with tenant and namespace, so that no constraint can reveal another tenant's
row. Times are Unix milliseconds. Migrations in ``migrations/`` create these tables; a test compares the two.
"""

from tenancy.schema import states
from tenancy.schema.base import TENANT_SCOPE, UNLIMITED, metadata, owned
from tenancy.schema.chunks import UNSETTLED, chunk, entry, entry_label, kv_format, placement, tombstone, unexpired
from tenancy.schema.processes import clock_mark, gateway_process, maintenance_lease
from tenancy.schema.records import (
    audit_checkpoint,
    audit_head,
    audit_record,
    deletion_blob,
    deletion_job,
    usage_hour,
)
from tenancy.schema.tenants import api_token, namespace, namespace_key, quota, reservation, tenant
from tenancy.schema.versions import VERSION_MAX, tenant_version, version_seen

__all__ = [
    "TENANT_SCOPE",
    "UNLIMITED",
    "UNSETTLED",
    "VERSION_MAX",
    "api_token",
    "audit_checkpoint",
    "audit_head",
    "audit_record",
    "chunk",
    "clock_mark",
    "deletion_blob",
    "deletion_job",
    "entry",
    "entry_label",
    "gateway_process",
    "kv_format",
    "maintenance_lease",
    "metadata",
    "namespace",
    "namespace_key",
    "owned",
    "placement",
    "quota",
    "reservation",
    "states",
    "tenant",
    "tenant_version",
    "tombstone",
    "unexpired",
    "usage_hour",
    "version_seen",
]
