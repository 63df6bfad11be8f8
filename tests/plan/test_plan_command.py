"""The whole plan: properties of every recipe's plan, the output of `dapo plan`, and what it refuses."""

from __future__ import annotations

import itertools
import re

import pytest
from typer.testing import CliRunner

from dapo.cli import app
from dapo.config import Config
from dapo.errors import ConfigError, ModelError
from dapo.model.memory import GIB
from dapo.plan.advice import advice
from dapo.plan.command import PlanOptions
from dapo.plan.estimate import estimate
from dapo.plan.hardware import find_gpu
from dapo.plan.learn import Learner, update
from dapo.plan.memory import DoesNotFit
from dapo.plan.shapes import model_shape
from dapo.plan.workload import workload
from tests.plan.test_plan import GSM8K, H200, PUBLISHED, ROOT, planned, printed

PAGES = (ROOT / "docs" / "explanation" / "scaling.md", ROOT / "docs" / "tutorial" / "lora.md")
SHOWN = [block for page in PAGES for block in re.findall(r"```\n\$ dapo (plan .*?)```", page.read_text("utf-8"), re.S)]


# Properties


@pytest.mark.parametrize("recipe", ["dapo_qwen2.5_32b", "dapo_early_qwen2.5_32b", "dapo_math_17k", "gsm8k"])
@pytest.mark.parametrize("gpu", ["h200", "l40s"])
def test_more_gpus_are_never_slower_unless_the_network_or_the_host_is_named(recipe, gpu):
    plans = []
    for gpus in (1, 2, 8, 16, 64, 128, 1024, 10_000):
        try:
            plans.append(planned(ROOT / "recipes" / f"{recipe}.yaml", gpus, gpu))
        except DoesNotFit:
            assert not plans, "it fits on fewer GPUs"
    for fewer, more in itertools.pairwise(plans):
        named = "network" in " ".join(advice(more)) or more.learning.limit in ("the network", "the host")
        assert more.seconds <= fewer.seconds * 1.001 or named, (fewer.layout.gpus, more.layout.gpus)


def test_a_slow_network_is_named_as_the_bottleneck():
    config = Config.load(PUBLISHED)
    work = workload(config)
    fast, slow = (estimate(config, work, find_gpu("h200", network), 128) for network in (50, 0.1))
    assert fast.learning.limit != "the network"
    assert slow.learning.limit == "the network"
    assert slow.seconds > fast.seconds


def test_longer_responses_and_a_lower_keep_rate_take_longer():
    usual, longer, rarer = planned(), planned(mean_response=8000), planned(keep_rate=0.2)
    assert usual.seconds < longer.seconds
    assert usual.seconds < rarer.seconds
    assert [len(plan.work.rounds) for plan in (usual, rarer)] == [1, 2]


def test_in_flight_sampling_has_no_tail_and_dedicated_gpus_overlap_both_sides():
    overrides = ("rollout.mode=inflight", "algorithm.max_staleness=1")
    tails = [planned(gpus=1024, overrides=("rollout.mode=inflight", f"algorithm.max_staleness={i}")).sampling.tail
             for i in (1, 2, 100)]  # fmt: skip
    strict = planned(gpus=1024, overrides=("algorithm.max_staleness=1",)).sampling.tail
    assert strict >= tails[0] > tails[1] > tails[2] == 0  # the longest must finish before it is stale
    turns, apart = planned(rollout_gpus=96), planned(overrides=overrides, rollout_gpus=96)
    sides = apart.sampling.seconds + apart.rewards, apart.reference + apart.learning.seconds
    assert apart.seconds == pytest.approx(max(sides) + apart.sync)
    assert turns.seconds == pytest.approx(sum(turns.phases.values()))
    text = printed(Config.load(PUBLISHED, overrides), PlanOptions(gpus="128", rollout_share=0.75))
    assert "overlapped" in text
    assert "cluster.learners=32 cluster.rollout_workers=96" in text


