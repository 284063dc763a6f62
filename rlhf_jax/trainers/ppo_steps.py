"""PPO's functions, jitted once, each under its role's view of the device grid."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.losses import adaptive_kl_coef
from rlhf_jax.models.lora import deferred_merge, learnt, with_adapters
from rlhf_jax.models.parameters import shapes, unstack_layers
from rlhf_jax.rollout.decoder import decoder_for
from rlhf_jax.rollout.generate import generate
from rlhf_jax.rollout.rooms import check_packs, packed
from rlhf_jax.rollout.score import response_logprobs, response_values
from rlhf_jax.settings import Config, Lora, Ppo
from rlhf_jax.settings import Rollout as RolloutSettings
from rlhf_jax.sharding.mesh import View
from rlhf_jax.sharding.offload import to_device
from rlhf_jax.sharding.placement import Views, placed_shapes
from rlhf_jax.sharding.reshard import Reshard, make_reshard, to_devices
from rlhf_jax.sharding.rules import batch_sharding, in_view, replicated
from rlhf_jax.trainers.optimizer import (
    Learning,
    TrainState,
    at_rest,
    init_state,
    make_optimizer,
    make_schedule,
    on_base,
    state_shardings,
    state_update,
)
from rlhf_jax.trainers.ppo import Learner, actor_loss, critic_loss, make_experience, minibatch_order, passes
from rlhf_jax.trainers.roles import shardings_of
from rlhf_jax.trainers.shared_critic import SharedSteps, make_shared_steps
from rlhf_jax.trainers.step import Step
from rlhf_jax.types import Prompts, Rollout


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Responses from a policy: its parameters moved to the generation layout, then prefill and decode."""

    reshard: Reshard  # training parameters -> generation parameters, layers unstacked
    generate: Callable[[Any, Prompts, jax.Array], Rollout]
    generate_samples: Callable[[Any, Prompts, jax.Array], Rollout]  # eval.samples to each prompt
    shapes: Any  # generation parameters as ShapeDtypeStructs with their shardings
    lora: Lora

    def place(self, params: Any) -> Any:
        """The generation parameters of a policy; adapters are merged into its matrices, one after another."""
        return self.reshard(deferred_merge(params, self.lora) if self.lora.rank else params)


def make_sampler(
    model: nn.Module,
    params: Any,
    views: Views,
    settings: RolloutSettings,
    eos_ids: Sequence[int],
    samples: int,
    lora: Lora,
) -> Sampler:
    """The sampler of a model whose parameters (arrays or shapes) lie as `views.train` says."""
    scanned = getattr(model, "scan_layers", False)
    generation_model = model.clone(scan_layers=False) if scanned else model
    if settings.dtype is not None and hasattr(model, "dtype"):
        generation_model = generation_model.clone(dtype=jnp.dtype(settings.dtype))
    generation_params = jax.eval_shape(unstack_layers, params) if scanned else params
    reshard = make_reshard(
        params,
        shardings_of(model, params, views.train),
        shardings_of(generation_model, generation_params, views.generate),
        unstack=scanned,
        dtype=settings.dtype,
    )
    sample = functools.partial(
        generate,
        decoder_for(generation_model),
        response_length=settings.response_length,
        eos_ids=tuple(eos_ids),
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        slots=settings.slots,
    )
    several = functools.partial(sample, samples=samples)
    places = batch_sharding(views.generate)
    return Sampler(
        reshard=reshard,
        generate=in_view(views.generate, sample, out_shardings=places),
        generate_samples=in_view(views.generate, several, out_shardings=places),
        shapes=reshard.shapes,
        lora=lora,
    )


@dataclasses.dataclass(frozen=True)
class PolicySteps:
    """What can be done with a policy's parameters without learning."""

    model: nn.Module
    params: Any  # tree of ShapeDtypeStructs
    actor: nn.Module  # the model, with adapters where these are what learns
    learnt: Any  # the part of the actor's parameters that learns, as ShapeDtypeStructs
    views: Views
    sampler: Sampler
    to_train: Callable[[Rollout], Rollout]  # a rollout's rows, from the generation view to the training view
    logprobs: Callable[[Any, Rollout], jax.Array]  # (the actor's parameters, rollout) -> [B, T]
    reference_logprobs: Callable[[Any, Rollout], jax.Array]  # (parameters placed for the reference, rollout)


