"""Makes tasks by name."""

from collections.abc import Callable
import inspect
from typing import Any

from experiments.tasks import base, functions, grammar
from experiments.tasks.addition import Addition
from experiments.tasks.gym import ReasoningGym
from experiments.tasks.mixture import Mixture
from experiments.tasks.problems import Jsonl, Parquet, Problems

_KINDS: dict[str, tuple[Callable[..., base.Task], str]] = {
    "addition": (Addition, "'addition' or 'addition:<digits>'"),
    "reasoning_gym": (ReasoningGym, "'reasoning_gym:<data set>'"),
    "jsonl": (Jsonl, "'jsonl:<path>'"),
    "parquet": (Parquet, "'parquet:<path>'"),
}
_ROW_OPTIONS = {"heldout_size", "instruction", "verifier"}
_KIND_OPTIONS = {
    "addition": set[str](),
    "jsonl": _ROW_OPTIONS | {"heldout"},
    "parquet": _ROW_OPTIONS | {"heldout"},
}


def make_task(name: str, seed: int, **options: Any) -> base.Task:
  """Makes a task by name; the docstring of `experiments.tasks` lists the names.

  Args:
    name: A task, with options as in `'reasoning_gym:gcd?max_value=50&num=2'`;
      or a weighted sum of tasks, `'0.7*addition + 0.3*reasoning_gym:gcd'`.
    seed: Random seed of the order of the training examples, and for procedural
      data sets of their content. Held-out examples do not depend on it.
    **options: Options as in the name, for example `heldout_size=200`; in a sum
      they apply to each task.

  Returns:
    The task.

  Raises:
    ValueError: If the name or an option is unknown (names the most similar
      ones), or the task refuses its options or its data.
    ImportError: If the task needs an extra that is not installed.
  """
  terms = grammar.weighted_sum(name, "task")
  parts = [_one(term, seed, options) for _, term in terms]
  if len(parts) == 1:
    return parts[0]
  names = [part.name for part in parts]
  for one in names:
    if names.count(one) > 1:
      raise ValueError(f"task {name!r} has {one!r} twice: add up its weights")
  return Mixture(name, seed, parts, [weight for weight, _ in terms])


def _one(name, seed, extra):
  """Makes a task that is not a sum."""
  base_name, options = grammar.options(name)
  options = {**options, **extra}
  if "seed" in options:
    raise ValueError(
        f"task {name!r}: the seed is not an option of the name; remove it and"
        " set config.task.seed"
    )
  kind, _, argument = base_name.partition(":")
  if kind not in _KINDS:
    if not functions.is_name(base_name):
      known = [*_KINDS, "<module>:<function>"]
      raise ValueError(base.unknown("task", name, known))
    task = _of_function(base_name, seed, options)
  else:
    make, form = _KINDS[kind]
    argument = argument or ("1" if kind == "addition" else "")
    if not argument:
      raise ValueError(f"task must be {form}, got {name!r}")
    if kind != "reasoning_gym":  # Its data sets check their own options.
      _check_options(kind, options, _KIND_OPTIONS[kind])
    task = make(argument, seed, **options)
  if "?" in name:
    task.name = name  # Tells apart tasks that differ in their options only.
  return task


def _of_function(name, seed, options):
  """Makes a task from what a function of any module returns."""
  function = functions.load(name)
  parameters = inspect.signature(function).parameters.values()
  takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
  taken = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
  own = {k: v for k, v in options.items() if takes_all or k in taken}
  rest = {k: v for k, v in options.items() if k not in own}
  try:
    inspect.signature(function).bind(seed=seed, **own)
  except TypeError as error:
    raise ValueError(
        f"task {name!r} is called with {', '.join(['seed', *own])}: {error}"
    ) from error
  made = function(seed=seed, **own)
  if isinstance(made, base.Task):
    _check_options(name, rest, taken - {"seed"})
    made.name = name
    return made
  if isinstance(made, list):
    _check_options(name, rest, _ROW_OPTIONS | taken - {"seed"})
    rows = [(f"{name}: row {i}", row) for i, row in enumerate(made, start=1)]
    return Problems(name, rows, seed, **rest)
  raise ValueError(
      f"task {name!r} must return a list of rows or an experiments.tasks.Task,"
      f" got {type(made).__name__}"
  )


def _check_options(name, options, known):
  """Raises ValueError for options that a task does not have."""
  for key in options:
    if key not in known:
      raise ValueError(base.unknown(f"option of {name}", key, known))
