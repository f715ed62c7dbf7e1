"""Errors that end `varve` with one line for its user."""


class UserError(Exception):
    """One line that tells the user what is wrong. exit_code: of the command."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ConfigError(UserError):
    """A flag, environment variable or file says something impossible."""

    exit_code = 2


class LaunchError(UserError):
    """The server cannot start, or cannot go on."""
