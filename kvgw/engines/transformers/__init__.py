"""Hugging Face transformers: keep the KV cache of prompts in a gateway and take it back in another process.

    reuse = await KVReuse.open(client, model, ModelIdentity.of_folder("org/model", folder))
    restored = await reuse.restore(input_ids)
    output = model.generate(input_ids, **reuse.cache_argument(restored.cache), max_new_tokens=64)
    await reuse.store(input_ids, restored.cache)

For decoder-only models with full attention, one sequence at a time, without padding. What this cannot do right is
refused with the reason: docs/engines/transformers.md. Needs ``kvgw[transformers]``.
"""

from kvgw.engines.transformers.identity import ModelIdentity
from kvgw.engines.transformers.reuse import KVReuse, Restored, Stored

__all__ = ["KVReuse", "ModelIdentity", "Restored", "Stored"]
