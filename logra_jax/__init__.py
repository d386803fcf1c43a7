"""LoGRA for JAX: full-weight RL updates from sketched gradients.

A training step is four calls, which can all run under one `jax.jit`::

  value, grads = logra_jax.value_and_grad(loss_fn)(params, opt_state, batch)
  probe = logra_jax.kl_probe(logits_fn, params, opt_state, probe_batch)
  updates, opt_state = tx.update(grads, opt_state, params, probe=probe)
  params = logra_jax.apply_updates(params, updates, opt_state)

Here `tx` is an optax chain that contains `sketch` and usually `kl_budget`. The
kernels to be sketched are its targets; a model uses them through `dot_general`,
`dense`, or the layers in `linen` and `nnx`.

Notation, in the docstrings of all modules: kernel `W [d_in, d_out]`, layer
input `X [N, d_in]`, output cotangent `dY [N, d_out]`, dense gradient
`G = Xᵀ dY`, basis `A [rank, d_in]`, sketch `S = A G = (X Aᵀ)ᵀ dY
[rank, d_out]`, thin update or factor `D [rank, d_out]`, full update `Aᵀ D`.
"""

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
