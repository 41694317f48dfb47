"""`refusion info`: what a model or an adapter is, from the headers of its files."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from refusion.cli import options


def info(
    path: Annotated[str, typer.Argument(metavar="PATH", help="As --model of generate, or an adapter.")] = "default",
    adapter: options.Adapter = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, each tensor too, as JSON.")] = False,
) -> None:
    """Show what a model or an adapter is, without loading its weights."""
    from refusion import checkpoint

    facts = checkpoint.info(path, adapter=adapter)
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False))
        return
    rows = adapter_summary(facts) if facts["format"] == "adapter" else summary(facts)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")


def summary(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts that a person asks for first, as names and texts."""
    config, tokenizer, mask = facts["config"], facts["tokenizer"], facts["mask_token"]
    added = [] if facts["adapter"] is None else [("adapter", _short(facts["adapter"]))]
    return [
        ("path", facts["path"]),
        ("format", facts["format"]),
        ("family", facts["family"]),
        ("parameters", f"{facts['parameters']:,}"),
        *_sizes(facts),
        *added,
        ("layers", str(config["num_layers"])),
        ("width", str(config["hidden_size"])),
        ("heads", f"{config['num_heads']}, of keys and values {config['num_kv_heads']}"),
        ("positions", f"{config['max_positions']:,}"),
        ("vocabulary", f"{tokenizer['vocab_size']:,} tokens"),
        ("end tokens", ", ".join(_token(end) for end in tokenizer["eos"]) or "none"),
        ("chat template", "yes" if tokenizer["chat_template"] else "no"),
        ("mask token", _token(mask) if mask else "none: a left-to-right model, not yet a ReFusion model"),
    ]


def adapter_summary(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts about an adapter that a person asks for first, as names and texts."""
    mask = facts["mask_token"]
    return [
        ("path", facts["path"]),
        ("format", "LoRA adapter (peft)"),
        ("base", facts["base"] or "not named"),
        ("parameters", f"{facts['parameters']:,}"),
        *_sizes(facts),
        ("rank", f"{facts['rank']}, alpha {facts['alpha']:g}"),
        ("low-rank parts", ", ".join(facts["targets"]) or "not named"),
        ("held whole", ", ".join(facts["saved"]) or "nothing"),
        ("mask token", _token(mask) if mask else "none of its own"),
    ]


def _short(facts: dict[str, Any]) -> str:
    return f"{facts['path']} (rank {facts['rank']}, {facts['bytes'] / 1e6:,.1f} MB)"


def _sizes(facts: dict[str, Any]) -> list[tuple[str, str]]:
    dtypes = ", ".join(f"{count} {kind}" for kind, count in facts["dtypes"].items())
    return [
        ("tensors", f"{len(facts['tensors'])} ({dtypes})"),
        ("size", f"{facts['bytes'] / 1e6:,.1f} MB in {len(facts['files'])} files"),
    ]


def _token(token: dict[str, Any]) -> str:
    return f"{token['token']} ({token['id']})"
