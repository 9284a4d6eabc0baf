"""All known mistakes in one table."""

from tests.parity.bad_input.case import Bad
from tests.parity.bad_input.classes import CLASSES
from tests.parity.bad_input.command_lines import COMMAND_LINES, FILES
from tests.parity.bad_input.corpora import CORPORA
from tests.parity.bad_input.folders import BAD_FOLDERS
from tests.parity.bad_input.keys import KEYS
from tests.parity.bad_input.places import PLACES
from tests.parity.bad_input.user_code import OWN_CODE

TABLE = [*KEYS, *COMMAND_LINES, *FILES, *CORPORA, *BAD_FOLDERS, *OWN_CODE, *CLASSES, *PLACES]


def named(*names: str) -> list[Bad]:
    """Return the mistakes with these names."""
    found = {bad.name: bad for bad in TABLE}
    return [found[name] for name in names]
