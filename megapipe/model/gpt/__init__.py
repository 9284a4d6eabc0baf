"""GPT-style decoders: one configurable model, of which GPT-2, GPT-3 and Llama are settings."""
