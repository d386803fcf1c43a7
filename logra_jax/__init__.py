"""LoGRA for JAX: full-weight RL updates from sketched gradients."""

from logra_jax import linen, nnx
from logra_jax._dense import Kernel, dense, dot_general
from logra_jax._grad import value_and_grad
from logra_jax._init import init
from logra_jax._kl_budget import KLBudgetState, cosine_budget, kl_budget
from logra_jax._merge import apply_updates
from logra_jax._probe import (
    KLProbe,
    exact_kl,
    kl_probe,
    quadratic_kl,
    realised_kl,
)
from logra_jax._row_adam import ScaleByRowAdamState, scale_by_row_adam
from logra_jax._sketch import sketch
from logra_jax._state import SketchState, Update
from logra_jax._summary import diagnostics, summary
from logra_jax._targets import DEFAULT_TARGETS

__all__ = [
    "DEFAULT_TARGETS",
    "KLBudgetState",
    "KLProbe",
    "Kernel",
    "ScaleByRowAdamState",
    "SketchState",
    "Update",
    "apply_updates",
    "cosine_budget",
    "dense",
    "diagnostics",
    "dot_general",
    "exact_kl",
    "init",
    "kl_budget",
    "kl_probe",
    "linen",
    "nnx",
    "quadratic_kl",
    "realised_kl",
    "scale_by_row_adam",
    "sketch",
    "summary",
    "value_and_grad",
]
