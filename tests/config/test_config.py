"""Tests of the configuration: what is accepted, how mistakes are explained, and that a run reads every option."""

from __future__ import annotations

import io
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from dapo.config import Config, RewardConfig, Section, leaves
from dapo.config.reference import options_markdown
from dapo.data.readers import PREPARED, find_files
from dapo.errors import ConfigError
from dapo.plan import plan_text
from dapo.rewards.rules import RULES, make_rule
from dapo.sampling.rules import group_rules
from tests import runs

ROOT = Path(__file__).parent.parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))

SMALLEST = "model: {path: m}\ndata: {train: d.jsonl}\n"

# Adding, renaming or removing an option is a decision: it changes this list, the page of options and the recipes.
OPTIONS = [
    "run.name", "run.dir", "run.steps", "run.epochs", "run.seed", "run.save_every", "run.store_tokens", "run.trackers",
    "run.show_samples",
    "model.path", "model.dtype", "model.device", "model.lora.rank", "model.lora.alpha", "model.lora.target_modules",
    "data.train", "data.columns", "data.train_batch_size", "data.gen_batch_size", "data.max_prompt_length",
    "data.max_response_length", "data.overlong_prompts", "data.deduplicate", "data.prompt_template",
    "data.system_prompt", "data.chat_template_kwargs",
    "rollout.n", "rollout.temperature", "rollout.stop", "rollout.max_concurrent",
    "rollout.kv_memory_fraction", "rollout.mode", "rollout.engine", "rollout.tensor_parallel", "rollout.vllm",
    "environment.use", "environment.max_turns", "environment.max_turn_tokens", "environment.timeout",
    "environment.workers", "environment.memory_gb",
    "reward.use", "reward.extract", "reward.regex", "reward.think_tags", "reward.threshold", "reward.code_score",
    "reward.code_unsafe", "reward.workers", "reward.timeout",
    "reward.memory_gb", "reward.model.device", "reward.model.batch_size", "reward.length_shaping",
    "reward.target_length", "reward.overlong_buffer.len", "reward.overlong_buffer.penalty_factor",
    "algorithm.loss", "algorithm.advantage",
    "algorithm.adv_norm", "algorithm.clip_ratio_low", "algorithm.clip_ratio_high", "algorithm.clip_ratio_c",
    "algorithm.loss_agg_mode", "algorithm.overlong_filter", "algorithm.kl_loss_coef", "algorithm.kl_reward_coef",
    "algorithm.max_staleness", "algorithm.importance_correction", "algorithm.max_logprob_gap",
    "algorithm.filter_groups.enable", "algorithm.filter_groups.metric", "algorithm.filter_groups.function",
    "algorithm.filter_groups.max_num_gen_batches",
    "algorithm.filter_groups.on_exhausted", "algorithm.filter_groups.min_batch_ratio",
    "algorithm.ledger.enable", "algorithm.ledger.explore", "algorithm.ledger.revisit",
    "algorithm.ledger.lookahead", "algorithm.ledger.correct",
    "optim.lr", "optim.warmup_steps", "optim.lr_schedule", "optim.weight_decay", "optim.betas", "optim.grad_clip",
    "optim.ppo_mini_batch_size",
    "optim.ppo_epochs", "optim.max_tokens_per_micro_batch", "optim.recompute_activations",
    "eval.k", "eval.every", "eval.data", "eval.best_metric", "eval.temperature", "eval.top_p", "eval.top_k",
    "cluster.learners", "cluster.offload", "cluster.rollout_workers", "cluster.reward_workers",
    "cluster.max_restarts", "cluster.timeout",
]  # fmt: skip


def load(folder: Path, text: str = SMALLEST, *overrides: str) -> Config:
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    return Config.load(folder / "recipe.yaml", overrides)


def sentence(folder: Path, text: str = SMALLEST, *overrides: str) -> str:
    """Return the error message: one line that says where the mistake is."""
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith((str(folder / "recipe.yaml"), "override '"))
    return message


