"""What a PPO run is made of and does not change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlhf_jax.data.messages import Dialogue
from rlhf_jax.models.lora import join
from rlhf_jax.settings import Config
from rlhf_jax.sharding.placement import Views
from rlhf_jax.trainers.evaluate import Evaluator
from rlhf_jax.trainers.ppo import Learner
from rlhf_jax.trainers.ppo_steps import PpoSteps


@dataclasses.dataclass(frozen=True)
class Bases:
    """What adapters lie beside, where these are what learns: it never changes, and no checkpoint holds it."""

    actor: Any = None
    critic: Any = None


@dataclasses.dataclass(frozen=True)
class PpoTask:
    """All that the loop needs and does not change."""

    config: Config
    views: Views
    steps: PpoSteps
    evaluator: Evaluator  # holds the reference, the scorer and the renderer
    prompts: Sequence[Dialogue]
    held_out: Sequence[Dialogue]
    save_policy: Callable[[Any, int], None]  # exports actor parameters of a step as the best policy
    flops: (
        Callable[[np.ndarray, np.ndarray], float] | None
    )  # of an iteration, from prompt and response lengths
    bases: Bases = Bases()

    def actor_params(self, learner: Learner) -> Any:
        """All parameters of the actor."""
        return join(self.bases.actor, learner.actor.params)

    def critic_params(self, learner: Learner) -> Any:
        """All parameters of the critic."""
        return join(self.bases.critic, learner.critic.params)
