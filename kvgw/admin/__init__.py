"""The HTTP face of a gateway: health, metrics, and the verbs of operators and tenants, one module a subject.

Each module has an `APIRouter` that `kvgw.admin.app` mounts. A route says what it needs in its first line
(`Seat.require…`), finds whom it is about (`Seat.tenant`, `Seat.namespace`), and calls the catalog or a room.
"""
