"""Searches for the largest micro-batch or the smallest slice that fits."""

from collections.abc import Callable
import dataclasses
import math

import jax.numpy as jnp

from experiments.models import architectures
from experiments.planning import targets
from experiments.planning.request import Request, resolved
from experiments.planning.update_plan import Plan, plan

_MAX_SEQUENCES = 4096


def largest(fits: Callable[[int], bool], limit: int) -> int:
  """The largest n in `[0, limit]` that fits, by doubling and then bisection.

  Args:
    fits: Whether n ≥ 1 fits; if so, all smaller ones fit too. It is called
      about 2 log₂ n times.
    limit: The largest n to try.
  """
  good, bad = 0, 1
  while bad <= limit and fits(bad):
    good, bad = bad, 2 * bad
  bad = min(bad, limit + 1)
  while bad - good > 1:
    middle = (good + bad) // 2
    good, bad = (middle, bad) if fits(middle) else (good, middle)
  return good


def search_batch(
    request: Request, tell: Callable[[Plan], None] = lambda _: None
) -> list[Plan]:
  """Looks for the largest micro-batch that fits.

  Args:
    request: What to plan; `sequences` and `micro_batch` are set by the search.
    tell: Called with each plan as it is made.

  Returns:
    All plans that were made. The last one is the largest that fits, or the one
    of a single sequence if that does not fit.
  """
  tried: dict[int, Plan] = {}

  def fits(n: int) -> bool:
    tried[n] = plan(dataclasses.replace(request, sequences=n, micro_batch=n))
    tell(tried[n])
    return tried[n].fits

  best = tried.pop(max(1, largest(fits, _MAX_SEQUENCES)))
  return [*tried.values(), best]


def search_slice(
    request: Request, tell: Callable[[Plan], None] = lambda _: None
) -> list[Plan]:
  """Looks for the smallest slice of the target's family that fits.

  Slices with less memory than the weights alone need are skipped.

  Args:
    request: What to plan; the shape of `target` is set by the search, and
      `mesh` must be None.
    tell: Called with each plan as it is made.

  Returns:
    All plans that were made. The last one fits, or is that of the largest
    slice.

  Raises:
    ValueError: If `mesh` is given.
  """
  if request.mesh is not None:
    raise ValueError(
        f"mesh={dict(request.mesh)} fixes the number of devices; leave it out"
        " to search for a slice"
    )
  request = resolved(request)
  family = targets.parse(request.target).family
  weights = architectures.n_params(architectures.architecture(request.model))
  weights *= jnp.dtype(request.param_dtype).itemsize
  slices = targets.slices(family)
  roomy = [t for t in slices if weights <= t.memory_bytes * math.prod(t.shape)]
  tried = []
  for target in roomy or slices[-1:]:
    tried.append(plan(dataclasses.replace(request, target=target.name)))
    tell(tried[-1])
    if tried[-1].fits:
      break
  return tried