def test_a_recipe_needs_only_a_model_and_data_and_names_the_run_after_its_file(tmp_path):
    config = load(tmp_path)
    assert (config.run.name, config.run_dir) == ("recipe", Path("runs/recipe"))
    assert load(tmp_path, SMALLEST, "run.name=mine").run_dir == Path("runs/mine")
    assert config.gen_batch_size == config.mini_batch_size == config.data.train_batch_size
    assert not config.needs_reference


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optim: {lrr: 1}", "unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
        ("algorithm: {filter_groups: {metrc: acc}}", "did you mean 'algorithm.filter_groups.metric'?"),
        ("optm: {lr: 1}", "unknown key 'optm'; did you mean 'optim'?"),
        ("rollout: {lr: 1}", "unknown key 'rollout.lr'; did you mean 'optim.lr'?"),
        ("lr: 1", "unknown key 'lr'; did you mean 'optim.lr'?"),
        ("zebra: 1", "unknown key 'zebra'"),
        (
            "optim: {learning_rate: 1}",
            "'optim.learning_rate' ('learning_rate' of TRL); in dapo it is 'optim.lr': the same",
        ),
        ("rollout: {load_format: 1}", "the engine samples from the weights being trained"),
        ("optim: {seed: 1}", "unknown key 'optim.seed'; did you mean 'run.seed'?"),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion(tmp_path, text, expected):
    assert sentence(tmp_path, SMALLEST + text).endswith(expected)


WORKERS = "expected 0 to 16384, or a mapping of engines (embedded, vllm) to numbers such as {vllm: 1, embedded: 2}"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.steps=many", "'run.steps' is 'many': input should be a valid integer"),
        ("run.steps=0", "'run.steps' is 0: input should be greater than or equal to 1"),
        ("rollout.n=1", "'rollout.n' is 1: input should be greater than or equal to 2"),
        ("optim.lr=.nan", "'optim.lr' is nan: input should be a finite number"),
        ("algorithm.loss_agg_mode=mean", "'algorithm.loss_agg_mode' is 'mean': input should be 'token-mean', "),
        (
            "algorithm.loss=gppo",
            "'algorithm.loss' is 'gppo': expected dapo, grpo, dr_grpo, gspo, cispo, sapo, gmpo, or path/to/file.py:",
        ),
        ("algorithm.loss=[dapo]", "'algorithm.loss' is ['dapo']: input should be a valid string"),
        ("algorithm.advantage=mine.py", "'algorithm.advantage' is 'mine.py': expected path/to/file.py:function"),
        ("optim.lr_schedule=cosin", "'optim.lr_schedule' is 'cosin': expected constant, linear, cosine, or path/to"),
        ("run.name=7", "'run.name' is 7: input should be a valid string"),
        ("model.lora.target_modules=5", "'model.lora.target_modules' is 5: "),
        ("optim=3", "'optim' is 3: input should be a valid dictionary"),
        ("rollout.stop=abc", "'rollout.stop' is 'abc': input should be a valid tuple"),
        ('rollout.stop=["x", ""]', "rollout.stop holds an empty string, which would end every response"),
        ("data.chat_template_kwargs=5", "'data.chat_template_kwargs' is 5: input should be a valid dictionary"),
        ('reward.think_tags=["<t>"]', "reward.think_tags is ['<t>'], but must be two strings, neither of which"),
        ('reward.think_tags=["t", "/t"]', "reward.think_tags is ['t', '/t'], but must be two strings"),
        ('reward.think_tags=["", "x"]', "reward.think_tags is ['', 'x'], but must be two strings"),
        ("cluster.rollout_workers=-1", f"'cluster.rollout_workers' is -1: {WORKERS}"),
        ("cluster.rollout_workers=true", f"'cluster.rollout_workers' is True: {WORKERS}"),
        ("cluster.rollout_workers={}", f"'cluster.rollout_workers' is {{}}: {WORKERS}"),
        ("cluster.rollout_workers={vlm: 1}", f"'cluster.rollout_workers' is {{'vlm': 1}}: {WORKERS}"),
        ("cluster.rollout_workers={vllm: 0}", f"'cluster.rollout_workers' is {{'vllm': 0}}: {WORKERS}"),
        ("cluster.rollout_workers={vllm: 1.5}", f"'cluster.rollout_workers' is {{'vllm': 1.5}}: {WORKERS}"),
    ],
)
def test_a_wrong_type_or_range_names_the_key_what_was_found_and_what_was_expected(tmp_path, override, expected):
    assert expected in sentence(tmp_path, SMALLEST, override)


def test_several_mistakes_are_reported_at_once(tmp_path):
    message = sentence(tmp_path, "data: {train: d.jsonl}\noptim: {lrr: 1}\nrun: {steps: 0}")
    assert "'model' is missing" in message
    assert "unknown key 'optim.lrr'" in message
    assert "'run.steps' is 0" in message


