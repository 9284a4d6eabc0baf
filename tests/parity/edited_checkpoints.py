"""Checkpoints with changed values, as if they had been trained that way."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from tests.unit.checkpoint.checkpoint_worlds import edit_manifest


def set_a_weight(step: Path, value: float) -> None:
    """Set a weight of the last rank, with matching checksums."""
    path = max(step.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    head = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:head])
    key = next(key for key in header if key.startswith("model/"))
    start, stop = (head + offset for offset in header[key]["data_offsets"])
    data[start : start + 4] = struct.pack("<f", value)
    path.write_bytes(data)

    def edit(body: dict[str, Any]) -> None:
        name, _, offsets = key.partition("@")
        (piece,) = (
            piece
            for piece in body["entries"][name]["pieces"]
            if piece["file"] == path.name and ",".join(map(str, piece["offsets"])) == offsets
        )
        piece["xxh128"] = xxh3_128_hexdigest(data[start:stop])

    edit_manifest(step, edit)
