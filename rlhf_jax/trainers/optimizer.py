"""AdamW with a schedule, exact micro-batches, and updates that a non-finite gradient cannot spoil."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from rlhf_jax.errors import Halted
from rlhf_jax.models import lora
from rlhf_jax.sharding.mesh import View
from rlhf_jax.sharding.offload import to_device, to_host
from rlhf_jax.sharding.placement import placed_shapes
from rlhf_jax.sharding.rules import in_view, replicated
from rlhf_jax.trainers.step import Step

Metrics = dict[str, jax.Array]
Loss = Callable[..., tuple[jax.Array, Metrics]]  # (params, batch) -> (loss, metrics), sums over rows
Gradient = Callable[[Loss], Callable[..., Any]]  # to (params, batch) -> ((loss, metrics), gradients)
value_and_gradient = functools.partial(jax.value_and_grad, has_aux=True)


class Diverged(Halted):
    """Too many updates in a row were not finite. The last good state is saved; exit code 3."""

    code = 3


@struct.dataclass
class TrainState:
    """Parameters and their optimizer. `params` and the moments lie in the same layout."""

    params: Any
    opt_state: Any
    steps: Any  # int32, optimizer steps taken
    bad_steps: Any  # int32, updates in a row that were skipped because they were not finite


@dataclasses.dataclass(frozen=True)
class Learning:
    """How a role's parameters change and where its state lies."""

    rate: optax.Schedule
    tx: optax.GradientTransformationExtraArgs
    places: TrainState  # of shardings

    def shapes(self, params: Any) -> TrainState:
        """The state of these parameters, arrays or shapes, as ShapeDtypeStructs with their shardings."""
        return state_shapes(self.tx, params, self.places)


def make_schedule(peak: float, *, steps: int, warmup_steps: int, schedule: str) -> optax.Schedule:
    """Learning rate by optimizer step: a linear rise to `peak`, then constant, or linear or cosine to 0.

    The first step already has peak / warmup_steps, so that no step is wasted on a learning rate of 0.
    """
    rest = max(steps - warmup_steps, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest),
    }[schedule]
    if warmup_steps <= 0:
        return after
    rise = optax.linear_schedule(peak / warmup_steps, peak, max(warmup_steps - 1, 1))
    return optax.join_schedules([rise, after], [warmup_steps])


def make_optimizer(
    learning_rate: optax.Schedule, *, weight_decay: float, max_grad_norm: float
) -> optax.GradientTransformationExtraArgs:
    """AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101) behind a clip of the global norm.

    Weight decay acts on matrices only, not on norms and biases. An update is given the gradients' `norm`.
    """
    return optax.chain(
        _clip(max_grad_norm),
        optax.adamw(learning_rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=weight_decay, mask=_matrices),
    )


def _clip(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """optax.clip_by_global_norm for a norm that is known: `update_step` reports it and looks at it anyway."""

    def update(updates, state, params=None, **known):
        scale = jnp.minimum(1, max_norm / known["norm"])
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _matrices(params: Any) -> Any:
    """True for leaves that decay: kernels and the like, by name, because stacked norms are matrices too."""
    names = ("kernel", "embedding", lora.A, lora.B)
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in names, params)


