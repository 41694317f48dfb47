"""Which examples an optimiser step sees: an endless order that can be entered at any place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refusion.data.mixture import Mixture, Pick
from refusion.training.encode import Encoded
from refusion.training.noise import Noised, NoiseSettings, noise


@dataclass(frozen=True)
class Place:
    """Where the next step begins: an epoch and an index into its order."""

    epoch: int = 0
    index: int = 0


class StepPlan:
    """Cuts the mixture's epochs into steps of about `batch_tokens` tokens.

    The steps depend on the data, the seed and batch_tokens only, never on devices.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Encoded]],
        mixture: Mixture,
        *,
        settings: NoiseSettings,
        seed: int,
        mask_id: int,
        end_id: int,
        batch_tokens: int,
        border_labels: bool = False,
    ) -> None:
        self._sources, self._mixture, self._settings = sources, mixture, settings
        self._seed, self._mask_id, self._end_id = seed, mask_id, end_id
        self._batch_tokens, self._border_labels = batch_tokens, border_labels
        self._epoch: tuple[int, list[Pick]] | None = None

    def step(self, place: Place) -> tuple[list[Noised], Place]:
        """The examples of the step at `place`, noised, and where the next step begins.

        Examples are taken until batch_tokens is reached; the last one may exceed it.
        """
        examples: list[Noised] = []
        total, epoch, index = 0, place.epoch, place.index
        while total < self._batch_tokens:
            order = self._order(epoch)
            if index >= len(order):
                epoch, index = epoch + 1, 0
                continue
            pick = order[index]
            row = self._sources[pick.source][pick.row]
            examples.append(self.noised(row, pick.visit, pick.example))
            total += len(examples[-1].tokens)
            index += 1
        return examples, Place(epoch, index)

    def noised(self, row: Encoded, visit: int, example: int) -> Noised:
        return noise(
            row.prompt, row.answer, mask_id=self._mask_id, end_id=self._end_id, settings=self._settings,
            seed=self._seed, epoch=visit, example=example, border_labels=self._border_labels, ended=row.ended,
        )

    def _order(self, epoch: int) -> list[Pick]:
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self._mixture.epoch(epoch))
        return self._epoch[1]
