"""Tests that a step on eight simulated devices equals the step on one.

The number of devices is fixed when JAX starts, so all cases, which are in
`sharding_cases.py`, run in one separate process.
"""

import os
import pathlib
import subprocess
import sys


def test_eight_devices():
  cases = pathlib.Path(__file__).with_name("sharding_cases.py")
  flag = "--xla_force_host_platform_device_count=8"
  env = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}",
  }
  process = subprocess.run(
      [sys.executable, "-m", "pytest", "-q", "--tb=short", str(cases)],
      env=env,
      capture_output=True,
      text=True,
      check=False,
  )
  assert process.returncode == 0, process.stdout + process.stderr
  assert " passed" in process.stdout or "....." in process.stdout
