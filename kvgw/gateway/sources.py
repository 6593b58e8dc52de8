"""Where a read may look: the caller's namespace first, then the public ones that the request names.

What a public namespace has is reported under its name, so that nobody takes a shared hit for one of their own. A public
namespace that is not there, not public or not for this caller simply has nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvgw.gateway.directory import Directory, Place
from tenancy.access import Caller
from tenancy.catalog import Catalog
from tenancy.errors import KeyGone, KeyRefused, KeyUnavailable, NamespaceUnknown
from tenancy.model import FormatRow, FoundChunk
from tenancy.naming import entry_keys


@dataclass(frozen=True, slots=True)
class Source:
    """One namespace that a read looks into."""

    name: str
    """Empty for the caller's own."""
    place: Place
    formats: Sequence[FormatRow]
    keys: Sequence[Sequence[bytes]]
    """Entry keys: for each format, one for each engine key."""

    async def find(self, catalog: Catalog, now_ms: int) -> dict[bytes, FoundChunk]:
        """What is visible of all keys, by entry key."""
        return await catalog.lookup(
            self.place.scope,
            [one.format_id for one in self.formats],
            [key for keys in self.keys for key in keys],
            now_ms,
        )


def source_of(name: str, place: Place, formats: Sequence[FormatRow], engine_keys: Sequence[bytes]) -> Source:
    """A namespace with the keys as it names them."""
    keys = [entry_keys(place.keys.names.entry, one.fingerprint, engine_keys) for one in formats]
    return Source(name, place, formats, keys)


async def shared_sources(
    directory: Directory, caller: Caller, references: Sequence[str], own: Source, engine_keys: Sequence[bytes]
) -> list[Source]:
    """The public namespaces among `references` that the caller may read and that know all of `own`'s formats."""
    found = []
    for reference in references:
        try:
            place = await directory.shared(caller, reference)
        except (NamespaceUnknown, KeyGone, KeyUnavailable, KeyRefused):
            continue  # what is wrong with another's keys must not cost the caller what is its own
        known = [await directory.shared_format(place, one.canonical) for one in own.formats]
        formats = [one for one in known if one is not None]
        if len(formats) == len(known):
            found.append(source_of(reference, place, formats, engine_keys))
    return found
