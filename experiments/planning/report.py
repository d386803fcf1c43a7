"""Plans as text for a terminal, and as plain data for JSON."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from experiments.planning.update_plan import Plan
from experiments.reporting.units import GIB


def plan_table(found: Plan) -> str:
  """A plan as text for a terminal."""
  r, gib = found.request, lambda n: f"{n / GIB:10.3f} GiB"
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
  """The last line: whether the plan fits, and by how much."""
  memory = f"{found.memory_bytes / GIB:.2f} GiB of {found.request.target}"
  if found.peak_bytes is None:
    return f"does not fit in {memory}: {found.refusal}"
  margin = (found.memory_bytes - found.peak_bytes) / GIB
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
  """Whether the share of a GPU that JAX takes by default is enough."""
  return (found.peak_bytes or 0) <= 0.75 * found.memory_bytes


def plan_json(found: Plan) -> dict[str, Any]:
  """A plan as plain data, with derived figures."""
  out = dataclasses.asdict(found)
  if found.peak_bytes is not None:
    out["peak_gib"] = round(found.peak_bytes / GIB, 3)
    out["floor_gib"] = round(found.floor_bytes / GIB, 3)
    out["ratio_to_floor"] = round(found.peak_bytes / found.floor_bytes, 3)
  return out


def search_line(found: Plan) -> str:
  """One line of a search."""
  peak = "?" if found.peak_bytes is None else f"{found.peak_bytes / GIB:.2f}"
  return (
      f"{found.request.target}, {found.request.micro_batch} at once: peak"
      f" {peak} GiB, {'fits' if found.fits else 'does not fit'}"
      f" ({found.compile_seconds:.0f} s)"
  )
