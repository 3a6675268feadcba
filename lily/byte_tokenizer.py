"""A tokenizer for models that have none: bytes, and pairs of printable ASCII characters."""

from __future__ import annotations

from itertools import product
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from lily.errors import UsageError

__all__ = ["END_OF_TEXT", "MIN_VOCAB", "byte_tokenizer", "tokenizer_config"]

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB = 257


def byte_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE with at most 9,282 tokens; larger ids have none.

    Every text can be encoded, and most of what a random model writes can be read. The pairs, as far as
    ``vocab_size`` has room for them, make the one end-of-text token rare among tokens drawn at random. It has the
    last id.

    Raises:
        UsageError: ``vocab_size`` has no room for all bytes and the end of a text.
    """
    if vocab_size < MIN_VOCAB:
        raise UsageError(
            f"a vocabulary of {vocab_size} is too small for a byte tokenizer; it has at least {MIN_VOCAB} tokens"
        )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # In the byte-level alphabet printable characters stand for themselves, and this one for the space.
    printable = ["Ġ", *(chr(code) for code in range(0x21, 0x7F))]
    pairs = list(product(printable, printable))[: vocab_size - MIN_VOCAB]
    vocab = {token: i for i, token in enumerate([*alphabet, *map("".join, pairs)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """``tokenizer_config.json`` for it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
