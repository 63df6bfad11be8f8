import pytest

from dapo.rewards.function import Sample
from dapo.rewards.task import Job, Kind, Task
from tests import make

SEQUENTIAL, BATCHED, ASYNC = Kind(), Kind(is_batched=True), Kind(is_async=True)


def task(kind, indices, is_retry=False):
    return Task(Job("spec", kind, make.prompt(), [Sample(str(i)) for i in range(8)]), list(indices), is_retry)


@pytest.mark.parametrize(
    ("kind", "is_retry", "has_begun", "died", "failed", "retries"),
    [
        # In sequence, the first response is at fault: at once if it timed out, at the second death if the worker died.
        (SEQUENTIAL, False, True, False, [2], [([3, 5], False)]),
        (SEQUENTIAL, False, True, True, [], [([3, 5], False), ([2], True)]),
        (SEQUENTIAL, True, True, True, [2], [([3, 5], False)]),
        # Before the first response has begun, the one at fault is unknown.
        (SEQUENTIAL, False, False, True, [], [([2, 3, 5], True)]),
        (SEQUENTIAL, True, False, True, [2, 3, 5], []),
        # Judged in one call, all responses fail together.
        (BATCHED, False, True, False, [2, 3, 5], []),
        (BATCHED, False, True, True, [], [([2, 3, 5], True)]),
        (BATCHED, True, True, True, [2, 3, 5], []),
        # Judged concurrently, any of them can be at fault, so each is retried alone.
        (ASYNC, False, True, False, [], [([2], True), ([3], True), ([5], True)]),
        (ASYNC, False, True, True, [], [([2], True), ([3], True), ([5], True)]),
    ],
)
def test_which_responses_fail_and_which_are_retried_when_a_worker_is_lost(
    kind, is_retry, has_begun, died, failed, retries
):
    blame = task(kind, [2, 3, 5], is_retry).assign_blame(has_begun=has_begun, died=died)
    assert blame.failed == failed
    assert [(part.indices, part.is_retry) for part in blame.retries] == retries


def test_an_async_response_retried_alone_fails():
    assert task(ASYNC, [2], is_retry=True).assign_blame(has_begun=True, died=True).failed == [2]
    assert task(ASYNC, [2], is_retry=True).assign_blame(has_begun=True, died=False).failed == [2]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 8, 20])
def test_splitting_a_task_keeps_its_responses_in_at_most_that_many_parts(parts):
    shares = task(SEQUENTIAL, range(8)).split(parts)
    assert [index for share in shares for index in share.indices] == list(range(8))
    assert len(shares) <= parts
    assert all(share.indices for share in shares)
    assert len(task(BATCHED, range(8)).split(parts)) == 1


def test_the_time_limit_is_per_response_or_per_batched_call():
    assert task(SEQUENTIAL, range(4)).time_limit(2.0) == 2.0
    assert task(BATCHED, range(4)).time_limit(2.0) == 8.0
    assert task(ASYNC, range(4)).time_limit(2.0) == 3.0


def test_the_future_completes_with_the_last_score_and_in_order():
    whole = task(SEQUENTIAL, range(8))
    whole.mark_unjudged([7, 0, 3, 1, 2, 5, 6], "no")
    assert not whole.job.future.done()
    whole.mark_unjudged([4], "late")
    assert [score.error for score in whole.job.future.result(timeout=0)] == ["no"] * 4 + ["late"] + ["no"] * 3
