"""Adapters that connect inference engines to a gateway: one package an engine, which imports that engine.

Each uses only the SDK, so that it runs where the engine runs, and importing this package imports none of them.
"""
