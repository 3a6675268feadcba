"""The checkpoint's tokenizer: text to ids, and ids to bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from lily.errors import CheckpointError, ConfigError, UsageError
from lily.generation_config import (
    GENERATION_CONFIG,
    GenerationDefaults,
    checked_token_ids,
    load_generation_config,
)
from lily.json_file import read_json_object, shown

__all__ = [
    "TOKENIZER_CONFIG",
    "GenerationDefaults",
    "Tokenizer",
    "load_generation_config",
    "special_token_text",
]

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

PROTOCOL_TOKENS = frozenset(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
)
"""What a parser of the output reads: text, even where a tokenizer flags it as special."""


def _byte_alphabet() -> dict[int, int]:
    """Code point to byte in byte-level BPE (GPT-2).

    Printable Latin-1 stands for itself; the other bytes, in order, are U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: byte for byte in printable} | {0x100 + n: byte for n, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """Byte-level BPE over the ``tokenizers`` library; safe to share between threads.

    Decoding works on bytes: a token may hold part of a character, and only the whole sequence is
    UTF-8.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, model_ids: Iterable[int], path: Path) -> None:
        self._backend = backend
        self._path = path
        self._bytes: dict[int, bytes] = {}
        added = backend.get_added_tokens_decoder()
        self._ids: NDArray[np.int64] = np.unique(np.fromiter([*model_ids, *added], dtype=np.int64))
        self._added: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in added.items() if token.special and token.content not in PROTOCOL_TOKENS
        )
        """Ids of control tokens, such as the end of a turn; none of the protocol's markers."""

    @classmethod
    def load(cls, model_dir: str | Path) -> Tokenizer:
        """Reads ``tokenizer.json``, and the special tokens ``tokenizer_config.json`` adds to it.

        Raises:
            CheckpointError: ``tokenizer.json`` is missing, malformed, or not byte-level BPE, or an
                added token does not get the id its file gives it.
            ConfigError: ``tokenizer_config.json`` is malformed.
        """
        path = Path(model_dir) / TOKENIZER
        try:
            source = path.read_text(encoding="utf-8")
            backend = tokenizers.Tokenizer.from_str(source)
            document = json.loads(source)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; a checkpoint directory needs its tokenizer") from None
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error.strerror}") from None
        except Exception as error:  # the library raises bare Exception for what it cannot parse
            raise CheckpointError(f"{path} is not a tokenizer: {error}") from None
        if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
            found = type(backend.decoder).__name__ if backend.decoder is not None else "none"
            raise CheckpointError(f"{path}: the decoder is {found}; only byte-level BPE (ByteLevel) is supported")
        # Either setting would silently change a prompt.
        backend.no_truncation()
        backend.no_padding()
        # The library numbers added tokens by itself and ignores the file where the two differ.
        for token in document["added_tokens"]:
            if (got := backend.token_to_id(token["content"])) != token["id"]:
                raise CheckpointError(
                    f"{path}: added token {token['content']!r} has id {token['id']}, "
                    f"but the ids before it make it {got}"
                )
        cls._add_configured(backend, Path(model_dir) / TOKENIZER_CONFIG)
        return cls(backend, model_ids=document["model"]["vocab"].values(), path=path)

    @staticmethod
    def _add_configured(backend: tokenizers.Tokenizer, path: Path) -> None:
        """Adds the tokens that only ``added_tokens_decoder`` declares."""
        declared = (read_json_object(path) or {}).get("added_tokens_decoder") or {}
        if not isinstance(declared, Mapping):
            raise ConfigError(f"{path}: added_tokens_decoder is {shown(declared)}; it must be an object")
        entries: list[tuple[int, str, bool]] = []
        for key, entry in declared.items():
            text = entry.get("content") if isinstance(entry, Mapping) else None
            if not key.isdecimal() or not isinstance(text, str) or not text:
                raise ConfigError(
                    f"{path}: added_tokens_decoder[{key!r}] is {shown(entry)}; "
                    "it must be an id with an object that has a content string"
                )
            entries.append((int(key), text, entry.get("special") is True))
        for token_id, text, special in sorted(entries):
            if backend.token_to_id(text) is None:
                token = tokenizers.AddedToken(text, special=special, normalized=False)
                (backend.add_special_tokens if special else backend.add_tokens)([token])
            if (got := backend.token_to_id(text)) != token_id:
                raise ConfigError(
                    f"{path}: added_tokens_decoder gives {text!r} the id {token_id}, but {TOKENIZER} makes it {got}"
                )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of ``text``; nothing is put before or after it.

        Args:
            special: read the text of an added token (``<|im_end|>``, ``<think>``) as that token, as
                in a rendered prompt; ``False`` reads it as ordinary characters, as in text that is
                not trusted.

        Raises:
            UsageError: the text is not valid Unicode (it holds a lone surrogate).
        """
        backend = self._backend if special else self._without_added
        try:
            return list(backend.encode(text, add_special_tokens=False).ids)
        except TypeError:
            for position, character in enumerate(text):
                if 0xD800 <= ord(character) <= 0xDFFF:
                    raise UsageError(
                        f"the text holds a lone surrogate (U+{ord(character):04X}) "
                        f"at character {position}; it must be valid Unicode"
                    ) from None
            raise

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD.

        Args:
            skip_special: leave out :attr:`special_ids`.

        Raises:
            UsageError: an id has no token.
        """
        hidden = self.special_ids if skip_special else frozenset()
        raw = b"".join(self.token_bytes(token_id) for token_id in ids if token_id not in hidden)
        return raw.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; an added token's are its text in UTF-8.

        Raises:
            UsageError: the id has no token.
            CheckpointError: the token is not spelled in the byte-level alphabet.
        """
        known = self._bytes.get(token_id)
        if known is not None:
            return known
        if token_id in self._added:
            raw = self._added[token_id].encode("utf-8")
        else:
            text = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            if text is None:
                raise UsageError(f"token id {token_id} has no token; the tokenizer has {self.vocab_size} tokens")
            try:
                raw = bytes(_BYTE_OF[ord(character)] for character in text)
            except KeyError:
                raise CheckpointError(
                    f"{self._path}: token {token_id} ({text!r}) is not spelled in the byte-level alphabet"
                ) from None
        self._bytes[token_id] = raw
        return raw

    def token_id(self, text: str) -> int | None:
        """The id whose token is spelled ``text`` in the vocabulary, or ``None``."""
        found: int | None = self._backend.token_to_id(text)
        return found

    @property
    def vocab_size(self) -> int:
        """How many ids have a token; less than the rows of a padded vocabulary."""
        return len(self._ids)

    def valid_ids(self, padded_vocab: int) -> NDArray[np.bool_]:
        """Which rows of the model's vocabulary may be sampled.

        Returns:
            bool ``[padded_vocab]``, true where an id has a token.

        Raises:
            CheckpointError: a token's id is not a row.
        """
        highest = int(self._ids.max(initial=-1))
        if highest >= padded_vocab:
            raise CheckpointError(
                f"{self._path}: token id {highest} is beyond the model's vocabulary "
                f"of {padded_vocab} rows; the tokenizer belongs to another model"
            )
        mask = np.zeros(padded_vocab, dtype=np.bool_)
        mask[self._ids] = True
        return mask

    def eos_ids(self, model_dir: str | Path, config_eos: int | Sequence[int] | None = None) -> tuple[int, ...]:
        """Ids that end a generation.

        They are those of ``generation_config.json``, else the config's, else ``eos_token``.

        Args:
            model_dir: the checkpoint, for ``generation_config.json`` and ``tokenizer_config.json``.
            config_eos: ``eos_token_id`` of ``config.json``.

        Returns:
            The ids without repeats, in the order given; empty when no file names one.

        Raises:
            ConfigError: a file is malformed, or names an id or a token that the tokenizer does not
                have.
        """
        ids = load_generation_config(model_dir).eos_ids
        source = f"{Path(model_dir) / GENERATION_CONFIG}: eos_token_id"
        if not ids and config_eos is not None:
            source = f"{Path(model_dir) / 'config.json'}: eos_token_id"
            ids = checked_token_ids(config_eos, source)
        if not ids:
            path = Path(model_dir) / TOKENIZER_CONFIG
            source = f"{path}: eos_token"
            text = special_token_text(read_json_object(path) or {}, "eos_token", path)
            if text is None:
                return ()
            if (found := self.token_id(text)) is None:
                raise ConfigError(f"{source} is {text!r}, which is not in the vocabulary")
            ids = (found,)
        present = set(self._ids.tolist())
        for token_id in ids:
            if token_id not in present:
                raise ConfigError(f"{source} is {token_id}, which has no token; there are {self.vocab_size} tokens")
        return tuple(dict.fromkeys(ids))

    @cached_property
    def _without_added(self) -> tokenizers.Tokenizer:
        source = json.loads(self._backend.to_str())
        source["added_tokens"] = []
        return tokenizers.Tokenizer.from_str(json.dumps(source))


def special_token_text(config: Mapping[str, Any], key: str, path: Path) -> str | None:
    """The text of a special token, which the file gives as a string or an object with ``content``.

    Raises:
        ConfigError: it is neither.
    """
    value = config.get(key)
    text = value.get("content") if isinstance(value, Mapping) else value
    if value is not None and not isinstance(text, str):
        raise ConfigError(f"{path}: {key} is {shown(value)}; it must be a string or an object with content")
    return text