def make_policy_steps(
    config: Config, views: Views, model: nn.Module, params: Any, eos_ids: Sequence[int]
) -> PolicySteps:
    """Jitted functions for this model. `params` may be arrays or shapes."""
    if config.ppo.packing:
        check_packs(model)
    actor = with_adapters(model, config.lora)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)

    def logprobs_of(model):
        def logprobs(params, rollout):
            return response_logprobs(model, params, rollout, temperature=config.rollout.temperature or 1.0)[0]

        return packed(logprobs) if config.ppo.packing else logprobs

    logprobs_there = _of_rows(logprobs_of(model), views.reference, views.train)
    return PolicySteps(
        model=model,
        params=params,
        actor=actor,
        learnt=learnt(shapes(actor)) if config.lora.rank else params,
        views=views,
        sampler=make_sampler(model, params, views, config.rollout, eos_ids, config.eval.samples, config.lora),
        to_train=lambda rollout: to_devices(rollout, batch_sharding(views.train)),
        logprobs=in_view(views.train, logprobs_of(actor)),
        reference_logprobs=_fetching(logprobs_there)
        if config.placement.offload.reference
        else logprobs_there,
    )


def _of_rows(function: Callable[..., Any], view: View, home: View) -> Callable[..., Any]:
    """(parameters, batch) -> arrays of rows, in a role's view.

    The batch comes from the home view; where that is on other devices, the results go back there.
    """
    if view.mesh == home.mesh:
        return in_view(view, function)
    there: Any = in_view(view, function, out_shardings=batch_sharding(view))

    def visit(params, batch):
        return to_devices(there(params, to_devices(batch, batch_sharding(view))), batch_sharding(home))

    return Step(visit, lambda params, batch: there.lower(params, placed_shapes(batch, batch_sharding(view))))


def _fetching(function: Any) -> Step:
    """(parameters in host memory, batch) -> results; their copy on the devices lives as long as the call."""
    return Step(lambda params, batch: function(to_device(params), batch), function.lower)


def recomputes_old_logprobs(config: Config, model: nn.Module) -> bool:
    """True where the policy's log-probabilities at a rollout are those of a forward pass of their own.

    Under `auto` that is wherever sampling may round otherwise than training: in another type than float32, or
    in a module that does not say in which it computes.
    """
    if config.ppo.old_logprobs != "auto":
        return config.ppo.old_logprobs == "recompute"
    trains = getattr(model, "dtype", None)
    samples = trains if config.rollout.dtype is None else config.rollout.dtype
    return None in (trains, samples) or not jnp.dtype(trains) == jnp.dtype(samples) == jnp.float32


@dataclasses.dataclass(frozen=True)
class PpoSteps:
    """The functions that learn, from batches of the training view. States that are replaced are donated."""

    policy: PolicySteps
    critic: nn.Module
    old_logprobs: Callable[[Any, Rollout], jax.Array | None]  # None: those that the rollout came with
    values: Callable[[Any, Rollout], tuple[jax.Array, jax.Array]]  # -> values_BT, final_values_B
    experience: Callable[..., Any]  # (rollout, statistics, kl_coef) -> (experience, metrics)
    update_actor: Callable[..., Any]  # (state, experience, kl_coef, shuffle_key, base) -> (state, metrics)
    update_critic: Callable[..., Any]  # (state, experience, shuffle_key, base) -> (state, metrics)
    advance: Callable[
        [Learner, jax.Array], Learner
    ]  # (learner, KL a response) -> counter and KL coefficient moved on
    init_learner: Callable[[Any, Any], Learner]  # (actor parameters, critic parameters), placed
    actor_state: TrainState  # of ShapeDtypeStructs with their shardings, to compile the steps without arrays
    critic_state: TrainState
    shared: SharedSteps | None  # in place of `values` and the updates, where the critic is the policy's head

    @property
    def learner_shapes(self) -> Learner:
        """A Learner of ShapeDtypeStructs with their shardings: what a checkpoint is restored to."""
        everywhere = self.actor_state.steps.sharding
        return Learner(
            actor=self.actor_state,
            critic=self.critic_state,
            kl_coef=placed_shapes(jax.ShapeDtypeStruct((), np.float32), everywhere),
            iteration=placed_shapes(jax.ShapeDtypeStruct((), np.int32), everywhere),
        )


