"""How the body of a call is read: what stands in for what it leaves out, and what of it is not honoured."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reading:
    """What holds for one call.

    `closes`: objects of its JSON schemas are limited to the properties that they list (`json_schemas.closed`).
    `temperature` is that of a call which names none; None: the model's own. `ignored` are the names of what was asked
    for and is not honoured; whoever finds more adds to them.
    """

    closes: bool = True
    temperature: float | None = None
    ignored: list[str] = field(default_factory=list)
