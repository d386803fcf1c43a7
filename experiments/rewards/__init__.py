"""Rewards of responses: weighted parts, scored with a time limit.

Entry points: `RewardWorkers` and, for responses that were cut off, `overlong`.
May import `tasks` and what lies below it.
"""

from experiments.rewards.parts import BadReward, Rewards
from experiments.rewards.worker_pool import RewardWorkers, Scores

__all__ = ["BadReward", "RewardWorkers", "Rewards", "Scores"]
