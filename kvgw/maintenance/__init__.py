"""What a gateway does by itself: write-back, sweep, expiry, eviction, orphans, heartbeat. One module a job."""
