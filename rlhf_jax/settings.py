"""Every setting of a run, as frozen dataclasses with explanations; `rlhf-jax config --help` prints them.

This module imports nothing heavy, so that `--help` answers at once. config.py reads YAML and `key=value`, and
checks.py looks across settings.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def option(default: Any, help: str) -> Any:
    """A field with its default and the sentence that explains it."""
    return dataclasses.field(default=default, metadata={"help": help})


def section(kind: type) -> Any:
    """A field that is itself a dataclass of settings."""
    return dataclasses.field(default_factory=kind)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Shape of a Llama-architecture model trained from nothing (`policy.model=new` or `reward.model=new`)."""

    vocab_size: int = option(
        512, "entries of the tokenizer, trained as byte-level BPE on the training texts; at least 260"
    )
    layers: int = option(4, "number of transformer layers")
    embed: int = option(128, "width of the residual stream")
    heads: int = option(4, "number of query heads; divides embed")
    kv_heads: int = option(4, "number of key/value heads; divides heads")
    mlp: int = option(384, "width of the feed-forward layer")
    max_positions: int = option(1024, "longest sequence, in tokens")
    tied: bool = option(True, "the unembedding is the embedding table; false: a table of its own")


@dataclasses.dataclass(frozen=True)
class Policy:
    """The model that is improved."""

    model: str = option("new", "hub name, directory, or `new` for a model of policy.shape with fresh weights")
    shape: Shape = section(Shape)
    dtype: str = option(
        "float32", "type of the computation: float32 or bfloat16 (weights and Adam's moments stay float32)"
    )
    remat: str = option(
        "products",
        "what the backward pass recomputes: none; products (all but those results of matrix products with "
        "weights that are no wider than their input); layers (all but each layer's input: least memory, "
        "about a third more work). Of policy, critic and reward model",
    )


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters in place of whole matrices: what SFT, the reward model's training and PPO learn."""

    rank: int = option(0, "inner width of the adapters; 0: none, all parameters learn")
    alpha: float = option(16.0, "adapters act with the weight alpha / rank")
    targets: str = option(
        "q,k,v,o,gate,up,down",
        "projections that have one, of these names; those that a model lacks are passed over",
    )


@dataclasses.dataclass(frozen=True)
class Data:
    """Preference pairs and prompts."""

    train: str = option(
        "synthetic", "preference pairs: JSONL (.gz), parquet, a hub name (NAME or NAME:SPLIT), or `synthetic`"
    )
    validation: str | None = option(
        None, "held-out pairs in the same forms; none: a share of data.train, split by prompt"
    )
    validation_fraction: float = option(
        0.1, "share of the prompts held out where data.validation is not given"
    )
    prompts: str | None = option(None, "prompts for PPO, in the same forms; none: the prompts of the pairs")
    limit: int | None = option(None, "read at most this many rows of each source")
    first_turn: bool = option(False, "PPO and evaluation prompts are the first turn of each dialogue only")


@dataclasses.dataclass(frozen=True)
class Supervised:
    """What fine-tuning and the reward model's training have in common. A row is a dialogue or a pair."""

    learning_rate: float = option(1e-5, "peak learning rate of AdamW")
    warmup_fraction: float = option(0.05, "share of the steps in which the learning rate rises from 0")
    schedule: str = option(
        "cosine", "learning rate after the warm-up: constant, linear or cosine (both to 0)"
    )
    weight_decay: float = option(0.0, "AdamW's decoupled weight decay")
    max_grad_norm: float = option(1.0, "gradients are scaled down to this global norm")
    batch_size: int = option(16, "dialogues or pairs a step, over all devices")
    micro_batch_size: int | None = option(
        None, "dialogues or pairs a forward pass; divides batch_size; none: the whole batch"
    )
    max_length: int = option(512, "longest prompt + response in tokens; the oldest turns go first")
    eval_every: int = option(100, "steps between evaluations on the held-out pairs, and between saves")


@dataclasses.dataclass(frozen=True)
class Sft(Supervised):
    """Supervised fine-tuning of the policy on the chosen responses, before everything else."""

    epochs: int = option(0, "passes over the chosen responses; 0 skips the phase")


@dataclasses.dataclass(frozen=True)
class Reward(Supervised):
    """The reward model and its training on pairs."""

    model: str = option(
        "new",
        "`reward`, `run`: the backbone: hub name, directory, `new`, `policy`; others: the trained directory",
    )
    shape: Shape = section(Shape)
    function: str | None = option(
        None,
        "`module:function` of (prompts, responses) -> scores, in place of a reward model; its code runs",
    )
    retries: int = option(
        0, "how often a call of reward.function is made again that raised, hung or gave no finite number each"
    )
    timeout: float | None = option(None, "seconds that a call of reward.function may take; none: any")
    fallback: float | None = option(
        None,
        "score, standardised, of a response that could not be scored; none: the run saves and stops",
    )
    dtype: str = option("float32", "type of the computation: float32 or bfloat16")
    loss: str = option("bradley_terry", "ranking loss: bradley_terry or hinge")
    margin: float = option(0.0, "how much higher the chosen response should score")
    centering_coef: float = option(
        0.0, "weight of mean((s_chosen + s_rejected)^2), which keeps scores around 0"
    )
    epochs: int = option(1, "passes over the pairs")


