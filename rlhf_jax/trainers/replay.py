"""Updates of a PPO dump, done again without changing anything: what in them is not finite?

Every minibatch is looked at with the same parameters, those of the checkpoint: updates that were skipped left
them as they were.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from rlhf_jax.checkpoint import named_leaves
from rlhf_jax.losses.masked import counts
from rlhf_jax.models.lora import join
from rlhf_jax.models.parameters import unstack_layers
from rlhf_jax.rollout.score import response_logprobs, response_logprobs_and_values, response_values
from rlhf_jax.sharding.mesh import View
from rlhf_jax.sharding.processes import fetch, put
from rlhf_jax.sharding.reshard import to_devices
from rlhf_jax.sharding.rules import batch_sharding, in_view, replicated
from rlhf_jax.trainers.dump import Batch
from rlhf_jax.trainers.optimizer import accumulate
from rlhf_jax.trainers.ppo import Experience, Learner, minibatch_order, policy_loss, value_loss
from rlhf_jax.trainers.ppo_task import PpoTask

Finite = dict[str, tuple[int, float, float]]  # name -> (entries that are not finite, smallest, largest)


@dataclasses.dataclass(frozen=True)
class Role:
    """What takes one update: the actor, the critic, or both on one trunk."""

    name: str
    view: View
    params: dict[str, Any]  # what learns, by the role's model
    base: dict[str, Any]  # what lies beside it
    outputs: Callable[[Any, Experience], dict[str, jax.Array]]  # (whole parameters, rows) -> arrays [b, T]
    loss: Callable[..., tuple[jax.Array, dict[str, jax.Array]]]  # (outputs, rows, kl_coef, denominator)
    modules: tuple[tuple[str, nn.Module, str | None], ...]  # (model, module, method) applied to the tokens

    def whole(self, params: Any, base: Any) -> Any:
        return {name: join(base.get(name), part) for name, part in params.items()} | {
            name: part for name, part in base.items() if name not in params
        }


def roles_of(task: PpoTask, learner: Learner, *, warming_up: bool) -> list[Role]:
    """The updates of an iteration in their order."""
    if task.steps.shared is not None:
        return [_shared_role(task, learner, warming_up)]
    critic = _critic_role(task, learner)
    return [critic] if warming_up else [critic, _actor_role(task, learner)]


def _actor_role(task: PpoTask, learner: Learner) -> Role:
    model, temperature = task.steps.policy.actor, task.config.rollout.temperature

    def outputs(whole, rows):
        logprobs_BT, entropy_BT = response_logprobs(
            model, whole["actor"], rows.rollout, temperature=temperature
        )
        return {"log-probabilities": logprobs_BT, "entropy": entropy_BT}

    def loss(out, rows, kl_coef, denominator):
        ppo = task.config.ppo
        return policy_loss(
            out["log-probabilities"],
            out["entropy"],
            rows,
            kl_coef=kl_coef,
            ppo=ppo,
            denominator=denominator,
        )

    base, view = {"actor": task.bases.actor}, task.views.train
    params = {"actor": learner.actor.params}
    return Role("actor", view, params, base, outputs, loss, (("actor", model, _hidden(model)),))


def _critic_role(task: PpoTask, learner: Learner) -> Role:
    model = task.steps.critic

    def outputs(whole, rows):
        return {"values": response_values(model, whole["critic"], rows.rollout)[0]}

    def loss(out, rows, kl_coef, denominator):
        return value_loss(out["values"], rows, ppo=task.config.ppo, denominator=denominator)

    base, params = {"critic": task.bases.critic}, {"critic": learner.critic.params}
    return Role("critic", task.views.critic, params, base, outputs, loss, (("critic", model, None),))


def _shared_role(task: PpoTask, learner: Learner, warming_up: bool) -> Role:
    model, critic, config = task.steps.policy.actor, task.steps.critic, task.config

    def outputs(whole, rows):
        logprobs_BT, entropy_BT, values_BT, _ = response_logprobs_and_values(
            model,
            whole["actor"],
            critic,
            whole["critic"],
            rows.rollout,
            temperature=config.rollout.temperature,
        )
        return {"log-probabilities": logprobs_BT, "entropy": entropy_BT, "values": values_BT}

    def loss(out, rows, kl_coef, denominator):
        value, metrics = value_loss(out["values"], rows, ppo=config.ppo, denominator=denominator)
        if warming_up:
            return value, metrics
        policy, more = policy_loss(
            out["log-probabilities"],
            out["entropy"],
            rows,
            kl_coef=kl_coef,
            ppo=config.ppo,
            denominator=denominator,
        )
        return policy + config.critic.coef * value, more | metrics

    params: dict[str, Any] = {"critic": learner.critic.params}
    base: dict[str, Any] = {"actor": task.bases.actor}
    if warming_up:
        base["actor"] = task.actor_params(learner)
    else:
        params = {"actor": learner.actor.params} | params
    name = "critic" if warming_up else "actor and critic"
    return Role(name, task.views.train, params, base, outputs, loss, (("actor", model, "hidden"),))


def _hidden(model: nn.Module) -> str | None:
    return "hidden" if hasattr(model, "hidden") and hasattr(model, "unembed") else None


@dataclasses.dataclass(frozen=True)
class Looked:
    """One minibatch of a role's update."""

    minibatch: int  # from 0
    outputs: Finite  # log-probabilities, entropy, ratio, values, at response tokens
    terms: Finite  # of the loss, and the loss
    gradients: dict[str, tuple[int, float]]  # leaf -> (entries that are not finite, norm)

    @property
    def finite(self) -> bool:
        """True where the update would be taken."""
        return not self.terms["loss"][0] and not any(bad for bad, _ in self.gradients.values())