def test_offloaded_state_takes_no_gpu_memory_and_costs_time():
    usual, offloaded = planned(gpus=32), planned(gpus=32, overrides=("cluster.learners=32", "cluster.offload=true"))
    assert not {"masters", "moments"} & offloaded.memory.parts.keys()
    assert offloaded.learning.seconds >= usual.learning.seconds
    with pytest.raises(DoesNotFit, match=r"; 16 such GPUs or cluster\.offload=true would be enough$"):
        planned(gpus=8)
    assert planned(gpus=8, overrides=("cluster.learners=8", "cluster.offload=true")).seconds > usual.seconds


def test_tensor_parallelism_is_that_of_the_recipe_or_the_fastest_that_fits():
    vllm = ("rollout.engine=vllm",)
    assert planned(overrides=vllm).layout.tensor_parallel == 1
    assert planned(overrides=(*vllm, "rollout.tensor_parallel=4"), rollout_gpus=64).layout.engines == 16
    plans = [planned(overrides=vllm, rollout_gpus=64, tensor_parallel=ways).seconds for ways in (1, 2, 4, 8)]
    assert planned(overrides=vllm, rollout_gpus=64).seconds == min(plans)
    short = (*vllm, "data.max_response_length=8192", "optim.max_tokens_per_micro_batch=0")
    assert planned(overrides=short, gpu="a100", rollout_gpus=64).layout.tensor_parallel > 1  # weights take 61 of 67 GiB


def test_generated_and_trained_tokens_follow_from_the_recipe():
    plan = planned(keep_rate=0.2, mean_response=1000)
    assert plan.work.rounds == (1536.0, 1536.0)  # 1,536 x 0.2 is not enough, and surplus is not carried over
    assert plan.work.generated_tokens == pytest.approx(2 * 1536 * 16 * 1000, rel=1e-3)
    assert (plan.work.trained_groups, plan.work.updates) == (512, 16)
    carried = workload(Config.load(PUBLISHED, ["algorithm.max_staleness=1"]), keep_rate=0.2)
    assert sum(carried.rounds) == pytest.approx(512 / 0.2)
    exhausted = workload(Config.load(PUBLISHED, ["algorithm.filter_groups.max_num_gen_batches=1"]), keep_rate=0.2)
    assert exhausted.trained_groups == pytest.approx(1536 * 0.2)


def test_ranks_without_a_response_do_not_help():
    work = workload(Config.load(PUBLISHED))
    shape = model_shape("Qwen/Qwen2.5-32B")
    fewer, more = (update(Learner(shape, H200, ranks, 22_528, True), work) for ranks in (512, 4096))
    assert more.seconds >= fewer.seconds
    assert any("Only 512 of 4,096 learners" in sentence for sentence in advice(planned(gpus=4096)))


def test_many_groups_of_short_responses_are_bound_by_the_driver():
    sizes = ("data.train_batch_size=8192", "data.gen_batch_size=16384", "data.max_response_length=64")
    options = (*sizes, "reward.overlong_buffer.len=16")
    short = planned(gpus=1024, overrides=options, mean_response=16)
    assert short.sampling.driver == pytest.approx(16_384 / (20_000 / 60) - 1.7, abs=0.3)  # sampling itself takes 1.7 s
    assert planned(gpus=1024).sampling.driver == 0
    asked = PlanOptions(gpus="1024", mean_response=16)
    text = " ".join(printed(Config.load(PUBLISHED, options), asked).split())
    assert "a driver that dispatches 333 groups per second to any number of engines" in text


# The command


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")))
def test_the_plan_of_every_recipe_fits_80_columns_and_names_what_is_measured_and_assumed(recipe):
    config = Config.load(ROOT / "recipes" / f"{recipe}.yaml")
    gpus = "128" if "32b" in recipe else "1"
    for question in (PlanOptions(gpus=gpus), PlanOptions(gpus=f"{gpus},1024")):
        text, narrow = printed(config, question), printed(config, question, width=80)
        assert max(map(len, text.splitlines())) <= 100
        assert max(map(len, narrow.splitlines())) <= 80
        tables, narrow_tables = ([line.rstrip() for line in each.splitlines() if line[:1] == " "]
                                 for each in (text, narrow))  # fmt: skip
        assert tables == narrow_tables  # no table is wrapped or cut off
        assert "Measured on one H200" in text
        assert "Assumed: log-normal lengths" in text
    assert "The bottleneck is" in printed(config, PlanOptions(gpus=gpus))


