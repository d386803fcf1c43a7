"""Says whether an update or a training run fits, before a device is rented.

Plan a model; sizes and mesh are chosen, or given by flags:

  python -m experiments.plan --model=qwen2.5-7b --target=h100:4 --rank=256 \\
    --tokens=2048 --out=plan.json

Search for the largest micro-batch, or the smallest slice, that fits:

  python -m experiments.plan --model=DIR --target=v5e:2x4 --search=batch

Plan a training run with the sizes of its config, sampling included:

  python -m experiments.plan --config=experiments/configs/qwen2_5_7b.py \\
    --model=qwen2.5-7b --target=v5p:2x2x1

The real update is compiled by the target's own compiler (XLA), which needs no
such device. In a notebook: `planning.update_plan.plan(Request(model, target))`.
"""

import dataclasses
import json
import pathlib
import re
import typing
from typing import Any

from absl import flags
import jax
from ml_collections import config_flags

from experiments import _cli
from experiments.planning import report, run_plan, search
from experiments.planning.request import Request, help_of
from experiments.planning.update_plan import Plan, plan
from experiments.reporting import provenance

_SEARCHES = {"batch": search.search_batch, "slice": search.search_slice}
# Fields whose flags do not go with --config, which has the sizes.
_FIELDS = {
    field.name: field
    for field in dataclasses.fields(Request)
    if field.name not in ("model", "target")
}


def parse_mesh(text: str) -> dict[str, int]:
  """Reads a mesh such as `fsdp:4,tensor:2`.

  Raises:
    ValueError: If the text has another form.
  """
  if not re.fullmatch(r"[a-z]+:\d+(,[a-z]+:\d+)*", text):
    raise ValueError(f"mesh={text!r} must be like 'fsdp:4,tensor:2'")
  return {
      axis: int(size)
      for axis, size in (part.split(":") for part in text.split(","))
  }


def plan_model(
    request: Request, search_for: str | None = None, dump: str | None = None
) -> dict[str, Any]:
  """Plans a request, or searches from it, and prints the result.

  Args:
    request: What to plan.
    search_for: None, 'batch' or 'slice'.
    dump: Folder for the compiler's files, or None; not for a search.

  Returns:
    The plan as plain data, with the plans that were `tried` before it.

  Raises:
    ValueError, ImportError: See `update_plan.plan`.
  """
  tried: list[Plan] = []
  if search_for is None:
    tried = [plan(request, dump)]
  else:
    tell = lambda one: print(report.search_line(one), flush=True)
    tried = _SEARCHES[search_for](request, tell)
    print()
  print(report.plan_table(tried[-1]))
  return report.plan_json(tried[-1]) | {
      "tried": [report.plan_json(one) for one in tried[:-1]]
  }


def _request(values: flags.FlagValues) -> Request:
  """Makes the request that the flags describe."""
  fields: dict[str, Any] = {name: values[name].value for name in _FIELDS}
  if fields["mesh"] is not None:
    fields["mesh"] = parse_mesh(fields["mesh"])
  return Request(model=values.model, target=values.target, **fields)


def _refuse_sizes(values: flags.FlagValues) -> None:
  """Raises ValueError for a flag that does not go with --config."""
  for name in (*_FIELDS, "search", "dump"):
    if values[name].present:
      raise ValueError(
          f"--{name} does not go with --config, which fixes the sizes; change"
          " the config instead (--config.FIELD=VALUE), or leave --config out"
      )


def _check_writable(file: pathlib.Path) -> None:
  """Raises OSError now instead of after minutes of compiling."""
  file.parent.mkdir(parents=True, exist_ok=True)
  new = not file.exists()
  file.open("a").close()
  if new:
    file.unlink()


def main(values: flags.FlagValues) -> None:
  # Compiling needs no accelerator of this machine.
  jax.config.update("jax_platforms", "cpu")
  if values.config is not None:
    _refuse_sizes(values)
  elif values.search and values.dump:
    raise ValueError(
        "--dump does not go with --search, which compiles several programs;"
        " search first, then give the sizes that it found and --dump"
    )
  if values.out is not None:
    _check_writable(pathlib.Path(values.out))
  if values.config is None:
    content = plan_model(_request(values), values.search, values.dump)
  else:
    content = run_plan.plan_config(values.config, values.model, values.target)
    print(report.run_plan_table(content))
  if values.out is not None:
    content = {"command": provenance.command(), **content}
    text = json.dumps(content, indent=2) + "\n"
    pathlib.Path(values.out).write_text(text, "utf-8")


def _define_flags() -> None:
  """Defines a flag for each field of `Request`, and the command's own flags."""
  config_flags.DEFINE_config_file(
      "config", None, "Training config to plan instead of single sizes."
  )
  for name in ("model", "target"):
    flags.DEFINE_string(name, None, help_of(name))
  types = typing.get_type_hints(Request)
  for name, field in _FIELDS.items():
    default: Any = field.default
    if int in (types[name], *typing.get_args(types[name])):
      flags.DEFINE_integer(name, default, help_of(name))
    else:
      flags.DEFINE_string(name, default, help_of(name))
  flags.DEFINE_enum(
      "search",
      None,
      list(_SEARCHES),
      "Find the largest micro-batch (batch) or the smallest slice (slice) that"
      " fits.",
  )
  flags.DEFINE_string("out", None, "JSON file to write the plan to.")
  flags.DEFINE_string("dump", None, "Folder for the compiler's own files.")
  flags.mark_flags_as_required(["model", "target"])


if __name__ == "__main__":
  _define_flags()
  _cli.run(main)