@dataclasses.dataclass(frozen=True)
class Critic:
    """The value function."""

    init: str = option(
        "policy",
        "weights it starts from: policy (fresh head), reward (same tokenizer needed), or a directory",
    )
    shared: bool = option(
        False,
        "a value head on the policy's own trunk: one pass gives log-probabilities and values, and one "
        "backward pass of policy loss + coef * value loss teaches both. The head has critic.learning_rate, "
        "the trunk ppo.learning_rate",
    )
    coef: float = option(0.1, "weight of the value loss in the trunk's gradient, where the trunk is shared")
    learning_rate: float = option(
        1e-5, "peak learning rate of the critic's AdamW; the field's default is ten times the actor's"
    )
    warmup_iterations: int = option(
        0, "first iterations in which only the critic learns; of a shared one its head"
    )
    max_grad_norm: float = option(1.0, "the critic's gradients are scaled down to this global norm")


@dataclasses.dataclass(frozen=True)
class Ppo:
    """Proximal policy optimisation. One iteration: a rollout, then `epochs` passes of `minibatches` steps."""

    iterations: int = option(100, "rollouts; may grow when a run is resumed")
    batch_size: int = option(16, "responses a rollout, over all devices")
    epochs: int = option(2, "passes over each rollout")
    minibatches: int = option(1, "optimizer steps a pass; divides batch_size")
    micro_batch_size: int | None = option(
        None, "responses a forward pass; divides batch_size / minibatches; none: all"
    )
    learning_rate: float = option(1e-6, "peak learning rate of the actor's AdamW")
    warmup_iterations: int = option(0, "iterations in which both learning rates rise from 0")
    schedule: str = option(
        "constant", "learning rates after the warm-up: constant, linear or cosine (both to 0)"
    )
    weight_decay: float = option(0.0, "AdamW's decoupled weight decay, for actor and critic")
    max_grad_norm: float = option(1.0, "the actor's gradients are scaled down to this global norm")
    clip_low: float = option(0.2, "the probability ratio is clipped below 1 - clip_low")
    clip_high: float = option(0.2, "the probability ratio is clipped above 1 + clip_high")
    dual_clip: float | None = option(
        None, "bound on the loss of negative advantages, times -A; above 1; none: off"
    )
    value_clip: float | None = option(
        0.2, "the new value is clipped around the old one by this much; none: off"
    )
    aggregation: str = option(
        "token_mean", "loss over tokens: token_mean, seq_mean_token_sum or seq_mean_token_mean"
    )
    gamma: float = option(1.0, "discount a token")
    lam: float = option(0.95, "GAE's trace decay a token")
    whiten_advantages: bool = option(True, "advantages get mean 0 and variance 1 over the whole rollout")
    bootstrap_truncated: bool = option(
        False, "a truncated response's return goes on with the critic's last value, not with 0"
    )
    kl_coef: float = option(0.05, "weight of the KL to the reference, nats a token")
    kl_target: float | None = option(
        None, "nats a response that the KL coefficient is steered to; none: it stays fixed"
    )
    kl_horizon: float = option(10000.0, "responses over which the adaptive KL coefficient moves")
    kl_placement: str = option("reward", "where the KL acts: reward (per token) or loss")
    kl_kind: str = option("k1", "estimator of the KL: k1, k2, k3 or abs")
    entropy_coef: float = option(0.0, "weight of the mean entropy, which is added to what is maximised")
    stop_kl: float | None = option(
        None, "the remaining steps of an iteration are skipped once ppo_kl passes this; none: off"
    )
    reward_clip: float | None = option(None, "scores are clipped to ± this after standardisation; none: off")
    missing_eos_penalty: float = option(0.0, "subtracted from the score of a response that did not end")
    packing: bool = option(
        False,
        "padding of prompts and responses is not computed in scoring and updates, which are compiled for "
        "several sizes",
    )
    old_logprobs: str = option(
        "auto",
        "the ratio's denominator: rollout (as sampled, no pass), recompute (a forward pass of the training "
        "weights) or auto (rollout where sampling and training both compute in float32)",
    )


