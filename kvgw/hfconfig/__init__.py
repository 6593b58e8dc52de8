"""KV formats from a model's ``config.json``: geometry and positions are read, everything else is stated by the caller.

A config says how many layers keep which kind of cache and how positions are encoded. It does not say what an engine
makes of it (element type, layout, rank, recurrent state storage, …): that is a `Deployment`, and whatever is
left open is refused with the name of the missing field, never guessed.
"""

from kvgw.hfconfig.build import format_from_hf_config, layer_groups
from kvgw.hfconfig.deployment import AS_MODEL, AsModel, Deployment

__all__ = ["AS_MODEL", "AsModel", "Deployment", "format_from_hf_config", "layer_groups"]
