"""Does it fit? Compiles the real update for a target that is not at hand.

  python -m experiments.plan --model=qwen2.5-7b --target=h100:4 \
    --optimizer=logra --rank=256 --tokens=2048 [--json=out.json]

Peak memory of a device means arguments + outputs - aliased + temporaries, as
the target's own compiler (XLA) reports them. `--search=batch` looks for the
largest micro-batch that fits, `--search=slice` for the smallest slice of the
target's family. In a notebook: `planner.plan(planner.Request(model, target))`.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import math
import pathlib
import re
import sys
from typing import Any

from absl import app, flags
import jax
import jax.numpy as jnp

from experiments.models import architectures
from experiments.planning import targets
from experiments.planning.plan import Plan, Request, plan, resolved

_GIB = 2**30
_MAX_SEQUENCES = 4096


def largest(fits: Callable[[int], bool], limit: int) -> int:
  """The largest n in `[0, limit]` that fits, by doubling, then bisection.

  Args:
    fits: whether n ≥ 1 fits; all smaller ones do then. Costly: called about
      2 log₂ n times.
    limit: where to stop looking.
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
    request: `sequences` and `micro_batch` are replaced, and set equal.
    tell: called with each plan as it is made.

  Returns:
    All plans that were made; the last one is the largest that fits, or of one
    sequence if that does not.
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

  Slices whose memory is less than the weights alone are not compiled for.

  Args:
    request: the shape of `target` is replaced; `mesh` must be None.
    tell: called with each plan as it is made.

  Returns:
    All plans that were made; the last one fits, or is of the largest slice.

  Raises:
    ValueError: `mesh` is given.
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


def table(found: Plan) -> str:
  """A plan as text for a terminal."""
  r, gib = found.request, lambda n: f"{n / _GIB:10.3f} GiB"
  rows = [
      f"{r.model} on {r.target}: {r.optimizer}, rank {r.rank}, {r.sequences} x"
      f" {r.tokens} tokens a device, {r.micro_batch} at once,"
      f" {r.param_dtype} weights, others {r.others}",
      f"mesh {_mesh_text(r.mesh)}, token blocks of {r.token_block or r.tokens}",
      "",
      *(f"  {kind:<16}{gib(n)}" for kind, n in found.arguments.items()),
      f"  {'gradient':<16}{gib(found.gradient_bytes)}  (among temporaries)",
  ]
  if not found.refusal:
    rows += [
        "",
        f"  {'arguments':<16}{gib(found.argument_bytes)}",
        f"  {'outputs':<16}{gib(found.output_bytes)}",
        f"  {'aliased':<16}{gib(found.aliased_bytes)}",
        f"  {'temporaries':<16}{gib(found.temporary_bytes)}",
    ]
  if found.peak_bytes is not None:
    ratio = found.peak_bytes / found.floor_bytes
    rows.append(f"  {'peak':<16}{gib(found.peak_bytes)}  per device")
    rows.append(
        f"  {'floor':<16}{gib(found.floor_bytes)}  bfloat16 weights /"
        f" {found.n_devices} devices; the peak is {ratio:.2f} times this"
    )
  if not found.refusal:
    rows += ["", f"  {'operations':<16}{found.flops / 1e12:10.3f} TFLOP"]
    rows += [
        f"  {kind:<20}{gib(n)[4:]}"
        for kind, n in found.collective_bytes.items()
    ]
    if found.unknown_loops:
      rows.append(
          f"  ({found.unknown_loops} loops of unknown length are counted once)"
      )
  rows += ["", f"  compiled in {found.compile_seconds:.0f} s", _verdict(found)]
  return "\n".join(rows)


def _mesh_text(mesh: Mapping[str, int] | None) -> str:
  return ",".join(f"{axis}:{size}" for axis, size in (mesh or {}).items())


def _verdict(found: Plan) -> str:
  """The last line: whether it fits, and by how much."""
  memory = f"{found.memory_bytes / _GIB:.2f} GiB of {found.request.target}"
  if found.peak_bytes is None:
    return f"does not fit in {memory}: {found.refusal}"
  margin = (found.memory_bytes - found.peak_bytes) / _GIB
  if found.refusal:
    return f"does not fit in {memory}: {found.refusal}"
  if not found.fits:
    return f"does not fit in {memory}: {-margin:.2f} GiB too much"
  verdict = f"fits in {memory}: {margin:.2f} GiB to spare"
  if found.request.target.startswith("h100") and not _by_default(found):
    verdict += (
        "; JAX takes 75 % of a GPU unless told more: run with"
        " XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
    )
  return verdict


