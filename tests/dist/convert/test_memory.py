"""A conversion holds one shard, whatever the size of the model."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch

from megapipe.convert import HuggingFaceFolder, export, import_model
from megapipe.convert.dcp.export import export_dcp
from megapipe.convert.dcp.folder import open_dcp
from megapipe.testing import World, run_world
from tests.parity.converted import write_checkpoint
from tests.parity.reference import shapes
from tests.parity.tiers import in_parts
from tests.unit.model.transformers_models import model_of

MMAP_THRESHOLD = -3
"""Option of mallopt: the bytes from which a block is mapped by itself and returned when it is
freed."""
SHARD = 4 << 20


def high_water(reset: bool = False) -> int:
    """Return the most bytes that were resident since the last reset, which returns free memory."""
    if reset:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(x.split()[1]) for x in lines if x.startswith("VmHWM:"))


def peaks(world: World, folder: Path, case: str) -> dict[int, tuple[int, ...]]:
    """Return bytes of weights and peak bytes of conversions, by number of layers. The peaks are of
    export to Hugging Face, import from it, export to torch's DCP and import from that, above what
    was in use before, in a process that does nothing else. The first conversion loads what is
    loaded later."""
    assert ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 18)
    base = model_of(case)
    sizes = {"hidden": 512, "ffn_hidden": 1408, "head_dim": 128, "vocab_size": 300, "dtype": "fp32"}
    if case == "mixtral":
        sizes["moe"] = base.moe.model_copy(update={"num_experts": 4, "expert_ffn_hidden": 352})
    base = base.model_copy(update=sizes)
    found = {}
    for layers in (1, 2, 5):
        model = base.model_copy(update={"layers": layers})
        params = {name: torch.rand(shape) for name, shape in shapes(model).items()}
        size = sum(tensor.nbytes for tensor in params.values())
        checkpoint = write_checkpoint(folder / f"run{layers}", model, params)
        del params
        before = high_water(reset=True)
        export(checkpoint, folder / f"hf{layers}", shard_bytes=SHARD)
        out = high_water() - before
        before = high_water(reset=True)
        opened = HuggingFaceFolder.open(folder / f"hf{layers}")
        import_model(opened, folder / f"back{layers}", shard_bytes=SHARD)
        back = high_water() - before
        before = high_water(reset=True)
        export_dcp(checkpoint, folder / f"dcp{layers}")
        dcp_out = high_water() - before
        before = high_water(reset=True)
        source = open_dcp(folder / f"dcp{layers}")
        import_model(source, folder / f"again{layers}", tokenizer="byte", shard_bytes=SHARD)
        found[layers] = size, out, back, dcp_out, high_water() - before
        assert len(opened.files.files) >= layers
    return found


@in_parts("case", ["llama", "mixtral"], full=["mixtral"])
def test_memory_does_not_grow_with_the_number_of_tensors(case: str, tmp_path: Path) -> None:
    (found,) = run_world(1, peaks, tmp_path, case, timeout_s=300)
    _, (_, *few), (size, *many) = found.values()
    assert size > 60e6
    assert max(many) < 16e6, found
    assert max(b - a for a, b in zip(few, many, strict=True)) < 1e6, found