def test_a_missing_key_is_named(tmp_path):
    assert sentence(tmp_path, "model: {path: m}\ndata: {train_batch_size: 3}").endswith("'data.train' is missing")
    assert sentence(tmp_path, "model: {path: m}").endswith("'data' is missing")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml: cannot be read \(No such file or directory\)$"):
        Config.load(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)$"):
        Config.load(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"\(Is a directory\); to continue the run in it: dapo resume "):
        Config.load(tmp_path / "run")
    (tmp_path / "binary.yaml").write_bytes(b"model: \xff")
    with pytest.raises(ConfigError, match=r"binary\.yaml: not valid YAML"):
        Config.load(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {path: m", "not valid YAML ("),
        ("model:\n\tpath: m", "not valid YAML ("),
        (SMALLEST + "optim:\n  lr: 1\n  lr: 2", "the key 'lr' appears twice"),
        (SMALLEST + "data: {train: other.jsonl}", "the key 'data' appears twice"),
        ("", "expected sections such as `model:` and `data:`, found nothing"),
        ("- model", "expected sections such as `model:` and `data:`, found a list"),
        ("model: !!python/object/apply:os.getcwd []", "not valid YAML ("),
    ],
)
def test_invalid_yaml_and_files_without_sections_are_refused(tmp_path, text, expected):
    assert expected in sentence(tmp_path, text)


@pytest.mark.parametrize("override", ["optim.lr", "=3", "optim.lr 3"])
def test_an_override_that_is_not_an_assignment_is_refused(tmp_path, override):
    expected = f"override '{override}': expected section.key=value, for example optim.lr=1e-5"
    assert sentence(tmp_path, SMALLEST, override) == expected


def test_an_override_below_a_value_or_with_a_broken_value_is_refused(tmp_path):
    assert "'train' is a value, not a section" in sentence(tmp_path, SMALLEST, "data.train.file=x")
    assert "the value is not valid YAML" in sentence(tmp_path, SMALLEST, "optim.betas=[0.9,")


def test_a_glob_in_an_override_is_answered_with_how_to_quote_it(tmp_path):
    found = sentence(tmp_path, SMALLEST, "data.train=*.parquet")
    assert found.endswith("""; in quotes it is text: 'data.train="*.parquet"'""")
    assert load(tmp_path, SMALLEST, 'data.train="*.parquet"').data.train[0].path == "*.parquet"


REFUSED = "the URL of an endpoint holds a user name, a password or a key"


@pytest.mark.parametrize(
    "url",
    [
        "https://me:hunter2@judge.example/v1",
        "https://hunter2@judge.example/v1",
        "HTTPS://me:hunter2@judge.example/v1",
        "https://me:hun/ter?2#hunter2@judge.example/v1",
        "me:hunter2@judge.example/v1",
        "https://judge.example/v1?api_key=hunter2",
        "https://judge.example/v1?a=1&X-Amz-Signature=hunter2",
        "https://judge.example/v1?accessToken=hunter2",
        "https://judge.example/v1?code=hunter2&b=2",
        "judge.example/v1?token=hunter2",
        "model:https://me:hunter2@models.example/rm",
    ],
)
@pytest.mark.parametrize("form", ["{}", "{{math: 1.0, '{}': 0.5}}"])
def test_a_url_with_a_secret_is_refused_with_what_to_do_instead_and_is_not_shown(tmp_path, url, form):
    message = sentence(tmp_path, SMALLEST, f"reward.use={form.format(url)}")
    assert REFUSED in message
    assert "set the environment variable DAPO_REWARD_TOKEN" in message
    assert "hunter2" not in message
    message = sentence(tmp_path, SMALLEST + f"reward: {{use: {json.dumps(url)}}}\n")
    assert REFUSED in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    "use",
    [
        "https://judge.example:8443/v1?max_tokens=512&model=rm-8b&tokenizer=x&design=2&author=y",
        "http://[::1]:80/judge/%40me",
        "rewards@2/file.py:score",
        "model:org/rm@main",
    ],
)
def test_a_judge_without_a_secret_is_accepted(tmp_path, use):
    assert load(tmp_path, SMALLEST, f"reward.use={use}").reward.use == use


