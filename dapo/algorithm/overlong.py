"""Overlong reward shaping: what a response loses for being long. Every function returns what is added to the reward."""


def soft_overlong_penalty(length: int, max_response_length: int, buffer_len: int, penalty_factor: float) -> float:
    """0 up to max_response_length - buffer_len tokens, then falling linearly to -penalty_factor at the limit."""
    expected = max_response_length - buffer_len
    return min(0.0, max(-penalty_factor, -(length - expected) / buffer_len * penalty_factor))


def target_length_penalty(reward: float, length: int, target_length: int, *, is_cut_off: bool) -> float:
    """A share of |reward|, always downwards: a long wrong answer never gains.

    None up to 1.5 times the target, growing linearly to a half at 2 times; a response that was cut off loses a further
    fifth.
    """
    beyond = (length - 1.5 * target_length) / (0.5 * target_length)
    share = 0.5 * min(1.0, max(0.0, beyond)) + (0.2 if is_cut_off else 0.0)
    return -abs(reward) * share
