"""The tokenizer of a Hugging Face folder: files <-> Tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from refusion.checkpoint.jsonfile import read_object
from refusion.checkpoint.reasons import reason
from refusion.checkpoint.tokenizer import Tokenizer
from refusion.errors import CheckpointError

_KINDS = ("bos", "eos", "pad", "unk", "mask")
_SLOW_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")
_LARGEST = 1_000_000_000_000_000_019_884_624_838_656  # what transformers writes for "no limit"


def _text(value: Any) -> str | None:
    """A special token is written as a string or as an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The template, from its own file or from the config, where several may have names."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file}: can't be read ({error}); fetch the file again") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is None:
        template = read_object(folder / "chat_template.json", optional=True).get("chat_template")
    return template if isinstance(template, str) else None


def _backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if file.exists():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise CheckpointError(f"{file}: isn't a tokenizer ({reason(error)}); fetch the file again") from error
    if not any((folder / name).exists() for name in _SLOW_FILES):
        raise CheckpointError(f"{folder}: holds no tokenizer; add the model's tokenizer.json")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CheckpointError(f"{folder}: has no tokenizer.json; install transformers to read older files") from error
    try:
        slow = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        return slow.backend_tokenizer
    except Exception as error:  # whatever the tokenizer's own code raises
        why = reason(error)
        raise CheckpointError(f"{folder}: its tokenizer can't be read ({why}); add a tokenizer.json") from error


def _end_ids(*sources: Any) -> list[int]:
    found: list[int] = []
    for source in sources:
        ids = source if isinstance(source, list) else [source]
        found += [i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0]
    return found


def read_tokenizer(folder: Path, config: dict[str, Any], generation: dict[str, Any]) -> Tokenizer:
    """The tokenizer in a folder.

    config, generation: contents of config.json and generation_config.json, which name
    further end tokens. The mask token is the one that the tokenizer's own files name.

    Raises:
        CheckpointError: no tokenizer, or a damaged one.
    """
    settings = read_object(folder / "tokenizer_config.json", optional=True)
    mapped = read_object(folder / "special_tokens_map.json", optional=True)
    backend = _backend(folder)
    ids: dict[str, int | None] = {}
    for kind in _KINDS:
        text = _text(settings.get(f"{kind}_token")) or _text(mapped.get(f"{kind}_token"))
        ids[kind] = backend.token_to_id(text) if text else None
    for kind in ("bos", "pad"):
        if ids[kind] is None:
            ids[kind] = next(iter(_end_ids(config.get(f"{kind}_token_id"))), None)
    ends = _end_ids(ids["eos"], generation.get("eos_token_id"), config.get("eos_token_id"))
    bos = ids["bos"]
    starts = backend.encode("a").ids[:1]
    return Tokenizer(
        backend,
        eos_ids=ends,
        bos_id=bos,
        pad_id=ids["pad"],
        unk_id=ids["unk"],
        mask_id=ids["mask"],
        chat_template=_chat_template(folder, settings),
        add_bos=bos is not None and starts == [bos],
        settings=settings,
    )


def tokenizer_files(tokenizer: Tokenizer, max_positions: int) -> dict[str, str]:
    """Name and content of the files that transformers' AutoTokenizer reads."""
    ids = {
        "bos": tokenizer.bos_id,
        "eos": tokenizer.eos_ids[0] if tokenizer.eos_ids else None,
        "pad": tokenizer.pad_id,
        "unk": tokenizer.unk_id,
        "mask": tokenizer.mask_id,
    }
    texts = {f"{kind}_token": tokenizer.id_to_token(i) for kind, i in ids.items() if i is not None}
    special = {name: text for name, text in texts.items() if text is not None}
    settings = dict(tokenizer.settings)
    # classes that don't read tokenizer.json, or need files that aren't written, must not be named
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for key in ("auto_map", "vocab_file", "merges_file", "tokenizer_file", "name_or_path", "backend", "is_local"):
        settings.pop(key, None)
    length = settings.get("model_max_length")
    settings["model_max_length"] = length if isinstance(length, int) and length < _LARGEST else max_positions
    settings.setdefault("clean_up_tokenization_spaces", False)
    settings["added_tokens_decoder"] = tokenizer.added_tokens()
    settings.update({f"{kind}_token": special.get(f"{kind}_token") for kind in _KINDS})
    settings["chat_template"] = tokenizer.chat_template
    settings = {key: value for key, value in settings.items() if value is not None}
    return {
        "tokenizer.json": tokenizer.to_json(),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
        "special_tokens_map.json": json.dumps(special, indent=2, ensure_ascii=False) + "\n",
    }
