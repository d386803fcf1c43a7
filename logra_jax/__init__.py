"""LoGRA for JAX: full-weight RL updates from sketched gradients."""

from logra_jax import linen
from logra_jax import nnx
from logra_jax._dense import dense
from logra_jax._dense import dot_general
from logra_jax._grad import value_and_grad
from logra_jax._init import init
from logra_jax._kl_budget import cosine_budget
from logra_jax._kl_budget import kl_budget
from logra_jax._kl_budget import KLBudgetState
from logra_jax._merge import apply_updates
from logra_jax._probe import exact_kl
from logra_jax._probe import kl_probe
from logra_jax._probe import KLProbe
from logra_jax._probe import quadratic_kl
from logra_jax._probe import realised_kl
from logra_jax._row_adam import scale_by_row_adam
from logra_jax._row_adam import ScaleByRowAdamState
from logra_jax._sketch import sketch
from logra_jax._state import SketchState
from logra_jax._state import Update
from logra_jax._summary import diagnostics
from logra_jax._summary import summary
from logra_jax._targets import DEFAULT_TARGETS
