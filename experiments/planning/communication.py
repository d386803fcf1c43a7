"""What devices send for an update: dense gradients against sketches.

  python -m experiments.planning.communication --out=docs/results/memory

The real update of a model is compiled for eight devices, as eight replicas
(`data`) and with the weights split (`fsdp`), and the bytes of its collectives
are counted (`experiments.planning.hlo_cost`). Writes `communication.json` and
`communication.md`.
Cost: one to two minutes a row on two CPU cores. Needs the extra
`tpu`, or `cuda` for `--target=h100:8`.
"""

import dataclasses
import json
import pathlib
from typing import Any

from absl import app, flags

from experiments.planning import update_plan
from experiments.planning.request import Request

_MIB = 2**20


def requests(model: str, target: str, rank: int) -> list[Request]:
  """The rows: dense Adam and LoGRA, each on both meshes of eight devices."""
  return [
      Request(
          model,
          target,
          optimizer=optimizer,
          rank=rank,
          mesh={axis: 8},
          param_dtype="float32",
          # Some compilers sum a dense gradient anew for each block.
          token_block=0,
      )
      for axis in ("data", "fsdp")
      for optimizer in ("dense_adam", "logra")
  ]


def row(plan: update_plan.Plan) -> dict[str, Any]:
  """What the table and the JSON say of one program, in bytes per device."""
  return {
      "request": dataclasses.asdict(plan.request),
      "collective_bytes": plan.collective_bytes,
      "total_bytes": sum(plan.collective_bytes.values()),
      "versions": plan.versions,
  }


def table(rows: list[dict[str, Any]]) -> str:
  """Rows of `row` as Markdown; they must be of one model and one target."""
  first = rows[0]["request"]
  kinds = sorted({kind for r in rows for kind in r["collective_bytes"]})
  lines = [
      "# Bytes that a device sends in an update",
      "",
      f"{first['model']} on {first['target']}, one sequence of"
      f" {first['tokens']} tokens per device, rank {first['rank']}, float32"
      " weights, embeddings and norms frozen, KL probe included; MiB per"
      " device. With `data` all that is sent is gradients. With `fsdp` the"
      " weights are gathered too, and features where the vocabulary is split;"
      " a TPU's compiler writes many of these, and sums of gradients, as rings"
      " of collective-permutes.",
      "",
      f"| mesh | optimizer | {' | '.join(kinds)} | total |",
      f"|---|---|{'---:|' * (len(kinds) + 1)}",
  ]
  for r in rows:
    (axis,) = [a for a, size in r["request"]["mesh"].items() if size > 1]
    moved = [r["collective_bytes"].get(kind, 0) for kind in kinds]
    numbers = [f"{n / _MIB:,.1f}" for n in (*moved, r["total_bytes"])]
    names = (f"{axis}: 8", r["request"]["optimizer"])
    lines.append(f"| {' | '.join((*names, *numbers))} |")
  lines += ["", "Made by `python -m experiments.planning.communication`.", ""]
  return "\n".join(lines)


def main(names: flags.FlagValues) -> None:
  out = pathlib.Path(names.out)
  out.mkdir(parents=True, exist_ok=True)
  rows = []
  for request in requests(names.model, names.target, names.rank):
    rows.append(row(update_plan.plan(request)))
    print(json.dumps(rows[-1]["collective_bytes"]), flush=True)
  (out / "communication.json").write_text(json.dumps(rows, indent=2) + "\n")
  (out / "communication.md").write_text(table(rows))
  print(table(rows))


if __name__ == "__main__":
  flags.DEFINE_string(
      "model", "qwen2.5-0.5b", "A name of experiments.models.architectures."
  )
  flags.DEFINE_string("target", "v5p:2x2x2", "Eight devices.")
  flags.DEFINE_integer("rank", 64, "Of the sketches.")
  flags.DEFINE_string("out", None, "Folder to write to.")
  flags.mark_flag_as_required("out")
  app.run(lambda argv: main(flags.FLAGS))