def make_ppo_steps(config: Config, policy: PolicySteps, critic: nn.Module, critic_params: Any) -> PpoSteps:
    """Jitted functions for this actor and critic. `critic_params` may be arrays or shapes.

    States are of what learns: with adapters, these and a head. Updates take the base of adapters beside.
    """
    ppo, views, actor = config.ppo, policy.views, policy.actor
    if ppo.packing:
        check_packs(critic)
    critic_params = learnt(critic_params) if config.lora.rank else critic_params
    learns, critic_learns = _learning(config, policy, critic, critic_params)
    everywhere, offload = replicated(views.train), config.placement.offload.optimizer

    def update(learns, loss, stop_kl, state: TrainState, experience, key):
        order = minibatch_order(key, ppo.batch_size, epochs=ppo.epochs, minibatches=ppo.minibatches)
        lr = learns.rate(state.steps)
        state, metrics = passes(learns.tx, loss, state, experience, order, ppo=ppo, stop_kl=stop_kl)
        return state, {**metrics, "lr": lr, "bad_steps": state.bad_steps}

    def update_actor(state, experience, kl_coef, key, base=None):
        temperature = config.rollout.temperature
        loss = functools.partial(actor_loss, kl_coef=kl_coef, model=actor, ppo=ppo, temperature=temperature)
        return update(learns, on_base(loss, base), ppo.stop_kl, state, experience, key)

    def update_critic(state, experience, key, base=None):
        loss = functools.partial(critic_loss, model=critic, ppo=ppo)
        return update(critic_learns, on_base(loss, base), None, state, experience, key)

    next_iteration = in_view(
        views.train, lambda i, *kl: (i + 1, _next_kl_coef(ppo, *kl)), out_shardings=(everywhere, everywhere)
    )

    def advance(learner, observed_kl):
        iteration, kl_coef = next_iteration(learner.iteration, learner.kl_coef, observed_kl)
        return dataclasses.replace(learner, iteration=iteration, kl_coef=kl_coef)

    def init_learner(params, critic_params):
        return Learner(
            actor=at_rest(init_state(learns.tx, params, learns.places), offload=offload),
            critic=at_rest(
                init_state(critic_learns.tx, critic_params, critic_learns.places), offload=offload
            ),
            kl_coef=jax.device_put(np.float32(ppo.kl_coef), everywhere),
            iteration=jax.device_put(np.int32(0), everywhere),
        )

    values = functools.partial(response_values, critic)
    recomputes = recomputes_old_logprobs(config, actor)
    return PpoSteps(
        policy=policy,
        critic=critic,
        old_logprobs=policy.logprobs if recomputes else lambda params, rollout: None,
        values=_of_rows(packed(values) if ppo.packing else values, views.critic, views.train),
        experience=in_view(views.train, functools.partial(make_experience, ppo=ppo)),
        update_actor=state_update(update_actor, views.train, learns.places, offload=offload),
        update_critic=_from_home(
            state_update(update_critic, views.critic, critic_learns.places, offload=offload), views
        ),
        advance=advance,
        init_learner=init_learner,
        actor_state=learns.shapes(policy.learnt),
        critic_state=critic_learns.shapes(critic_params),
        shared=make_shared_steps(
            config, views.train, actor, critic, learns, critic_learns, recomputes=recomputes
        )
        if config.critic.shared
        else None,
    )


def _next_kl_coef(ppo: Ppo, kl_coef: jax.Array, observed_kl: jax.Array) -> jax.Array:
    if ppo.kl_target is None:
        return kl_coef
    moved = adaptive_kl_coef(kl_coef, observed_kl, ppo.kl_target, ppo.kl_horizon, ppo.batch_size)
    return jnp.where(jnp.isfinite(observed_kl), moved, kl_coef)  # one bad rollout spoils no later one


def _from_home(update_critic: Any, views: Views) -> Callable[..., Any]:
    """The critic's update from an experience and a key that lie in the training view."""
    if views.critic.mesh == views.train.mesh:
        return update_critic

    def visit(state, experience, key, base=None):
        experience = to_devices(experience, batch_sharding(views.critic))
        return update_critic(state, experience, jax.device_put(key, replicated(views.critic)), base)

    def lower(state, experience, key, base=None):
        experience = placed_shapes(experience, batch_sharding(views.critic))
        return update_critic.lower(state, experience, placed_shapes(key, replicated(views.critic)), base)

    return Step(visit, lower)


def _learning(
    config: Config, policy: PolicySteps, critic: nn.Module, critic_params: Any
) -> tuple[Learning, Learning]:
    """How actor and critic learn."""
    ppo, settings, views = config.ppo, config.critic, policy.views
    rate, tx = _optimizer(
        ppo, ppo.learning_rate, ppo.max_grad_norm, ppo.iterations - settings.warmup_iterations
    )
    critic_rate, critic_tx = _optimizer(ppo, settings.learning_rate, settings.max_grad_norm, ppo.iterations)

    def places(tx, model, params, view):
        return state_shardings(tx, params, shardings_of(model, params, view), view)

    return (
        Learning(rate, tx, places(tx, policy.actor, policy.learnt, views.train)),
        Learning(critic_rate, critic_tx, places(critic_tx, critic, critic_params, views.critic)),
    )


def _optimizer(ppo: Ppo, peak: float, max_grad_norm: float, iterations: int):
    """(learning rate by optimizer step, optimizer) for this many iterations."""
    steps = ppo.epochs * ppo.minibatches
    schedule = make_schedule(
        peak, steps=iterations * steps, warmup_steps=ppo.warmup_iterations * steps, schedule=ppo.schedule
    )
    return schedule, make_optimizer(schedule, weight_decay=ppo.weight_decay, max_grad_norm=max_grad_norm)
