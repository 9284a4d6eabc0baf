"""Chat templates in the manner of known models, and a tokenizer with their marks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim }}"
    "{{ eos_token or '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
FORGETFUL = CHATML.replace("m['content']", "(m['content'] if loop.last else m['content'] | lower)")
"""A template that writes a message differently if it is not the last one."""
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] if loop.last else m['content'] | lower }}{{ '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}"
)
"""A template like FORGETFUL that marks the assistant's turns itself."""
NAMES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>")
NAMES += ("<|start_header_id|>", "<|end_header_id|>")


def tokenizer() -> Tokenizer:
    """Make a tokenizer of bytes, some pairs of them, and the marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("a", "n"), ("h", "e"), ("o", "u"), ("Ċ", "Ċ"), ("Ġ", "t"), ("Ġt", "he")]
    names = [*NAMES, *alphabet, *("".join(pair) for pair in pairs)]
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(NAMES))
    return made


def conversation(*texts: str) -> list[dict[str, Any]]:
    """Make messages of these texts, from user and assistant in turn; one that begins with ``!`` is
    the system's."""

    def each() -> Iterator[dict[str, Any]]:
        turn = 0
        for text in texts:
            if text.startswith("!"):
                yield {"role": "system", "content": text[1:]}
                continue
            yield {"role": ("user", "assistant")[turn % 2], "content": text}
            turn += 1

    return list(each())
