"""In flight: a full batch is trained on at once, and groups that are not finished go on with the new weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dapo.sampling.strict import DynamicSampler, Pending, Step


class InflightSampler(DynamicSampler):
    """Keeps about `gen_batch_size` groups under way, across steps.

    An answer's length never decides whether it is trained on: a group that would become too old is waited for, and
    being the oldest it is then first in the batch.
    """

    def _gather(self, step: Step) -> None:
        while not self._is_complete(step, len(step.kept), self.pending.values()):
            self._top_up(step)
            if not self.pending:
                break  # all that this step may submit is decided
            unfinished = self._unfinished()
            hoped_for = len(step.kept) + len(self.pending) - len(unfinished)
            # When rewards arrive must not change a decision. So none is looked at before it can end the step, and then
            # every one that is due is waited for; until then the judge works beside the engine.
            if not unfinished or self._is_complete(step, hoped_for, unfinished):
                self._settle(step)
            else:
                self._poll()
        step.kept.sort(key=lambda group: group.serial)
        step.rounds = math.ceil(step.submitted / self.config.gen_batch_size)

    def _is_complete(self, step: Step, kept: int, undecided: Iterable[Pending]) -> bool:
        """Whether the batch is full, and the update would leave no undecided group older than is allowed."""
        oldest_allowed = step.version + 1 - self.config.algorithm.max_staleness
        return kept >= self.config.data.train_batch_size and all(g.version >= oldest_allowed for g in undecided)

    def _top_up(self, step: Step) -> None:
        """Keep the engine busy, but have no more in store than this batch and the next are likely to need.

        What an update leaves over then fits into one batch, and none of it becomes stale, whenever it is finished.
        """
        size, limit = self.config.gen_batch_size, self.config.algorithm.filter_groups.max_num_gen_batches
        missing = 2 * self.config.data.train_batch_size - len(step.kept)
        count = min(size - len(self._unfinished()), math.ceil(missing / self._keep_rate()) - len(self.pending))
        if limit > 0:
            count = min(count, limit * size - step.submitted)
        if count > 0:
            self._submit_more(step, count)