@pytest.mark.parametrize(
    ("text", "override"),
    [
        ("", "reward.use=[https://me:hunter2@judge.example]"),
        ("", "reward.use={https://me:hunter2@judge.example: high}"),
        ("", "reward.use={https://judge.example?token=hunter2: 1, "),
        ("", "reward.use: https://me:hunter2@judge.example"),
        ("", "reward.use.x=https://me:hunter2@judge.example"),
        ("", "run.steps=https://me:hunter2@judge.example"),
        ("reward: math\n", "reward.use=https://judge.example?key=hunter2"),
        ("reward: {use: https://me.example/a/rather/long/path/of/an/endpoint?token=hunter2: 1}\n", ""),
        ("reward: {use: https://me:hunter2@judge.example, use: math}\n", ""),
        ("reward: {use: {https://me:hunter2@judge.example: 1, https://me:hunter2@judge.example: 2}}\n", ""),
    ],
)
def test_no_error_message_shows_a_secret_wherever_it_is(tmp_path, text, override):
    assert "hunter2" not in sentence(tmp_path, SMALLEST + text, *[override] * bool(override))


def test_pydantic_shows_no_secret_either():
    values = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"use": "https://me:hunter2@judge.example"}}
    with pytest.raises(ValidationError, match=REFUSED) as caught:
        Config.model_validate(values)
    assert "hunter2" not in str(caught.value)


def test_overrides_reach_every_depth_create_sections_and_the_last_one_wins(tmp_path):
    overrides = [
        "algorithm.filter_groups.metric=score",
        "optim.betas=[0.8, 0.9]",
        "optim.lr=1",
        "optim.lr=2",
        "eval.data=null",
    ]
    config = load(tmp_path, SMALLEST + "optim: {lr: 3}", *overrides)
    assert config.algorithm.filter_groups.metric == "score"
    assert (config.optim.betas, config.optim.lr, config.eval.data) == ((0.8, 0.9), 2, None)


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.e-6", "1.0e-6", "0.000001", "+1e-6"])
def test_numbers_may_be_written_in_any_usual_notation(tmp_path, text):
    assert load(tmp_path, SMALLEST + f"optim: {{lr: {text}}}").optim.lr == 1e-6
    assert load(tmp_path, SMALLEST, f"optim.lr={text}").optim.lr == 1e-6


