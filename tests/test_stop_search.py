"""Stop strings in an answer that grows: what is found equals a search of the whole text, at a bounded cost."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from refusion.generation import StopSearch, first_stop

TEXTS = ("a", "ab", " b", "c", " ", "\n", "é", "€", "😀", ".", "")


def byte_level() -> tokenizers.Tokenizer:
    """The tokens are single bytes and a few words, in GPT-2's alphabet."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "bc", "Ġa", "Ġb"]
    backend = tokenizers.Tokenizer(models.BPE({token: at for at, token in enumerate(words)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """Words with a space in front, and bytes that decode together or not at all, as in Llama's."""
    words = ["<unk>", "▁", "▁a", "▁b", "a", "b", "ab", "c", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(models.BPE({token: at for at, token in enumerate(words)}, [], unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<end>"])
    return backend


def word_piece() -> tokenizers.Tokenizer:
    """Spaces come with the decoder, which also draws punctuation to the word before it."""
    words = ["[UNK]", "a", "b", "##a", "##b", "##bc", ".", ",", "'", "s", "é"]
    backend = tokenizers.Tokenizer(models.WordPiece({token: at for at, token in enumerate(words)}))
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.add_special_tokens(["<end>"])
    return backend


BACKENDS = {"bytes": byte_level(), "fallback": byte_fallback(), "words": word_piece()}


def likely(backend: tokenizers.Tokenizer) -> list[int]:
    """The ids of the texts' characters and bytes, so that stop strings turn up."""
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("é€😀 \n")
    marks = [*"abcé.▁", "ab", "bc", "Ġa", "Ġb", "▁a", "▁b", "##a", "##b", "##bc", "<end>"]
    marks += ["".join(piece for piece, _ in bytes_of)[at] for at in range(11)]
    marks += [f"<0x{byte:02X}>" for byte in "é€😀\n".encode()]
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return sorted({vocabulary[mark] for mark in marks if mark in vocabulary})


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=60)
@given(data=st.data(), stop=st.lists(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3).map("".join).filter(bool),
                                     min_size=1, max_size=3))
def test_it_equals_a_search_of_the_whole_text(name: str, data: Any, stop: list[str]) -> None:
    backend = BACKENDS[name]
    decode = partial(backend.decode, skip_special_tokens=True)
    ids = data.draw(st.lists(st.sampled_from(likely(backend)), max_size=80))
    growth = data.draw(st.lists(st.sampled_from([1, 1, 1, 2, 7]), min_size=len(ids), max_size=len(ids)))
    search, length = StopSearch(stop, decode), 0
    for more in growth:
        length = min(length + more, len(ids))
        found = search(ids[:length])
        assert found == first_stop(ids[:length], stop=stop, decode=decode)
        if found is not None or length == len(ids):
            break


@pytest.mark.parametrize(("name", "word"), [("bytes", "a"), ("fallback", "▁a"), ("words", "a")])
def test_a_token_costs_a_window_and_not_the_whole_answer(name: str, word: str) -> None:
    backend, decoded = BACKENDS[name], 0

    def decode(ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return backend.decode(ids, skip_special_tokens=True)

    ids = [backend.token_to_id(word)] * 1000
    search = StopSearch(["\n\n", "never"], decode)
    assert all(search(ids[: n + 1]) is None for n in range(len(ids)))
    # a window of 13 to 26 tokens each time; all of the answer each time would be 500,500
    assert decoded < 30 * len(ids)


def test_a_stop_string_may_begin_in_text_that_was_searched_before() -> None:
    """One character of it a token, hundreds of tokens behind the start, split over the border of a window."""
    text = "x" * 301 + "stop here" + "x" * 40
    for shift in range(30):
        ids = list(range(shift, len(text)))
        search = StopSearch(["stop here"], lambda part: "".join(text[at] for at in part))
        found = [n for n in range(1, len(ids) + 1) if search(ids[:n]) is not None]
        assert found[0] == 310 - shift


def test_a_replacement_character_can_be_a_stop_string() -> None:
    """It is there while a character is incomplete, and gone when the next token completes it."""
    backend = BACKENDS["fallback"]
    decode = partial(backend.decode, skip_special_tokens=True)
    ids = [backend.token_to_id(token) for token in (*["a"] * 60, "<0xC3>")]
    search = StopSearch(["\ufffd"], decode)
    assert [search(ids[: n + 1]) for n in range(61)] == [None] * 60 + [61]