@pytest.mark.parametrize(("recipe", "looks_ahead"), [(GSM8K, True), (PUBLISHED, False)])
def test_the_recipe_takes_the_options_of_its_plan(recipe, looks_ahead):
    text = printed(Config.load(recipe), PlanOptions(gpus="128"))
    (options,) = re.findall(r"- Options: (.*)", text)
    assert Config.load(recipe, options.split()).cluster.learners == 128
    assert ("algorithm.ledger.lookahead=1" in options) == looks_ahead


def test_the_memory_table_adds_up():
    text = printed(Config.load(PUBLISHED), PlanOptions(gpus="128"))
    plan = planned()
    assert f"{plan.memory.peak[0] / GIB:.1f}" in text
    assert sum(pair[0] for pair in plan.memory.parts.values()) == plan.memory.peak[0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu", "24"], r"--gpu 24 is not known; choose one with as much memory: .*, rtx4090 \(24 GB\), "),
        (["--gpus", "0"], "--gpus is 0, but must be at least 1"),
        (["--gpus", "many"], "--gpus many: expected a number such as 8"),
        (["--gpus", "8", "--rollout-share", "0.99"], "8 of 8 GPUs would only sample, which leaves none to train"),
        (["--gpus", "8", "--rollout-share", "1"], "--rollout-share is 1, but must be at least 0 and below 1"),
        (["--mean-response", "30000"], "--mean-response is 30000, but must be above 0 and at most 20480"),
        (["--keep-rate", "0"], "--keep-rate is 0, but must be above 0"),
        (["--network", "0"], "--network is 0, but must be above 0"),
        (["--tensor-parallel", "3", "--gpus", "8"], "--tensor-parallel is 3, but must be"),
        (["model.path=acme/rocket"], "model.path acme/rocket: the shape of this model is not known"),
        (["model.dtype=float32"], "plans are for bfloat16 only"),
        (["--gpus", "1"], r"does not fit: .*; 16 such GPUs would be enough$"),
        (["--gpu", "rtx4090"], "take 64 GiB, .* more such GPUs would not help, but GPUs with more memory may"),
        (["--gpu", "T4"], "--gpu T4 has no bfloat16 and is not supported; choose from b200"),
        (["--gpu", "Tesla V100"], "--gpu Tesla V100 has no bfloat16 and is not supported"),
    ],
)
def test_wrong_options_are_refused_with_one_sentence(arguments, sentence):
    result = CliRunner().invoke(app, ["plan", str(PUBLISHED), *arguments])
    assert isinstance(result.exception, ConfigError | ModelError)
    assert result.exception.exit_code == 2
    assert re.search(sentence, str(result.exception))
    assert "\n" not in str(result.exception)


def test_shorter_responses_are_advised_only_if_they_make_the_recipe_fit():
    long = ("model.path=Qwen/Qwen2.5-0.5B", "data.max_response_length=1000000")
    with pytest.raises(DoesNotFit, match=r"but a smaller data\.max_response_length or GPUs with more memory may"):
        planned(gpus=1, gpu="rtx4090", overrides=long)
    with pytest.raises(DoesNotFit) as refused:
        planned(GSM8K, 1, "rtx3060", ("model.path=Qwen/Qwen2.5-7B",))
    assert "max_response_length" not in str(refused.value)


def test_the_option_that_limits_decoding_is_the_one_to_raise():
    few = planned(GSM8K, 1, overrides=("rollout.max_concurrent=32",))
    assert "a larger rollout.max_concurrent (now 32)" in advice(few)[0]
    cached = planned(GSM8K, 1, overrides=("rollout.kv_memory_fraction=0.01", "rollout.max_concurrent=1000"))
    assert cached.memory.slots < 1000 and "a larger rollout.kv_memory_fraction" in advice(cached)[0]