BUFFER = "reward.length_shaping=buffer", "data.max_response_length=8"
FINAL = "algorithm.filter_groups.metric=seq_final_reward"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (BUFFER, "reward.overlong_buffer.len is 0, but must lie between 1 and data.max_response_length - 1 = 7"),
        ([*BUFFER, "reward.overlong_buffer.len=8"], "reward.overlong_buffer.len is 8, but must lie between 1 and"),
        (["reward.length_shaping=target"], "reward.target_length is 0, but must lie between 1 and"),
        (["reward.use={}"], "reward.use is an empty mapping"),
        (["eval.best_metric=a/avg@2"], "eval.best_metric needs an evaluation"),
        (
            ["eval={k: 2, data: {a: x, b: y}, best_metric: c/avg@2}"],
            "eval.best_metric is 'c/avg@2', but must start with",
        ),
        (["rollout.top_p=0.9"], "rollout.top_p is not an option"),
        (
            ["rollout.mode=inflight", "algorithm.max_staleness=0"],
            "rollout.mode inflight needs an algorithm.max_staleness of at least 1",
        ),
        (["rollout.top_k=5"], "rollout.top_k is not an option"),
        (["data.train_batch_size=4", "optim.ppo_mini_batch_size=5"], "ppo_mini_batch_size is 5 prompts, more than"),
        (["rollout.tensor_parallel=2"], "rollout.tensor_parallel is for vLLM only: set rollout.engine to vllm"),
        (
            ["rollout.engine=vllm", "cluster.rollout_workers={embedded: 2}"],
            "rollout.engine is vllm, but cluster.rollout_workers names no worker that runs it",
        ),
        (["optim.betas=[0.9, 1.0]"], "optim.betas must both lie in [0, 1), found [0.9, 1.0]"),
        (["run.name=a/b"], "run.name must be a plain folder name, found 'a/b'"),
        (["run.name=.."], "run.name must be a plain folder name, found '..'"),
        (
            ["algorithm.loss=grpo", "algorithm.loss_agg_mode=token-mean"],
            "algorithm.loss grpo needs algorithm.loss_agg_mode seq-mean-token-mean, but it is token-mean; leave it out",
        ),
        (["algorithm.loss=gspo", "algorithm.clip_ratio_c=3"], "needs algorithm.clip_ratio_c null, but it is 3.0"),
        (["algorithm.loss=dr_grpo", "algorithm.adv_norm=std"], "needs algorithm.adv_norm none, but it is std"),
        (
            ["algorithm.loss=grpo", "algorithm.clip_ratio_low=0.2", "algorithm.clip_ratio_high=0.28"],
            "algorithm.loss grpo clips symmetrically, but algorithm.clip_ratio_low is 0.2 and",
        ),
        (["algorithm.loss=sapo", "algorithm.clip_ratio_high=0.3"], "algorithm.loss sapo has no clip"),
        (
            ["algorithm.advantage=a.py:f", "algorithm.adv_norm=none"],
            "algorithm.advantage replaces the built-in advantage, which contradicts algorithm.adv_norm none",
        ),
        (
            ["algorithm.filter_groups={function: a.py:f, enable: false}"],
            "algorithm.filter_groups.function decides about each group, which contradicts "
            "algorithm.filter_groups.enable false",
        ),
        (["algorithm.filter_groups={function: a.py:f, metric: acc}"], "algorithm.filter_groups.metric acc"),
        ([FINAL], "algorithm.filter_groups.metric seq_final_reward needs algorithm.kl_reward_coef > 0"),
        (["algorithm.ledger.revisit=0.5"], "algorithm.ledger.revisit needs algorithm.ledger.enable"),
        (["algorithm.ledger.correct=true"], "algorithm.ledger.correct needs algorithm.ledger.enable"),
        (["algorithm.ledger.lookahead=2"], "algorithm.ledger.lookahead needs algorithm.ledger.enable"),
        *(
            (
                ["algorithm.ledger={enable: true, lookahead: 2}", remote],
                "algorithm.ledger.lookahead reads the hidden states of a model in the trainer's own process",
            )
            for remote in ("cluster.learners=2", "cluster.rollout_workers=1", "cluster.reward_workers=1")
        ),
        (
            ["algorithm.ledger={enable: true, revisit: 0.5, correct: true}"],
            "algorithm.ledger.correct knows no weights for prompts that algorithm.ledger.revisit draws again",
        ),
        (
            ["algorithm.ledger={enable: true, lookahead: 2, correct: true}"],
            "algorithm.ledger.correct cannot be combined with algorithm.ledger.lookahead: a prompt drawn with",
        ),
        (["model.lora.target_modules=[q_proj, lm_head]"], "model.lora.target_modules cannot contain lm_head"),
    ],
)
def test_contradictory_options_are_refused(tmp_path, overrides, expected):
    assert expected in sentence(tmp_path, SMALLEST, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [*BUFFER, "reward.overlong_buffer.len=7"],
        ["reward.overlong_buffer.len=9999"],  # not switched on
        ["reward.length_shaping=target", "reward.target_length=5"],
        ["reward.use={math: 1, style.py:check: 0.2}"],
        ["data.train_batch_size=4", "optim.ppo_mini_batch_size=4"],
        ["optim.betas=[0, 0.999]"],
        [FINAL, "algorithm.kl_reward_coef=0.1"],
        ["algorithm.loss=grpo", "algorithm.clip_ratio_low=0.1", "algorithm.clip_ratio_high=0.1"],
        ["algorithm.loss=gspo", "algorithm.clip_ratio_high=0.1"],
        ["model.lora.target_modules=[q_proj]"],
        ["rollout.tensor_parallel=2", "cluster.rollout_workers={vllm: 1, embedded: 2}"],
    ],
)
def test_options_that_only_just_agree_are_accepted(tmp_path, overrides):
    assert load(tmp_path, SMALLEST, *overrides) != load(tmp_path, SMALLEST)


def test_rollout_workers_are_one_number_or_a_number_per_engine(tmp_path):
    assert load(tmp_path).rollout_engines == ()
    assert load(tmp_path, SMALLEST, "cluster.rollout_workers=2").rollout_engines == ("embedded", "embedded")
    mixed = load(tmp_path, SMALLEST, "rollout.tensor_parallel=4", "cluster.rollout_workers={vllm: 1, embedded: 2}")
    assert mixed.rollout_engines == ("vllm", "embedded", "embedded")
    assert mixed.rollout_gpus == (4, 1, 1)
    assert mixed.uses_vllm
    assert Config.model_validate_json(mixed.model_dump_json()) == mixed


