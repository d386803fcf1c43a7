r"""Serves a model over HTTP, with an OpenAI-compatible completion API.

  python -m experiments.serve --model=DIR [--port=8000]

  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \
    -d '{"model": "DIR", "prompt": "3 + 5 =", "max_tokens": 8}'

It answers one request at a time: use it for tests and to try a model; vLLM and
similar servers are much faster under load. There is no authentication, and POST
/load reads any path: serve only on a network that you trust.
"""

import pathlib

from absl import flags

from experiments import _cli
from experiments.rollouts import server as server_lib
from experiments.runs import restore


def main(values: flags.FlagValues) -> None:
  loaded = restore.load_any(values.model)
  name = values.name or pathlib.Path(values.model).absolute().name
  engine = server_lib.Engine(loaded, name, restore.load_any)
  with server_lib.Server(engine, values.host, values.port) as server:
    print(f"{name} at {server.url}/v1/completions; Ctrl-C ends", flush=True)
    try:
      server.serve_forever()
    except KeyboardInterrupt:
      print()


if __name__ == "__main__":
  flags.DEFINE_string(
      "model", None, "Hugging Face directory, GGUF file, or workdir of a run."
  )
  flags.DEFINE_string(
      "name", None, "Model name in requests; default: last part of the path."
  )
  flags.DEFINE_string("host", "127.0.0.1", "Address to listen on.")
  flags.DEFINE_integer("port", 8000, "Port to listen on.")
  flags.mark_flag_as_required("model")
  _cli.run(main)
