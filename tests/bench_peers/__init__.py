"""The gateway beside other stores, each through its own client: ``make bench-peers``.

    python -m tests.bench_peers [--rounds 9] [--json FILE] [--plot FILE] [--only NAME ...] [--skip NAME ...]

plan          what is measured, in which order, and the rows that come out
environments  a peer's own environment: its lock file in ``.venv-bench-<peer>``, Debian packages unpacked there
servers       peers' server processes
contenders    systems that are ready to be measured; `gateways` are ours, `others` the peers
client        a peer's client process, with a subject from `peers`; `tier_client` is the gateway's for cold reads
limits        what the machine can do, measured by a process of its own in the same rounds
report        figures to rows, table and plot
run           the order of things; `__main__` the command line
"""
