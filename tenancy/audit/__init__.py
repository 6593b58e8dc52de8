"""The audit log: a chain of hashes over what was done, signed checkpoints of it, and its verification."""
