"""Every parser of foreign bytes under a coverage-guided fuzzer, and what it has found worth keeping (C16, F06)."""
