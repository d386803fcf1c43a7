"""Plans of updates and runs, as text and as plain data."""

import dataclasses
import json

from experiments.planning import report
from experiments.reporting.units import GIB


def test_the_table_and_the_data_say_the_same(small_plan):
  read = json.loads(json.dumps(report.plan_json(small_plan)))
  assert read["peak_bytes"] == small_plan.peak_bytes
  assert read["request"]["rank"] == 8
  assert "jax" in read["versions"]
  text = report.plan_table(small_plan)
  assert f"{small_plan.peak_bytes / GIB:.3f} GiB  per device" in text
  assert text.splitlines()[-1].startswith("fits in ")


def test_the_plan_of_a_run_as_text():
  content = {
      "target": "h100:4",
      "fits": True,
      "refusal": "",
      "gib": {"update": 9.64, "temporaries": None, "sampling": 128.5},
  }
  head, line, verdict = report.run_plan_table(content).splitlines()
  assert head == report.RUN_PLAN_HEAD and verdict == "fits"
  # Numbers end where the names of their columns end.
  names = ("update", "temporaries", "sampling")
  ends = [head.index(name) + len(name) for name in names]
  assert [line[:end].split()[-1] for end in ends] == ["9.64", "?", "128.50"]
  assert line.split()[0] == "h100:4"
  content["fits"] = False
  assert report.run_plan_table(content).endswith("\ndoes not fit")
  content["refusal"] = "RESOURCE_EXHAUSTED: no room"
  assert report.run_plan_table(content).endswith(
      "not fit RESOURCE_EXHAUSTED: no room"
  )


def test_a_line_of_a_search(small_plan):
  request = dataclasses.replace(small_plan.request, micro_batch=3)
  plan = dataclasses.replace(
      small_plan, request=request, peak_bytes=3 * GIB, compile_seconds=4.4
  )
  line = "cpu:1, 3 at once: peak 3.00 GiB, fits (4 s)"
  assert report.search_line(plan) == line
  refused = dataclasses.replace(plan, peak_bytes=None, fits=False)
  assert "peak ? GiB, does not fit" in report.search_line(refused)


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
