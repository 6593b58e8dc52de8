"""A slot that holds, or is about to hold, a sealed blob, and the grips that brackets have on it."""

from __future__ import annotations

from enum import Enum
from uuid import UUID

from storage.arena import Slot
from storage.errors import StorageError


class State(Enum):
    """Where a resident is in its life. Only filling, clean and dirty ones are found by name.

    ::

        draft ─────┬─▶ dirty ◀──▶ clean ──▶ (evicted)
                   └────────────────▲
        filling ────────────────────┘          any ──▶ gone ──▶ (slot freed with the last grip)
    """

    DRAFT = "draft"
    """Being sealed by one bracket; has no name yet."""
    FILLING = "filling"
    """Being read from a tier by one of its grips."""
    CLEAN = "clean"
    """Whole, and every tier that shall have it has it."""
    DIRTY = "dirty"
    """Whole, and due in some tier: not evictable."""
    GONE = "gone"
    """Dropped, failed, or never published: nobody finds it."""

    __hash__ = object.__hash__  # the books are kept by state: Enum's own is a call in Python for each entry


_CLEAN, _DIRTY = State.CLEAN, State.DIRTY
"""A member is looked up in Python too, and this is asked of every chunk that is read."""


class Part(Enum):
    """What the holder of a grip has to do."""

    FILL = "fill"
    """Fill the slot, then report."""
    WAIT = "wait"
    """Wait for the one who fills."""
    READY = "ready"
    """Use the bytes."""
    FAILED = "failed"
    """Leave: the blob could not be had, `Grip.error` says why."""


class Grip:
    """One bracket's use of a resident: while it lasts the slot is neither evicted nor reused."""

    __slots__ = ("error", "part", "resident", "tenant", "was_resident")

    def __init__(self, resident: Resident, tenant: UUID, part: Part, *, was_resident: bool) -> None:
        self.resident = resident
        self.tenant = tenant
        self.part = part
        self.was_resident = was_resident
        self.error: StorageError | None = None

    @property
    def slot(self) -> Slot:
        return self.resident.slot


class Resident:
    """A slot with its state. Each tenant that keeps it from being evicted is charged for the whole of it, once.

    Charging every such tenant, not only the owner, means that readers of a public blob each use their own share, and
    that one of them leaving never moves a debt to another.
    """

    __slots__ = ("expected", "grips", "name", "owner", "slot", "state", "uses")

    def __init__(self, name: str, owner: UUID, slot: Slot, state: State) -> None:
        self.name = name
        self.owner = owner
        self.slot = slot
        self.state = state
        self.expected = False
        """Brought in ahead of a reader who has not come yet: that will be its first use."""
        self.grips: dict[Grip, None] = {}
        """In the order of arrival: the first that waits is the next to fill."""
        self.uses: dict[UUID, int] = {}
        """Reasons not to evict, by the tenant that is charged: its grips, and for the owner that it is dirty."""

    @property
    def is_whole(self) -> bool:
        return self.state is _CLEAN or self.state is _DIRTY
