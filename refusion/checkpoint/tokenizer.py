"""Text <-> token ids, where a user's text can never turn into a control token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from refusion.checkpoint import chat

_LARGEST_ID = 2**32 - 1
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The byte behind each character of byte-level BPE (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return table


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """A `tokenizers.Tokenizer` with end tokens and a chat template.

    eos_ids: every id that ends a text, the one to write first.
    add_bos: whether the model was trained on texts that start with bos_id; `encode` adds
        it only on request, `chat` leaves it to the template.
    settings: the keys of tokenizer_config.json that aren't known here; `save` keeps them.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int] = (),
        bos_id: int | None = None,
        pad_id: int | None = None,
        unk_id: int | None = None,
        mask_id: int | None = None,
        chat_template: str | None = None,
        add_bos: bool = False,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.bos_id = bos_id
        self.pad_id = pad_id
        self.unk_id = unk_id
        self.mask_id = mask_id
        self.chat_template = chat_template
        self.add_bos = add_bos
        self.settings = dict(settings or {})
        self._install(backend)

    def _install(self, backend: tokenizers.Tokenizer) -> None:
        control = {*self.eos_ids, self.bos_id, self.pad_id, self.mask_id}
        self._parsing = _with_special(backend, {i for i in control if i is not None})
        self._parsing.no_truncation()
        self._parsing.no_padding()
        # two objects, not a flag switched to and fro: threads of a server share the tokenizer
        self._plain = tokenizers.Tokenizer.from_str(self._parsing.to_str())
        self._plain.encode_special_tokens = True
        added = self._parsing.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        self._special = {index: token.content for index, token in added.items() if token.special}
        self._pattern = chat.pattern_of(self._special.values())
        for name in ("vocab_size", "_byte_level"):
            self.__dict__.pop(name, None)

    def encode(self, text: str, *, parse_special: bool = False, bos: bool = False) -> list[int]:
        """Ids of a text; special-token strings in it are plain text unless `parse_special`.

        bos: put bos_id in front where the model was trained with one (`add_bos`).
        """
        backend = self._parsing if parse_special else self._plain
        ids = backend.encode(_clean(text), add_special_tokens=False).ids
        return [self.bos_id, *ids] if bos and self.add_bos and self.bos_id is not None else ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ids; ids without a token (padding of the vocabulary) print nothing."""
        return self._parsing.decode(list(ids), skip_special_tokens=skip_special)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_template)

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text that `chat` encodes; see there."""
        if not self.chat_template:
            return "\n".join(str(message.get("content") or "") for message in messages)
        names = {"bos_token": self.bos_id, "eos_token": self.eos_ids[0] if self.eos_ids else None,
                 "pad_token": self.pad_id, "unk_token": self.unk_id, "mask_token": self.mask_id}
        tokens = {name: self.id_to_token(index) for name, index in names.items() if index is not None}
        # a key whose value is None means an absent key to templates
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        return chat.render(self.chat_template, messages, add_generation_prompt, {**tokens, **variables})

    def chat(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of a conversation: the template's control tokens are read, those in contents are text.

        Without a chat template the contents are joined by newlines (behind bos_id where the
        model wants one). `variables` reach the template (enable_thinking, tools).

        Raises:
            DataError: the template refuses the messages.
            CheckpointError: the template isn't valid.
        """
        if not self.chat_template:
            return self.encode(self.render(messages), bos=True)
        originals: dict[str, str] = {}
        if self._pattern is not None:
            (messages, variables), originals = chat.guard((messages, variables), self._pattern)
        text = self.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        if self._pattern is None or not originals:
            return self.encode(text, parse_special=True)
        ids: list[int] = []
        start = 0
        for match in self._pattern.finditer(text):
            ids += self.encode(_restored(text[start : match.start()], originals))
            ids += self.encode(match.group(), parse_special=True)
            start = match.end()
        return ids + self.encode(_restored(text[start:], originals))

    @cached_property
    def vocab_size(self) -> int:
        """The largest id that has a token, plus one."""
        return max(self._parsing.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which `decode` skips."""
        return frozenset(self._special)

    def id_to_token(self, index: int) -> str | None:
        """The token as the vocabulary spells it, or None for an id without one."""
        return self._parsing.id_to_token(index) if 0 <= index <= _LARGEST_ID else None

    def token_to_id(self, token: str) -> int | None:
        return self._parsing.token_to_id(token)

    def token_bytes(self, index: int) -> bytes:
        """The UTF-8 bytes a token stands for; a character may be spread over several tokens.

        Control tokens give their own spelling, ids without a token nothing.
        """
        if index in self._added:
            return self._added[index].encode()
        token = self.id_to_token(index)
        if token is None:
            return b""
        if self._byte_level:
            return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in json.dumps(json.loads(self._parsing.to_str()).get("decoder"))

    def add_mask_token(self, token: str) -> int:
        """Adds a control token, makes it the mask token and returns its id."""
        backend = tokenizers.Tokenizer.from_str(self._parsing.to_str())
        backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False)])
        index = backend.token_to_id(token)
        if index is None:
            raise ValueError(f"the tokenizer refuses the token {token!r}")
        self.mask_id = index
        self._install(backend)
        return index

    def use_mask(self, index: int | None) -> None:
        """Makes an id the mask token, and its token a control token; None for no mask token."""
        if index != self.mask_id:
            self.mask_id = index
            self._install(self._parsing)

    def added_tokens(self) -> dict[str, dict[str, Any]]:
        """The tokens beside the vocabulary's own, as tokenizer_config.json lists them."""
        names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
        added = self._parsing.get_added_tokens_decoder()
        return {str(i): {name: getattr(token, name) for name in names} for i, token in sorted(added.items())}

    def to_json(self) -> str:
        """The content of tokenizer.json."""
        return self._parsing.to_str(pretty=True)


def _with_special(backend: tokenizers.Tokenizer, control: set[int]) -> tokenizers.Tokenizer:
    """The same tokenizer with the added tokens of `control` marked special, or plain text could hold them."""
    added = backend.get_added_tokens_decoder()
    if all(added[index].special for index in control if index in added):
        return backend
    content = json.loads(backend.to_str())
    content["added_tokens"] = [
        {**token, "special": token["special"] or token["id"] in control} for token in content["added_tokens"]
    ]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def _restored(text: str, originals: dict[str, str]) -> str:
    for sentinel, original in originals.items():
        text = text.replace(sentinel, original)
    return text


def _clean(text: str) -> str:
    """Lone surrogates have no UTF-8 form; they become the replacement character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
