"""Bytes that devices send in an update: dense gradients against sketches.

  python -m experiments.planning.communication --out=docs/results/memory

The real update of a model is compiled for eight devices, as eight replicas
(`data`) and with the weights split (`fsdp`). The bytes of its collectives are
counted (`experiments.planning.hlo_cost`). Writes `communication.json` and
`communication.md`.

Cost: one to two minutes per row on two CPU cores. Needs the extra `tpu`, or
`cuda` for `--target=h100:8`.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import pathlib
from typing import Any

from absl import flags

from experiments import _cli
from experiments.planning import update_plan
from experiments.planning.request import Request, help_of
from experiments.reporting import tables
from experiments.reporting.units import MIB


def requests(model: str, target: str, rank: int) -> list[Request]:
  """Requests for dense Adam and LoGRA, on both meshes of eight devices."""
  return [
      Request(
          model,
          target,
          optimizer=optimizer,
          rank=rank,
          mesh={axis: 8},
          param_dtype="float32",
          # Some compilers sum a dense gradient again for each block.
          token_block=0,
      )
      for axis in ("data", "fsdp")
      for optimizer in ("dense_adam", "logra")
  ]


def traffic(plan: update_plan.Plan) -> dict[str, Any]:
  """The part of a plan that is saved, in bytes per device."""
  return {
      "request": dataclasses.asdict(plan.request),
      "collective_bytes": plan.collective_bytes,
      "total_bytes": sum(plan.collective_bytes.values()),
      "versions": plan.versions,
  }


def traffic_page(rows: Sequence[Mapping[str, Any]]) -> str:
  """Makes a Markdown page of saved rows.

  Args:
    rows: Results of `traffic`, all for one model and one target.
  """
  first = rows[0]["request"]
  kinds = sorted({kind for row in rows for kind in row["collective_bytes"]})
  lines = []
  for row in rows:
    (axis,) = [a for a, size in row["request"]["mesh"].items() if size > 1]
    sent = [row["collective_bytes"].get(kind, 0) for kind in kinds]
    numbers = [f"{n / MIB:,.1f}" for n in (*sent, row["total_bytes"])]
    lines.append([f"{axis}: 8", row["request"]["optimizer"], *numbers])
  paragraphs = [
      "# Bytes that a device sends in an update\n",
      f"{first['model']} on {first['target']}, one sequence of"
      f" {first['tokens']} tokens per device, rank {first['rank']}, float32"
      " weights, embeddings and norms frozen, KL probe included; MiB per"
      " device. With `data` all that is sent is gradients. With `fsdp` the"
      " weights are gathered too, and features where the vocabulary is split;"
      " a TPU's compiler writes many of these, and sums of gradients, as rings"
      " of collective-permutes.\n",
      tables.markdown(["mesh", "optimizer", *kinds, "total"], lines),
      "Made by `python -m experiments.planning.communication`.\n",
  ]
  return "\n".join(paragraphs)


def main(values: flags.FlagValues) -> None:
  out = pathlib.Path(values.out)
  out.mkdir(parents=True, exist_ok=True)
  rows = []
  for request in requests(values.model, values.target, values.rank):
    rows.append(traffic(update_plan.plan(request)))
    print(json.dumps(rows[-1]["collective_bytes"]), flush=True)
  text = json.dumps(rows, indent=2) + "\n"
  (out / "communication.json").write_text(text, "utf-8")
  (out / "communication.md").write_text(traffic_page(rows), "utf-8")
  print(traffic_page(rows))


if __name__ == "__main__":
  flags.DEFINE_string("model", "qwen2.5-0.5b", help_of("model"))
  flags.DEFINE_string(
      "target", "v5p:2x2x2", "Eight devices, such as v5p:2x2x2 or h100:8."
  )
  flags.DEFINE_integer("rank", 64, "Rank of the sketches.")
  flags.DEFINE_string("out", None, "Folder to write the files to.")
  flags.mark_flag_as_required("out")
  _cli.run(main)
