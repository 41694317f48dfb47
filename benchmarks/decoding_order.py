"""Draws which pass wrote which token of an answer, as an SVG for the README.

    python benchmarks/decoding_order.py --model FOLDER --out docs/decoding_order.svg
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

import refusion

PROMPT = (
    "Liam hid 4 dozen eggs in the yard for the Easter egg hunt. Mia finds 7 eggs. Oliver finds 2 times as many as "
    "Mia. William finds 4 less than Oliver, and Noah finds 0.5 as many as William. How many eggs are still hidden in "
    "the yard? Give the result as your final answer. Do not include units."
)
WIDTH, LINE, CELL, PAD = 940, 46, 8.2, 7


def written_in(generation: refusion.Generation) -> dict[int, int]:
    """Answer position -> number of the pass that fixed it; 0 is the prompt's own pass."""
    found: dict[int, int] = {}
    for passes, _, event in generation.events:
        if event.kind == "committed":
            for position in event.positions:
                found[position] = passes - 1
    return found


def shade(number: int, last: int) -> tuple[str, str]:
    """Background and text colour: early passes dark, late ones light, readable in grey."""
    share = number / max(last, 1)
    light = 30 + 60 * share
    return f"hsl(212 60% {light:.0f}%)", "#fff" if light < 58 else "#111"


def draw(pieces: list[tuple[str, int]], title: str) -> str:
    """One box a token in reading order, the pass that wrote it in the corner."""
    last = max(number for _, number in pieces)
    x, y, body = PAD, 44, []
    for text, number in pieces:
        shown = text.replace("\n", "⏎")
        width = max(len(shown), 2) * CELL + PAD
        if x + width > WIDTH - PAD:
            x, y = PAD, y + LINE
        fill, ink = shade(number, last)
        body.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="36" rx="4" fill="{fill}"/>'
            f'<text x="{x + 4:.1f}" y="{y + 29}" fill="{ink}" xml:space="preserve">{escape(shown)}</text>'
            f'<text x="{x + width - 4:.1f}" y="{y + 12}" fill="{ink}" font-size="9" text-anchor="end">{number}</text>'
        )
        x += width + 3
        if text.endswith("\n"):
            x, y = PAD, y + LINE
    height = y + LINE + PAD
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13.5">'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
        f'<text x="{PAD}" y="26" font-size="14" font-family="system-ui, sans-serif" fill="#111">{escape(title)}</text>'
        + "".join(body)
        + "</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="folder, GGUF file or hub id of a ReFusion model")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--decoder", default="refusion")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("docs/decoding_order.svg"))
    options = parser.parse_args()
    model = refusion.load(options.model)
    config = refusion.DecodeConfig(decoder=options.decoder, max_tokens=options.max_tokens)
    generation = refusion.generate(model, options.prompt, config, record=True)[0]
    order = written_in(generation)
    words = [model.tokenizer.decode([token], skip_special=False) for token in generation.token_ids]
    pieces = [(word, order[at]) for at, word in enumerate(words)]
    title = (
        f"{generation.tokens} tokens in {generation.forwards} passes after the prompt's "
        f"({generation.tpf:.2f} per pass). The number is the pass that fixed the token; 0 is the prompt's own."
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(draw(pieces, title), encoding="utf-8")
    print(f"{options.out}: {title}")


if __name__ == "__main__":
    main()