def test_the_resolved_yaml_loads_as_an_equal_configuration(tmp_path):
    config = load(
        tmp_path, SMALLEST, "run.name=2e5x", "run.seed=9223372036854775807", "data.system_prompt='12e3'",
        "model.lora={rank: 4, target_modules: [q_proj, größe]}", "optim.lr=1e-7", "optim.betas=[0.5, 0.75]",
        "algorithm.clip_ratio_c=null", "eval.data='null'", "model.path='é: {x} # y'",
        "cluster.rollout_workers={vllm: 1, embedded: 2}",
    )  # fmt: skip
    assert config.data.system_prompt == "12e3"  # text that looks like a number must stay text
    (tmp_path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert Config.load(tmp_path / "config.yaml") == config


def test_a_configuration_cannot_be_changed(tmp_path):
    config = load(tmp_path)
    with pytest.raises(ValidationError, match="frozen"):
        config.optim.lr = 1.0
    with pytest.raises(ValidationError, match="frozen"):
        config.optim = config.optim


CLIPS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode", "adv_norm")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (0.2, 0.28, 10.0, "token-mean", "std")),
        (["algorithm.loss=dapo", "algorithm.clip_ratio_high=0.3"], (0.2, 0.3, 10.0, "token-mean", "std")),
        (["algorithm.loss=grpo"], (0.2, 0.2, None, "seq-mean-token-mean", "std")),
        (["algorithm.loss=grpo", "algorithm.clip_ratio_low=0.1"], (0.1, 0.1, None, "seq-mean-token-mean", "std")),
        (["algorithm.loss=grpo", "algorithm.clip_ratio_high=0.1"], (0.1, 0.1, None, "seq-mean-token-mean", "std")),
        (["algorithm.loss=dr_grpo"], (0.2, 0.2, None, "seq-mean-token-sum", "none")),
        (["algorithm.loss=gspo"], (3e-4, 4e-4, None, "seq-mean-token-mean", "std")),
        (["algorithm.loss=cispo"], (1.0, 4.0, None, "token-mean", "std")),
        (["algorithm.loss=sapo"], (0.2, 0.28, None, "seq-mean-token-mean", "std")),
        (["algorithm.loss=gmpo"], (0.4, 0.4, None, "seq-mean-token-mean", "std")),
        (["algorithm.loss=mine.py:f"], (0.2, 0.28, 10.0, "token-mean", "std")),
    ],
)
def test_the_name_of_a_loss_sets_the_options_that_belong_to_it(tmp_path, overrides, expected):
    config = load(tmp_path, SMALLEST, *overrides)
    assert tuple(getattr(config.algorithm, name) for name in CLIPS) == expected
    assert Config.from_text(config.to_yaml(), "config.yaml") == config  # the resolved options are accepted


def test_the_set_of_options_is_frozen():
    assert [name for name, _ in leaves()] == OPTIONS


def test_every_option_has_a_help_sentence():
    assert [name for name, info in leaves() if not (info.description or "").endswith(".")] == []


def test_the_options_page_is_current():
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    remedy = "python -m dapo.config.reference > docs/reference/configuration.md"
    assert page == options_markdown(), remedy


