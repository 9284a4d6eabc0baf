"""Corpora, tokenizers, token files and batches; nothing here knows of ranks."""
