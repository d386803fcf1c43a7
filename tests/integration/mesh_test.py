"""The training program on meshes of eight simulated devices.

The number of devices is fixed when JAX starts, so all cases, which are in
`mesh_cases.py`, run in one separate process.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from experiments.configs import tiny
from experiments.runs import workdir

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # Programs compile faster and run slower, which suits these small ones.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)


@pytest.mark.parametrize(
    "which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)]
)
def test_eight_devices(which):
  cases = pathlib.Path(__file__).with_name("mesh_cases.py")
  flags = (os.environ.get("XLA_FLAGS", ""), *FLAGS)
  env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
  process = subprocess.run(
      [sys.executable, "-m", "pytest", "-m", which, "--tb=short", str(cases)],
      env=env,
      capture_output=True,
      text=True,
      check=False,
  )
  assert process.returncode == 0, process.stdout + process.stderr


def test_a_run_may_go_on_on_another_mesh(tmp_path):
  workdir.claim(tmp_path, tiny.get_config())
  config = tiny.get_config().unlock()
  config.mesh.fsdp = 8
  workdir.claim(tmp_path, config.lock())
  config.unlock().optimizer.rank = 8
  with pytest.raises(ValueError, match=r"optimizer\.rank: 4 there, 8") as error:
    workdir.claim(tmp_path, config.lock())
  assert "mesh" not in str(error.value)
