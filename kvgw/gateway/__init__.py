"""The gateway's verbs: one straight line each, over the rooms that `kvgw.wiring` opened."""
