"""The laws, asked of everything that there is: rows, bucket, disks and memory, by one who sees all of it at once."""

from __future__ import annotations

from typing import Any, Final

from kvgw.verify import verify_catalog
from tenancy.audit.verifying import Finding
from tenancy.schema import TENANT_SCOPE
from tests.simulation.world import Node, World

_COUNTED: Final = """
SELECT q.tenant_id, q.scope_id, q.stored_bytes, q.objects, q.s3_bytes, q.limit_bytes, q.limit_objects, q.limit_s3_bytes,
  (SELECT coalesce(sum(sealed_length), 0) FROM chunk c WHERE c.tenant_id = q.tenant_id AND c.namespace_id = q.scope_id)
  + (SELECT coalesce(sum(bytes), 0) FROM reservation r
     WHERE r.tenant_id = q.tenant_id AND r.namespace_id = q.scope_id),
  (SELECT count(*) FROM chunk c WHERE c.tenant_id = q.tenant_id AND c.namespace_id = q.scope_id)
  + (SELECT coalesce(sum(objects), 0) FROM reservation r
     WHERE r.tenant_id = q.tenant_id AND r.namespace_id = q.scope_id),
  (SELECT coalesce(sum(length), 0) FROM placement p
   WHERE p.tenant_id = q.tenant_id AND p.namespace_id = q.scope_id AND p.tier = 's3')
  + (SELECT coalesce(sum(s3_bytes), 0) FROM reservation r
     WHERE r.tenant_id = q.tenant_id AND r.namespace_id = q.scope_id)
FROM quota q
"""
_STRAY: Final = (
    (
        "live chunks without an entry",
        "SELECT count(*) FROM chunk c WHERE c.state = 'live' AND NOT EXISTS (SELECT 1 FROM entry e WHERE "
        "e.tenant_id = c.tenant_id AND e.namespace_id = c.namespace_id AND e.blob_id = c.blob_id)",
    ),
    (
        "entries whose chunk is on its way out",
        "SELECT count(*) FROM entry e JOIN chunk c USING (tenant_id, namespace_id, blob_id) WHERE c.state <> 'live'",
    ),
    (
        "placements that a dying chunk keeps",
        "SELECT count(*) FROM placement p JOIN chunk c USING (tenant_id, namespace_id, blob_id) "
        "WHERE c.state <> 'live' AND p.state <> 'doomed'",
    ),
)


class Laws:
    """Looks at a world whose transactions are all whole: between any two of them."""

    def __init__(self, world: World) -> None:
        self._world = world

    def look(self) -> None:
        """What must hold at every moment: laws 1 and 4, and that rows agree with each other."""
        self._world.counts["inspections"] += 1
        self._check_counters()
        self._check_placed()
        for what, statement in _STRAY:
            ((count,),) = self._rows(statement)
            if count:
                self._world.breach(f"rows disagree: {count} {what}")

    def unsettled(self) -> list[str]:
        """What is still to be done before nothing is; empty when all has settled."""
        found = [f"{count} {what}" for what, count in self._waiting().items() if count]
        rows = {(tier, node, name) for tier, node, name in self._rows("SELECT tier, node, object FROM placement")}
        there = {("s3", "", name) for name in self._world.bucket.objects}
        for node in self._world.nodes:
            there |= {("nvme", node.name, name) for name in node.disk.visible}
            if node.serving is None:
                found.append(f"{node.letter} does not serve")
            elif dirty := node.serving.rooms.staging.dirty_names():
                found.append(f"{len(dirty)} blobs that wait in the staging of {node.name}, as {dirty[0]}")
        if there - rows:
            found.append(f"{len(there - rows)} blobs without a row, as {min(there - rows)}")
        if rows - there:
            found.append(f"{len(rows - there)} rows without a blob, as {min(rows - there)}")
        return found

    async def at_the_end(self, node: Node) -> None:
        """In a gateway that has settled: memory (law 7), fsck, and the audit log."""
        opened, world = node.serving, self._world
        assert opened is not None
        now = opened.rooms.staging.statistics()
        held = {
            "windows": now.windows.used_bytes,
            "drafts": now.draft_bytes,
            "being filled": now.filling_bytes,
            "gone but in use": now.gone_bytes,
            "lingering": now.lingering,
            "waiters": now.waiters,
            "handlers": len(node.process.handlers) - 1 if node.process else 0,  # this look is one
            "PUTs at work": int(opened.rooms.outbox.foreground),
        }
        if any(held.values()):
            world.breach(f"law 7: {node.name} still holds {held}")
        report = await opened.crew.fsck.run()
        if report.verdict != "clean":
            world.breach(
                f"fsck at {node.name}: {report.verdict}: {report.findings[:3]} {report.refused} {report.unseen}"
            )
        verdict = await verify_catalog(opened.rooms.catalog._database, opened.rooms.signer.public_key, {})
        if verdict.finding is not Finding.WHOLE:
            world.breach(f"the audit log: {verdict.sentence}")

    def _check_counters(self) -> None:
        sums: dict[str, list[int]] = {}
        whole: dict[str, list[int]] = {}
        for tenant, scope, *numbers in self._rows(_COUNTED):
            counters, limits, counted = numbers[:3], numbers[3:6], numbers[6:]
            if any(have > most for have, most in zip(counters, limits, strict=True)):
                self._world.breach(f"law 4: {counters} of {scope} is over its limits {limits}")
            if scope == TENANT_SCOPE.hex:
                whole[tenant] = counters
                continue
            if counters != counted:
                self._world.breach(f"law 4: the counters of {scope} are {counters}, its rows {counted}")
            sums[tenant] = [a + b for a, b in zip(sums.get(tenant, [0, 0, 0]), counters, strict=True)]
        for tenant, counters in whole.items():
            if counters != sums.get(tenant, [0, 0, 0]):
                self._world.breach(f"law 4: a tenant has {counters}, its namespaces together {sums.get(tenant)}")

    def _check_placed(self) -> None:
        """Law 1: where a row says that a blob is, it is, and would be after a loss of power."""
        disks = {node.name: node.disk for node in self._world.nodes}
        statement = "SELECT tier, node, object, length FROM placement WHERE state = 'ok'"
        for tier, node, name, length in self._rows(statement):
            if tier == "s3":
                blob = self._world.bucket.objects.get(name)
            elif node in disks:
                blob = disks[node].durable.get(name)
                if blob is not None and not blob.synced:
                    self._world.breach(f"law 1: {name} is on {node}, but was never synced")
            else:
                continue  # of a disk that was lost
            if blob is None or len(blob.data) != length:
                self._world.breach(f"law 1: a row says that {tier} {node} has {name}, and it has not")

    def _waiting(self) -> dict[str, int]:
        questions = {
            "reservations": "SELECT count(*) FROM reservation",
            "chunks that are to go": "SELECT count(*) FROM chunk WHERE state <> 'live'",
            "placements that are not done": "SELECT count(*) FROM placement WHERE state NOT IN ('ok', 'quarantined')",
            "deletion jobs": "SELECT count(*) FROM deletion_job WHERE state <> 'done'",
        }
        return {what: int(self._rows(statement)[0][0]) for what, statement in questions.items()}

    def _rows(self, statement: str) -> list[tuple[Any, ...]]:
        return self._world.connection.execute(statement).fetchall()
