"""Where a number comes from: the command, the machine, the versions."""

from collections.abc import Iterable
import importlib.metadata
import os
import pathlib
import platform
import shlex
import sys
from typing import Any

import jax


def command() -> str:
  """Returns the command line of this process, quoted for a shell."""
  return shlex.join(["python", *sys.orig_argv[1:]])


def versions(packages: Iterable[str] = ("jax", "jaxlib")) -> dict[str, str]:
  """Returns the versions of Python and of the packages that are installed."""
  installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
  return {"python": platform.python_version()} | {
      name: importlib.metadata.version(name)
      for name in packages
      if name in installed
  }


def machine() -> dict[str, Any]:
  """Describes this machine and its load, to be stored with measurements."""
  return {
      "cpu": _cpu_model(),
      "cpus": len(os.sched_getaffinity(0)),
      "load_average": round(os.getloadavg()[0], 2),
      "device": jax.devices()[0].device_kind,
      "jax": jax.__version__,
      "python": platform.python_version(),
      "xla_flags": os.environ.get("XLA_FLAGS", ""),
  }


def _cpu_model() -> str:
  """Returns the processor's name, from /proc/cpuinfo where there is one."""
  cpuinfo = pathlib.Path("/proc/cpuinfo")
  if cpuinfo.is_file():
    for line in cpuinfo.read_text("utf-8").splitlines():
      if line.startswith("model name"):
        return line.partition(":")[2].strip()
  return platform.processor()
