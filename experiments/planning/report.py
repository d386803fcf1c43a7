"""Plans of updates and runs as text, and as plain data for JSON."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from experiments.planning.update_plan import Plan
from experiments.reporting.units import GIB


def plan_table(plan: Plan) -> str:
  """Formats the plan of an update for a terminal."""
  r, gib = plan.request, lambda n: f"{n / GIB:10.3f} GiB"
  rows = [
      f"{r.model} on {r.target}: {r.optimizer}, rank {r.rank}, {r.sequences} x"
      f" {r.tokens} tokens a device, {r.micro_batch} at once,"
      f" {r.param_dtype} weights, others {r.others}",
      f"mesh {_mesh_text(r.mesh)}, token blocks of {r.token_block or r.tokens}",
      "",
      *(f"  {kind:<16}{gib(n)}" for kind, n in plan.arguments.items()),
      f"  {'gradient':<16}{gib(plan.gradient_bytes)}  (among temporaries)",
  ]
  if not plan.refusal:
    rows += [
        "",
        f"  {'arguments':<16}{gib(plan.argument_bytes)}",
        f"  {'outputs':<16}{gib(plan.output_bytes)}",
        f"  {'aliased':<16}{gib(plan.aliased_bytes)}",
        f"  {'temporaries':<16}{gib(plan.temporary_bytes)}",
    ]
  if plan.peak_bytes is not None:
    ratio = plan.peak_bytes / plan.floor_bytes
    rows.append(f"  {'peak':<16}{gib(plan.peak_bytes)}  per device")
    rows.append(
        f"  {'floor':<16}{gib(plan.floor_bytes)}  bfloat16 weights /"
        f" {plan.n_devices} devices; the peak is {ratio:.2f} times this"
    )
  if not plan.refusal:
    rows += ["", f"  {'operations':<16}{plan.flops / 1e12:10.3f} TFLOP"]
    rows += [
        f"  {kind:<20}{gib(n)[4:]}" for kind, n in plan.collective_bytes.items()
    ]
    if plan.unknown_loops:
      rows.append(
          f"  ({plan.unknown_loops} loops of unknown length are counted once)"
      )
  rows += ["", f"  compiled in {plan.compile_seconds:.0f} s", _verdict(plan)]
  return "\n".join(rows)


def _mesh_text(mesh: Mapping[str, int] | None) -> str:
  """A mesh as `--mesh` takes it."""
  return ",".join(f"{axis}:{size}" for axis, size in (mesh or {}).items())


def _verdict(plan: Plan) -> str:
  """The last line: whether the plan fits, and by how much."""
  memory = f"{plan.memory_bytes / GIB:.2f} GiB of {plan.request.target}"
  if plan.peak_bytes is None:
    return f"does not fit in {memory}: {plan.refusal}"
  margin = (plan.memory_bytes - plan.peak_bytes) / GIB
  if plan.refusal:
    return f"does not fit in {memory}: {plan.refusal}"
  if not plan.fits:
    return f"does not fit in {memory}: {-margin:.2f} GiB too much"
  verdict = f"fits in {memory}: {margin:.2f} GiB to spare"
  if plan.request.target.startswith("h100") and not _default_suffices(plan):
    verdict += (
        "; JAX takes 75 % of a GPU unless told more: run with"
        " XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
    )
  return verdict


def _default_suffices(plan: Plan) -> bool:
  """Whether the share of a GPU that JAX takes by default is enough."""
  return (plan.peak_bytes or 0) <= 0.75 * plan.memory_bytes


def plan_json(plan: Plan) -> dict[str, Any]:
  """Converts the plan of an update to plain data, with derived figures."""
  out = dataclasses.asdict(plan)
  if plan.peak_bytes is not None:
    out["peak_gib"] = round(plan.peak_bytes / GIB, 3)
    out["floor_gib"] = round(plan.floor_bytes / GIB, 3)
    out["ratio_to_floor"] = round(plan.peak_bytes / plan.floor_bytes, 3)
  return out


def search_line(plan: Plan) -> str:
  """Formats one plan of a search as a line."""
  peak = "?" if plan.peak_bytes is None else f"{plan.peak_bytes / GIB:.2f}"
  return (
      f"{plan.request.target}, {plan.request.micro_batch} at once: peak"
      f" {peak} GiB, {'fits' if plan.fits else 'does not fit'}"
      f" ({plan.compile_seconds:.0f} s)"
  )


# Header of `run_plan_line`; its columns are the names of `gib`.
RUN_PLAN_HEAD = (
    "  devices      update  temporaries  sampling  cache  evaluation  device"
)


def run_plan_line(content: Mapping[str, Any]) -> str:
  """Formats the plan of a run as a line of its config's docstring.

  Args:
    content: What `run_plan.plan_config` returned, or its JSON file.

  Returns:
    The line, in GiB per device.
  """
  cells = [f"  {content['target']:<11}"]
  for name, value in content["gib"].items():
    text = "?" if value is None else f"{value:.2f}"
    cells.append(text.rjust(len(name)))
  return "  ".join(cells)


def run_plan_table(content: Mapping[str, Any]) -> str:
  """Formats the plan of a run for a terminal, with a verdict."""
  verdict = "fits"
  if not content["fits"]:
    verdict = f"does not fit {content['refusal']}".rstrip()
  return f"{RUN_PLAN_HEAD}\n{run_plan_line(content)}\n{verdict}"