def look(task: PpoTask, role: Role, batch: Batch) -> Iterator[Looked]:
    """Each minibatch of the role's update, in order. All processes go through it together."""
    experience = _placed(batch.experience, role.view)
    kl_coef = put(np.asarray(fetch(batch.kl_coef)), replicated(role.view))
    measured = in_view(role.view, functools.partial(_measured, role, task.config.ppo.micro_batch_size))
    for number, rows in enumerate(order_of(task, batch)):
        yield looked(number, measured(role.params, role.base, kl_coef, experience, rows))


def nonfinite_gradients(task: PpoTask, learner: Learner, batch: Batch) -> dict[str, int]:
    """Leaf -> entries of its gradient that are not finite, in each role's first minibatch that has such."""
    found: dict[str, int] = {}
    for role in roles_of(task, learner, warming_up=batch.warming_up):
        for one in look(task, role, batch):
            bad = {name: count for name, (count, _) in one.gradients.items() if count}
            if bad:
                found |= bad
                break
    return found


def first_bad_module(role: Role, batch: Batch, rows: np.ndarray) -> str | None:
    """The innermost module whose output is the first that is not finite at a valid token; layer after layer.

    For one process: the modules run one operation after another.
    """
    minibatch = _placed(jax.tree.map(lambda x: np.asarray(fetch(x))[rows], batch.experience), role.view)
    rollout, whole = minibatch.rollout, role.whole(role.params, role.base)
    for name, scanned, method in role.modules:
        module, params = layer_by_layer(scanned, whole[name])
        run = functools.partial(
            module.apply, {"params": params}, rollout.tokens_BS, rollout.mask_BS, method=method
        )
        if found := first_bad_output(run, rollout.mask_BS):
            return f"{name}: {found}"
    return None


def layer_by_layer(module: nn.Module, params: Any) -> tuple[nn.Module, Any]:
    """A model whose layers are modules of their own, and its parameters."""
    if not getattr(module, "scan_layers", False):
        return module, params
    plain: dict[str, Any] = {"remat": "none"} if hasattr(module, "remat") else {}
    return module.clone(scan_layers=False, **plain), unstack_layers(params)


def first_bad_output(run: Callable[[], Any], valid_BS: Any) -> str | None:
    """The innermost module under `run` whose output is the first that is not finite at a valid token."""
    valid_BS = np.asarray(valid_BS)
    found: list[str] = []

    def watch(call, args, kwargs, context):
        out = call(*args, **kwargs)
        if not found and not all(_finite(leaf, valid_BS) for leaf in jax.tree.leaves(out)):
            path = "/".join(map(str, context.module.path)) or "the whole"
            found.append(f"{path} ({type(context.module).__name__}.{context.method_name})")
        return out

    with nn.intercept_methods(watch):
        run()
    return found[0] if found else None


