"""The rooms a gateway works with, opened and handed over by `kvgw.wiring`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvgw.fence import Fence
from kvgw.gateway.arrivals import Arrivals
from kvgw.gateway.backlog import Backlog
from kvgw.gateway.coherence import Coherence
from kvgw.gateway.diskroom import DiskRoom
from kvgw.gateway.index import MatchIndex
from kvgw.gateway.leases import MatchLeases
from kvgw.gateway.limiter import Limiter
from kvgw.gateway.meter import Meter
from kvgw.gateway.outbox import Outbox
from kvgw.gateway.recent import RecentRows
from kvgw.gateway.turns import Turns
from kvgw.metrics import Metrics
from kvgw.runtime import Clock, Rng, Workers
from kvgw.witness import Witness
from storage.lending import Lending
from storage.staging import Staging
from storage.tier import Tier
from storage.tracing import Tracer
from tenancy.catalog import Catalog
from tenancy.deletion.deletions import Deletions
from tenancy.keys.keyring import Keyring
from tenancy.keys.signing import Signer
from tenancy.timekeeping import CatalogTime


@dataclass(frozen=True, slots=True)
class Rooms:
    """Everything that the gateway's verbs and its maintenance share."""

    catalog: Catalog
    keyring: Keyring
    staging: Staging
    lending: Lending
    tiers: Mapping[str, Tier]
    """By label, fastest first: ``nvme``, ``s3``."""
    tracers: Mapping[str, Tracer]
    """By the label of the tier that each looks through."""
    deletions: Deletions
    backlog: Backlog
    arrivals: Arrivals
    index: MatchIndex
    coherence: Coherence | None
    """None: nobody else writes."""
    metrics: Metrics
    limiter: Limiter
    turns: Turns
    meter: Meter
    clock: Clock
    time: CatalogTime
    """What the catalog's rows are compared with: never runs backward."""
    fence: Fence
    leases: MatchLeases
    outbox: Outbox
    disk_room: DiskRoom
    rng: Rng
    workers: Workers
    signer: Signer
    witness: Witness
    recent: RecentRows = field(default_factory=RecentRows)

    def placement_node(self, tier: str) -> str:
        """The node in a placement of this tier: this one for its own disk, none for what all nodes share."""
        return self.catalog.node.node if tier == "nvme" else ""

    @property
    def intended_tiers(self) -> tuple[tuple[str, str], ...]:
        """Tiers that every chunk is meant for, with the node of each."""
        return tuple((tier, self.placement_node(tier)) for tier in self.tiers)
