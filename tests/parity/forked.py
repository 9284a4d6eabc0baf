"""The server from which processes of tests are forked: it has loaded what they use.

Loading a module in every rank of every world may take as long as the test. Test files are not among
the modules: some of them register a family, a schedule or a rule.
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
    """Return the modules that a server loads; the last one closes the list."""
    return [*testing.PRELOAD, *_LIBRARIES, *_OURS, "tests.parity.gc_freeze"]


def start_server() -> None:
    """Start the one server of `multiprocessing` if it does not run."""
    forkserver.set_forkserver_preload(loaded())
    forkserver.ensure_running()
