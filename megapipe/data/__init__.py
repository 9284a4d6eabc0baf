"""Corpora, tokenizers, token files and batches; nothing here depends on ranks."""
