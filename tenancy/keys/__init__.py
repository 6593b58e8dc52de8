"""The key hierarchy: root key, namespace keys, data keys and id keys, and their life."""
