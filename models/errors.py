"""The one error that this package raises for what a user can put right."""


class ModelError(Exception):
    """A model cannot be found, understood or loaded; the message is one line that names the culprit."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def name_first(names: list[str], limit: int = 3) -> str:
    """The first few of `names` as one readable phrase: "a, b, c and 12 more"."""
    head = ", ".join(names[:limit])
    return head if len(names) <= limit else f"{head} and {len(names) - limit} more"
