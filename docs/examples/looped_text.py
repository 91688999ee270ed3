"""Text by a looped model: two layers learn to predict characters in loops, are solved, and decode with one cache.

python docs/examples/looped_text.py
python docs/examples/looped_text.py --picture text.png  # and text that it has not seen, coloured by evaluations
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from _puzzles import arguments, train
from torch import Tensor, nn

from implicit_attention import EquilibriumTransformer, Picard
from implicit_attention.layers import Exit, Rotary

WIDTH, HEADS, LENGTH = 96, 4, 128
#: A training draws a loop of 2 to 8 steps for every batch.
DRAWN, LOOPS = range(2, 9), (1, 2, 4, 8, 16, 64)
#: Windows of a picture.
PICTURED = 5


class Reader(nn.Module):
    """Two causal layers, repeated: the scores of the next character for every character (B, N)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(size, WIDTH), nn.Linear(WIDTH, size)
        solver = Picard(rtol=1e-3, max_steps=64)
        self.layer = EquilibriumTransformer(
            WIDTH,
            HEADS,
            depth=2,
            norm="post",
            causal=True,
            rotary=Rotary(),
            mlp_ratio=3.0,
            solver=solver,
            on_failure="ignore",
        )

    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        return self.head(self.layer(self.embed(tokens), **options))

    def loss(self, tokens: Tensor, targets: Tensor, done: float) -> Tensor:
        """Cross-entropy after a number of steps that is drawn; late in the training the last one is to change little.

        Rest is asked for late: asked for at once, states come to rest before they answer anything.
        """
        x, steps = self.embed(tokens), DRAWN[int(torch.randint(len(DRAWN), ()))]
        before = self.layer(x, steps=steps - 1)
        z = self.layer(x, steps=1, start=before)
        wrong = F.cross_entropy(self.head(z).flatten(0, 1), targets.flatten())
        change = (z - before).norm(dim=-1) / z.detach().norm(dim=-1)
        return wrong + 0.3 * min(max(4 * done - 2, 0), 1) * change.mean()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    given = arguments(__doc__, argv, picture="draw text that was not learnt, coloured by evaluations, to this file")
    torch.manual_seed(given.seed)
    written = "\n".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(written))
    numbers = {character: number for number, character in enumerate(alphabet)}
    codes = torch.tensor([numbers[character] for character in written])
    learnt, held = codes[: len(codes) * 9 // 10], codes[len(codes) * 9 // 10 :]

    def batch() -> tuple[tuple[Tensor], Tensor]:
        windows = learnt[torch.randint(len(learnt) - LENGTH, (12, 1)) + torch.arange(LENGTH + 1)]
        return (windows[:, :-1],), windows[:, 1:]

    reader = Reader(len(alphabet))
    seconds = train(reader, batch, updates=3 if given.quick else 700, rate=4e-3, loss=reader.loss)
    reader.eval()
    found: dict[str, Any] = {"seconds": seconds, "parameters": sum(p.numel() for p in reader.parameters())}
    print(f"{found['parameters']} parameters, trained for {seconds} s in loops of {DRAWN[0]} to {DRAWN[-1]} steps")
    count = 2 if given.quick else 64
    windows = held[: count * LENGTH + 1]
    test = tuple(part.view(count, LENGTH) for part in (windows[:-1], windows[1:]))
    found |= {"loops": loops(reader, *test), "solved": solved(reader, *test), "exits": exits(reader, *test)}
    if given.picture is not None:
        picture(reader, test[0][:PICTURED], alphabet, given.picture)
    # Places behind the windows of the training were not learnt.
    prompt = held[: LENGTH // 2]
    return found | {"decoded": decode(reader, prompt, 8 if given.quick else LENGTH // 2, alphabet)}


@torch.no_grad()
def bits(reader: Reader, tokens: Tensor, targets: Tensor, **options: Any) -> float:
    """Bits per character."""
    return F.cross_entropy(reader(tokens, **options).flatten(0, 1), targets.flatten()).item() / math.log(2)


def loops(reader: Reader, tokens: Tensor, targets: Tensor) -> dict[int, float]:
    """Print and return the bits per character after some numbers of steps, more than the training had among them."""
    found = {steps: bits(reader, tokens, targets, steps=steps) for steps in LOOPS}
    print("bits per character by steps: " + ", ".join(f"{steps}: {value:.3f}" for steps, value in found.items()))
    return found


def solved(reader: Reader, tokens: Tensor, targets: Tensor) -> dict[str, float]:
    """The same for the solved state: each token is solved on its own, and those that have settled leave the work."""
    value, report = bits(reader, tokens, targets), reader.layer.last_solve
    settled, evaluations = report.converged.double().mean().item(), report.num_evals.double()
    told = f"{settled:.1%} of the tokens settled, {evaluations.mean():.1f} evaluations a token (at most"
    print(f"solved: {value:.3f} bits, {told} {int(evaluations.max())})")
    return {"bits": value, "settled": settled, "evaluations": evaluations.mean().item()}


def exits(reader: Reader, tokens: Tensor, targets: Tensor) -> dict[str, dict[str, float]]:
    """Tokens that end before they have settled, each by a rule."""
    found = {}
    rules = {
        "a step changes it by .3 at most": Exit(rtol=0.3),
        "4 evaluations are made": Exit(evaluations=4),
        "3 are in the mean, and others change more": Exit(mean=3.0),
        "a step changes its prediction by .01 nats at most": Exit(readout=reader.head, nats=0.01),
    }
    for name, rule in rules.items():
        value = bits(reader, tokens, targets, exit=rule)
        evaluations = reader.layer.last_solve.num_evals.double().mean().item()
        print(f"a token ends when {name}: {value:.3f} bits, {evaluations:.2f} evaluations a token")
        found[name] = {"bits": value, "evaluations": evaluations}
    return found


@torch.no_grad()
def decode(reader: Reader, prompt: Tensor, count: int, alphabet: list[str]) -> dict[str, Any]:
    """Print a continuation; every layer has one set of keys and values, however many evaluations a token takes."""
    cache = reader.layer.new_cache()
    scores, continued = reader(prompt[None], cache=cache)[:, -1], []
    for _ in range(count):
        drawn = torch.multinomial(F.softmax(scores / 0.5, dim=-1), 1)
        continued.append(int(drawn))
        scores = reader(drawn, cache=cache)[:, -1]
    text = "".join(alphabet[code] for code in continued)
    evaluations, steps = cache.num_evals.double().mean().item(), DRAWN[-1]
    print(f"...{''.join(alphabet[code] for code in prompt[-40:].tolist())}|{text}")
    print(
        f"{cache.length} tokens, {evaluations:.1f} evaluations each: a cache of {cache.num_bytes} bytes; a loop of "
        f"{steps} steps that keeps the keys of every step: {steps * cache.num_bytes}"
    )
    return {"text": text, "bytes": cache.num_bytes, "evaluations": evaluations}


@torch.no_grad()
def picture(reader: Reader, tokens: Tensor, alphabet: list[str], path: Path) -> None:
    """Draw windows below each other, every character with the evaluations after which its prediction rests."""
    from implicit_attention.plotting import text_figure

    reader(tokens, exit=Exit(readout=reader.head, nats=0.01))
    evaluations = reader.layer.last_solve.num_evals.flatten()
    text = "".join(alphabet[code] for code in tokens.flatten().tolist())
    title = f"Evaluations until the prediction behind a character changes by .01 nats at most, {len(tokens)} windows"
    text_figure(text, evaluations, title=title).savefig(path)


if __name__ == "__main__":
    main()
