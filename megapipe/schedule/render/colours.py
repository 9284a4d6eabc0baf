"""The colours that all drawings share."""

from megapipe.schedule.ir import Kind

OF_KIND = {  # of the first chunk; later chunks are paler
    Kind.F: (106, 153, 214),
    Kind.B: (224, 133, 98),
    Kind.I: (88, 174, 146),
    Kind.W: (232, 190, 92),
    Kind.R: (168, 138, 198),
}
IDLE = "#eceff2"
INK = "#222222"
LINE = "#7a828a"
MEMORY = "#b9c4d0"
GATHER = "#5f7f95"
REDUCE = "#a0485a"


def shade(kind: Kind, chunk: int, chunks: int) -> str:
    """The colour of the kind, mixed with up to 60% white for the last chunk."""
    white = 0.6 * chunk / (chunks - 1) if chunks > 1 else 0.0
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in OF_KIND[kind])
