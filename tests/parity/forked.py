"""The process that processes of tests are forks of: it has loaded what they use.

What a fork would load for itself costs every rank of every world as much as its test. No file of
tests is among it: some of them register a family, a schedule or a rule.
"""

from __future__ import annotations

from multiprocessing import forkserver

from megapipe import testing

_LIBRARIES = (
    *("pytest", "hypothesis", "tokenizers", "safetensors.torch", "transformers.models.auto"),
    *("transformers.models.llama.modeling_llama", "torch.nn.attention.flex_attention"),
)
_OURS = ("megapipe.data.commands", "megapipe.convert.commands", "megapipe.model.gpt.stage")


def loaded() -> list[str]:
    """The modules that a server loads, the last of which closes the list."""
    return [*testing.PRELOAD, *_LIBRARIES, *_OURS, "tests.parity.frozen"]


def start_server() -> None:
    """Start the server that `multiprocessing` has one of, if it does not run."""
    forkserver.set_forkserver_preload(loaded())
    forkserver.ensure_running()
