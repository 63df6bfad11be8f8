"""Overlong reward shaping: the soft penalty on responses that come near the length limit."""


def soft_overlong_penalty(length: int, max_response_length: int, buffer_len: int, penalty_factor: float) -> float:
    """0 up to max_response_length - buffer_len tokens, then falling linearly to -penalty_factor at the limit."""
    expected = max_response_length - buffer_len
    return min(0.0, max(-penalty_factor, -(length - expected) / buffer_len * penalty_factor))
