"""Checks across settings, made before anything is created. Messages carry the numbers and the remedy."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from rlhf_jax.errors import InputError
from rlhf_jax.layouts import check_layout, layouts, shares, show
from rlhf_jax.settings import Config, Health, Lora, Shape

CHOICES = {
    "policy.dtype": ("float32", "bfloat16"),
    "reward.dtype": ("float32", "bfloat16"),
    "reward.loss": ("bradley_terry", "hinge"),
    "sft.schedule": ("constant", "linear", "cosine"),
    "reward.schedule": ("constant", "linear", "cosine"),
    "ppo.schedule": ("constant", "linear", "cosine"),
    "ppo.aggregation": ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean"),
    "ppo.kl_kind": ("k1", "k2", "k3", "abs"),
    "ppo.kl_placement": ("reward", "loss"),
    "ppo.old_logprobs": ("auto", "rollout", "recompute"),
    "policy.remat": ("none", "products", "layers"),
    "rollout.dtype": ("float32", "bfloat16"),
    "run.resume": ("auto", "never"),
}

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")  # that may have an adapter

# What a number must satisfy, in words, and the settings that it holds for. None is always allowed where
# the type has it.
RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "at least 1",
        lambda x: x >= 1,
        """data.limit sft.batch_size sft.micro_batch_size sft.eval_every reward.epochs reward.batch_size
        reward.micro_batch_size reward.eval_every ppo.iterations ppo.batch_size ppo.epochs
        ppo.minibatches ppo.micro_batch_size rollout.prompt_length rollout.response_length eval.prompts
        rollout.slots eval.samples eval.batch_size run.save_every run.keep run.max_bad_steps""",
    ),
    ("at least 2", lambda x: x >= 2, "sft.max_length reward.max_length"),
    (
        "0 or more",
        lambda x: x >= 0,
        """sft.epochs sft.learning_rate sft.weight_decay reward.margin reward.centering_coef
        reward.learning_rate reward.weight_decay critic.learning_rate critic.warmup_iterations
        critic.coef lora.rank reward.retries
        ppo.learning_rate ppo.warmup_iterations ppo.weight_decay ppo.kl_coef ppo.entropy_coef
        ppo.missing_eos_penalty rollout.temperature rollout.top_k eval.every run.profile_every run.profile""",
    ),
    (
        "above 0",
        lambda x: x > 0,
        """sft.max_grad_norm reward.max_grad_norm critic.max_grad_norm ppo.max_grad_norm ppo.clip_high
        ppo.value_clip lora.alpha ppo.kl_target ppo.kl_horizon ppo.stop_kl ppo.reward_clip health.kl
        health.score_fall health.entropy reward.timeout""",
    ),
    (
        "between 0 and 1, both excluded",
        lambda x: 0 < x < 1,
        "data.validation_fraction ppo.clip_low health.length_fall health.cut_off",
    ),
    ("at least 0 and below 1", lambda x: 0 <= x < 1, "sft.warmup_fraction reward.warmup_fraction"),
    ("between 0 and 1", lambda x: 0 <= x <= 1, "ppo.gamma ppo.lam"),
    ("above 0 and at most 1", lambda x: 0 < x <= 1, "rollout.top_p"),
    ("above 1", lambda x: x > 1, "ppo.dual_clip"),
    ("between 0 and 4294967295", lambda x: 0 <= x < 2**32, "run.seed"),
)


def nearest(name: str, names: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing where no name is near."""
    near = difflib.get_close_matches(str(name), list(names), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value of every leaf; an absent optional section is one leaf, None."""
    leaves: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            leaves |= flat(value, f"{prefix}{field.name}.")
        else:
            leaves[prefix + field.name] = value
    return leaves


def check(config: Config, *, training: bool = True) -> None:
    """Raise InputError for the first setting that cannot work. `training=False` allows greedy decoding."""
    values = flat(config)
    _check_values(values)
    _check_shape("policy", config.policy.model, config.policy.shape)
    if config.reward.function is None:
        _check_shape("reward", config.reward.model, config.reward.shape)
    elif not re.fullmatch(r"[\w.]+:\w+", config.reward.function):
        raise InputError(f"reward.function={config.reward.function} is not of the form module:function")
    _check_lora(config.lora)
    _check_health(config.health)
    _check_batches(config)
    _check_lengths(config)
    if training:
        _check_ppo(config)
        _check_shared_critic(config)
    for role, layout in layouts(config).items():
        check_layout(role, layout)


def check_devices(config: Config, device_count: int, process_count: int = 1) -> None:
    """Raise InputError where a layout does not fit the devices, or a batch not the layout."""
    roles = shares(config, device_count)
    for role, share in roles.items():
        if process_count > 1 and len(share.devices) < device_count:
            raise InputError(
                f"placement.{role}.devices={show(share.devices)} with {process_count} processes: arrays "
                "cannot move between sets of devices across processes; leave placement.*.devices out"
            )
    ppo, minibatch = config.ppo, config.ppo.batch_size // config.ppo.minibatches
    step = ppo.micro_batch_size or minibatch
    step_name = "ppo.micro_batch_size" if ppo.micro_batch_size else "ppo.batch_size / ppo.minibatches"
    batches = [("ppo.batch_size", ppo.batch_size, role) for role in roles]
    batches += [(step_name, step, "train"), (step_name, step, "critic")]
    for name, phase, role in (("sft", config.sft, "train"), ("reward", config.reward, "reward")):
        field = "micro_batch_size" if phase.micro_batch_size else "batch_size"
        if phase.epochs > 0:
            batches.append((f"{name}.{field}", getattr(phase, field), role))
    for name, size, role in batches:
        parts = roles[role].layout.data * roles[role].layout.fsdp
        if size % parts:
            raise InputError(
                f"{name}={size} is not divisible by data * fsdp = {parts} of placement.{role}; "
                f"use {math.ceil(size / parts) * parts}"
            )


def _check_values(values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{name}={value} is not a finite number")
        if value == "":
            raise InputError(f"{name} is empty; give a value or leave the setting out")
        if isinstance(value, str) and "\0" in value:
            raise InputError(f"{name}={value!r} holds a null character; leave it out")
    scheme, separator, _ = values["run.dir"].partition("://")
    if separator and scheme != "gs":
        raise InputError(f"run.dir={values['run.dir']} is neither a local path nor gs://; use one of them")
    for words, holds, names in RANGES:
        for name in names.split():
            if values[name] is not None and not holds(values[name]):
                raise InputError(f"{name}={values[name]} must be {words}")
    for name, choices in CHOICES.items():
        if values[name] is not None and values[name] not in choices:
            near = nearest(values[name], choices)
            raise InputError(f"{name}={values[name]} must be one of {', '.join(choices)}{near}")


def _check_shape(section: str, model: str, shape: Shape) -> None:
    if model != "new":
        return
    name = f"{section}.shape"
    for field, value in dataclasses.asdict(shape).items():
        if field != "tied" and value < 1:
            raise InputError(f"{name}.{field}={value} must be at least 1")
    if shape.vocab_size < 260:
        raise InputError(
            f"{name}.vocab_size={shape.vocab_size} must be at least 260: 256 bytes and the special tokens"
        )
    if shape.embed % (2 * shape.heads):
        raise InputError(
            f"{name}.embed={shape.embed} does not give {shape.heads} heads an even width; "
            f"use {math.ceil(shape.embed / (2 * shape.heads)) * 2 * shape.heads}"
        )
    if shape.heads % shape.kv_heads:
        raise InputError(f"{name}.kv_heads={shape.kv_heads} does not divide {name}.heads={shape.heads}")


def _check_lora(lora: Lora) -> None:
    for name in lora.targets.split(","):
        if name not in PROJECTIONS:
            raise InputError(
                f"lora.targets={lora.targets}: {name or 'an empty name'} is none of {', '.join(PROJECTIONS)}"
                f"{nearest(name, PROJECTIONS)}"
            )


def _check_health(health: Health) -> None:
    signs = [field.name for field in dataclasses.fields(health) if field.name != "stop"]
    named = [] if health.stop in (None, "all") else health.stop.split(",")
    for name in named:
        if name not in signs:
            raise InputError(
                f"health.stop={health.stop}: {name or 'an empty name'} is none of all, {', '.join(signs)}"
                f"{nearest(name, signs)}"
            )


def _check_batches(config: Config) -> None:
    ppo = config.ppo
    if ppo.batch_size % ppo.minibatches:
        raise InputError(
            f"ppo.batch_size={ppo.batch_size} is not divisible by ppo.minibatches={ppo.minibatches}; "
            f"use ppo.batch_size={math.ceil(ppo.batch_size / ppo.minibatches) * ppo.minibatches}"
        )
    whole = {
        "sft.batch_size": (config.sft.batch_size, config.sft.micro_batch_size),
        "reward.batch_size": (config.reward.batch_size, config.reward.micro_batch_size),
        "ppo.batch_size / ppo.minibatches": (ppo.batch_size // ppo.minibatches, ppo.micro_batch_size),
    }
    for name, (batch, micro) in whole.items():
        if micro is not None and batch % micro:
            best = max(size for size in range(1, min(batch, micro) + 1) if batch % size == 0)
            field = f"{name.partition('.')[0]}.micro_batch_size"
            raise InputError(f"{name} = {batch} is not divisible by {field}={micro}; use {field}={best}")


def _check_lengths(config: Config) -> None:
    rollout, policy, reward = config.rollout, config.policy, config.reward
    if policy.model == "new":
        limit = f"policy.shape.max_positions={policy.shape.max_positions}"
        whole = rollout.prompt_length + rollout.response_length
        if whole > policy.shape.max_positions:
            raise InputError(f"rollout.prompt_length + rollout.response_length = {whole} exceeds {limit}")
        if config.sft.epochs and config.sft.max_length > policy.shape.max_positions:
            raise InputError(f"sft.max_length={config.sft.max_length} exceeds {limit}")
    if reward.model == "new" and reward.function is None and reward.max_length > reward.shape.max_positions:
        limit = f"reward.shape.max_positions={reward.shape.max_positions}"
        raise InputError(f"reward.max_length={reward.max_length} exceeds {limit}")


def _check_ppo(config: Config) -> None:
    ppo = config.ppo
    if config.rollout.temperature == 0:
        raise InputError(
            "rollout.temperature=0 is greedy, from which PPO cannot learn; use a temperature above 0"
        )
    if ppo.kl_target is not None and ppo.kl_coef == 0:
        raise InputError(
            f"ppo.kl_target={ppo.kl_target} steers ppo.kl_coef by factors, and it is 0; start it above 0"
        )
    if ppo.kl_placement == "loss" and ppo.kl_kind == "k1":
        raise InputError(
            "ppo.kl_placement=loss with ppo.kl_kind=k1: the gradient of k1 has mean 0 and holds nothing "
            "back; use ppo.kl_kind=k2 or k3, or ppo.kl_placement=reward"
        )
    if config.critic.warmup_iterations >= ppo.iterations:
        raise InputError(
            f"critic.warmup_iterations={config.critic.warmup_iterations} leaves the actor none of "
            f"ppo.iterations={ppo.iterations}; lower it"
        )
    if ppo.warmup_iterations > ppo.iterations:
        raise InputError(
            f"ppo.warmup_iterations={ppo.warmup_iterations} exceeds ppo.iterations={ppo.iterations}; lower it"
        )


def _check_shared_critic(config: Config) -> None:
    critic, placement = config.critic, config.placement
    if not critic.shared:
        return
    if critic.init != "policy":
        raise InputError(
            f"critic.shared=true has the policy's trunk, and critic.init={critic.init} gives another; "
            "use critic.init=policy or critic.shared=false"
        )
    if placement.critic not in (None, placement.train):
        raise InputError(
            "critic.shared=true lies where the policy is trained; leave placement.critic out, or make it "
            "equal to placement.train"
        )