def state_shardings(tx: optax.GradientTransformation, params: Any, shardings: Any, view: View) -> TrainState:
    """Where each leaf of a TrainState lies: Adam's moments beside their parameters, scalars everywhere."""
    everywhere = replicated(view)
    opt_state = optax.tree_utils.tree_map_params(
        tx,
        lambda _, sharding: sharding,
        jax.eval_shape(tx.init, params),
        shardings,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(params=shardings, opt_state=opt_state, steps=everywhere, bad_steps=everywhere)


def state_shapes(tx: optax.GradientTransformation, params: Any, shardings: TrainState) -> TrainState:
    """A TrainState of ShapeDtypeStructs with their shardings, for compilation without arrays."""
    count = jax.ShapeDtypeStruct((), jnp.int32)
    state = TrainState(params=params, opt_state=jax.eval_shape(tx.init, params), steps=count, bad_steps=count)
    return placed_shapes(state, shardings)


def init_state(tx: optax.GradientTransformation, params: Any, shardings: TrainState) -> TrainState:
    """A fresh state around parameters that already lie where `shardings.params` says."""

    def fresh(params):
        zero = jnp.zeros((), jnp.int32)
        return tx.init(params), zero, zero

    places = (shardings.opt_state, shardings.steps, shardings.bad_steps)
    opt_state, steps, bad_steps = jax.jit(fresh, out_shardings=places)(params)
    return TrainState(params=params, opt_state=opt_state, steps=steps, bad_steps=bad_steps)


def on_base(loss: Callable[..., Any], base: Any) -> Callable[..., Any]:
    """The loss of whole parameters as one of those that learn; without a base, these are the whole."""
    return lambda params, *args, **options: loss(lora.join(base, params), *args, **options)


def accumulate(
    loss: Loss,
    params: Any,
    batch: Any,
    micro_batch_size: int | None,
    gradient: Gradient = value_and_gradient,
):
    """Value and gradient of a loss that is a weighted sum over rows, a few rows at a time.

    The loss carries the whole batch's denominator, so that accumulation only adds: micro-batches change
    rounding, nothing else.

    Args:
      batch: tree of arrays with one leading size; `micro_batch_size` divides it.
      gradient: from a loss to the function of the same arguments that this one returns the sums of.
    Returns:
      ((loss, metrics), gradients)
    """
    grad = gradient(loss)
    rows = jax.tree.leaves(batch)[0].shape[0]
    if micro_batch_size is None or micro_batch_size == rows:
        return grad(params, batch)
    # row r goes to micro-batch r mod n: each device's rows are spread over all micro-batches, and none moves
    split = jax.tree.map(lambda x: x.reshape(micro_batch_size, -1, *x.shape[1:]).swapaxes(0, 1), batch)
    first = jax.tree.map(lambda x: x[0], split)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(grad, params, first))

    def add(total, rows):
        return jax.tree.map(jnp.add, total, grad(params, rows)), None

    return jax.lax.scan(add, zeros, split)[0]


def update_step(
    tx: optax.GradientTransformationExtraArgs,
    loss: Loss,
    state: TrainState,
    batch: Any,
    micro_batch_size: int | None = None,
    gradient: Gradient = value_and_gradient,
) -> tuple[TrainState, Metrics]:
    """One optimizer step. Where loss or gradient is not finite, the state stays and `bad_steps` counts it.

    Returns:
      (state, metrics): the loss's metrics with `loss`, `grad_norm` (before clipping) and `skipped` (0 or 1).
      A skipped step's metrics are all 0 but for `skipped`.
    """
    (value, metrics), grads = accumulate(loss, state.params, batch, micro_batch_size, gradient)
    norm = optax.tree.norm(grads)
    good = jnp.isfinite(norm) & jnp.isfinite(value)
    state = apply_gradients(tx, state, grads, norm, good)
    metrics = {**metrics, "loss": value, "grad_norm": norm}
    metrics = {name: jnp.where(good, number, 0.0) for name, number in metrics.items()}
    return state, {**metrics, "skipped": (~good).astype(jnp.float32)}


def apply_gradients(
    tx: optax.GradientTransformationExtraArgs,
    state: TrainState,
    grads: Any,
    norm: jax.Array,
    good: jax.Array,
) -> TrainState:
    """The state after a step with gradients of this norm, or where they are not `good`, one more bad step.

    A condition holds one state where a selection leaf by leaf would hold two. No device waits for another
    inside it: the norm is known, and the rest is elementwise.
    """

    def step(state):
        updates, opt_state = tx.update(grads, state.opt_state, state.params, norm=norm)
        return TrainState(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            steps=state.steps + 1,
            bad_steps=jnp.zeros_like(state.bad_steps),
        )

    def stay(state):
        return dataclasses.replace(state, bad_steps=state.bad_steps + 1)

    return jax.lax.cond(good, step, stay, state)


def at_rest(state: Any, *, offload: bool) -> Any:
    """A state, or a tree of them, as it is kept between updates: with offload, its optimizer on the host."""
    return _with_opt_state(to_host, state) if offload else state


def state_update(
    function: Callable[..., tuple[Any, Any]], view: View, places: Any, *, offload: bool
) -> Callable[..., tuple[Any, Any]]:
    """An update of a state, or of a tree of them, jitted; what it replaces is donated.

    An offloaded optimizer is on the devices only for as long as it takes.
    """
    update: Any = in_view(view, function, donate_argnums=0, out_shardings=(places, None))
    if not offload:
        return update

    def step(state, *inputs):
        state, metrics = update(_with_opt_state(to_device, state), *inputs)
        return at_rest(state, offload=True), metrics

    return Step(step, update.lower)


def _with_opt_state(move: Callable[[Any], Any], states: Any) -> Any:
    def moved(state):
        return dataclasses.replace(state, opt_state=move(state.opt_state))

    return jax.tree.map(moved, states, is_leaf=lambda node: isinstance(node, TrainState))
