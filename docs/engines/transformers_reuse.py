"""Answer a prompt from KV that any process may have stored: transformers_reuse.py MODEL_FOLDER ENDPOINT PROMPT"""

import asyncio
import sys
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvgw
from kvgw.engines.transformers import KVReuse, ModelIdentity


async def main(folder: Path, endpoint: str, prompt: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    async with kvgw.connect(endpoint) as client:
        reuse = await KVReuse.open(client, model, ModelIdentity.of_folder(folder.name, folder))
        restored = await reuse.restore(inputs.input_ids)
        started = time.monotonic()
        output = model.generate(**inputs, max_new_tokens=32, do_sample=False, **reuse.cache_argument(restored.cache))
        seconds = time.monotonic() - started
        stored = await reuse.store(inputs.input_ids, restored.cache)
    length = inputs.input_ids.shape[1]
    print(f"{restored.tokens} of {length} tokens loaded, {stored.tokens} are kept, {seconds:.2f} s to generate")
    print(tokenizer.decode(output[0, length:], skip_special_tokens=True))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
