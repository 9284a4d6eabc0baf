"""GPT-style decoders: GPT-2, GPT-3 and Llama are settings of it."""
