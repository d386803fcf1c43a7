"""Plans as text and as plain data."""

import dataclasses
import json

from experiments.planning import report

GIB = 2**30


def test_the_table_and_the_data_say_the_same(small_plan):
  read = json.loads(json.dumps(report.plan_json(small_plan)))
  assert read["peak_bytes"] == small_plan.peak_bytes
  assert read["request"]["rank"] == 8
  assert "jax" in read["versions"]
  text = report.plan_table(small_plan)
  assert f"{small_plan.peak_bytes / GIB:.3f} GiB  per device" in text
  assert text.splitlines()[-1].startswith("fits in ")


def test_verdicts(small_plan):
  short = dataclasses.replace(
      small_plan, fits=False, peak_bytes=3 * GIB, memory_bytes=2 * GIB
  )
  assert report.plan_table(short).endswith(": 1.00 GiB too much")
  refused = dataclasses.replace(short, refusal="RESOURCE_EXHAUSTED: no room")
  assert report.plan_table(refused).endswith("RESOURCE_EXHAUSTED: no room")
  request = dataclasses.replace(small_plan.request, target="h100:1")
  tight = dataclasses.replace(
      small_plan, request=request, peak_bytes=70 * GIB, memory_bytes=79 * GIB
  )
  assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in report.plan_table(tight)
