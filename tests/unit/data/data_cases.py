"""Texts and a tokenizer small enough to be made in a test."""

import os

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = [f"Document {i}: " + "the quick brown fox. " * (i % 7) + "äöü €\n" for i in range(60)]


def train_bpe(specials: list[str], vocab_size: int = 320) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def drop_privileges() -> None:
    """File permissions do not bind root; from here to the end of the test they bind us."""
    if os.geteuid() == 0:
        os.seteuid(65534)
