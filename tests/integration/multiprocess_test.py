"""Two processes compute the same as one process."""

import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from experiments.runs import checkpoints, metric_names, record
from tests.helpers.paths import ROOT

WORKER = ROOT / "tests" / "helpers" / "multiprocess_worker.py"
DEVICES = 4
SECONDS = 500


def run(task, folder, n_processes):
  """Runs the worker in processes that share `DEVICES` devices."""
  folder.mkdir()
  with socket.socket() as server:
    server.bind(("localhost", 0))
    port = server.getsockname()[1]
  count = f"--xla_force_host_platform_device_count={DEVICES // n_processes}"
  env = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": f"{count} --xla_backend_optimization_level=0",
      "PYTHONPATH": str(ROOT),
  }
  logs = [folder / f"log{index}" for index in range(n_processes)]
  command = [sys.executable, WORKER, task, folder]
  processes = []
  try:
    for index, log in enumerate(logs):
      with log.open("w") as file:
        numbers = map(str, (port, n_processes, index))
        process = subprocess.Popen(
            [*command, *numbers],
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
      processes.append(process)
    codes = _wait(processes)
  finally:
    for process in processes:  # No process outlives the test.
      process.kill()
      process.wait()
  assert codes == [0] * n_processes, "\n".join(log.read_text() for log in logs)
  return [log.read_text() for log in logs]


def _wait(processes):
  """Exit codes when all ended, one failed or time is up; None: still runs."""
  end = time.monotonic() + SECONDS
  while time.monotonic() < end:
    codes = [process.poll() for process in processes]
    if None not in codes or any(codes):
      return codes
    time.sleep(0.2)
  return [process.poll() for process in processes]


def test_an_update_in_two_processes_is_that_in_one(tmp_path):
  arrays = []
  for n in (1, 2):
    run("step", tmp_path / str(n), n)
    with np.load(tmp_path / str(n) / "step.npz") as file:
      arrays.append(dict(file))
  one, two = arrays
  assert one.keys() == two.keys()
  for name, wanted in one.items():
    scale = np.abs(wanted).max(initial=0)
    if name.startswith("['after']"):
      # A factor can round to the next bfloat16: 2⁻⁸ of the step.
      scale = np.abs(wanted - one[name.replace("after", "before")]).max()
      assert scale > 1e-4 or "_proj" not in name, name
      np.testing.assert_allclose(
          two[name], wanted, rtol=0, atol=1e-2 * scale, err_msg=name
      )
    else:
      np.testing.assert_allclose(
          two[name], wanted, rtol=1e-4, atol=1e-5 * scale, err_msg=name
      )
  assert 0 < one["['metrics']['kl/predicted']"] < 2e-4
  assert one["['metrics']['kl/skipped']"] == 0


@pytest.mark.slow
def test_a_run_in_two_processes_is_that_in_one(tmp_path):
  """Only the first process writes the record; all write checkpoints."""
  rows = []
  for n in (1, 2):
    folder = tmp_path / str(n)
    outputs = run("train", folder, n)
    assert "update 2/2" in outputs[0]
    assert not any("update" in output for output in outputs[1:])
    rows.append(record.read_rows(folder / record.FILENAME))
    saved = checkpoints.Checkpoints(folder / "checkpoints")
    assert saved.updates() == [1, 2]
  for one, two in zip(*rows, strict=True):
    assert one.keys() == two.keys()
    for name, wanted in one.items():
      if metric_names.repeats(name):
        np.testing.assert_allclose(two[name], wanted, rtol=1e-3, atol=1e-6)
