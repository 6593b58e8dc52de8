"""Views of slots that end with their bracket, and the three things that the gateway gets to hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from storage.arena import Slot

_GIVEN_BACK = "this piece of staging memory was given back: use it only inside its `async with` block"
_STILL_WRITABLE = (
    "a slice of a writable staging view, or an array over it, is alive and could change bytes that must not change any "
    "more: release it (`slice.release()`, `del array`) before `freeze` or `publish`"
)


class Access:
    """One bracket's view of a slot: closed at first, then writable, then read-only; closed again at its end.

    A slice of a view is not released with it. Slices of the writable view are looked for when it is frozen; no slice
    may outlive the bracket.
    """

    __slots__ = ("_ended", "_exporter", "_slot", "_view", "is_zero")

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._ended = False
        self.is_zero = False
        """The slot was overwritten with zeros after its last writer had gone."""
        self._view: memoryview | None = None
        self._exporter: weakref.ref[object] | None = None

    @property
    def view(self) -> memoryview:
        """The view as it is now. Raises `ValueError` when the bracket has ended."""
        if self._view is None:
            raise ValueError(_GIVEN_BACK)
        return self._view

    def thaw(self) -> memoryview:
        """Open the slot for writing."""
        assert self._view is None, "this access is open already"
        exporter = self._slot.exporter()
        self._exporter = weakref.ref(exporter)
        self._view = memoryview(exporter).cast("B")
        return self._view

    def read_only(self) -> memoryview:
        """Give a read-only view in the place of the writable one, which raises from now on."""
        if self._ended:
            raise ValueError(_GIVEN_BACK)
        if self._view is None or not self._view.readonly:
            self._release()
            self._view = self._slot.view.toreadonly()
        return self._view

    def freeze(self) -> memoryview:
        """`read_only`, with the promise that the bytes do not change any more.

        Raises `BufferError` when that cannot be promised, because a slice or an array over the writable view is alive.
        """
        try:
            view = self.read_only()
        except BufferError as error:
            raise BufferError(_STILL_WRITABLE) from error
        if self._exporter is not None and self._exporter() is not None:
            raise BufferError(_STILL_WRITABLE)
        return view

    def reopen(self) -> memoryview:
        """Writable again, with what it holds. Raises `BufferError` while a slice of the view is alive."""
        if self._ended:
            raise ValueError(_GIVEN_BACK)
        self._release()
        self.is_zero = False
        return self.thaw()

    def wipe(self) -> None:
        """`freeze`, then overwrite the slot with zeros in the thread that calls. Raises `BufferError` like `freeze`."""
        self.freeze()
        self._slot.zero()
        self.is_zero = True

    def close(self) -> None:
        """End the access. Raises `BufferError` while a call in some thread still uses the view: call it again later."""
        self._ended = True
        self._release()

    def _release(self) -> None:
        if self._view is not None:
            self._view.release()
            self._view = None


class Window:
    """Memory for plaintext, of one operation; all zero when it is handed out and again when it is given back."""

    __slots__ = ("_access",)

    def __init__(self, access: Access) -> None:
        self._access = access

    @property
    def view(self) -> memoryview:
        """The window's bytes: writable, read-only once frozen. Raises `ValueError` after the block."""
        return self._access.view

    def freeze(self) -> memoryview:
        """The same bytes read-only, from now on the only way to see them; raises `BufferError`, see `Access.freeze`."""
        return self._access.freeze()

    def reopen(self) -> memoryview:
        """Writable again after `freeze`, for the next payload of the same operation; what it holds is still there."""
        return self._access.reopen()

    def wipe(self) -> None:
        """Zero the window now, for good: in a worker thread it costs the event loop nothing, and what was just used is
        still in the cache. Raises `BufferError`, see `Access.freeze`.
        """
        self._access.wipe()


class Draft:
    """A slot in which a blob is being sealed; it takes sealed bytes only, for it is not zeroed."""

    __slots__ = ("_access", "_publish")

    def __init__(self, access: Access, publish: Callable[[bool], None]) -> None:
        self._access = access
        self._publish = publish

    @property
    def view(self) -> memoryview:
        """The slot's bytes: writable, read-only once published. Raises `ValueError` after the block."""
        return self._access.view

    def publish(self, dirty: bool) -> None:
        """Make the sealed blob a resident; `dirty` while a tier is still due to get it.

        `view` stays readable until the block ends. Raises `BufferError`, see `Access.freeze`, and `ValueError` when
        the name is taken.
        """
        self._access.freeze()
        self._publish(dirty)


class Reading:
    """A resident's sealed bytes, shared with other readers."""

    __slots__ = ("_access", "was_resident")

    def __init__(self, access: Access, *, was_resident: bool) -> None:
        self._access = access
        self.was_resident = was_resident
        """Whether the blob was in staging before anybody had to fetch it for this read."""

    @property
    def view(self) -> memoryview:
        """The blob, read-only. Raises `ValueError` after the block."""
        return self._access.view
