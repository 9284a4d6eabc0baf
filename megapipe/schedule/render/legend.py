"""What the colours and lines of a picture mean."""

from megapipe.schedule.render.boxes import NAMES, Box
from megapipe.schedule.render.colours import GATHER, IDLE, LINE, REDUCE, shade
from megapipe.schedule.render.scene import Rectangle, Shape, Words
from megapipe.schedule.simulate import Timeline

SWATCH = 14.0


def legend(
    rows: list[list[Box]], timeline: Timeline, chunks: int, x: float, y: float
) -> tuple[list[Shape], float]:
    """The shapes of the legend with its upper left corner at (x, y), and where it ends."""
    kinds = sorted({part.op.kind for row in rows for box in row for part in box.parts})
    entries = [
        (NAMES[kind], [(shade(kind, chunk, chunks), 0) for chunk in range(chunks)])
        for kind in kinds
    ]
    entries.append(("idle", [(IDLE, 0)]))
    entries += [("parameters gathered", [(GATHER, 0)])] if timeline.gathers else []
    entries += [("gradients reduced", [(REDUCE, 0)])] if timeline.reductions else []
    replicas = len(timeline.schedule.placement.table)
    if replicas > 1:
        entries += [(f"replica {replica}", [(LINE, replica)]) for replica in range(replicas)]
    if chunks > 1:
        entries.append((f"dark to pale: chunks 0 to {chunks - 1}", []))
    shapes: list[Shape] = []
    for name, fills in entries:
        for fill, hatch in fills:
            shapes.append(Rectangle(x, y, SWATCH, SWATCH, fill, hatch=hatch))
            x += SWATCH
        shapes.append(Words(x + 5, y + 11, name, anchor="start"))
        x += 24 + 6.2 * len(name)
    return shapes, x
