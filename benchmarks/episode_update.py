"""python -m benchmarks.episode_update: an update of episodes that begin alike, with their beginnings computed once.

Episodes of the environment `guess`, as a model plays them that has begun to learn: most guess the middle of what is
left. They are trained on at SmolLM2-135M's shape with random weights, with shared turns and with shared prompts only,
alternately in one process; on a CPU in float32 with one thread. `--groups` and `--n` set how many there are.
"""

from __future__ import annotations

import argparse
import time
from contextlib import contextmanager

import numpy as np
import torch

from benchmarks.gpu_common import SMOLLM2_135M, machine, random_model
from benchmarks.gpu_update import update_config
from dapo.algorithm.filtering import GroupRules, form_group
from dapo.environments.environment import End
from dapo.environments.guess import LARGEST, Guess
from dapo.policy import packing
from dapo.policy.policy import Policy
from dapo.policy.sharing import Bundle, by_prompt
from dapo.types import Group, Prompt, Rollout, Score

PROMPT_TOKENS, MAX_TURNS = 44, 5
WRAP = (3, 4, 5, 6)  # stands for what a chat template puts around a message
END = 2


def guess_groups(seed: int, count: int, n: int) -> list[Group]:
    """Play groups of episodes. All rows have the same prompt, as in recipes/guess_number.jsonl."""
    rng = np.random.default_rng(seed)
    prompt = Prompt("guess", (), tuple(range(100, 100 + PROMPT_TOKENS)), None)
    groups = []
    for serial in range(count):
        number = int(rng.integers(1, LARGEST + 1))
        played = [_episode(serial, index, number, rng) for index in range(n)]
        rollouts, scores = [rollout for rollout, _ in played], [Score(score) for _, score in played]
        groups.append(form_group(serial, prompt, rollouts, scores, GroupRules(400, filter_enabled=False)))
    return groups


def _episode(serial: int, index: int, number: int, rng: np.random.Generator) -> tuple[Rollout, float]:
    environment = Guess({"answer": number})
    tokens: list[int] = []
    given: list[tuple[int, int]] = []
    while True:
        middle = (environment.low + environment.high) // 2
        guess = middle if rng.random() < 0.7 else int(rng.integers(environment.low, environment.high + 1))
        tokens += [10 + guess, END]
        reply = environment.reply(str(guess))
        if len(given) == MAX_TURNS - 1 and not isinstance(reply, End):
            reply = environment.cut_off()
        if isinstance(reply, End):
            length = len(tokens)
            logprobs = np.where([any(s <= i < e for s, e in given) for i in range(length)], 0.0, -1.0)
            rollout = Rollout(
                serial,
                index,
                np.array(tokens, np.int32),
                logprobs.astype(np.float32),
                "stop",
                1,
                "",
                given=tuple(given),
            )
            return rollout, float(reply.score or 0.0)
        start = len(tokens)
        tokens += [*WRAP, *(_token(word) for word in reply.split()), *WRAP]
        given.append((start, len(tokens)))


def _token(word: str) -> int:
    return 200 + sum(ord(letter) * (place + 1) for place, letter in enumerate(word)) % 800


@contextmanager
def only_prompts_shared():
    """Pack as if responses shared nothing but their prompts."""
    before = packing.bundle
    packing.bundle = lambda items, share=True: [Bundle(0, members) for members in by_prompt(items)]
    try:
        yield
    finally:
        packing.bundle = before


def seconds_of(policy: Policy, groups: list[Group]) -> tuple[float, int]:
    """Return the seconds of one update, and the tokens that it computed. On a CPU these are seconds of CPU time."""
    clock = time.perf_counter if policy.like.is_cuda else time.process_time
    start = clock()
    result = policy.update(groups, step=1, version=0)
    return clock() - start, result.computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cpu":
        torch.set_num_threads(1)
    policy = Policy(random_model(SMOLLM2_135M, device, dtype), update_config(None))
    groups = guess_groups(0, options.groups, options.n)
    found = []
    for _ in range(options.repeats + 1):  # the first warms up
        with only_prompts_shared():
            before = seconds_of(policy, groups)
        found.append((before, seconds_of(policy, groups)))
    (before, tokens_before), (now, tokens_now) = (min(each) for each in zip(*found[1:], strict=True))
    print(f"{options.groups} x {options.n} episodes; best of {options.repeats}; {machine()}")
    print(f"prompts shared: {tokens_before:,} tokens, {before:.3f} s")
    print(f"turns shared:   {tokens_now:,} tokens, {now:.3f} s")
    print(f"ratio:          {tokens_now / tokens_before:.3f} of the tokens, {now / before:.3f} of the time")


if __name__ == "__main__":
    main()
