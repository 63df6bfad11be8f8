"""In-flight dynamic sampling: train as soon as a batch is full; unfinished groups continue with the new weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dapo.sampling.strict import DynamicSampler, Pending, StepState
from dapo.types import Group


class InflightSampler(DynamicSampler):
    """Keeps about `gen_batch_size` groups in flight, also across steps.

    Long responses are not lost: before an update would make a group older than `max_staleness`, the step waits for that
    group and trains on it.
    """

    def _collect(self, step: StepState) -> None:
        while not self._is_complete(step, len(step.kept), self.pending.values()):
            self._top_up(step)
            if not self.pending:
                break  # the step's limit on submissions is reached, and every group is decided
            unfinished = self._unfinished()
            most_kept = len(step.kept) + len(self.pending) - len(unfinished)  # if the filter keeps every finished group
            # The time at which scores arrive must not change a decision. So scores are read only when they could
            # complete the batch, or when the engine is idle, and then the step waits for all finished groups. Until
            # then the judge and the engine work in parallel.
            if not unfinished or self._is_complete(step, most_kept, unfinished):
                self._decide_finished(step)
            else:
                self._poll()
        # Submission order, after the groups that cannot wait. In one process those have the lowest serials. On a
        # cluster a group of a lost worker is sampled again, and is then newer than groups with higher serials.
        step.kept.sort(key=lambda group: (not self._cannot_wait(step, group), group.serial))
        step.rounds = math.ceil(step.submitted / self.config.gen_batch_size)

    def _batch_size(self, step: StepState) -> int:
        """Return `train_batch_size`, or the number of groups that would be too old for the next batch if that is more.

        The filter may keep more groups than expected. Dropping the surplus would mostly drop long responses.
        """
        must_train = sum(self._cannot_wait(step, group) for group in step.kept)
        return max(self.config.data.train_batch_size, must_train)

    def _cannot_wait(self, step: StepState, group: Group) -> bool:
        """Return whether the group would be too old for the next batch."""
        return group.weight_version < self._oldest_allowed(step)

    def _oldest_allowed(self, step: StepState) -> int:
        """Return the oldest weight version allowed in the next batch, which follows one more update."""
        return step.version + 1 - self.config.algorithm.max_staleness

    def _is_complete(self, step: StepState, kept: int, undecided: Iterable[Pending]) -> bool:
        """Return whether the batch is full and the update would make no undecided group older than `max_staleness`."""
        oldest = self._oldest_allowed(step)
        return kept >= self.config.data.train_batch_size and all(group.version >= oldest for group in undecided)

    def _top_up(self, step: StepState) -> None:
        """Submit prompts to keep the engine busy, but no more than this batch and the next are expected to need.

        The engine counts as busy with as many unfinished responses as `gen_batch_size` groups have.

        Invariant: kept + keep rate x undecided <= 2 x train_batch_size. The groups left after an update are then
        expected to fill the next batch. If more are kept than expected, that batch grows by these few.
        """
        size, limit = self.config.gen_batch_size, self.config.algorithm.filter_groups.max_num_gen_batches
        missing = 2 * self.config.data.train_batch_size - len(step.kept)
        free = size - math.ceil(self._unfinished_responses() / self.config.rollout.n)
        count = min(free, math.ceil(missing / self._keep_rate()) - len(self.pending))
        if limit > 0:
            count = min(count, limit * size - step.submitted)
        if count > 0:
            self._submit_more(step, count)
