"""Tests of the environment `guess`."""

from __future__ import annotations

import pytest

from dapo.environments.environment import End
from dapo.environments.guess import LARGEST, Guess


def played(number, choose):
    """Return the score of an episode of five turns in which `choose(low, high)` guesses."""
    game = Guess({"answer": number})
    for _ in range(5):
        found = game.reply(f"My guess: {choose(game.low, game.high)}")
        if isinstance(found, End):
            return found.score
    return game.cut_off().score


def test_halving_finds_every_number_and_a_fixed_guess_only_one():
    assert [played(n, lambda low, high: (low + high) // 2) for n in range(1, LARGEST + 1)] == [1.0] * LARGEST
    fixed = [played(n, lambda low, high: 7) for n in range(1, LARGEST + 1)]
    assert fixed == pytest.approx([0.5 * 10 / 15] * 6 + [1.0] + [0.5 * 7 / 15] * 9)  # it rules out one side of 7
    assert played(16, lambda low, high: low) == pytest.approx(0.5 * 5 / 15)
    assert played(16, lambda low, high: "no") == 0.0


def test_it_says_higher_or_lower_and_where_the_number_is():
    game = Guess({"answer": "9"})
    assert game.reply("16") == "Lower. The number is between 1 and 15. Answer with one number."
    assert game.reply("Is it 8?") == "Higher. The number is between 9 and 15. Answer with one number."
    assert game.reply("3") == "Higher. The number is between 9 and 15. Answer with one number."
    assert game.reply("10") == "Lower. The number is 9. Answer with one number."
    end = game.reply("9")
    assert isinstance(end, End) and (end.score, end.acc, end.extras) == (1.0, True, {"guesses": 5})


@pytest.mark.parametrize("text", ["9", " 9.\n", "**9**", "The number is 9!"])
def test_a_turn_that_ends_with_its_only_number_finds_it(text):
    assert isinstance(Guess({"answer": 9}).reply(text), End)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        *((text, "such number") for text in ("0", "17", "9" * 5000, "It is 99.")),
        *((text, "answer") for text in ("", "hello", "-", "eight", "9 or 10", "7 8 9", "The number is between 9 and")),
    ],
)
def test_what_is_no_such_number_or_no_answer_is_a_guess_that_tells_nothing(text, what):
    game = Guess({"answer": 9})
    assert game.reply(text) == f"That is no {what}. The number is between 1 and 16. Answer with one number."
    end = game.cut_off()
    assert (end.score, end.acc, end.extras) == (0.0, False, {"guesses": 1})


@pytest.mark.parametrize("answer", [0, 17, None, "x", 1.5, [3]])
def test_a_row_without_a_number_is_refused(answer):
    with pytest.raises(ValueError, match="guess needs a whole number from 1 to 16"):
        Guess({"answer": answer})
