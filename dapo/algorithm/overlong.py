"""Length penalties. Every function returns a value <= 0 that is added to the reward. Lengths are in tokens."""

from collections.abc import Callable

# (reward, length, data.max_response_length, whether the response was cut off there) -> what is added to the reward
LengthShaping = Callable[[float, int, int, bool], float]


def soft_overlong_penalty(length: int, max_response_length: int, buffer_len: int, penalty_factor: float) -> float:
    """Return 0 up to max_response_length - buffer_len, then fall linearly to -penalty_factor at max_response_length."""
    expected = max_response_length - buffer_len
    return min(0.0, max(-penalty_factor, -(length - expected) / buffer_len * penalty_factor))


def target_length_penalty(reward: float, length: int, target_length: int, *, is_cut_off: bool) -> float:
    """Return minus a share of |reward|, so that a long wrong answer (negative reward) does not gain.

    The share is 0 up to 1.5 x target_length, grows linearly to 0.5 at 2 x target_length, and stays there. A response
    that was cut off loses a further 0.2.
    """
    beyond = (length - 1.5 * target_length) / (0.5 * target_length)
    share = 0.5 * min(1.0, max(0.0, beyond)) + (0.2 if is_cut_off else 0.0)
    return -abs(reward) * share
