"""Rewards of responses: weighted parts, scored with a time limit."""

from experiments.rewards.parts import BadReward, Rewards
from experiments.rewards.workers import RewardWorkers, Scores

__all__ = ["BadReward", "RewardWorkers", "Rewards", "Scores"]
