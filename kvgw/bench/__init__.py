"""`kvgw bench`: a gateway measured from clients in other processes, beside Redis and the machine's own limits.

plan        what is measured (options, cases) and what comes out (rows)
run         the order of things: systems interleaved inside each round
worker      a client process; `subjects` are the systems that it drives, `protocol` its commands
gateway     the gateway process; `redis` the Redis process, `resp` our client of it
limits      what the machine could do: copy, encrypt, hash, move through a socket
processes   child processes and the CPU time that they used
report      rows, table, JSON
"""