@dataclasses.dataclass(frozen=True)
class Rollout:
    """How responses are sampled."""

    prompt_length: int = option(64, "longest prompt in tokens; the oldest turns go first")
    response_length: int = option(64, "longest response in tokens")
    temperature: float = option(
        1.0,
        "logits are divided by this, in sampling and in every log-probability; 0 is greedy (evaluation only)",
    )
    top_k: int = option(0, "sample among this many likeliest tokens; 0: all")
    top_p: float = option(1.0, "sample among the likeliest tokens that hold this much probability; 1: all")
    slots: int | None = option(
        None,
        "responses generated at the same time, over all devices: waiting prompts take the place of responses "
        "that end; none: all of a batch, until the longest ends",
    )
    dtype: str | None = option(
        None,
        "type that generation computes in, float32 or bfloat16; weights are cast before they move, and "
        "ppo.old_logprobs=auto recomputes what bfloat16 rounds. none: no cast, policy.dtype",
    )


@dataclasses.dataclass(frozen=True)
class Eval:
    """Comparison of the policy before and after, on the same held-out prompts with the same keys."""

    prompts: int = option(128, "held-out prompts")
    samples: int = option(1, "responses a prompt")
    batch_size: int = option(32, "responses a batch; a prompt's eval.samples stay together")
    every: int = option(
        0, "PPO iterations between evaluations, by which the best policy is kept; 0: only at the end"
    )


@dataclasses.dataclass(frozen=True)
class Health:
    """Signs that a PPO run goes wrong. Each is warned of once when it begins; none switches it off."""

    kl: float | None = option(
        1.0, "mean KL to the reference, nats a token, above which the policy is far off"
    )
    score_fall: float | None = option(
        2.0,
        "fall of the mean score below its best that is too much, in standard deviations of the first scores",
    )
    entropy: float | None = option(0.02, "mean entropy, nats a token, below which the policy has collapsed")
    length_fall: float | None = option(
        0.2, "share of the first step's mean response length below which responses have collapsed"
    )
    cut_off: float | None = option(
        0.95, "share of responses at their length limit above which they no longer end, if it began lower"
    )
    explained_variance: float | None = option(
        -0.5, "critic's explained variance; 20 steps in a row below it say that the critic has failed"
    )
    stop: str | None = option(
        None, "signs at which the run saves and stops with exit code 4: all, or names such as kl,entropy"
    )


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one role's parameters lie on the devices. -1 takes what is left."""

    data: int = option(-1, "replicas, each with its share of the batch")
    fsdp: int = option(1, "shards of the parameters; the batch is split over them as well")
    tensor: int = option(1, "shards of heads, feed-forward width and vocabulary")
    devices: str | None = option(
        None,
        "FIRST-LAST in jax.devices(), such as 0-3; none: all. Two roles have the same or disjoint devices; "
        "with several processes every role has all, because arrays cannot move to other devices across them",
    )


@dataclasses.dataclass(frozen=True)
class Offload:
    """What is in host memory (pinned_host) between its uses: slower, and free for the rest of the step."""

    reference: bool = option(False, "parameters of the reference")
    reward: bool = option(False, "parameters of the reward model in PPO and evaluation")
    optimizer: bool = option(False, "Adam's moments of actor and critic")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Device layout of each role."""

    train: Layout = section(Layout)
    generate: Layout = section(Layout)
    critic: Layout | None = option(None, "layout of the critic; none: as placement.train")
    reference: Layout | None = option(None, "layout of the reference; none: as placement.train")
    reward: Layout | None = option(None, "layout of the reward model; none: as placement.train")
    offload: Offload = section(Offload)


@dataclasses.dataclass(frozen=True)
class Run:
    """Where a run lives and how it goes on."""

    dir: str = option("runs/rlhf", "the run's directory, local or gs://")
    seed: int = option(0, "every random number of the run comes from it")
    resume: str = option(
        "auto", "auto goes on where the directory stopped; never refuses a directory that holds a run"
    )
    save_every: int = option(10, "PPO iterations between checkpoints")
    keep: int = option(2, "checkpoints kept for each phase")
    profile_every: int = option(
        10, "PPO iterations between those whose phases are timed one by one; 0: never"
    )
    profile: int = option(
        0,
        "PPO iterations of each start that the profiler traces, from the third one on, into run.dir/profile",
    )
    max_bad_steps: int = option(5, "non-finite updates in a row after which the run stops")
    tensorboard: bool = option(False, "also write TensorBoard event files (needs the extra `tensorboard`)")


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run."""

    policy: Policy = section(Policy)
    lora: Lora = section(Lora)
    data: Data = section(Data)
    sft: Sft = section(Sft)
    reward: Reward = section(Reward)
    critic: Critic = section(Critic)
    ppo: Ppo = section(Ppo)
    rollout: Rollout = section(Rollout)
    eval: Eval = section(Eval)
    health: Health = section(Health)
    placement: Placement = section(Placement)
    run: Run = section(Run)
