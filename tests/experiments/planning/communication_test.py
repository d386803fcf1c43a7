"""The page about the bytes that an update sends, made from saved rows."""

import json

from experiments.planning import communication
from experiments.planning.request import resolved
from tests.helpers.paths import ROOT

FOLDER = ROOT / "docs/results/memory"


def saved_rows():
  text = (FOLDER / "communication.json").read_text("utf-8")
  return json.loads(text)


def test_requests_compare_two_optimizers_on_two_meshes():
  requests = communication.requests("qwen2.5-0.5b", "v5p:2x2x2", 64)
  assert [(r.mesh, r.optimizer) for r in requests] == [
      ({"data": 8}, "dense_adam"),
      ({"data": 8}, "logra"),
      ({"fsdp": 8}, "dense_adam"),
      ({"fsdp": 8}, "logra"),
  ]
  for request in requests:
    resolved(request)


def test_the_committed_page_is_made_from_the_committed_rows():
  committed = (FOLDER / "communication.md").read_text("utf-8")
  assert communication.traffic_page(saved_rows()) == committed


def test_committed_rows_are_those_of_the_command():
  first = saved_rows()[0]["request"]
  requests = communication.requests(
      first["model"], first["target"], first["rank"]
  )
  for request, row in zip(requests, saved_rows(), strict=True):
    (axis,) = request.mesh
    assert row["request"]["mesh"][axis] == 8
    for name in ("optimizer", "param_dtype", "token_block", "others"):
      assert row["request"][name] == getattr(request, name)


def test_kinds_that_a_program_does_not_have_are_zero():
  rows = saved_rows()
  rows[0]["collective_bytes"] = {"all-reduce": 3 * 2**20}
  rows[0]["total_bytes"] = 3 * 2**20
  page = communication.traffic_page(rows)
  assert "| data: 8 | dense_adam | 0.0 | 3.0 | 0.0 | 3.0 |" in page


def test_what_is_saved_of_a_plan(small_plan):
  row = communication.traffic(small_plan)
  assert row["request"]["model"] == small_plan.request.model
  assert row["total_bytes"] == sum(row["collective_bytes"].values())
  assert set(row) == set(saved_rows()[0])