def order_of(task: PpoTask, batch: Batch) -> np.ndarray:
    """Row numbers of each minibatch of the iteration."""
    ppo = task.config.ppo
    order = minibatch_order(batch.shuffle_key, ppo.batch_size, epochs=ppo.epochs, minibatches=ppo.minibatches)
    return np.asarray(fetch(order))


def inputs_of(batch: Batch) -> Finite:
    """The arrays that a batch came with, at response tokens."""
    experience = fetch(batch.experience)
    mask_BT = experience.rollout.mask_BT
    arrays = {
        "sampled log-probabilities": experience.rollout.logprobs_BT,
        "old log-probabilities": experience.old_logprobs_BT,
        "reference log-probabilities": experience.ref_logprobs_BT,
        "old values": experience.old_values_BT,
        "advantages": experience.advantages_BT,
        "returns": experience.returns_BT,
    }
    found = {name: counted(x, mask_BT) for name, x in arrays.items()}
    found["KL coefficient"] = counted(np.asarray(fetch(batch.kl_coef)), True)
    return {name: (int(bad), float(low), float(high)) for name, (bad, low, high) in found.items()}


def nonfinite_leaves(params: Any) -> dict[str, int]:
    """Leaf -> entries that are not finite, where there are such."""
    bad_entries = jax.jit(lambda tree: jax.tree.map(lambda x: (~jnp.isfinite(x)).sum(), tree))(params)
    return {name: int(bad) for name, bad in named_leaves(fetch(bad_entries), "/").items() if bad}


def _measured(role: Role, micro_batch_size: int | None, params, base, kl_coef, experience, rows):
    minibatch = jax.tree.map(lambda x: x[rows], experience)
    mask_BT = minibatch.rollout.mask_BT

    def loss(params, minibatch):
        out = role.outputs(role.whole(params, base), minibatch)
        return role.loss(out, minibatch, kl_coef, counts(mask_BT))

    out = role.outputs(role.whole(params, base), minibatch)
    if "log-probabilities" in out:
        out["ratio"] = jnp.exp(out["log-probabilities"] - minibatch.old_logprobs_BT)
    outputs = {name: (x_BT, mask_BT) for name, x_BT in out.items()}
    return counted_update(loss, params, minibatch, micro_batch_size, outputs)


def counted_update(
    loss: Any, params: Any, batch: Any, micro_batch_size: int | None, outputs: dict[str, tuple[Any, Any]]
) -> tuple[Any, Any, Any]:
    """Outputs, terms of the loss and gradients of an update, as a Looked has them but on the devices.

    Args:
      outputs: name -> (array, mask).
    """
    (value, terms), grads = accumulate(loss, params, batch, micro_batch_size)
    gradients = {
        name: ((~jnp.isfinite(x)).sum(), jnp.linalg.norm(x.astype(jnp.float32).ravel()))
        for name, x in named_leaves(grads, "/").items()
    }
    return (
        {name: counted(x, mask) for name, (x, mask) in outputs.items()},
        {name: counted(x, True) for name, x in (terms | {"loss": value}).items()},
        gradients,
    )


def looked(minibatch: int, found: tuple[Any, Any, Any]) -> Looked:
    """What `counted_update` found, brought to the host."""
    outputs, terms, gradients = jax.tree.map(lambda x: x.item(), fetch(found))
    terms["loss"] = terms.pop("loss")  # what the terms add up to stands behind them
    return Looked(minibatch, outputs, terms, {name: tuple(pair) for name, pair in gradients.items()})


def counted(x: Any, mask: Any) -> tuple[Any, Any, Any]:
    """(entries that are not finite, smallest and largest of the rest), of those that the mask holds."""
    good = jnp.isfinite(x) & mask
    low, high = jnp.where(good, x, jnp.inf).min(), jnp.where(good, x, -jnp.inf).max()
    return (~jnp.isfinite(x) & mask).sum(), low, high


def _finite(leaf: Any, valid_BS: np.ndarray) -> bool:
    """True for what is finite at valid tokens, and for what cannot be looked at."""
    if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array):
        return True
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return True
    bad = ~np.isfinite(np.asarray(leaf, np.float32))
    return not (bad[valid_BS] if bad.shape[:2] == valid_BS.shape else bad).any()


def _placed(experience: Experience, view: View) -> Experience:
    places = batch_sharding(view)
    host = isinstance(jax.tree.leaves(experience)[0], np.ndarray)
    return put(experience, places) if host else to_devices(experience, places)
