"""RLHF in JAX and Flax: reward models and PPO as pure functions over sharded parameters."""
