"""Real traffic: a recorded request trace, driven through a gateway or through an ideal cache.

trace      the file: one request a line
synthetic  a small trace made from a seed, for whoever has none
ideal      what a cache of a given size could have reused, without a gateway
plan       what is asked for
drive      tenants that replay their requests over the client
outcome    what was measured
run        a gateway, its tenants, and the whole
"""
