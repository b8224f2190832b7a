"""What every command of the command line shares: errors that the user can mend, and leaving with a status."""

from __future__ import annotations

from collections.abc import Callable

# Which extra of this package brings an optional package.
EXTRAS = {"typer": "cli", "rich": "cli", "matplotlib": "plot", "jinja2": "plot", "triton": "triton"}
WRONG_USE = 2


class UserError(Exception):
    """Something that the person at the keyboard can mend: shown without a traceback, exit status 2."""


def missing(error: ImportError) -> UserError:
    """What to tell about a package that cannot be imported; an error of this package's own is raised again."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        raise error
    return UserError(f"this command needs {package}: pip install 'flash_kda[{EXTRAS[package]}]'")


def guarded(action: Callable[[], int]) -> None:
    """Leave with the action's status, or with 2 and a message if the user can mend what went wrong."""
    import typer

    try:
        status = action()
    except UserError as error:
        typer.secho(f"flash-kda: {error}", fg=typer.colors.RED, err=True)
        status = WRONG_USE
    if status:
        raise typer.Exit(status)