def test_every_option_is_read_by_a_run(tmp_path, monkeypatch):
    """Watch which options a real run reads with every feature on. Reads while the configuration is loaded do not count.

    A search through the source would prove nothing: `.name`, `.path` and `.steps` are everywhere.
    """
    from dapo.terminal.console import ConsoleReporter
    from dapo.training.trainer import Trainer

    everything = [
        "run.steps=null", "run.epochs=1",  # 2 steps of 3 prompts
        "model.lora.rank=2", "algorithm.kl_loss_coef=0.1", "algorithm.kl_reward_coef=0.1",
        "reward.length_shaping=buffer", "reward.overlong_buffer.len=2", "data.gen_batch_size=3", "eval.k=2",
        "algorithm.filter_groups.max_num_gen_batches=1",  # gives at most 3 of 4 groups, so the rounds are exhausted
    ]  # fmt: skip
    recipe = runs.recipe(tmp_path, reward=SELDOM_EQUAL)
    with (tmp_path / "data.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({"prompt": "too long " * 100, "answer": 1}))
    (tmp_path / "other.jsonl").write_text('{"prompt": "another question", "answer": 1}', encoding="utf-8")
    config = Config.load(recipe, [*everything, f"eval.data={tmp_path}/other.jsonl"])
    reads: set[tuple[type, str]] = set()

    def reading(self: Section, name: str) -> Any:
        reads.add((type(self), name))
        return object.__getattribute__(self, name)

    monkeypatch.setattr(Section, "__getattribute__", reading, raising=False)
    trainer = Trainer(config, reporter=ConsoleReporter(Console(file=io.StringIO())))
    trainer.train()
    trainer.close()
    # Reads in worker processes cannot be watched, so build here what they build, and the other judges and shapings.
    options = RewardConfig(regex="(.)", length_shaping="target", target_length=3)
    for rule in RULES:
        make_rule(rule, options)
    group_rules(config.model_copy(update={"reward": options}))
    unread = {name for name, _ in leaves() if _owner(name) not in reads and not name.startswith("environment.")}
    # The options of environments, reward models, vLLM and clusters are tested in their rooms' tests.
    assert unread == {
        "reward.model.device", "reward.model.batch_size",
        "rollout.tensor_parallel", "rollout.vllm",
        "cluster.offload", "cluster.max_restarts", "cluster.timeout",
    }  # fmt: skip


SELDOM_EQUAL = "def reward(completion, answer):\n    return sum(map(ord, completion)) / 1000"


def _owner(option: str) -> tuple[Any, str]:
    *path, leaf = option.split(".")
    section: Any = Config
    for name in path:
        section = section.model_fields[name].annotation
    return section, leaf


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_planned_and_misses_only_files_that_a_command_makes(recipe, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = Config.load(recipe)
    assert config.run.name == recipe.stem
    assert "sampling" in plan_text(config).split("\n")[1]
    for source in [*config.data.train, *(s for members in (config.eval.data or {}).values() for s in members)]:
        stem = Path(source.path).stem.removesuffix("-test")
        if not source.path.startswith("gym:") and stem not in PREPARED:
            assert find_files(source.path)


def test_the_page_about_training_lists_all_recipes():
    page = (ROOT / "docs" / "how-to" / "train.md").read_text(encoding="utf-8")
    assert {path.stem for path in RECIPES} == set(re.findall(r"`recipes/([\w.]+)\.yaml`", page))


def test_the_published_recipe_has_the_published_values():
    """Compare with the values listed with the published run; options that are not listed there are off."""
    config = Config.load(ROOT / "recipes" / "dapo_qwen2.5_32b.yaml")
    data, algorithm, optim, evaluation = config.data, config.algorithm, config.optim, config.eval
    assert (optim.lr, optim.warmup_steps, optim.weight_decay, optim.betas, optim.grad_clip) == (
        1e-6, 10, 0.1, (0.9, 0.999), 1.0,
    )  # fmt: skip
    assert (data.train_batch_size, data.gen_batch_size, config.rollout.n, optim.ppo_mini_batch_size) == (
        512,
        1536,
        16,
        32,
    )
    assert (data.max_prompt_length, data.max_response_length) == (2048, 16384 + 4096)
    assert (config.reward.length_shaping, config.reward.overlong_buffer.len) == ("buffer", 4096)
    assert (config.reward.use, config.reward.overlong_buffer.penalty_factor) == ("math_dapo", 1.0)
    assert (algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.clip_ratio_c) == (0.2, 0.28, 10)
    assert (algorithm.kl_loss_coef, algorithm.kl_reward_coef, algorithm.loss_agg_mode) == (0, 0, "token-mean")
    assert (algorithm.filter_groups.metric, algorithm.filter_groups.max_num_gen_batches) == ("acc", 10)
    assert not algorithm.ledger.enable
    assert algorithm.max_staleness == 0
    assert (evaluation.temperature, evaluation.top_p, evaluation.k, evaluation.every) == (1.0, 0.7, 32, 5)


def test_the_early_recipe_differs_from_the_published_one_only_in_loss_and_sampling():
    full, early = (Config.load(ROOT / "recipes" / f"{name}qwen2.5_32b.yaml") for name in ("dapo_", "dapo_early_"))
    differing = {key for key, _ in leaves() if full.option(key) != early.option(key)}
    filters = {"enable", "metric", "max_num_gen_batches"}
    assert differing <= {
        "run.name", "data.gen_batch_size", "algorithm.loss_agg_mode",
        *(f"algorithm.filter_groups.{name}" for name in filters),
    }  # fmt: skip
    assert (early.algorithm.loss_agg_mode, early.algorithm.filter_groups.enable) == ("seq-mean-token-mean", False)


def multiplied(form: str) -> str:
    """Return lines that each repeat the line before nine times, by aliases."""
    letters = "abcdefghi"
    return "".join(
        f"{letter}: &{letter} {form % ', '.join([f'*{before}'] * 9)}\n" for before, letter in pairwise(letters)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &a [1, 1, 1]\n" + multiplied("[%s]"), "more than 50,000 values, with aliases expanded"),
        ("a: &a {x: 1}\n" + multiplied("{<<: [%s]}"), "more than 50,000 values"),
        ("a: &a [*a]", "more than 32 levels of nesting"),
        ("a: &a " + "[" * 20 + "]" * 20 + "\nb: " + "[" * 20 + "*a" + "]" * 20, "more than 32 levels of nesting"),
        ("[" * 5000, "nested too deeply"),
        ("a" * 300_000, "longer than 262,144 characters"),
        (SMALLEST + "run: {steps: " + "9" * 5000 + "}", "an integer that does not fit into 64 bits"),
        (SMALLEST + "run: {steps: 0x" + "f" * 90 + "}", "an integer that does not fit into 64 bits"),
        (SMALLEST + 'run: {name: "a\\0b"}', "a NUL character, which no name or path can contain"),
        (SMALLEST + 'run: {dir: "\\ud800"}', "half of a surrogate pair"),
        (SMALLEST + 'run: {name: "a\\nb"}', "run.name must be a plain folder name, found 'a\\nb'"),
        (SMALLEST + "run: {name: !!timestamp 2024-13-45}", "could not determine a constructor"),
        (SMALLEST + "run: {name: !!bool maybe}", "KeyError: 'maybe'"),
    ],
)
def test_yaml_that_would_hang_or_crash_a_parser_is_refused_in_one_sentence(tmp_path, text, expected):
    message = sentence(tmp_path, text)
    assert expected in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.n=1000000000000", "less than or equal to 65536"),
        ("reward.workers=100000", "less than or equal to 1024"),
        ("reward.timeout=1e300", "less than or equal to 604800"),
        ("reward.memory_gb=1e300", "less than or equal to 1000000"),
        ("cluster.rollout_workers=1000000000000", "expected 0 to 16384"),
        ("data.train={path: x, size: 100000000000}", "'data.train.size' is 100000000000"),
        ("model.lora.target_modules=[]", "model.lora.target_modules is empty"),
        (f"rollout.vllm{'.a' * 5000}=1", "more than 32 levels of nesting"),
        (f"run.name=[{'x' * 5000}]", "...: input should be a valid string"),
    ],
)
def test_absurd_sizes_are_refused(tmp_path, override, expected):
    message = sentence(tmp_path, SMALLEST, override)
    assert expected in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["run.steps=5", "run.epochs=2"], "run.steps is 5 and run.epochs is 2; set one of them, and the other to null"),
        (["run.steps=null"], "run.steps and run.epochs are both null; set one of them"),
        (["run.epochs=0"], "'run.epochs' is 0: input should be greater than 0"),
        (["run.epochs=1", "data.train=[d.jsonl, 'gym:gcd']"], "gym:gcd generates them without end; give it a `size`"),
    ],
)
def test_a_run_has_steps_or_epochs(tmp_path, overrides, expected):
    message = sentence(tmp_path, SMALLEST, *overrides)
    assert expected in message
    assert "{'" not in message  # the whole section is not quoted


def test_epochs_replace_the_default_number_of_steps_and_survive_being_written(tmp_path):
    assert load(tmp_path).run.steps == 100
    config = load(tmp_path, SMALLEST, "run.epochs=2")
    assert (config.run.steps, config.run.epochs) == (None, 2)
    assert load(tmp_path, config.to_yaml()) == config.renamed("recipe")
    assert load(tmp_path, SMALLEST, "run.epochs=1", "data.train={path: 'gym:gcd', size: 5}").run.epochs == 1


def test_a_date_is_text_and_a_json_surrogate_pair_is_one_character(tmp_path):
    assert load(tmp_path, SMALLEST, "run.name=2024-01-31").run.name == "2024-01-31"
    config = load(tmp_path, SMALLEST, 'run.name="\\ud83d\\ude42"')
    assert config.run.name == "🙂"
    (tmp_path / "again.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert Config.load(tmp_path / "again.yaml") == config
