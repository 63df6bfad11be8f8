import threading
import time

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from dapo.config import RewardConfig, RewardModelConfig
from dapo.errors import RewardError
from dapo.rewards.judge import build_judge
from dapo.rewards.pool import WorkerPool
from dapo.rewards.reward_model import RewardModelJudge
from dapo.types import Prompt
from tests import make, tiny

PROMPT = Prompt("u", ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}), (1,), answer=4)
TEXTS = ["4", "It is four, I believe: two and two make four.", "", "four" * 30, "5"]
OPTIONS = RewardModelConfig(device="cpu", batch_size=3)


def save(directory, *, labels=1, bert=False, **overrides):
    torch.manual_seed(0)
    shape = tiny._shape(overrides | {"num_labels": labels})
    if bert:
        model = BertForSequenceClassification(BertConfig(**shape))
    else:
        model = LlamaForSequenceClassification(LlamaConfig(**shape))
    model.eval().save_pretrained(directory)
    tokenizer = tiny.tiny_tokenizer()
    if bert:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(directory)
    return model


def judge_all(judge, texts):
    return judge.submit(PROMPT, [make.rollout([1], text=text) for text in texts]).result(timeout=60)


def score_alone(model, text, template):
    """Score one response by itself, in float64, without padding."""
    tokenizer = tiny.tiny_tokenizer()
    if template:
        body = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        tokens = tokenizer(f"{body}<|im_start|>assistant\n{text}<|im_end|>\n")["input_ids"]
    else:
        tokens = tokenizer(f"Be brief.\n2+2?\n{text}")["input_ids"]
    with torch.no_grad():
        return model.double()(torch.tensor([tokens])).logits.item()


def test_closing_stops_a_forward_pass_at_the_next_layer(tmp_path):
    save(tmp_path)
    judge = RewardModelJudge(str(tmp_path), OPTIONS)
    begun, layers, finished = threading.Event(), judge.model.model.layers, []

    def wait(*_):
        begun.set()
        while not judge.closed:
            time.sleep(0.001)

    layers[0].register_forward_hook(wait)
    layers[1].register_forward_hook(lambda *_: finished.append(1))
    futures = [judge.submit(PROMPT, [make.rollout([1], text=text) for text in TEXTS]) for _ in range(3)]
    assert begun.wait(60)
    judge.close()
    assert finished == []
    scores = [score for future in futures for score in future.result(timeout=0)]
    assert {score.error for score in scores} == {"the judge was closed before it judged this response"}


@pytest.mark.parametrize("bert", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_batched_scores_equal_the_scores_of_each_response_alone(tmp_path, bert, batch_size):
    model = save(tmp_path, bert=bert)
    judge = RewardModelJudge(str(tmp_path), RewardModelConfig(device="cpu", batch_size=batch_size))
    values = [score.value for score in judge_all(judge, TEXTS)]
    judge.close()
    expected = [score_alone(model, text, template=not bert) for text in TEXTS]
    assert values == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.01  # otherwise the comparison shows nothing


def test_without_a_padding_token_responses_are_judged_one_by_one(tmp_path):
    model = save(tmp_path, pad_token_id=None)
    judge = RewardModelJudge(str(tmp_path), OPTIONS)
    values = [score.value for score in judge_all(judge, TEXTS)]
    judge.close()
    assert values == pytest.approx([score_alone(model, text, template=True) for text in TEXTS], abs=1e-5)


def test_a_conversation_too_long_for_the_model_is_unjudged_and_not_truncated(tmp_path):
    model = save(tmp_path, max_position_embeddings=128)
    judge = RewardModelJudge(str(tmp_path), OPTIONS)
    first, long, last = judge_all(judge, ["4", "x" * 100, "5"])
    judge.close()
    length = len(tiny.tiny_tokenizer().apply_chat_template(
        [*PROMPT.messages, {"role": "assistant", "content": "x" * 100}], return_dict=True)["input_ids"])  # fmt: skip
    assert long.error == f"{tmp_path}: the conversation has {length} tokens; the model reads at most 128"
    expected = [score_alone(model, text, template=True) for text in ("4", "5")]
    assert [first.value, last.value] == pytest.approx(expected, abs=1e-5)


def test_an_exception_makes_only_its_batch_unjudged(tmp_path):
    save(tmp_path)
    judge = RewardModelJudge(str(tmp_path), RewardModelConfig(device="cpu", batch_size=2))
    forward, calls = judge.model.forward, []

    def fail_once(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("out of memory")
        return forward(*args, **kwargs)

    judge.model.forward = fail_once
    scores = judge_all(judge, TEXTS)
    judge.close()
    assert [score.judged for score in scores] == [False, False, True, True, True]
    assert scores[0].error.startswith(f"{tmp_path}: RuntimeError: out of memory")
    assert "the judge was closed" in judge_all(judge, ["4"])[0].error


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        (lambda path: None, "has no config.json"),
        (lambda path: save(path, labels=3), "has 3 outputs; expected a reward model with 1"),
        (lambda path: tiny.save_tiny(path, num_labels=1), r"is not a reward model: it has no weights for score.weight"),
    ],
)
def test_a_model_that_is_not_a_reward_model_is_refused(tmp_path, prepare, sentence):
    prepare(tmp_path)
    with pytest.raises(RewardError, match=sentence) as caught:
        RewardModelJudge(str(tmp_path), OPTIONS)
    assert "\n" not in str(caught.value)


def test_an_unknown_device_is_refused(tmp_path):
    with pytest.raises(RewardError, match=r"reward\.model\.device is 'gpu'; expected cpu, cuda, cuda:N or auto"):
        RewardModelJudge(str(tmp_path), RewardModelConfig(device="gpu"))


def test_a_reward_model_may_be_one_term_of_a_sum(tmp_path):
    model = save(tmp_path / "rm")
    use = {"exact": 10.0, f"model:{tmp_path}/rm": 0.5}
    judge = build_judge(RewardConfig(use=use, workers=1, model=OPTIONS))
    [right, wrong] = judge_all(judge, ["4", "5"])
    judge.close()
    expected = [score_alone(model, text, template=True) for text in ("4", "5")]
    assert [right.value, wrong.value] == pytest.approx([10 + 0.5 * expected[0], 0.5 * expected[1]], abs=1e-5)
    assert (right.acc, wrong.acc) == (True, False)
    assert right.extras["score/rm"] == pytest.approx(expected[0], abs=1e-5)


def test_a_sum_with_a_missing_model_leaves_no_process_behind(tmp_path, monkeypatch):
    closed = []
    close = WorkerPool.close
    monkeypatch.setattr(WorkerPool, "close", lambda pool: (close(pool), closed.append(pool)))
    use = {"exact": 1.0, f"model:{tmp_path}/gone": 0.5}
    with pytest.raises(RewardError, match="gone: is not a local directory"):
        build_judge(RewardConfig(use=use, workers=1))
    assert closed
    assert not any(pool.workers or pool.thread.is_alive() for pool in closed)
