"""What the text of an answer must match, as a client says it."""

import enum
from dataclasses import dataclass


class ConstraintKind(enum.StrEnum):
    """Any JSON object; one of a JSON schema; a regular expression; one of some texts; a context-free grammar."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True)
class Constraint:
    """`text` is the schema, the expression or the grammar (Lark or GBNF); `choices` are those of `CHOICE`.

    Of a schema: `closes` limits objects to the properties that they list (`json_schemas.closed`); `lenient` leaves out
    what no grammar can hold an answer to, instead of refusing it.
    """

    kind: ConstraintKind
    text: str = ""
    choices: tuple[str, ...] = ()
    closes: bool = False
    lenient: bool = False