def _by_default(found: Plan) -> bool:
  """Whether what JAX takes of a GPU by default is enough."""
  return (found.peak_bytes or 0) <= 0.75 * found.memory_bytes


def to_json(found: Plan) -> dict[str, Any]:
  """A plan as plain data, with what follows from it."""
  out = dataclasses.asdict(found)
  if found.peak_bytes is not None:
    out["peak_gib"] = round(found.peak_bytes / _GIB, 3)
    out["floor_gib"] = round(found.floor_bytes / _GIB, 3)
    out["ratio_to_floor"] = round(found.peak_bytes / found.floor_bytes, 3)
  return out


def parse_mesh(text: str) -> dict[str, int]:
  """Reads `fsdp:4,tensor:2`.

  Raises:
    ValueError: the text has another form.
  """
  if not re.fullmatch(r"[a-z]+:\d+(,[a-z]+:\d+)*", text):
    raise ValueError(f"mesh={text!r} must be like 'fsdp:4,tensor:2'")
  return {
      axis: int(size)
      for axis, size in (part.split(":") for part in text.split(","))
  }


def run(
    request: Request,
    search: str | None = None,
    out: str | None = None,
    dump: str | None = None,
) -> None:
  """Plans or searches, prints tables, and writes JSON.

  Args:
    request: what to compile.
    search: None, `'batch'` or `'slice'`.
    out: file to write, or None.
    dump: folder for the compiler's files, or None; not in a search.

  Raises:
    ValueError, ImportError: see `planner.plan`.
    OSError: `out` cannot be written.
  """
  if out is not None:
    _check_writable(pathlib.Path(out))
  tell = lambda found: print(f"{_tried(found)}", flush=True)
  if search is None:
    tried = [plan(request, dump)]
  else:
    tried = (search_batch if search == "batch" else search_slice)(request, tell)
    print()
  print(table(tried[-1]))
  if out is not None:
    content = {
        "command": " ".join(["python -m experiments.plan", *sys.argv[1:]]),
        **to_json(tried[-1]),
        "tried": [to_json(found) for found in tried[:-1]],
    }
    text = json.dumps(content, indent=2) + "\n"
    pathlib.Path(out).write_text(text, "utf-8")


def _check_writable(file: pathlib.Path) -> None:
  """Raises OSError now, and not after minutes of compiling."""
  file.parent.mkdir(parents=True, exist_ok=True)
  new = not file.exists()
  file.open("a").close()
  if new:
    file.unlink()


def _tried(found: Plan) -> str:
  """One line of a search."""
  peak = "?" if found.peak_bytes is None else f"{found.peak_bytes / _GIB:.2f}"
  return (
      f"{found.request.target}, {found.request.micro_batch} at once: peak"
      f" {peak} GiB, {'fits' if found.fits else 'does not fit'}"
      f" ({found.compile_seconds:.0f} s)"
  )


_FIELDS = [f for f in dataclasses.fields(Request) if f.name != "mesh"]


def main(argv: Sequence[str]) -> None:
  del argv
  # Accelerators of this machine have no part in this.
  jax.config.update("jax_platforms", "cpu")
  values = flags.FLAGS.flag_values_dict()
  try:
    mesh = None if values["mesh"] is None else parse_mesh(values["mesh"])
    request = Request(**{f.name: values[f.name] for f in _FIELDS}, mesh=mesh)
    run(request, values["search"], values["json"], values["dump"])
  except (ValueError, ImportError, OSError) as error:
    if values["traceback"]:
      raise
    sys.exit(f"error: {error}")


def _define_flags() -> None:
  """One flag for each field of `Request`, and what is about the program."""
  help_text = "See experiments/planning/plan.py, Request."
  for field in _FIELDS:
    default = None if field.default is dataclasses.MISSING else field.default
    if "int" in str(field.type):
      flags.DEFINE_integer(field.name, default, help_text)
    else:
      flags.DEFINE_string(field.name, default, help_text)
  flags.DEFINE_string(
      "mesh", None, "As fsdp:4,tensor:2; default: see default_mesh."
  )
  flags.DEFINE_enum("search", None, ["batch", "slice"], "What to look for.")
  flags.DEFINE_string("json", None, "File to write the figures to.")
  flags.DEFINE_string("dump", None, "Folder for the compiler's own files.")
  flags.DEFINE_bool("traceback", False, "Show where an error comes from.")
  flags.mark_flags_as_required(["model", "target"])


if __name__ == "__main__":
  _define_flags()
  app.run(main)
