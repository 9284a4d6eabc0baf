"""All that is known to be wrong, in one table."""

from tests.parity.bad_input.case import Bad
from tests.parity.bad_input.command_lines import COMMAND_LINES, FILES
from tests.parity.bad_input.corpora import CORPORA
from tests.parity.bad_input.folders import BAD_FOLDERS
from tests.parity.bad_input.keys import KEYS
from tests.parity.bad_input.own_code import OWN_CODE
from tests.parity.bad_input.places import PLACES

TABLE = [*KEYS, *COMMAND_LINES, *FILES, *CORPORA, *BAD_FOLDERS, *OWN_CODE, *PLACES]


def named(*names: str) -> list[Bad]:
    """Cases of the table."""
    found = {bad.name: bad for bad in TABLE}
    return [found[name] for name in names]