def test_a_plan_decodes_as_many_responses_at_once_as_the_run_does():
    recipe = ROOT / "recipes" / "gsm8k_24gb.yaml"
    assert (workload(Config.load(recipe)).concurrent, Config.load(recipe).concurrent) == (512, 512)
    assert workload(Config.load(recipe, ["rollout.max_concurrent=48"])).concurrent == 48


def test_advice_names_only_what_the_recipe_does_not_do_yet():
    def fewer_tokens(*overrides):
        config = Config.load(GSM8K, overrides)
        return advice(estimate(config, workload(config), H200, 1))[0].partition("fewer tokens: ")[2]

    assert fewer_tokens() == "shorter responses."
    plain = fewer_tokens("algorithm.ledger={enable: false, lookahead: 1}", "optim.ppo_epochs=2")
    assert plain == "shorter responses, algorithm.ledger.enable, fewer optim.ppo_epochs."


def test_activations_of_an_update_that_fits_as_a_whole_are_computed_once():
    recipe = ROOT / "recipes" / "guess_five.yaml"
    assert not planned(recipe, 1, "rtx3060").memory.recomputes
    assert planned(recipe, 1, "rtx3060", ("data.max_response_length=4096",)).memory.recomputes


def test_the_plan_names_what_the_host_must_have_room_for_and_the_time_of_all_steps():
    def text(gpu: str, *overrides: str) -> str:
        return " ".join(printed(Config.load(GSM8K, overrides), PlanOptions(gpu=gpu)).split())

    full, adapters = text("h200"), text("rtx3060", "model.lora.rank=16", "run.steps=1000")
    assert "A checkpoint takes 20.1 GiB of disk, and a copy of it as much of the host's memory" in full
    assert "are in the host's memory" not in full
    assert "The frozen weights beneath the adapters (2.4 GiB) are in the host's memory." in adapters
    assert "A checkpoint takes 2.9 GiB of disk" in adapters
    assert re.search(r" trains [\d.]+ s per step", full), "the H200 was measured"
    step, days = re.search(r"About (\d+) s per step .* 1,000 steps take about (\d+) days", adapters).groups()  # pyright: ignore[reportOptionalMemberAccess]
    assert int(days) == round(int(step) * 1000 / 86_400)
    sharded = planned(gpus=8, overrides=("cluster.learners=8", "cluster.offload=true"))
    assert sharded.memory.offloaded_shard == 18 * sharded.shape.parameters / 8
    assert any("of each learner) are in the host's memory" in sentence for sentence in advice(sharded))


def test_a_comparison_names_the_numbers_of_gpus_that_do_not_fit():
    text = printed(Config.load(PUBLISHED), PlanOptions(gpus="128,8"))
    assert [line.split()[0] for line in text.splitlines() if re.match(r" +\d", line)] == ["8", "128"]
    assert "does not fit" in text
    assert "- 8 GPUs:" in text


@pytest.mark.parametrize("block", SHOWN)
def test_the_tables_in_the_docs_are_what_the_command_prints(block, monkeypatch):
    command, shown = block.split("\n\n", 1)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "100")
    result = CliRunner().invoke(app, command.replace("\\\n", " ").split(), catch_exceptions=False)
    printed_lines = [line.rstrip() for line in result.output.splitlines() if line.strip()]
    assert [line.rstrip() for line in shown.splitlines() if line.strip()] == printed_lines


def test_constants_are_listed_by_origin():
    source = (ROOT / "dapo" / "plan" / "hardware.py").read_text()
    assert source.index("# MEASURED") < source.index("READING =") < source.index("# ASSUMED") < source.index("NODE =")


def test_without_a_number_of_gpus_the_plan_is_for_the_cluster_of_the_recipe():
    options = ["rollout.engine=vllm", "rollout.tensor_parallel=4", "cluster.learners=64", "cluster.rollout_workers=16"]
    answers = (CliRunner().invoke(app, ["plan", str(PUBLISHED), *more]).output for more in ([], options))
    plain, split = (" ".join(answer.split()) for answer in answers)  # undo line wrapping
    assert "128 x h200" in plain and "in turns with 128 learners" in plain
    assert "128 x h200" in split and "64 learners" in split
